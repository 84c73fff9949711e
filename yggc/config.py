"""What a build is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from yggrt.tree import TreeShape

DTYPES = ("float32", "bfloat16")
TARGETS = ("cpu",)
LARGEST_SHAPE = TreeShape(draft_width=8, draft_depth=4, verify_width=16)
"""The artifacts and the KV buffers hold trees up to this one."""

DEFAULT_SHAPE = TreeShape(draft_width=4, draft_depth=2, verify_width=4)
"""What a plan uses while nothing is searched: on the demo pair and the shipped prompts no other of eight shapes had a
better median speed-up (1.12; a chain of one 1.10, width 8 and depth 4 with 8 nodes verified 0.87)."""
DEFAULT_MAX_CONTEXT = 8192
SMALLEST_CONTEXT = 64


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that decides what a bundle will be.

    drafter, verifier: folder, hub id or GGUF file.
    output:            bundle folder; None names it after the pair.
    dtype:             of activations and KV cache, and what weights are rounded to; packed weights take the room they
                       need in it, see yggc.packing.
    max_context:       tokens a request may reach, prompt included; None takes the verifier's, at most
                       DEFAULT_MAX_CONTEXT.
    num_threads:       CPU threads the steps are compiled for.
    """

    drafter: str
    verifier: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = DTYPES[0]
    max_context: int | None = None
    num_threads: int = 0

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target {self.target!r}: {', '.join(TARGETS)} is accepted")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: {' or '.join(DTYPES)} is accepted")
        if self.max_context is not None and self.max_context < SMALLEST_CONTEXT:
            raise ValueError(f"max-context {self.max_context}: at least {SMALLEST_CONTEXT} is accepted")
        if not 0 <= self.num_threads <= usable_cores():
            raise ValueError(f"threads {self.num_threads}: 1 to {usable_cores()} (this machine's cores) are accepted")

    @property
    def threads(self) -> int:
        """CPU threads, all cores where none were asked for."""
        return self.num_threads or usable_cores()
