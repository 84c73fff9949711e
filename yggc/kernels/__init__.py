"""The CPU kernels: their C++ source, its compilation, and the torch operators that stand for them in a traced graph.

AOTInductor's code calls the kernels through their C interface. A name carries a tag made of the source, so that bundles
built from different sources can be loaded into one process. In Python the operators compute a reference.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from yggc.packing import Format, PackedMatrix, num_rows, unpack
from yggrt.errors import BuildError

SOURCE = Path(__file__).with_name("kernels.cpp")
TAG = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
COMPILERS = ("g++", "clang++")
HUGE_LOGIT = 1e30
"""Stands for an infinite logit; kernels.cpp has the same number."""


def _linear(inputs: Tensor, weights: Tensor, columns: int, format: int) -> Tensor:
    matrix = unpack(PackedMatrix(weights, columns, inputs.shape[-1], Format(format)))
    return functional.linear(inputs.float(), matrix).to(inputs.dtype)


def _linear_shape(inputs: Tensor, weights: Tensor, columns: int, format: int) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], columns))


def _embedding(tokens: Tensor, weights: Tensor, features: int, format: int, narrow: bool) -> Tensor:
    rows = num_rows(weights, features, Format(format))
    matrix = unpack(PackedMatrix(weights, rows, features, Format(format)))
    return matrix[tokens].to(torch.bfloat16 if narrow else torch.float32)


def _embedding_shape(tokens: Tensor, weights: Tensor, features: int, format: int, narrow: bool) -> Tensor:
    return tokens.new_empty((*tokens.shape, features), dtype=torch.bfloat16 if narrow else torch.float32)


def _order(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices


def _order_shape(values: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.int64)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    rows = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return rows[0].transpose(0, 1).contiguous()


def _attention_shape(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return queries.new_empty((queries.shape[1], queries.shape[0], values.shape[2]))


def _children(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    # A drafter that overflows drafts badly; it must not break the request, since the verifier decides.
    logits = torch.nan_to_num(logits.float(), nan=-HUGE_LOGIT, posinf=HUGE_LOGIT, neginf=-HUGE_LOGIT)
    columns = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count].contiguous()
    return columns, torch.log_softmax(logits, dim=-1).gather(1, columns)


def _children_shape(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def draw_children(
    tokens: Tensor, log_q: Tensor, noise: Tensor, temperature: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator `draw` gives, in torch's own operators."""
    draws = temperature > 0
    law = torch.log_softmax(log_q / torch.where(draws, temperature, 1.0), dim=-1)
    keys = torch.where(draws, law + noise, log_q)
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :count]
    order = order.contiguous()
    sureness = (law.exp() * law).sum(dim=-1, keepdim=True).expand(-1, count)
    return tokens.gather(1, order), torch.where(draws, sureness, log_q[:, :count]), torch.where(draws, law, log_q)


def _draw_shape(
    tokens: Tensor, log_q: Tensor, noise: Tensor, temperature: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (tokens.shape[0], count)
    return tokens.new_empty(shape), log_q.new_empty(shape), log_q.new_empty(log_q.shape)


_LIBRARY = torch.library.Library("yggc", "DEF")
_SIGNATURES = {
    "linear": "(Tensor inputs, Tensor weights, int columns, int format) -> Tensor",
    "embedding": "(Tensor tokens, Tensor weights, int features, int format, bool narrow) -> Tensor",
    "children": "(Tensor logits, int count) -> (Tensor, Tensor)",
    "draw": "(Tensor tokens, Tensor log_q, Tensor noise, Tensor temperature, int count) -> (Tensor, Tensor, Tensor)",
    "order": "(Tensor values) -> Tensor",
    "attention": "(Tensor queries, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor",
}
_REFERENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (_linear, _linear_shape),
    "embedding": (_embedding, _embedding_shape),
    "children": (_children, _children_shape),
    "draw": (draw_children, _draw_shape),
    "order": (_order, _order_shape),
    "attention": (_attention, _attention_shape),
}
_C_ARGUMENTS = {"Tensor": "AtenTensorHandle", "int": "int64_t", "bool": "int32_t", "float": "double"}


def _operator_name(kernel: str) -> str:
    return f"ygg_{kernel}_{TAG}"


def _define() -> SimpleNamespace:
    """Register the operators: `linear`, `embedding` and `attention` of the result are their overloads."""
    operators = {}
    for kernel, signature in _SIGNATURES.items():
        name = _operator_name(kernel)
        reference, shape = _REFERENCES[kernel]
        _LIBRARY.define(f"{name}{signature}")
        _LIBRARY.impl(name, reference, "CPU")
        torch.library.register_fake(f"yggc::{name}", shape, lib=_LIBRARY)
        operators[kernel] = getattr(torch.ops.yggc, name).default
    return SimpleNamespace(**operators)


OPERATORS = _define()
"""linear(inputs [..., K], packed [N, K]) -> [..., N]; embedding(tokens [...], packed [N, K]) -> [..., K];
children(logits [R, V], K) -> (columns [R, K], log probabilities [R, K]), best first, the lower column among equals;
draw(tokens [R, M], log_q [R, M], noise [R, M], temperature [1], K) -> (tokens [R, K], where to look a child up in the
acceptance table [R, K], log of the law drawn from [R, M]): at temperature 0 the first K, looked up by their log_q;
above it K draws without replacement from softmax(log_q / temperature), noise being Gumbel's, looked up by minus its
entropy;
order(values [N]) -> indices [N], largest first, stable;
attention(queries [heads, W, dim], keys, values [kv_heads, S, dim], mask [W, S], scale) -> [W, heads, dim]."""


def c_interface() -> dict[torch._ops.OpOverload, list[str]]:
    """Operator -> C declaration of its kernel, as AOTInductor wants it."""
    declarations = {}
    for kernel, signature in _SIGNATURES.items():
        arguments = signature[1 : signature.index(")")].split(", ")
        types = [_C_ARGUMENTS[argument.split()[0]] for argument in arguments]
        results = ["AtenTensorHandle*"] * signature.split("->")[1].count("Tensor")
        call = f"AOTITorchError aoti_torch_cpu_{_operator_name(kernel)}({', '.join(types + results)})"
        declarations[getattr(OPERATORS, kernel)] = [call]
    return declarations


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX, else g++, else clang++. Raises BuildError when there is none."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    for name in wanted:
        command = shlex.split(name)
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise BuildError(
        f"no C++ compiler found (looked for {' and '.join(wanted)}); install one, or name it in CXX. "
        "Only building needs it, running a bundle does not."
    )


def compile_kernels(path: Path) -> None:
    """Compile the kernels for this machine's CPU into a shared library at `path`.

    Raises BuildError when there is no compiler or it fails.
    """
    torch_folder = Path(torch.__file__).parent  # torch.utils.cpp_extension knows it too, and warns of a missing CUDA
    command = [
        *find_compiler(), "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared",
        "-w", f"-DYGG_TAG={TAG}", f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(path),
        f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise BuildError(f"the C++ compiler failed on the kernels: {first_error_line(run.stderr)}")


def first_error_line(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    plain = [line for line in lines if "error" in line.lower()]
    told = [line for line in plain if re.search(r"\berror: ", line)]
    return (told or plain or lines or ["no output"])[0]
