"""What a build is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from yggrt.target import Target
from yggrt.tree import TreeShape

AUTO_DTYPE = "auto"
DTYPES = ("bfloat16", "float32")
TARGETS = ("cpu",)
BFLOAT16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
DEFAULT_SHAPE = TreeShape(draft_width=8, draft_depth=4, verify_width=16)
DEFAULT_MAX_CONTEXT = 8192
SMALLEST_CONTEXT = 64


def fastest_dtype(target: Target) -> str:
    """bfloat16 where the CPU computes in it; elsewhere it is emulated, and a wide step takes twice the float32 time."""
    return "bfloat16" if BFLOAT16_INSTRUCTIONS & set(target.instruction_set) else "float32"


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that decides what a bundle will be.

    drafter, verifier: folder, hub id or GGUF file.
    output:            bundle folder; None names it after the pair.
    dtype:             of weights, activations and KV cache; "auto" takes what this machine computes fastest.
    max_context:       tokens a request may reach, prompt included; None takes the verifier's, at most
                       DEFAULT_MAX_CONTEXT.
    num_threads:       CPU threads the steps are compiled for.
    """

    drafter: str
    verifier: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = AUTO_DTYPE
    max_context: int | None = None
    num_threads: int = 0

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target {self.target!r}: {', '.join(TARGETS)} is accepted")
        if self.dtype not in (AUTO_DTYPE, *DTYPES):
            raise ValueError(f"dtype {self.dtype!r}: {' or '.join(DTYPES)} is accepted")
        if self.max_context is not None and self.max_context < SMALLEST_CONTEXT:
            raise ValueError(f"max-context {self.max_context}: at least {SMALLEST_CONTEXT} is accepted")
        if not 0 <= self.num_threads <= usable_cores():
            raise ValueError(f"threads {self.num_threads}: 1 to {usable_cores()} (this machine's cores) are accepted")

    @property
    def threads(self) -> int:
        """CPU threads, all cores where none were asked for."""
        return self.num_threads or usable_cores()
