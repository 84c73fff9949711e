"""Greedy acceptance against a walk that looks at every row."""

import random

import numpy as np
import pytest

from tests import oracle
from yggrt.accept import accept_greedy


@pytest.mark.parametrize("seed", range(200))
def test_acceptance_equals_the_walk(seed):
    chance = random.Random(seed)
    size, vocabulary = chance.randint(1, 20), chance.choice([3, 5, 30])
    parents, tokens = [0], [chance.randrange(vocabulary)]
    for row in range(1, size):
        parent = chance.randrange(row)
        taken = {tokens[other] for other in range(1, row) if parents[other] == parent}
        free = [token for token in range(vocabulary) if token not in taken]
        if not free:
            break
        parents.append(parent)
        tokens.append(chance.choice(free))
    choices = [chance.randrange(vocabulary) for _ in tokens]
    found = accept_greedy(np.array(tokens), np.array(parents), np.array(choices))
    path, bonus = oracle.accept(tokens, parents, choices)
    assert found == [0, *path]
    assert [choices[row] for row in found] == [*(tokens[row] for row in path), bonus]


@pytest.mark.field(4)
def test_a_sibling_of_the_accepted_child_is_never_taken():
    found = accept_greedy(np.array([9, 5, 6, 7]), np.array([0, 0, 0, 2]), np.array([6, 7, 7, 1]))
    assert found == [0, 2, 3]
