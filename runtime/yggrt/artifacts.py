"""Step ABI v5 and the compiled artifacts that speak it.

An artifact is one AOTInductor package: code alone. Its weights are given to it and shared with other artifacts of the
same model, and its hot loops are called in a library of kernels. It takes a flat list of tensors in the order written
here, then the KV buffers (K and V of layer 0, of layer 1, …), which it changes in place, and returns a flat list.
AOTInductor checks nothing of what it is given, so `Step` does.

Invariant: loading an artifact never runs a compiler and never starts a process.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from yggrt.errors import ArtifactError

STEP_ABI_VERSION = 5

ROWS_PREFIX = "rows_"
"""Begins the name of a constant of which a step reads a few rows, an embedding; it reads the others whole."""

MASK_VALUE = -30000.0
"""Additive mask of an invisible row: finite, and exp(MASK_VALUE) is 0 in every dtype."""

LOG_Q_MIN = math.log(1e-4)
"""Lowest log q the acceptance table distinguishes, at its first knot; the last knot is log q = 0."""


DEPTH_UNITS, DEPTH_HEADS = 32, 8
"""Of the depth network that `verify` evaluates: hidden units, and depths it can speak of."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps in the KV cache, and how it attends to it.

    num_heads:          KV heads.
    key_dim, value_dim: elements of one head's row.
    window:             positions a query may look back (itself included), or None for all of them.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def attention_windows(layouts: tuple[LayerLayout, ...]) -> tuple[int | None, ...]:
    """The kinds of attention of a model, in the order of its masks: full attention (None) first, then each window."""
    windows = {layout.window for layout in layouts}
    return tuple(sorted(windows, key=lambda window: -1 if window is None else window))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Static sizes compiled into a model's artifacts.

    kv_rows:      rows of every KV buffer; extents are below it.
    max_width:    largest W.
    max_moves:    M, KV rows moved before a step.
    max_nodes:    N, nodes of a tree, root included (draft pass).
    pool_size:    P, candidates kept between passes (draft pass).
    num_children: K, children offered by every expanded node (draft pass).
    num_drawn:    M, its most likely tokens, among which children are drawn above temperature 0 (draft pass).
    num_knots:    B, knots of the acceptance table (draft pass).
    """

    kv_rows: int
    max_width: int
    max_moves: int
    max_nodes: int
    pool_size: int
    num_children: int
    num_drawn: int
    num_knots: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: at least 1 is accepted")
        if self.num_children > self.num_drawn:
            raise ValueError(f"num_drawn={self.num_drawn}: at least num_children={self.num_children} is accepted")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input of a step: a dtype and a size for each dimension, a number or the name of a symbolic one."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int | str, ...]


VERIFY_OUTPUTS = ("argmax", "gap", "hidden", "logits", "expected_tokens")
"""argmax int64[W]; gap float32[W], best minus second-best logit; hidden [W, H]; logits [W, V]; expected_tokens
float32[W, DEPTH_HEADS], see `yggrt.depth`."""

DRAFT_ROWS = ("tokens", "positions", "slots", "num_visible", "row_ancestors")
"""Inputs that describe the rows to run; a pass returns those of the rows the next pass runs, under the same names."""

DRAFT_STATE = (
    "tree_tokens",
    "tree_parents",
    "tree_depths",
    "tree_values",
    "tree_ancestors",
    "pool_values",
    "pool_tokens",
    "pool_parents",
)
"""The growth state, input and output of every pass."""

DRAFT_LAWS = ("drawn_tokens", "drawn_log_q")
"""What the children of the expanded nodes were drawn from: int64[R, M] tokens, most likely first, and float32[R, M],
the log of their chances at the request's temperature, which add up to 1; at temperature 0 the drafter's own log q."""


def verify_inputs(
    windows: tuple[int | None, ...],
    limits: StepLimits,
    dtype: torch.dtype,
    hidden_size: int,
    width: int | None = None,
) -> tuple[TensorSpec, ...]:
    """Inputs of `verify` ahead of the KV buffers, and with a width those of `verify.wN`, which runs as many rows alone.

    tokens, positions, slots: the W rows to run; padding rows have slot 0 and see only slot 0.
    mask: additive, one per kind of attention; no row is fully masked.
    move_src, move_dst: KV rows copied before the step, all read before any is written; unused entries are 0 → 0.
    depth_first, depth_second: the layers of the depth network; zeros where there is none.
    """
    index, real = torch.int64, torch.float32
    rows: int | str = "W" if width is None else width
    return (
        TensorSpec("tokens", index, (rows,)),
        TensorSpec("positions", index, (rows,)),
        TensorSpec("slots", index, (rows,)),
        *(TensorSpec(f"mask.{kind}", dtype, (rows, "S")) for kind in range(len(windows))),
        TensorSpec("move_src", index, (limits.max_moves,)),
        TensorSpec("move_dst", index, (limits.max_moves,)),
        TensorSpec("depth_first", real, (hidden_size + 1, DEPTH_UNITS)),
        TensorSpec("depth_second", real, (DEPTH_UNITS + 1, DEPTH_HEADS)),
    )


def draft_inputs(limits: StepLimits) -> tuple[TensorSpec, ...]:
    """Inputs of a draft pass ahead of the KV buffers.

    tokens, positions, slots: the W rows to run.
    num_visible:   committed rows each of them sees (slots 1 to num_visible); 0 marks a padding row.
    row_ancestors: tree nodes each of them sees, itself included.
    expand_rows, expand_nodes: the R rows whose children enter the pool, and the nodes they are.
    new_nodes:     numbers of the A nodes to add.
    root:          position and slot of the root.
    tree_*, pool_*: growth state: N nodes and P candidates; empty candidates have value -inf.
    acceptance_table: log a by (rank, log q) at temperature 0, by (place among the siblings, minus the entropy of the
                   drafter's law) above it.
    temperature:   0 offers the most likely children, in their order; above it they are drawn without replacement.
    noise:         standard Gumbel numbers for the draws; not looked at with temperature 0.
    copied_tokens: of a path that may be copied, by depth, the root first; -1 where there is none. A node of the path
                   offers its next token, in place of its last child where that is not among its children.
    copied_log_a:  how sure each of them is, given those before it; siblings are worth what that leaves.
    extent:        0, 1, …, S - 1: its length is the number of KV rows read.
    """
    index, real, truth = torch.int64, torch.float32, torch.bool
    nodes, pool = limits.max_nodes, limits.pool_size
    return (
        TensorSpec("tokens", index, ("W",)),
        TensorSpec("positions", index, ("W",)),
        TensorSpec("slots", index, ("W",)),
        TensorSpec("num_visible", index, ("W",)),
        TensorSpec("row_ancestors", truth, ("W", nodes)),
        TensorSpec("expand_rows", index, ("R",)),
        TensorSpec("expand_nodes", index, ("R",)),
        TensorSpec("new_nodes", index, ("A",)),
        TensorSpec("root", index, (2,)),
        TensorSpec("tree_tokens", index, (nodes,)),
        TensorSpec("tree_parents", index, (nodes,)),
        TensorSpec("tree_depths", index, (nodes,)),
        TensorSpec("tree_values", real, (nodes,)),
        TensorSpec("tree_ancestors", truth, (nodes, nodes)),
        TensorSpec("pool_values", real, (pool,)),
        TensorSpec("pool_tokens", index, (pool,)),
        TensorSpec("pool_parents", index, (pool,)),
        TensorSpec("acceptance_table", real, (limits.num_children, limits.num_knots)),
        TensorSpec("temperature", real, (1,)),
        TensorSpec("noise", real, ("R", limits.num_drawn)),
        TensorSpec("copied_tokens", index, (nodes,)),
        TensorSpec("copied_log_a", real, (nodes,)),
        TensorSpec("extent", index, ("S",)),
        TensorSpec("move_src", index, (limits.max_moves,)),
        TensorSpec("move_dst", index, (limits.max_moves,)),
    )


DRAFT_OUTPUTS = (*DRAFT_ROWS, *DRAFT_STATE, *DRAFT_LAWS)
"""Of a draft pass."""

TREE = ("tree_tokens", "tree_parents", "tree_depths", "tree_values")
"""Of DRAFT_STATE, what is left to say after the last pass."""

FUSED_DRAFT_OUTPUTS = (*TREE, *DRAFT_LAWS)
"""Of a fused draft: the tree after its last pass, and what each of the expanded nodes drew from, in growth order."""


def fused_draft_inputs(limits: StepLimits) -> tuple[TensorSpec, ...]:
    """Inputs of `draft.dN`, N passes in one graph, ahead of the KV buffers: those of `draft_inputs` that the host sets.

    tokens, positions, slots, num_visible: the token before the root (or a padding row) and the root.
    noise: a row for every node of the largest tree, of which those are used that are expanded.
    """
    index, real = torch.int64, torch.float32
    return (
        *(TensorSpec(name, index, (2,)) for name in ("tokens", "positions", "slots", "num_visible")),
        TensorSpec("root", index, (2,)),
        TensorSpec("acceptance_table", real, (limits.num_children, limits.num_knots)),
        TensorSpec("temperature", real, (1,)),
        TensorSpec("noise", real, (limits.max_nodes, limits.num_drawn)),
        TensorSpec("copied_tokens", index, (limits.max_nodes,)),
        TensorSpec("copied_log_a", real, (limits.max_nodes,)),
        TensorSpec("extent", index, ("S",)),
        TensorSpec("move_src", index, (limits.max_moves,)),
        TensorSpec("move_dst", index, (limits.max_moves,)),
    )


RunStep = Callable[[list[Tensor]], list[Tensor]]


REMEMBERED = 512
"""Kinds of inputs a step keeps in mind as checked."""


class Step:
    """A step bound to its KV buffers: checks its inputs against the ABI, then runs.

    run:     takes all tensors of the ABI, KV buffers last; a compiled artifact or, in tests, the module it came from.
    """

    def __init__(self, role: str, run: RunStep, inputs: tuple[TensorSpec, ...], limits: StepLimits) -> None:
        self.role = role
        self.inputs = inputs
        self.limits = limits
        self._run = run
        self._kv_buffers: tuple[Tensor, ...] = ()
        self._accepted: set[tuple[object, ...]] = set()  # shapes, dtypes and layouts of inputs that were checked before
        self._bounds = {"W": limits.max_width, "S": limits.kv_rows - 1, "R": limits.max_width, "A": limits.max_width}

    def bind(self, kv_buffers: tuple[Tensor, ...], layouts: tuple[LayerLayout, ...], dtype: torch.dtype) -> None:
        """Use these KV buffers from now on: [heads, kv_rows, dim] each, K and V layer by layer."""
        expected = [
            (layout.num_heads, self.limits.kv_rows, dim)
            for layout in layouts
            for dim in (layout.key_dim, layout.value_dim)
        ]
        found = [tuple(buffer.shape) for buffer in kv_buffers]
        if found != expected or any(buffer.dtype != dtype or not buffer.is_contiguous() for buffer in kv_buffers):
            raise ArtifactError(f"{self.role}: the KV buffers do not have the layout this artifact was compiled for")
        self._kv_buffers = kv_buffers

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run once. Raises ArtifactError when an input differs from the ABI in number, rank, size, dtype or layout."""
        found = tuple([(tensor.shape, tensor.dtype, tensor.is_contiguous()) for tensor in inputs])
        if found not in self._accepted:
            self._check(inputs)
            if len(self._accepted) >= REMEMBERED:
                self._accepted.clear()
            self._accepted.add(found)
        return self._run([*inputs, *self._kv_buffers])

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise ArtifactError(f"{self.role}: got {len(inputs)} inputs, takes {len(self.inputs)}")
        symbols: dict[str, int] = {}
        for tensor, spec in zip(inputs, self.inputs, strict=True):
            shape = tensor.shape
            fits = tensor.dtype == spec.dtype and len(shape) == len(spec.sizes) and tensor.is_contiguous()
            if fits:
                for size, wanted in zip(shape, spec.sizes, strict=True):
                    if isinstance(wanted, str):
                        if symbols.setdefault(wanted, size) != size or not 1 <= size <= self._bounds[wanted]:
                            fits = False
                    elif size != wanted:
                        fits = False
            if not fits:
                raise ArtifactError(
                    f"{self.role}: input {spec.name} is {tensor.dtype} {list(shape)}; contiguous {spec.dtype} "
                    f"{list(spec.sizes)} is accepted, with {self._describe_bounds(symbols)}"
                )

    def _describe_bounds(self, symbols: dict[str, int]) -> str:
        return ", ".join(
            f"{name} = {symbols[name]}" if name in symbols else f"{name} from 1 to {bound}"
            for name, bound in self._bounds.items()
        )


def load_kernels(path: Path) -> ctypes.CDLL:
    """Load the library of kernels that artifacts call; its names carry a tag, so that several may be loaded.

    Raises ArtifactError in one line when the loader refuses the file.
    """
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be loaded: {error}. Rebuild the bundle here.") from None


def load_weights(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """An artifact's constants by name, mapped from the file or copied to another device.

    Names that the file's header calls aliases stand for the same tensor. Raises ArtifactError in one line.
    """
    try:
        tensors = load_file(path, device)
        with safe_open(path, "pt") as file:
            aliases = {name: own for name, own in (file.metadata() or {}).items() if name != "format"}
        return tensors | {name: tensors[own] for name, own in aliases.items()}
    except (SafetensorError, OSError, KeyError) as error:
        raise ArtifactError(f"{path.name} cannot be read: {error}. Rebuild the bundle here.") from None


def load_package(path: Path, weights: Mapping[str, Tensor], device_index: int = -1) -> RunStep:
    """Load one AOTInductor package whose file has already been checked against the manifest, with its kernels loaded.

    weights:      its constants, used where they are; the artifact keeps them alive.
    device_index: CUDA device, -1 for the CPU.
    Raises ArtifactError in one line when torch refuses the file.
    """
    loader_class = torch._C._aoti.AOTIModelPackageLoader
    try:
        # model name, run_single_threaded (a CUDA graph allows no other way), num_runners, device_index
        loader = loader_class(str(path), "model", device_index >= 0, 1, device_index)
        constants = {name: weights[name] for name in loader.get_constant_fqns()}
        loader.load_constants(constants, use_inactive=False, check_full_update=True, user_managed=True)
    except KeyError as error:
        raise ArtifactError(
            f"{path.name} needs the constant {error}, which its weights lack. Rebuild the bundle."
        ) from None
    except Exception as error:  # the loader raises RuntimeError subclasses and std::exception translations alike
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        raise ArtifactError(f"{path.name} cannot be loaded: {first_line}. Rebuild the bundle here.") from None

    def run(inputs: list[Tensor], keep: object = constants) -> list[Tensor]:
        outputs: list[Tensor] = loader.boxed_run(inputs)
        return outputs

    return run
