"""The KV buffers of one model, how many committed tokens they hold, and the moves still owed to them.

Invariant: the row of committed position p is at slot p + 1 once the pending moves are applied; slot 0 is scratch. A
move is applied by the next step that runs, which reads every moved row before it writes any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yggrt.artifacts import LayerLayout, StepLimits

EXTENT_BUCKET = 64


class KvCache:
    """KV buffers, [heads, kv_rows, dim] each, K and V layer by layer.

    extents: the only ones that may be read, ascending; empty for all multiples of EXTENT_BUCKET.
    """

    def __init__(
        self,
        layouts: tuple[LayerLayout, ...],
        limits: StepLimits,
        dtype: torch.dtype,
        device: torch.device | None = None,
        extents: tuple[int, ...] = (),
    ) -> None:
        self.layouts = layouts
        self.limits = limits
        self.dtype = dtype
        self.extents = extents
        self.buffers: tuple[Tensor, ...] = tuple(
            torch.zeros(layout.num_heads, limits.kv_rows, dim, dtype=dtype, device=device)
            for layout in layouts
            for dim in (layout.key_dim, layout.value_dim)
        )
        self.num_committed = 0
        self.move_src = torch.zeros(limits.max_moves, dtype=torch.int64)
        self.move_dst = torch.zeros(limits.max_moves, dtype=torch.int64)
        self._src, self._dst = self.move_src.numpy(), self.move_dst.numpy()
        self.has_moves = False

    def reset(self) -> None:
        """Forget everything; rows need no clearing, since no mask shows a row that was not written."""
        self.num_committed = 0
        self.has_moves = True  # an interrupted owe_moves may have left some without saying so
        self.moved()

    def owe_moves(self, sources: Sequence[int], first_target: int) -> None:
        """Ask the next step to copy the rows at slots `sources` to first_target, first_target + 1, …"""
        count = len(sources)
        if not self.has_moves and all(source == first_target + place for place, source in enumerate(sources)):
            return  # they are there
        self._src[:count] = sources
        self._dst[:count] = range(first_target, first_target + count)
        self._src[count:] = 0
        self._dst[count:] = 0
        self.has_moves = count > 0

    def moved(self) -> None:
        """The step that was given the moves has run."""
        if self.has_moves:
            self._src[:] = 0
            self._dst[:] = 0
            self.has_moves = False

    def extent(self, num_rows: int) -> int:
        """Extent S that covers slots 0 to num_rows - 1, rounded up to a bucket."""
        for extent in self.extents:
            if extent >= num_rows:
                return extent
        bucket = -(-num_rows // EXTENT_BUCKET) * EXTENT_BUCKET
        return min(bucket, self.limits.kv_rows - 1)


def rows_needed(max_context: int, max_nodes: int) -> int:
    """Rows of a KV buffer: scratch, the context and the largest tree, in buckets, and one more than any extent."""
    rows = 1 + max_context + max_nodes
    return -(-rows // EXTENT_BUCKET) * EXTENT_BUCKET + 1
