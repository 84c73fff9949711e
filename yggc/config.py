"""What a build is asked for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16")
DRAFT_WIDTHS = (1, 2, 4, 8, 16)
DRAFT_DEPTHS = (1, 2, 3, 4, 6, 8)
"""The search tries these, as far as a kind of device has room for them."""

TARGET = r"cpu|cuda(:[0-9]{1,4})?"
DEFAULT_MAX_CONTEXT = 8192
SMALLEST_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is compiled for a kind of device.

    draft_width:   the largest W_d.      most_nodes: of a tree, root included, in artifacts and KV buffers.
    verify_widths: W_v that are timed.   fixed_widths: of them, those with an artifact of their own.
    """

    draft_width: int
    most_nodes: int
    verify_widths: tuple[int, ...]
    fixed_widths: tuple[int, ...]


DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
"""On the CPU float32 costs no more memory traffic than the checkpoint; on a GPU twice as much as bfloat16."""

SIZES = {
    "cpu": Sizes(8, 33, (1, 2, 3, 4, 6, 8, 12, 16, 24), ()),
    "cuda": Sizes(16, 65, (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64)),
}


def draft_depths(width: int, most_nodes: int) -> tuple[int, ...]:
    """Depths to try with trees that grow by `width` nodes a pass."""
    return tuple(depth for depth in DRAFT_DEPTHS if 1 + width * depth <= most_nodes)


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


COMPILE_OPTIONS = ("default", "max-autotune", "coordinate-descent")
"""Ways to compile a step for a GPU; what each says to the compiler is in `yggc.export`."""

MEASURED = "measured"
"""In place of one of COMPILE_OPTIONS: each model is compiled with those that ran fastest."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that decides what a bundle will be.

    drafter, verifier: folder, hub id or GGUF file.
    output:            bundle folder; None names it after the pair.
    target:            cpu, cuda or cuda:N.
    dtype:             of activations and KV cache, and what weights are rounded to; on the CPU packed weights take the
                       room they need in it, see yggc.packing. Empty takes the target's, see DEFAULT_DTYPE.
    max_context:       tokens a request may reach, prompt included; None takes the verifier's, at most
                       DEFAULT_MAX_CONTEXT.
    num_threads:       CPU threads the steps are compiled for.
    prompts:           to calibrate on, as `yggrt bench` reads them; None takes the shipped ones.
    plan:              a plan made before, to compile a bundle for without measuring or searching again.
    compile_options:   for a GPU, one of COMPILE_OPTIONS or MEASURED.
    """

    drafter: str
    verifier: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = ""
    max_context: int | None = None
    num_threads: int = 0
    prompts: Path | None = None
    plan: Path | None = None
    compile_options: str = MEASURED

    def __post_init__(self) -> None:
        if re.fullmatch(TARGET, self.target) is None:
            raise ValueError(f"target {self.target!r}: cpu, cuda or cuda:N is accepted")
        if not self.dtype:
            object.__setattr__(self, "dtype", DEFAULT_DTYPE[self.target.split(":")[0]])
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: {' or '.join(DTYPES)} is accepted")
        if self.max_context is not None and self.max_context < SMALLEST_CONTEXT:
            raise ValueError(f"max-context {self.max_context}: at least {SMALLEST_CONTEXT} is accepted")
        if not 0 <= self.num_threads <= usable_cores():
            raise ValueError(f"threads {self.num_threads}: 1 to {usable_cores()} (this machine's cores) are accepted")
        if self.compile_options not in (MEASURED, *COMPILE_OPTIONS):
            raise ValueError(
                f"compile options {self.compile_options!r}: {MEASURED}, {', '.join(COMPILE_OPTIONS)} are accepted"
            )
        if self.target == "cpu" and self.compile_options != MEASURED:
            raise ValueError(
                f"compile options {self.compile_options!r} were given for the CPU, whose hot loops are kernels of our "
                "own; leave them out, or build for a GPU (--target cuda)"
            )
        if self.plan is not None and self.prompts is not None:
            raise ValueError("both a plan and prompts were given; a plan is used as it is, without calibrating again")

    @property
    def threads(self) -> int:
        """CPU threads, all cores where none were asked for."""
        return self.num_threads or usable_cores()
