"""Which drafted nodes the verifier agrees with.

Invariant: what is emitted is exactly what the verifier would have said alone; above temperature 0, in law. For
`traverse` that needs every node's children drawn in order, without replacement, from the law they are verified with,
and what is kept decided without looking at the tokens; `walk` is exact on any tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

    def draw(self, weights: NDArray[Any]) -> int:
        """An index with the chance that its weight gives it. weights: float[n], not all 0."""


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """What a node's children were drawn from, one after another and without replacement.

    ids: int64[M], tokens; chances: float64[M], sum to 1. Other tokens were never drawn.
    """

    ids: NDArray[np.int64]
    chances: Law


class _Open:
    """A node on the path that is being tried, and what is left of it after the children that were rejected.

    accept:  its chance of being accepted.
    drafted: float64[M], what its next child was drawn from.
    inside, outside: the verifier's chances of the M tokens, and of all others together; those stand to one another as
    they did at first, and are `scale` times as likely.
    """

    def __init__(
        self,
        row: int,
        accept: float,
        children: Sequence[int],
        law_of: Callable[[int], NDArray[Any]],
        drafted: Callable[[int], DraftLaw],
    ) -> None:
        self.row, self.accept, self.children = row, accept, children
        self.visited = 0
        self.scale = 1.0
        self._law_of = law_of
        if children:  # a leaf's law is asked for only where the leaf is accepted
            draft = drafted(row)
            self._law = law_of(row)
            self.ids, self.drafted = draft.ids, draft.chances.copy()
            self.inside = self._law[draft.ids].astype(np.float64)
            self.outside = max(0.0, 1.0 - float(self.inside.sum()))

    def place(self, token: int) -> int | None:
        """Of a child among the M tokens; None for a dead one, which had no chance of being drawn."""
        place = int((self.ids == token).argmax())
        return place if self.ids[place] == token and self.drafted[place] > 0 else None

    def reject(self, place: int) -> None:
        """Turn one of the children down."""
        left = self.accept * self.inside - self.drafted
        np.maximum(left, 0.0, out=left)
        outside = self.accept * self.outside
        mass = float(left.sum()) + outside
        if mass > 0:
            self.inside, self.outside = left / mass, outside / mass
            self.scale *= self.accept / mass
            self.accept = mass / (mass + (1.0 - self.accept))
        else:
            self.accept = 0.0
        if self.visited == len(self.children):
            return  # nothing is left to be drawn
        self.drafted[place] = 0.0
        remaining = float(self.drafted.sum())
        if remaining > 0:
            self.drafted /= remaining

    def weights(self) -> NDArray[Any]:
        """Of the token after it, where none of its children is accepted: float[V]."""
        if not self.children:
            return self._law_of(self.row)
        weights = self._law
        before = weights[self.ids]
        weights[self.ids] = self.inside / self.scale
        if not self.inside.any() and not weights.any():  # p and q all but equal: what is left is lost in rounding
            weights[self.ids] = before
        return weights


def traverse(
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    law_of: Callable[[int], NDArray[Any]],
    drafted: Callable[[int], DraftLaw],
    chance: Chance,
) -> tuple[list[int], int]:
    """Walk from the leaves up: the rows accepted, the root's 0 first, and the token after them.

    tokens, parents: int64[W], token and parent row; row 0 is the root, parents come first, siblings in the order drawn.
    law_of:  a row to the verifier's law after it: processed as the request asks, of the row's own path.
    drafted: a row that has children to the law they were drawn from.
    Source: Traversal Verification; design, section 5, "Temperature above 0".
    """
    children: list[list[int]] = [[] for _ in range(tokens.size)]
    for row, parent in enumerate(parents.tolist()[1:], start=1):
        children[parent].append(row)

    path, places = [_Open(0, 1.0, children[0], law_of, drafted)], [0]
    while True:
        node = path[-1]
        if node.visited < len(node.children):
            row = node.children[node.visited]
            node.visited += 1
            place = node.place(int(tokens[row]))
            if place is None:
                continue
            accept = min(1.0, node.accept * float(node.inside[place]) / float(node.drafted[place]))
            if accept > 0:
                path.append(_Open(row, accept, children[row], law_of, drafted))
                places.append(place)
            else:
                node.reject(place)
        elif node.row == 0 or chance.coin(node.accept):
            return [each.row for each in path], chance.draw(node.weights())
        else:
            path.pop()
            path[-1].reject(places.pop())
