"""The compiled steps of a pair: which artifacts a build needs, compiling them, and loading them into an engine.

Each is kept in the stage cache under a key of all that could change it. The two models are compiled side by side, the
second in a process of its own, since most of the work of either runs on one core.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import sleep
from types import ModuleType

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from yggc import export, graphs, lowering, packing, self_check
from yggc import kernels as kernels_module
from yggc.checkpoints import Checkpoint, affine_weights, load_model, open_checkpoint
from yggc.config import COMPILE_OPTIONS, DRAFT_WIDTHS, SIZES, BuildOptions, draft_depths, usable_cores
from yggc.kernels import TAG, compile_kernels
from yggc.lowering import lower_to_kernels, merge_products
from yggc.packing import AffineWeights, round_to_levels
from yggc.progress import Progress
from yggc.room import DEVICE_MEMORY_OF_TOOLS, DEVICE_PER_WEIGHT_BYTE, available_device_memory
from yggc.self_check import check_compiled, check_module, make_probe
from yggc.stage_cache import StageCache
from yggrt import artifacts
from yggrt.artifacts import LayerLayout, Step, StepLimits, attention_windows, load_kernels, load_package, load_weights
from yggrt.bundle import table_tensor
from yggrt.engine import Engine
from yggrt.errors import BuildError, YggError
from yggrt.executor import PREFILL_WIDTH, Decoder
from yggrt.kvcache import KvCache, rows_needed
from yggrt.loader import StepLoader
from yggrt.plan import identity_table
from yggrt.target import Target
from yggrt.text import TextCodec, TextSpec
from yggrt.tree import TreeShape

NUM_KNOTS = 65
NUM_DRAWN = 32
"""Tokens among which a node's children are drawn above temperature 0."""
KERNELS_FILE = "kernels.so"
PACKAGE_FILE = "step.pt2"
WEIGHTS_FILE = "weights.safetensors"
RECORD_FILE = "step.json"
PARALLEL_MEMORY_BYTES = 12e9
"""Of memory for every compilation beside the first."""
CORES_A_COMPILATION = 2
"""Where there are many; on few cores two still help each other."""

SOURCES = (graphs, export, lowering, packing, kernels_module, self_check, artifacts)
"""A change in one of these makes kept artifacts worthless."""


@dataclass(frozen=True, slots=True)
class WantedStep:
    """An artifact that the build needs, and the cache entry that holds it once it is compiled.

    device:      as torch names it.
    vocabulary:  ids the output layer is cut to; None keeps it whole.
    draft_width: W_d of a fused draft; None for the others, which serve all widths.
    weight_bytes: of its model, once.  expected_s: seconds it may take.
    compile_options: one of `yggc.config.COMPILE_OPTIONS`.
    """

    role: str
    source: str
    device: str
    dtype: str
    num_threads: int
    vocab_size: int
    limits: StepLimits
    vocabulary: tuple[int, ...] | None
    draft_width: int | None
    compile_options: str
    weight_bytes: int
    expected_s: float
    entry: Path

    @property
    def depth(self) -> int | None:
        """Passes of a fused draft; None for the others."""
        return number_of(self.role, "draft.d")

    @property
    def width(self) -> int | None:
        """Rows of a `verify` of fixed width; None for the others."""
        return number_of(self.role, "verify.w")

    @property
    def model_role(self) -> str:
        """The step that serves every shape, whose weights this one uses."""
        return self.role.split(".")[0]


def number_of(role: str, prefix: str) -> int | None:
    """N of the roles `draft.dN` and `verify.wN`; None where a role does not begin so."""
    return int(role.removeprefix(prefix)) if role.startswith(prefix) else None


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A kept artifact of one model.

    package, weights:     the compiled file, and the file of its constants; None where it uses those of `verify` or
                          `draft`.
    layouts, hidden_size: of the model.
    """

    role: str
    limits: StepLimits
    vocabulary: tuple[int, ...] | None
    package: Path
    weights: Path | None
    layouts: tuple[LayerLayout, ...]
    hidden_size: int

    @property
    def depth(self) -> int | None:
        """N of a `draft.dN`; None for the others."""
        return number_of(self.role, "draft.d")

    @property
    def width(self) -> int | None:
        """N of a `verify.wN`; None for the others."""
        return number_of(self.role, "verify.w")


def source_digests(*modules: ModuleType) -> list[str]:
    """Of the modules' files: part of a cache key."""
    return [hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in modules]


def compile_kernels_once(cache: StageCache, progress: Progress, target: Target) -> Path:
    """The library of kernels, compiled now or kept from before."""
    key: dict[str, object] = {"tag": TAG, "sku": target.sku, "isa": target.instruction_set, "torch": torch.__version__}
    entry = cache.entry("kernels", key | {"source": source_digests(kernels_module)})
    if cache.has(entry):
        progress.reused("compile kernels")
    else:
        with progress.stage("compile kernels", 8):
            cache.fill(entry, lambda folder: compile_kernels(folder / KERNELS_FILE))
    return entry / KERNELS_FILE


def step_limits(target: str, max_context: int, context: int, vocab_size: int) -> StepLimits:
    """What a model's artifacts hold: every tree that the search tries.

    target: the kind of device. vocab_size: tokens the model's output layer scores.
    """
    sizes = SIZES[target]
    deepest = {width: draft_depths(width, sizes.most_nodes)[-1] for width in DRAFT_WIDTHS if width <= sizes.draft_width}
    return StepLimits(
        kv_rows=rows_needed(min(max_context, context), sizes.most_nodes),
        max_width=PREFILL_WIDTH,
        max_moves=max(deepest.values()),
        max_nodes=sizes.most_nodes,
        pool_size=max(TreeShape(width, depth, 1).pool_size for width, depth in deepest.items()),
        num_children=min(sizes.draft_width, vocab_size),
        num_drawn=min(NUM_DRAWN, vocab_size),
        num_knots=NUM_KNOTS,
    )


def wanted_step(
    cache: StageCache,
    target: Target,
    options: BuildOptions,
    checkpoint: Checkpoint,
    role: str,
    vocab_size: int,
    max_context: int,
    vocabulary: tuple[int, ...] | None,
    draft_width: int | None = None,
    compile_options: str = COMPILE_OPTIONS[0],
) -> WantedStep:
    """Where the artifact of one model is kept, under a key of all that could change it."""
    limits = step_limits(target.kind, max_context, checkpoint.context, len(vocabulary or range(vocab_size)))
    key: dict[str, object] = {
        "fingerprint": checkpoint.fingerprint,
        "role": role,
        "architecture": target.architecture,
        "dtype": options.dtype,
        "vocab_size": vocab_size,
        "vocabulary": vocabulary,
        "limits": asdict(limits),
        "threads": options.threads,
        "sku": target.sku,
        "isa": target.instruction_set,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "source": [TAG, *source_digests(*SOURCES)],
    }
    if draft_width is not None:
        key["draft_width"] = draft_width
    if compile_options != COMPILE_OPTIONS[0]:
        key["compile_options"] = compile_options
    depth = number_of(role, "draft.d") or 0
    layers = checkpoint.config.get_text_config().num_hidden_layers
    weight_bytes = checkpoint.num_parameters * getattr(torch, options.dtype).itemsize
    return WantedStep(
        role, checkpoint.source, target.device, options.dtype, options.threads, vocab_size, limits, vocabulary,
        draft_width, compile_options, weight_bytes, 25 + 3 * layers + 8 * depth + checkpoint.weight_bytes / 4e7,
        cache.entry(role, key),
    )  # fmt: skip


def compile_steps(
    cache: StageCache, progress: Progress, wanted: Sequence[WantedStep], kernels: Path | None
) -> list[CompiledStep]:
    """The artifacts, compiled now or kept from before. wanted: a model's own step before those that use its weights.

    Two are compiled at a time where the machine has the cores and the memory, and more where it has many.
    """
    missing = [step for step in wanted if not cache.has(step.entry)]
    for step in wanted:
        if step not in missing:
            progress.reused(f"compile {step.role}")
    if missing:
        if missing[0].device != "cpu":
            export.find_cuda_headers()
        together = _num_together(missing)
        seconds = [step.expected_s for step in missing]
        names = " and ".join(dict.fromkeys(step.role for step in missing))
        key = f"compile {names} {missing[0].dtype} {Path(missing[0].source).name}"
        with progress.stage(f"compile {names}", max(*seconds, sum(seconds) / together), key):
            _compile_all(cache, missing, together, kernels)
    return [read_step(step) for step in wanted]


def _num_together(steps: Sequence[WantedStep]) -> int:
    """How many of them to compile at a time."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = max(2, usable_cores() // CORES_A_COMPILATION) if usable_cores() > 1 else 1
    most = min(cores, int(memory // PARALLEL_MEMORY_BYTES) + 1, len(steps))
    device = steps[0].device
    if device != "cpu":
        each = max(step.weight_bytes for step in steps) * DEVICE_PER_WEIGHT_BYTE + DEVICE_MEMORY_OF_TOOLS
        most = min(most, int(available_device_memory(device) // each))
    return max(1, most)


def _compile_all(cache: StageCache, steps: Sequence[WantedStep], together: int, kernels: Path | None) -> None:
    """Compile each step in a process of its own, so that what compilers leave in memory does not slow what follows."""
    context = multiprocessing.get_context("spawn")
    waiting = list(steps)
    running: dict[Connection, tuple[WantedStep, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < together:
                step = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_compile_apart, args=(cache.root, step, kernels, there, os.getpid()), daemon=True
                )
                process.start()
                there.close()
                running[here] = (step, process)
            ready = multiprocessing.connection.wait(list(running))
            for here in [connection for connection in running if connection in ready]:
                step, process = running[here]
                try:
                    error = here.recv()
                except EOFError:  # it was killed
                    error = BuildError(f"compiling {step.role} ended without a result; is there enough memory?")
                if error is not None:
                    raise error
                process.join()
                del running[here]
                here.close()
    finally:
        for here, (_, process) in running.items():
            process.terminate()
            process.join()
            here.close()
        cache.remove_abandoned()


def _compile_apart(root: Path, step: WantedStep, kernels: Path | None, pipe: Connection, parent: int) -> None:
    """In a process of its own: compile, keep, and send the error there was, or None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build's own process ends this one
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        StageCache(root).fill(step.entry, lambda folder: compile_one(step, folder, kernels))
        pipe.send(None)
    except YggError as error:
        pipe.send(error)
    except OSError as error:
        pipe.send(BuildError(f"{step.role} cannot be compiled: {error.strerror or error}"))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        sleep(0.5)
    os._exit(1)


def compile_one(wanted: WantedStep, folder: Path, kernels: Path | None) -> None:
    """Compile a step into a folder. Raises a YggError also where it would not say what its model says.

    kernels: the library for the CPU; None elsewhere.
    """
    checkpoint, device = open_checkpoint(wanted.source), torch.device(wanted.device)
    model = load_model(checkpoint, getattr(torch, wanted.dtype))
    nn.Module.to(model, device)  # transformers' own wrapper of it has no types
    try:
        probe = make_probe(model, wanted.vocab_size)
        if wanted.model_role == "verify":
            step = export.verify_step(model, wanted.vocab_size, wanted.limits, wanted.width)
        else:
            step = export.draft_pass(model, wanted.vocab_size, wanted.limits, wanted.vocabulary)
        check_module(step, probe)
        if wanted.depth is not None and wanted.draft_width is not None:
            step = export.fused_draft(step, wanted.draft_width, wanted.depth)
        program = export.export_step(step)
        if device.type == "cpu":
            levels = affine_weights(checkpoint, model)
            if wanted.model_role != "verify":
                levels = rounded_weights(model) | levels
            program = lower_to_kernels(
                program,
                {f"model.{name}": weights for name, weights in levels.items()},
                exactly=wanted.model_role == "verify",
            )
        else:
            program = merge_products(program)
        export.compile_step(
            program, folder / PACKAGE_FILE, wanted.num_threads, folder / "inductor", device, wanted.compile_options
        )
        if wanted.role == wanted.model_role:
            tensors, aliases = export.constants(program)
            save_file(tensors, folder / WEIGHTS_FILE, aliases)
        if wanted.role == "verify":
            del program, tensors
            nn.Module.to(model, "meta")  # on a GPU the weights that are read now need its place
            if kernels is not None:
                load_kernels(kernels)
            weights = load_weights(folder / WEIGHTS_FILE, wanted.device)
            check_compiled(
                step, load_package(folder / PACKAGE_FILE, weights, -1 if device.index is None else device.index), probe
            )
    except YggError:
        raise
    except Exception as error:  # torch's exporters raise whatever their internals do
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise BuildError(
            f"{checkpoint.name} ({type(model).__name__}) cannot be compiled with torch {torch.__version__}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    record = {
        "layouts": [asdict(layout) for layout in step.layouts],
        "hidden_size": export.hidden_size(model),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record))


def rounded_weights(model: PreTrainedModel) -> dict[str, AffineWeights]:
    """A drafter's matrices in 8-bit levels: half the bytes of bfloat16, and next to no difference in what it drafts."""
    rounded: dict[int, AffineWeights] = {}
    found = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.dim() == 2:
            levels = rounded.get(value.data_ptr()) or round_to_levels(value.detach())
            if levels is not None:
                found[name] = rounded[value.data_ptr()] = levels
    return found


def read_step(step: WantedStep) -> CompiledStep:
    """What `compile_one` left in the entry of a step."""
    record = json.loads((step.entry / RECORD_FILE).read_text())
    return CompiledStep(
        role=step.role,
        limits=step.limits,
        vocabulary=step.vocabulary,
        package=step.entry / PACKAGE_FILE,
        weights=step.entry / WEIGHTS_FILE if step.role == step.model_role else None,
        layouts=tuple(LayerLayout(**layout) for layout in record["layouts"]),
        hidden_size=record["hidden_size"],
    )


class PairLoader:
    """Loads kept steps of a pair, whose models' weights are loaded once.

    kernels: the library for the CPU; None elsewhere. verify, draft: the steps whose weights the others use.
    """

    def __init__(
        self, kernels: Path | None, options: BuildOptions, target: Target, verify: CompiledStep, draft: CompiledStep
    ) -> None:
        assert verify.weights is not None and draft.weights is not None
        self._loader = StepLoader(target, kernels, getattr(torch, options.dtype))
        self.laws = self._loader.laws
        self.verify, self.draft = verify, draft
        self._weights = {
            "verify": self._loader.weights(verify.weights),
            "draft": self._loader.weights(draft.weights),
        }

    def step(self, step: CompiledStep) -> Step:
        """Not yet bound to a cache."""
        weights = self._weights[step.role.split(".")[0]]
        windows = attention_windows(self.verify.layouts)
        return self._loader.step(step.role, step.package, weights, step.limits, windows, self.verify.hidden_size)

    def cache(self, step: CompiledStep) -> KvCache:
        """Empty, of a step's model."""
        return self._loader.cache(step.layouts, step.limits)


def load_engine(
    pair: PairLoader,
    steps: Sequence[CompiledStep],
    options: BuildOptions,
    verifier: Checkpoint,
    drafter: Checkpoint,
    vocab_size: int,
    max_context: int,
    text: TextSpec,
) -> Engine:
    """An engine over kept steps, before there is a bundle: what is profiled and calibrated.

    steps: `verify` and `draft`, then those that use their weights; fused drafts of one width.
    """
    draft = pair.draft
    loaded = {step.role: pair.step(step) for step in steps}
    children = draft.limits.num_children
    decoder = Decoder(
        loaded["verify"],
        loaded["draft"],
        {step.depth: loaded[step.role] for step in steps if step.depth is not None},
        1,
        pair.cache(pair.verify),
        pair.cache(draft),
        table_tensor(identity_table(children, draft.limits.num_knots), children),
        max_context,
        plain_width=1,
        by_width={step.width: loaded[step.role] for step in steps if step.width is not None},
        laws=pair.laws,
    )
    codec = TextCodec(verifier.tokenizer, text)
    return Engine(
        decoder, TreeShape(1, 1, 2), codec, frozenset(text.eos_ids), vocab_size, drafter.context, options.threads
    )
