"""What a text may copy from itself, against looking through all of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from yggrt.copying import LONGEST_MATCH, NOTHING, Copies, find_match

LOG_A = (-2.0, -1.0, -0.5)


def match_by_looking(text: list[int], longest: int) -> tuple[int, int]:
    """The longest earlier occurrence of the text's end, of several the last."""
    for length in range(longest, 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                return start + length, length
    return len(text), 0


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_the_match_is_the_longest_and_of_those_the_last(vocabulary):
    chance = random.Random(vocabulary)
    lengths = set()
    for _ in range(150):
        text = [chance.randrange(vocabulary) for _ in range(chance.randrange(1, 60))]
        for longest in (1, 3, LONGEST_MATCH):
            found = find_match(np.array(text), longest)
            assert found == match_by_looking(text, longest)
            lengths.add(found[1])
    assert {0, 1} <= lengths and (vocabulary > 2 or LONGEST_MATCH in lengths)


def test_the_path_goes_on_as_the_text_did_and_is_surer_the_more_of_it_matched():
    copies = Copies(50, 6)
    tokens, log_a = copies.path([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 2, 3], LOG_A)
    assert tokens.tolist() == [3, 4, 5, 6, 7, 8]
    np.testing.assert_allclose(log_a.numpy()[1:], [-1.0, -0.5, -0.5, -0.5, -0.5])
    tokens, log_a = copies.path([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 2, 3, 8], LOG_A)
    assert tokens.tolist() == [8, 9, 9, 2, 3, 8]
    np.testing.assert_allclose(log_a.numpy()[1:], [-2.0, -1.0, -0.5, -0.5, -0.5])


def test_a_path_past_the_texts_end_repeats_itself():
    tokens, log_a = Copies(50, 8).path([7, 1, 2, 1, 2], LOG_A)
    assert tokens.tolist() == [2, 1, 2, 1, 2, 1, 2, 1]
    np.testing.assert_allclose(log_a.numpy()[1:], [-1.0, *[-0.5] * 6])


@pytest.mark.parametrize(("text", "log_a"), [([1, 2, 3], LOG_A), ([1], LOG_A), ([1, 2, 1, 2], ())])
def test_nothing_is_copied_where_the_last_token_is_new_or_there_are_no_rates(text, log_a):
    copies = Copies(50, 6)
    found = copies.path(text, log_a)
    assert found is copies.none and found[0].tolist() == [NOTHING] * 6


def test_a_text_that_goes_on_is_as_one_read_at_once_and_another_begins_with_a_reset():
    chance = random.Random(1)
    text = [chance.randrange(4) for _ in range(80)]
    growing = Copies(80, 5)
    for length in (3, 4, 9, 30, 31, 80):
        found, fresh = growing.path(text[:length], LOG_A), Copies(80, 5).path(text[:length], LOG_A)
        assert [part.tolist() for part in found] == [part.tolist() for part in fresh]
    growing.reset()
    other = [9, 8, 9, 8]
    assert growing.path(other, LOG_A)[0].tolist() == Copies(80, 5).path(other, LOG_A)[0].tolist()
