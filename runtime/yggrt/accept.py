"""Which drafted nodes the verifier agrees with.

Invariant: what is emitted is exactly what the verifier would have said alone.
"""

from __future__ import annotations

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
