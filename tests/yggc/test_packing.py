"""Packed weights: every format gives every weight back, and the smallest format that can is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from yggc.packing import BLOCK, PANEL, AffineWeights, Format, num_rows, pack, round_to_levels, unpack

PLAIN = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}


def exact_in(dtype: torch.dtype, rows: int, features: int) -> Tensor:
    """Random float32 values that are exact in `dtype`, both zeros among them, but in no smaller one of PLAIN."""
    values = torch.randn(rows, features).to(dtype).float()
    values[0, 0] = {torch.float32: 1 / 3, torch.bfloat16: 2.0**100, torch.float16: 1 + 2.0**-10}[dtype]
    values[-1, -2:] = torch.tensor([0.0, -0.0])
    return values


def random_affine(rows: int, features: int, bits: int) -> AffineWeights:
    """Random levels, the extreme ones among them; scales of both signs."""
    levels = torch.randint(0, 2**bits, (rows, features), dtype=torch.uint8)
    levels[0, :2] = torch.tensor([0, 2**bits - 1])
    blocks = (rows, features // BLOCK)
    return AffineWeights(levels, torch.randn(blocks).half() / 16, torch.randn(blocks).half() / 4, bits)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("features", [1, 32, 96, 100])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_weights_come_back_bit_for_bit_from_the_smallest_format(kind, rows, features):
    torch.manual_seed(0)
    values = exact_in(PLAIN[kind], rows, max(features, 3))[:, :features].contiguous()
    matrix = pack(values)
    assert (matrix.rows, matrix.features, matrix.format) == (rows, features, kind)
    assert same_bits(unpack(matrix), values)
    size = 4 if kind is Format.FLOAT32 else 2
    assert matrix.num_bytes == -(-rows // PANEL) * PANEL * features * size


@pytest.mark.parametrize("features", [32, 64, 96])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("bits", [4, 8])
def test_affine_weights_come_back_bit_for_bit_from_their_levels(bits, rows, features):
    torch.manual_seed(1)
    affine = random_affine(rows, features, bits)
    matrix = pack(affine.values(), affine)
    assert (matrix.rows, matrix.features) == (rows, features)
    assert matrix.format is (Format.AFFINE4 if bits == 4 else Format.AFFINE8)
    assert same_bits(unpack(matrix), affine.values())
    assert matrix.num_bytes == -(-rows // PANEL) * PANEL * features * {4: 0.625, 8: 1.125}[bits]


def test_affine_values_are_level_times_scale_plus_offset():
    torch.manual_seed(2)
    affine = random_affine(3, 64, 8)
    for row in range(3):
        for feature in range(64):
            scale, offset = (float(part[row, feature // BLOCK]) for part in (affine.scales, affine.offsets))
            expected = torch.tensor(int(affine.levels[row, feature]) * scale) + torch.tensor(offset)
            assert affine.values()[row, feature] == expected


@pytest.mark.parametrize("kind", [kind for kind in Format if kind >= Format.AFFINE8])
def test_any_block_that_differs_from_its_levels_makes_the_pack_ignore_them(kind):
    torch.manual_seed(3)
    affine = random_affine(33, 96, 4 if kind is Format.AFFINE4 else 8)
    assert pack(affine.values(), affine).format is kind
    for row, feature in ((0, 0), (32, 95), (17, 40)):
        values = affine.values()
        values[row, feature] = torch.nextafter(values[row, feature], torch.tensor(torch.inf))
        matrix = pack(values, affine)
        assert matrix.format is Format.FLOAT32
        assert same_bits(unpack(matrix), values)


def test_levels_of_a_model_that_was_rounded_on_loading_are_ignored():
    torch.manual_seed(4)
    affine = random_affine(33, 64, 4)
    values = affine.values().bfloat16()
    assert not torch.equal(values.float(), affine.values())
    matrix = pack(values, affine)
    assert matrix.format is Format.BFLOAT16
    assert same_bits(unpack(matrix), values.float())


def test_levels_of_a_matrix_that_was_cut_are_ignored():
    torch.manual_seed(9)
    affine = random_affine(33, 64, 8)
    values = affine.values()[[2, 3, 5, 31]]
    matrix = pack(values, affine)
    assert (matrix.rows, matrix.format) == (4, Format.FLOAT32)
    assert same_bits(unpack(matrix), values)


def test_values_exact_in_both_halves_are_packed_and_come_back():
    values = torch.arange(-64.0, 64.0).view(2, 64)
    matrix = pack(values)
    assert matrix.format in (Format.BFLOAT16, Format.FLOAT16)
    assert same_bits(unpack(matrix), values)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damaged_weights_come_back_as_damaged_as_they_were(dtype, damage):
    torch.manual_seed(5)
    values = torch.randn(33, 40).to(dtype)
    values[32, 39] = damage
    assert same_bits(unpack(pack(values)), values.float())


@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_that_does_not_lie_in_one_piece_is_packed_by_its_values(turned):
    torch.manual_seed(6)
    values = torch.randn(40, 35).t() if turned else torch.randn(35, 80)[:, ::2]
    assert not values.is_contiguous()
    assert same_bits(unpack(pack(values)), values.contiguous())


@pytest.mark.parametrize("kind", Format)
def test_panels_have_the_bytes_that_are_announced(kind):
    torch.manual_seed(7)
    features = 96
    if kind in PLAIN:
        matrix = pack(exact_in(PLAIN[kind], 70, features))
    else:
        affine = random_affine(70, features, 4 if kind is Format.AFFINE4 else 8)
        matrix = pack(affine.values(), affine)
    per_weight = {
        Format.FLOAT32: 4, Format.BFLOAT16: 2, Format.FLOAT16: 2, Format.AFFINE8: 1.125, Format.AFFINE4: 0.625,
    }[kind]  # fmt: skip
    assert kind.panel_bytes(features) == PANEL * features * per_weight
    assert matrix.data.dtype == torch.uint8
    assert matrix.num_bytes == matrix.data.numel() == 3 * kind.panel_bytes(features)
    assert num_rows(matrix.data, features, kind) == 96


def test_rows_beyond_the_last_are_zero():
    torch.manual_seed(8)
    matrix = pack(torch.randn(33, 64))
    panels = matrix.data.view(torch.float32).view(2, 64, PANEL)
    assert not panels[1, :, 1:].any()


@pytest.mark.parametrize(
    "levels, scales, offsets, bits",
    [
        ((4, 64), (4, 2), (4, 2), 5),
        ((4, 48), (4, 1), (4, 1), 4),
        ((4, 64), (4, 1), (4, 2), 4),
        ((4, 64), (4, 2), (4, 4), 8),
        ((4, 64), (3, 2), (4, 2), 8),
        ((4, 64), (4, 2), (5, 2), 8),
    ],
)
def test_levels_scales_and_offsets_that_do_not_fit_are_refused(levels, scales, offsets, bits):
    with pytest.raises(ValueError, match="are accepted"):
        AffineWeights(
            torch.zeros(levels, dtype=torch.uint8),
            torch.zeros(scales, dtype=torch.float16),
            torch.zeros(offsets, dtype=torch.float16),
            bits,
        )


def test_rounding_to_levels_moves_a_weight_by_half_a_level_and_little_more():
    torch.manual_seed(5)
    values = torch.randn(40, 96) * torch.logspace(-2, 3, 40)[:, None]
    values[3], values[4, :32] = 0.25, 0.0
    affine = round_to_levels(values)
    assert affine is not None and affine.bits == 8
    blocks = values.view(40, 3, BLOCK)
    step = ((blocks.amax(dim=2) - blocks.amin(dim=2)) / 255)[:, :, None].expand_as(blocks).reshape(40, 96)
    assert ((affine.values() - values).abs() <= 0.7 * step + values.abs() * 2**-10 + 1e-7).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e5])
def test_what_levels_cannot_hold_is_not_rounded(value):
    values = torch.ones(4, 64)
    assert round_to_levels(values) is not None
    values[2, 40] = value
    assert round_to_levels(values) is None
    assert round_to_levels(torch.ones(4, 40)) is None


def test_levels_that_give_other_values_are_used_only_where_that_is_allowed():
    torch.manual_seed(6)
    values = torch.randn(32, 64)
    levels = round_to_levels(values)
    assert pack(values, levels).format is Format.FLOAT32
    matrix = pack(values, levels, exactly=False)
    assert matrix.format is Format.AFFINE8 and torch.equal(unpack(matrix), levels.values())
