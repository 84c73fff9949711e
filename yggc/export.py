"""Checkpoints to artifacts: `torch.export` of the step modules, then AOTInductor.

Widths, extents and numbers of expanded and added nodes stay symbolic, so one artifact per model serves every shape. An
artifact is code; the weights lie beside it, packed once for all artifacts of a model.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import cpu_vec_isa
from torch._inductor.exc import CppCompileError, InductorError
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from yggc.config import COMPILE_OPTIONS
from yggc.graphs import KERNELS, TORCH, DraftPass, FusedDraft, Operators, VerifyStep, layer_layouts
from yggc.kernels import c_interface, find_compiler, first_error_line
from yggrt.artifacts import (
    MASK_VALUE,
    LayerLayout,
    RunStep,
    StepLimits,
    TensorSpec,
    attention_windows,
    draft_inputs,
    fused_draft_inputs,
    verify_inputs,
)
from yggrt.errors import BuildError

EXAMPLE_SIZES = {"W": 6, "S": 48, "R": 5, "A": 7}
"""Sizes traced with: all different, so that no two symbols are taken for one."""


@dataclass(frozen=True, slots=True)
class StepModule:
    """A step ready to be exported, or to be run eagerly.

    inputs:  the ABI's inputs ahead of the KV buffers.
    layouts: KV layout by layer.
    device:  where it runs.
    """

    role: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    layouts: tuple[LayerLayout, ...]
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device


def operators_of(device: torch.device) -> Operators:
    """What steps on a device compute with beside their model."""
    return KERNELS if device.type == "cpu" else TORCH


def verify_step(
    model: PreTrainedModel,
    vocab_size: int,
    limits: StepLimits,
    width: int | None = None,
    operators: Operators | None = None,
) -> StepModule:
    """The verifier's step, of as many rows as there are or of `width` alone.

    vocab_size: tokens of the tokenizer; logits beyond it are cut off. operators: default those of the model's device.
    """
    layouts = layer_layouts(model)
    inputs = verify_inputs(attention_windows(layouts), limits, model.dtype, hidden_size(model), width)
    module = VerifyStep(model, layouts, vocab_size, operators or operators_of(model.device)).eval()
    role = "verify" if width is None else f"verify.w{width}"
    return StepModule(role, module, inputs, layouts, limits, model.dtype, model.device)


def hidden_size(model: PreTrainedModel) -> int:
    """H, what the output layer reads: not always the size between the layers."""
    return int(model.get_output_embeddings().weight.shape[1])


def draft_pass(
    model: PreTrainedModel,
    vocab_size: int,
    limits: StepLimits,
    vocabulary: tuple[int, ...] | None = None,
    operators: Operators | None = None,
) -> StepModule:
    """The drafter's pass.

    vocab_size: tokens of the tokenizer; logits beyond it are cut off. vocabulary: ids the output layer is cut to.
    operators: default those of the model's device.
    """
    layouts, operators = layer_layouts(model), operators or operators_of(model.device)
    module = DraftPass(model, layouts, vocab_size, limits.num_children, MASK_VALUE, vocabulary, operators).eval()
    if module.vocabulary is not None:
        module.vocabulary.to(model.device)
    return StepModule("draft", module, draft_inputs(limits), layouts, limits, model.dtype, model.device)


def fused_draft(one_pass: StepModule, draft_width: int, draft_depth: int) -> StepModule:
    """`draft.dN`: draft_depth passes in one graph, with the weights of the one pass. draft_width: nodes each adds."""
    assert isinstance(one_pass.module, DraftPass)
    module = FusedDraft(one_pass.module, one_pass.limits, draft_width, draft_depth).eval()
    inputs, role = fused_draft_inputs(one_pass.limits), f"draft.d{draft_depth}"
    return StepModule(role, module, inputs, one_pass.layouts, one_pass.limits, one_pass.dtype, one_pass.device)


def example_inputs(step: StepModule, sizes: dict[str, int]) -> list[Tensor]:
    """Inputs of the right shapes with harmless values, ahead of the KV buffers."""
    examples = []
    for spec in step.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.sizes]
        if spec.name == "extent":
            examples.append(torch.arange(shape[0], device=step.device))
        elif spec.name == "new_nodes":
            examples.append(torch.arange(1, 1 + shape[0], device=step.device))
        else:
            examples.append(torch.zeros(shape, dtype=spec.dtype, device=step.device))
    return examples


def allocate_kv(step: StepModule) -> tuple[Tensor, ...]:
    """KV buffers [heads, kv_rows, dim], K and V layer by layer."""
    return tuple(
        torch.zeros(layout.num_heads, step.limits.kv_rows, dim, dtype=step.dtype, device=step.device)
        for layout in step.layouts
        for dim in (layout.key_dim, layout.value_dim)
    )


def nest_inputs(step: StepModule, flat: Sequence[Any], kv_buffers: Sequence[Any]) -> tuple[Any, ...]:
    """Flat ABI inputs as the module's arguments: the masks of `verify` are one tuple, the KV buffers another."""
    masks = [index for index, spec in enumerate(step.inputs) if spec.name.startswith("mask.")]
    if not masks:
        return (*flat, tuple(kv_buffers))
    first, last = masks[0], masks[-1] + 1
    return (*flat[:first], tuple(flat[first:last]), *flat[last:], tuple(kv_buffers))


def export_step(step: StepModule) -> ExportedProgram:
    """Trace a step with symbolic W, S, R and A."""
    limits = step.limits
    bounds = {"W": limits.max_width, "S": limits.kv_rows - 1, "R": limits.max_width, "A": limits.max_nodes - 1}
    dims = {name: Dim(name, min=1, max=bound) for name, bound in bounds.items()}
    sizes = {name: min(size, bounds[name]) for name, size in EXAMPLE_SIZES.items()}
    flat_dims = [
        {axis: dims[size] for axis, size in enumerate(spec.sizes) if isinstance(size, str)} or None
        for spec in step.inputs
    ]
    kv_buffers = allocate_kv(step)
    arguments = nest_inputs(step, example_inputs(step, sizes), kv_buffers)
    shapes = nest_inputs(step, flat_dims, (None,) * len(kv_buffers))
    with torch.no_grad():
        return torch.export.export(step.module, arguments, dynamic_shapes=shapes, strict=False)


INDUCTOR_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"max_autotune": False},
    "max-autotune": {"max_autotune": True},
    "coordinate-descent": {"max_autotune": False, "coordinate_descent_tuning": True},
}
"""By the names of `yggc.config.COMPILE_OPTIONS`. CUDA graphs are captured by the runtime, never by the compiler."""


def find_cuda_headers() -> Path:
    """The folder of NVIDIA's CUDA headers, as torch and the compiler find it. Raises BuildError when there is none."""
    from torch.utils import cpp_extension  # which looks for the toolkit, and warns, when it is imported

    folders = [str(Path(home) / "include") for home in (cpp_extension.CUDA_HOME, "/usr") if home]
    for name in ("CUDA_INC_PATH", "CPATH", "CPLUS_INCLUDE_PATH"):
        folders += os.environ.get(name, "").split(os.pathsep)
    for folder in filter(None, folders):
        if (Path(folder) / "cuda.h").is_file():
            return Path(folder)
    raise BuildError(
        f"no CUDA toolkit found (looked for cuda.h in {', '.join(filter(None, folders))}); install that of CUDA "
        f"{torch.version.cuda}, or name its folder in CUDA_HOME. Only building needs it, running does not."
    )


def compile_step(
    program: ExportedProgram,
    path: Path,
    num_threads: int,
    scratch: Path,
    device: torch.device,
    compile_options: str = COMPILE_OPTIONS[0],
) -> None:
    """Compile a program, for the CPU one that was lowered to the kernels, into one package at `path`.

    scratch: folder for the compiler's own files; removed afterwards. compile_options: one of COMPILE_OPTIONS.
    Raises BuildError when there is no C++ compiler or it fails.
    """
    find_compiler()
    if any(letter.isspace() for letter in str(scratch)):
        scratch = Path(tempfile.mkdtemp(prefix="yggc-"))  # the compiler's commands are cut at spaces
    options = {"aot_inductor.package_constants_in_so": False} | INDUCTOR_OPTIONS[compile_options]
    if device.type == "cpu":
        options |= {
            "aot_inductor.custom_ops_to_c_shims": c_interface(),
            "cpp.threads": num_threads,
            "cpp.enable_kernel_profile": True,  # names each call for `yggrt bench --breakdown`; free unobserved
        }
    else:  # torch 2.11 cannot split the reduction of a single row, and a norm should add up alike at every width
        options |= {"split_reductions": False}
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a missing CUDA runtime
    cpu_vec_isa.valid_vec_isa_list()  # what is found out of this machine stays in torch's own cache, for the next time
    place_before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except (CppCompileError, InductorError) as error:
        if "CppCompileError" not in f"{type(error).__name__}: {error}":
            raise
        raise BuildError(f"the C++ compiler failed on generated code: {first_error_line(str(error))}") from None
    finally:
        if place_before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = place_before
        shutil.rmtree(scratch, ignore_errors=True)


def constants(program: ExportedProgram) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Everything an artifact of this program must be given when it is loaded, by name, each once in memory of its own;
    and the names that stand for another one's tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, value in {**program.state_dict, **program.constants}.items():
        if not isinstance(value, Tensor):
            continue
        own = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else (name,)
        if own in first:
            aliases[name] = first[own]
            continue
        first[own] = name
        storage = value.untyped_storage()
        is_shared = storage.data_ptr() in storages or storage.nbytes() != value.numel() * value.element_size()
        storages.add(storage.data_ptr())
        tensors[name] = value.detach().clone() if is_shared else value.detach().contiguous()
    return tensors, aliases


def eager_run(step: StepModule) -> RunStep:
    """A step's module as the runtime calls an artifact: flat inputs, KV buffers last and changed in place."""
    count = len(step.inputs)

    def run(flat: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(step.module(*nest_inputs(step, flat[:count], tuple(flat[count:]))))

    return run
