"""What a build is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16")
TARGETS = ("cpu",)
DRAFT_WIDTHS = (1, 2, 4, 8)
DRAFT_DEPTHS = (1, 2, 3, 4, 6, 8)
MOST_NODES = 33
"""The search tries these; artifacts and KV buffers hold trees of up to MOST_NODES nodes, root included."""


DEFAULT_MAX_CONTEXT = 8192
SMALLEST_CONTEXT = 64


def draft_depths(width: int, most_nodes: int = MOST_NODES) -> tuple[int, ...]:
    """Depths to try with trees that grow by `width` nodes a pass."""
    return tuple(depth for depth in DRAFT_DEPTHS if 1 + width * depth <= most_nodes)


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
    prompts:           to calibrate on, as `yggrt bench` reads them; None takes the shipped ones.
    plan:              a plan made before, to compile a bundle for without measuring or searching again.
    """

    drafter: str
    verifier: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = DTYPES[0]
    max_context: int | None = None
    num_threads: int = 0
    prompts: Path | None = None
    plan: Path | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target {self.target!r}: {', '.join(TARGETS)} is accepted")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: {' or '.join(DTYPES)} is accepted")
        if self.max_context is not None and self.max_context < SMALLEST_CONTEXT:
            raise ValueError(f"max-context {self.max_context}: at least {SMALLEST_CONTEXT} is accepted")
        if not 0 <= self.num_threads <= usable_cores():
            raise ValueError(f"threads {self.num_threads}: 1 to {usable_cores()} (this machine's cores) are accepted")
        if self.plan is not None and self.prompts is not None:
            raise ValueError("both a plan and prompts were given; a plan is used as it is, without calibrating again")

    @property
    def threads(self) -> int:
        """CPU threads, all cores where none were asked for."""
        return self.num_threads or usable_cores()
