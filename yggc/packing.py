"""Weights in the smallest format that holds them exactly, laid out for `kernels/kernels.cpp`.

A checkpoint saved in bfloat16 and run in float32 has half its bits at zero; a GGUF file's weights are short levels with
a scale and an offset per block. Steps on a CPU are bound by the bytes they read, so the packed copy keeps what the file
kept and the kernel makes float32 of it on the way. Invariant: unpacking gives every weight back exactly (a zero may
lose its sign), but for a drafter's weights, which `round_to_levels` may have rounded: they decide what is proposed and
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

PANEL = 32  # weights side by side; kernels.cpp has the same number
BLOCK = 32  # features that share a scale and an offset
QUAD = 4  # neighbouring features whose levels lie together


class Format(IntEnum):
    """How a packed matrix keeps its weights; the numbers are the kernels'."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    AFFINE8 = 3
    AFFINE4 = 4

    def panel_bytes(self, features: int) -> int:
        """Bytes of PANEL rows."""
        if self in _DTYPES:
            return features * PANEL * _DTYPES[self].itemsize
        bits = 4 if self is Format.AFFINE4 else 8
        return features // BLOCK * PANEL * (2 + 2 + BLOCK * bits // 8)


_DTYPES = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeights:
    """A matrix [N, K] whose weights are level * scale + offset, computed in float32.

    levels: uint8[N, K], below 2 ** bits; scales, offsets: float16[N, K / BLOCK]. bits: 4 or 8.
    """

    levels: Tensor
    scales: Tensor
    offsets: Tensor
    bits: int

    def __post_init__(self) -> None:
        rows, features = self.levels.shape
        blocks = (rows, features // BLOCK)
        if self.bits not in (4, 8) or features % BLOCK or self.scales.shape != blocks or self.offsets.shape != blocks:
            raise ValueError(
                f"{self.bits}-bit levels {tuple(self.levels.shape)} with scales {tuple(self.scales.shape)} and offsets "
                f"{tuple(self.offsets.shape)}: 4 or 8 bits and one of each per {BLOCK} features are accepted"
            )

    def values(self) -> Tensor:
        """The weights, float32[N, K]."""
        levels = self.levels.view(self.levels.shape[0], -1, BLOCK).float()
        wide = levels * self.scales.float()[:, :, None] + self.offsets.float()[:, :, None]
        return wide.view(self.levels.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [rows, features] as the kernels read it. data: uint8[bytes]."""

    data: Tensor
    rows: int
    features: int
    format: Format

    @property
    def num_bytes(self) -> int:
        """Bytes one product with it reads."""
        return self.data.numel()


def round_to_levels(values: Tensor) -> AffineWeights | None:
    """A matrix [N, K] in 8-bit levels, which loses about as much as bfloat16 does; None where they cannot hold it.

    For drafters alone: a verifier's weights stay what they are.
    """
    rows, features = values.shape
    if features % BLOCK or not bool((values.abs() < torch.finfo(torch.float16).max / 2).all()):
        return None
    blocks = values.float().view(rows, -1, BLOCK)
    offsets = blocks.amin(dim=2).half()
    scales = ((blocks.amax(dim=2) - offsets.float()) / 255).half()
    steps = scales.float().clamp(min=2.0**-24)[:, :, None]  # the smallest number of float16
    levels = ((blocks - offsets.float()[:, :, None]) / steps).round().clamp(0, 255)
    return AffineWeights(levels.to(torch.uint8).view(rows, features), scales, offsets, bits=8)


def pack(values: Tensor, affine: AffineWeights | None = None, exactly: bool = True) -> PackedMatrix:
    """Pack a matrix [N, K] of float32, bfloat16 or float16 in the smallest format that holds it exactly.

    affine:  the levels it was made from, where it was; used only where they give the same values.
    exactly: False takes the levels whatever values they give.
    """
    rows, features = values.shape
    wide = values.float()
    if affine is not None and (not exactly or torch.equal(affine.values(), wide)):
        kind = Format.AFFINE4 if affine.bits == 4 else Format.AFFINE8
        return PackedMatrix(_pack_affine(affine), rows, features, kind)
    for kind, dtype in ((Format.BFLOAT16, torch.bfloat16), (Format.FLOAT16, torch.float16)):
        if torch.equal(wide.to(dtype).float(), wide):
            return PackedMatrix(_pack_plain(wide.to(dtype)), rows, features, kind)
    return PackedMatrix(_pack_plain(wide), rows, features, Format.FLOAT32)


def unpack(matrix: PackedMatrix) -> Tensor:
    """The matrix's weights, float32[rows, features]: the reference for the kernels."""
    panels = -(-matrix.rows // PANEL)
    if matrix.format in (Format.AFFINE8, Format.AFFINE4):
        blocks = matrix.data.view(panels, matrix.features // BLOCK, -1)
        scales = blocks[:, :, : 2 * PANEL].contiguous().view(torch.float16).float()
        offsets = blocks[:, :, 2 * PANEL : 4 * PANEL].contiguous().view(torch.float16).float()
        levels = blocks[:, :, 4 * PANEL :].reshape(panels, blocks.shape[1], -1, PANEL, QUAD)
        if matrix.format == Format.AFFINE4:
            levels = torch.stack((levels & 15, levels >> 4), dim=3).flatten(2, 3)
        levels = levels.transpose(3, 4).flatten(2, 3)
        wide = levels.float() * scales[:, :, None, :] + offsets[:, :, None, :]
        turned = wide.reshape(panels, matrix.features, PANEL)
    else:
        turned = matrix.data.view(_DTYPES[matrix.format]).view(panels, matrix.features, PANEL).float()
    return turned.transpose(1, 2).reshape(-1, matrix.features)[: matrix.rows].contiguous()


def num_rows(data: Tensor, features: int, kind: Format) -> int:
    """Rows of packed data, padding included."""
    return data.numel() // kind.panel_bytes(features) * PANEL


def _panels(matrix: Tensor) -> Tensor:
    """[N, …] with N padded with zeros to whole panels: [panels, PANEL, …]."""
    padding = -matrix.shape[0] % PANEL
    if padding:
        matrix = torch.cat((matrix, matrix.new_zeros(padding, *matrix.shape[1:])))
    return matrix.reshape(-1, PANEL, *matrix.shape[1:])


def _pack_plain(matrix: Tensor) -> Tensor:
    return _panels(matrix).transpose(1, 2).contiguous().view(torch.uint8).flatten()


def _pack_affine(affine: AffineWeights) -> Tensor:
    levels = _panels(affine.levels).transpose(1, 2)  # [panels, K, PANEL]
    levels = levels.reshape(levels.shape[0], -1, BLOCK // QUAD, QUAD, PANEL).transpose(3, 4)
    if affine.bits == 4:
        levels = levels[:, :, 0::2] | levels[:, :, 1::2] << 4
    scales, offsets = (
        _panels(part).transpose(1, 2).contiguous().view(torch.uint8) for part in (affine.scales, affine.offsets)
    )
    return torch.cat((scales, offsets, levels.flatten(2)), dim=2).flatten()
