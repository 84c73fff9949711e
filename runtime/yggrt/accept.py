"""Which drafted nodes the verifier agrees with.

Invariant: what is emitted is exactly what the verifier would have said alone; above temperature 0, in law. For
`traverse` that needs every node's children drawn in order, without replacement, from the law they are verified with,
and what is kept decided without looking at the tokens; `walk` is exact on any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def accept_greedy(tokens: NDArray[np.int64], parents: NDArray[np.int64], choices: NDArray[np.int64]) -> list[int]:
    """Walk from the root to the child that equals the verifier's choice, as long as there is one.

    tokens, parents: int64[W], token and parent row of each row; row 0 is the root, parents come before children and
                     siblings differ in token.
    choices:         int64[W], the verifier's argmax after each row.
    Returns the rows of the walk, the root's 0 first; the choices after them are the tokens to emit.
    """
    path = [0]
    for row in (tokens[1:] == choices[parents[1:]]).nonzero()[0].tolist():  # rows that agree with their parent
        if parents[row + 1] == path[-1]:  # those off the path are skipped
            path.append(row + 1)
    return path


def walk(tokens: NDArray[np.int64], parents: NDArray[np.int64], choose: Callable[[int], int]) -> tuple[list[int], int]:
    """Let the verifier choose after a row, and go to the child that says the same, as long as there is one.

    tokens, parents: int64[W], token and parent row of each row; row 0 is the root, siblings differ in token.
    choose:          a row to the token chosen after it, called once for every row of the walk, in its order.
    Returns the rows of the walk, the root's 0 first, and the token chosen after the last.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        children = ((parents == path[-1]) & (tokens == token)).nonzero()[0]
        children = children[children > 0]
        if not children.size:
            return path, token
        path.append(int(children[0]))


Law = NDArray[np.float64]


class Chance(Protocol):
    """Where randomness comes from: a generator when answering, all outcomes in turn when a law is proved."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""

    def draw(self, law: Law) -> int:
        """An index with the chance that the law gives it. law: float64[n], sums to 1."""


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """What a node's children were drawn from, one after another and without replacement.

    ids: int64[M], tokens; chances: float64[M], sum to 1. Other tokens were never drawn.
    """

    ids: NDArray[np.int64]
    chances: Law


@dataclass(slots=True)
class _Open:
    """A node on the path that is being tried: its chance of being accepted and both laws, after what was rejected."""

    row: int
    accept: float
    law: Law
    draft: DraftLaw | None
    children: Sequence[int]
    visited: int = 0


def traverse(
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    law_of: Callable[[int], Law],
    drafted: Callable[[int], DraftLaw],
    chance: Chance,
) -> tuple[list[int], int]:
    """Walk from the leaves up: the rows accepted, the root's 0 first, and the token after them.

    tokens, parents: int64[W], token and parent row; row 0 is the root, parents come first, siblings in the order drawn.
    law_of:  a row to the verifier's law after it, float64[V]: processed as the request asks, of the row's own path.
    drafted: a row that has children to the law they were drawn from.
    Source: Traversal Verification; design, section 5, "Temperature above 0".
    """
    children: list[list[int]] = [[] for _ in range(tokens.size)]
    for row in range(1, tokens.size):
        children[int(parents[row])].append(row)

    def opened(row: int, accept: float) -> _Open:
        return _Open(row, accept, law_of(row), drafted(row) if children[row] else None, children[row])

    path = [opened(0, 1.0)]
    while True:
        node = path[-1]
        if node.visited < len(node.children):
            row = node.children[node.visited]
            node.visited += 1
            accept = _chance_of_child(node, int(tokens[row]))
            if accept > 0:
                path.append(opened(row, accept))
            else:
                _reject(node, int(tokens[row]))
        elif node.row == 0 or chance.coin(node.accept):
            return [each.row for each in path], chance.draw(node.law)
        else:
            path.pop()
            _reject(path[-1], int(tokens[node.row]))


def _chance_of_child(node: _Open, token: int) -> float:
    assert node.draft is not None
    drawn = float(node.draft.chances[node.draft.ids == token].sum())
    return min(1.0, node.accept * float(node.law[token]) / drawn)


def _reject(node: _Open, token: int) -> None:
    """What is left of a node after one of its children was turned down."""
    draft = node.draft
    assert draft is not None
    left = node.accept * node.law
    left[draft.ids] -= draft.chances
    np.maximum(left, 0.0, out=left)
    mass = float(left.sum())
    if mass > 0:
        node.law = left / mass
        node.accept = mass / (mass + (1.0 - node.accept))
    else:
        node.accept = 0.0
    others = np.where(draft.ids == token, 0.0, draft.chances)
    remaining = float(others.sum())
    node.draft = DraftLaw(draft.ids, others / remaining if remaining > 0 else others)
