"""Masks of a step: what they show after any history of steps is what a mask written anew shows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests import oracle
from yggrt.artifacts import MASK_VALUE
from yggrt.masks import StepMask, prefix_mask
from yggrt.tree import ancestor_matrix

EXTENT = 48
WINDOWS = (None, 3, 11)
DTYPES = (torch.float32, torch.bfloat16)


def visible(mask: torch.Tensor) -> list[list[bool]]:
    """Which slots are shown; every entry is 0 or MASK_VALUE as the dtype holds it."""
    hidden = torch.tensor(MASK_VALUE, dtype=mask.dtype)
    assert bool(((mask == 0) | (mask == hidden)).all())
    return (mask == 0).tolist()


def expected_tree(parents: list[int], depths: list[int], num_tokens: int, window: int | None) -> list[list[bool]]:
    """By positions: a row sees the committed tokens before the root, and its ancestors, within its window."""
    related = oracle.mask(parents)
    rows = []
    for row, depth in enumerate(depths):
        position = num_tokens - 1 + depth
        shown = [False] * EXTENT
        for slot in range(1, num_tokens):
            shown[slot] = window is None or position - (slot - 1) < window
        for other, other_depth in enumerate(depths):
            near = window is None or depth - other_depth < window
            shown[num_tokens + other] = related[row][other] and near
        rows.append(shown)
    return rows


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_mask_shows_its_tree_whatever_it_showed_before(window, dtype):
    chance = random.Random(3)
    width = 5
    mask = StepMask(width, EXTENT, dtype, window, width)
    num_tokens = 1
    for _ in range(60):
        num_tokens = chance.choice([num_tokens + chance.randrange(6), chance.randrange(1, EXTENT - width)])
        num_tokens = num_tokens if num_tokens + width <= EXTENT else 1
        parents = [0] + [chance.randrange(node) for node in range(1, width)]
        depths = [0] * width
        for node in range(1, width):
            depths[node] = depths[parents[node]] + 1
        mask.show_tree(ancestor_matrix(np.array(parents), max(depths)), np.array(depths), num_tokens)
        assert visible(mask.tensor) == expected_tree(parents, depths, num_tokens, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", [1, 4])
def test_one_token_sees_the_text_and_padding_sees_scratch(width, window, dtype):
    mask = StepMask(width, EXTENT, dtype, window, 1)
    for num_tokens in (1, 2, 9, 30, 31, 4, 5, EXTENT - 1, 1):
        mask.show_token(num_tokens)
        shown = visible(mask.tensor)
        assert shown[0] == visible(prefix_mask(torch.tensor([num_tokens - 1]), EXTENT, window, dtype))[0]
        assert all(row == [True] + [False] * (EXTENT - 1) for row in shown[1:])


def test_one_row_may_show_trees_and_tokens_in_turns():
    mask = StepMask(1, EXTENT, torch.float32, None, 1)
    one, root = np.ones((1, 1), dtype=np.bool_), np.zeros(1, dtype=np.int64)
    for num_tokens in (3, 4, 5, 2):
        mask.show_token(num_tokens)
        token = visible(mask.tensor)
        mask.show_tree(one, root, num_tokens)
        assert visible(mask.tensor) == token
