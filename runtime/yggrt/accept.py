"""Which drafted nodes the verifier agrees with.

Invariant: what is emitted is exactly what the verifier would have said alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Outcome of one verification.

    rows:  rows of the accepted path below the root, in order.
    bonus: the verifier's own token after the path.
    """

    rows: tuple[int, ...]
    bonus: int


def accept_greedy(tokens: NDArray[np.int64], parents: NDArray[np.int64], choices: NDArray[np.int64]) -> Acceptance:
    """Walk from the root to the child that equals the verifier's choice, as long as there is one.

    tokens, parents: int64[W], token and parent row of each row; row 0 is the root, parents come before children and
                     siblings differ in token.
    choices:         int64[W], the verifier's argmax after each row.
    """
    agreed = np.flatnonzero(tokens[1:] == choices[parents[1:]]) + 1
    path: list[int] = []
    at = 0
    for row in agreed.tolist():  # rows that agree with their parent; those off the path are skipped
        if parents[row] == at:
            path.append(row)
            at = row
    return Acceptance(tuple(path), int(choices[at]))
