"""Additive attention masks of the verifier's steps, written with as little host work as a step needs.

A buffer keeps what it showed last: the next step of a sequence sees a few slots more, so only those are written. Masks
are written as whole numbers of their dtype's size, which numpy knows for every dtype.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yggrt.artifacts import MASK_VALUE

_BITS: dict[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class StepMask:
    """One mask [W, S] of a step, for full attention or for a sliding window.

    tensor:   what the step is given.
    num_rows: rows that see the sequence; those after them are padding and see slot 0, which no other row sees.
    """

    def __init__(self, width: int, extent: int, dtype: torch.dtype, window: int | None, num_rows: int) -> None:
        self.tensor = torch.full((width, extent), MASK_VALUE, dtype=dtype)
        self.tensor[num_rows:, 0] = 0
        self._bits: NDArray[np.signedinteger] = self.tensor.view(_BITS[dtype]).numpy()[:num_rows]
        self._by_visible = np.array([self._bits[0, 0], 0], dtype=self._bits.dtype)
        self._window = window
        self._shown = self._end = 1  # slots [1, shown) are visible in every row, none from `end` on

    def show_tree(self, ancestors: NDArray[np.bool_], depths: NDArray[np.int64], num_tokens: int) -> None:
        """The committed rows but the root, then a tree from slot num_tokens on.

        ancestors: bool[W, W]; depths: int64[W]; see `yggrt.tree.VerifyCut`.
        """
        width = depths.size
        if self._window is None:
            self._show_committed(num_tokens, num_tokens + width)
        else:  # a row at depth d is at position num_tokens - 1 + d and sees the last `window` positions up to itself
            lowest = depths[:, None] + (num_tokens - self._window)
            self._bits[:] = self._by_visible[0]
            self._bits[:, 1:num_tokens] = self._by_visible[(np.arange(num_tokens - 1) >= lowest).view(np.int8)]
            ancestors = ancestors & (depths[:, None] - depths[None, :] < self._window)
        self._bits[:, num_tokens : num_tokens + width] = self._by_visible[ancestors.view(np.int8)]

    def show_token(self, num_tokens: int) -> None:
        """The committed tokens up to the last, which is the one that runs."""
        if self._window is None:
            self._show_committed(num_tokens + 1, num_tokens + 1)
        else:
            self._bits[:] = self._by_visible[0]
            self._bits[:, first_visible(num_tokens - 1, self._window) : num_tokens + 1] = 0

    def _show_committed(self, shown: int, end: int) -> None:
        """Show slots [1, shown) and hide those from `end` on; what is between is the caller's."""
        if shown < self._shown:
            self._bits[:, shown : self._shown] = self._by_visible[0]
        else:
            self._bits[:, self._shown : shown] = 0
        if end < self._end:
            self._bits[:, end : self._end] = self._by_visible[0]
        self._shown, self._end = shown, end


def first_visible(position: int, window: int | None) -> int:
    """First slot a row at `position` may see."""
    return 1 if window is None else max(1, position - window + 2)


def prefix_mask(positions: Tensor, extent: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [W, S] of committed rows. positions: int64[W]."""
    slot_positions = torch.arange(extent) - 1
    back = positions[:, None] - slot_positions[None, :]
    visible = (back >= 0) & (slot_positions >= 0)
    if window is not None:
        visible &= back < window
    return torch.where(visible, 0.0, MASK_VALUE).to(dtype)
