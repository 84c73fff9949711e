"""The learned depth: what a tree of each depth would give next, told from the verifier's hidden row.

The network runs inside `verify`, on all its rows, with its weights as inputs; acceptance selects the row that counts.
Invariant: it decides how much is drafted, never which token comes next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yggrt.artifacts import DEPTH_HEADS, DEPTH_UNITS

_FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class DepthNetwork:
    """Two layers, relu(hidden · first) · second, each with its biases as the last row; column i speaks of depths[i].

    depths:        D_d to choose from, ascending, 0 (plain decoding) the first.
    verify_widths: rows that a tree of each depth hands to the verifier, as a rule; they price it.
    hidden_size:   H.
    first:         float32[H + 1, DEPTH_UNITS], little-endian.
    second:        float32[DEPTH_UNITS + 1, DEPTH_HEADS]; columns beyond the depths are not read.
    Source: design, section 5, "Depth predictor".
    """

    depths: tuple[int, ...]
    verify_widths: tuple[int, ...]
    hidden_size: int
    first: bytes
    second: bytes

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.depths, self.depths[1:], strict=False))
        if not 1 <= len(self.depths) <= DEPTH_HEADS or self.depths[0] != 0 or not ascending:
            raise ValueError(f"depths {self.depths!s:.80}: 1 to {DEPTH_HEADS} of them, ascending from 0, are accepted")
        if len(self.verify_widths) != len(self.depths) or min(self.verify_widths) < 1:
            raise ValueError(f"verify widths {self.verify_widths!s:.80}: one from 1 up for each depth is accepted")
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size={self.hidden_size} must be at least 1")
        for name, data, shape in (
            ("first", self.first, (self.hidden_size + 1, DEPTH_UNITS)),
            ("second", self.second, (DEPTH_UNITS + 1, DEPTH_HEADS)),
        ):
            if len(data) != _FLOAT.itemsize * math.prod(shape):
                raise ValueError(f"layer {name} has {len(data)} bytes; float32{list(shape)} is accepted")
            if not np.isfinite(np.frombuffer(data, _FLOAT)).all():
                raise ValueError(f"layer {name} holds numbers that are not finite")

    @classmethod
    def of_arrays(
        cls,
        depths: tuple[int, ...],
        verify_widths: tuple[int, ...],
        first: NDArray[np.float32],
        second: NDArray[np.float32],
    ) -> DepthNetwork:
        """first: float32[H + 1, DEPTH_UNITS]; second: float32[DEPTH_UNITS + 1, at most DEPTH_HEADS], a column each."""
        padded = np.zeros((DEPTH_UNITS + 1, DEPTH_HEADS), _FLOAT)
        padded[:, : second.shape[1]] = second
        return cls(depths, verify_widths, first.shape[0] - 1, first.astype(_FLOAT).tobytes(), padded.tobytes())

    @property
    def layers(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both layers as arrays."""
        first = np.frombuffer(self.first, _FLOAT).reshape(self.hidden_size + 1, DEPTH_UNITS)
        second = np.frombuffer(self.second, _FLOAT).reshape(DEPTH_UNITS + 1, DEPTH_HEADS)
        return first, second

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both layers as `verify` takes them."""
        first, second = self.layers
        return torch.tensor(first), torch.tensor(second)

    def expected_tokens(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Tokens that an iteration of each depth is expected to emit: float32[n, DEPTH_HEADS].

        hidden: float32[n, H]. The reference for what `verify` computes.
        """
        first, second = self.layers
        found: NDArray[np.float32] = np.maximum(hidden @ first[:-1] + first[-1], 0) @ second[:-1] + second[-1]
        return found
