"""Token trees: their sizes, the growth state of one iteration, and the cut handed to the verifier.

Nodes are in growth order; node 0 is the root (the last committed token) and parents[0] == 0. A child always comes after
its parent and is never more valuable than it, so the most valuable nodes of any number form a subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Static sizes of one iteration.

    draft_width:  W_d, nodes the drafter adds per pass.
    draft_depth:  D_d, drafter passes; 0 is plain decoding.
    verify_width: W_v, nodes handed to the verifier, root included.
    """

    draft_width: int
    draft_depth: int
    verify_width: int

    def __post_init__(self) -> None:
        if self.draft_width < 1 or self.draft_depth < 0 or self.verify_width < 1:
            raise ValueError(
                f"draft_width={self.draft_width}, draft_depth={self.draft_depth}, verify_width={self.verify_width}: "
                "widths start at 1 and the depth at 0"
            )
        if self.verify_width > self.capacity:
            raise ValueError(
                f"verify_width={self.verify_width} exceeds the {self.capacity} nodes of a tree "
                f"with draft_width={self.draft_width}, draft_depth={self.draft_depth}"
            )

    @property
    def capacity(self) -> int:
        """Nodes of a full tree, root included."""
        return 1 + self.draft_width * self.draft_depth

    @property
    def pool_size(self) -> int:
        """Candidates worth keeping between passes: no more can be added by the passes still to come."""
        return self.draft_width * max(self.draft_depth - 1, 1)


PLAIN = TreeShape(draft_width=1, draft_depth=0, verify_width=1)
"""No tree: plain decoding."""


def depths_to_fall_back_to(depth: int) -> tuple[int, ...]:
    """The halves of a depth down to plain decoding, and the depth itself: ascending."""
    depths = {0}
    while depth > 0:
        depths.add(depth)
        depth //= 2
    return tuple(sorted(depths))


@dataclass(frozen=True, slots=True)
class Tree:
    """A grown tree as the draft pass leaves it; all arrays in growth order.

    tokens, parents, depths: int64[N]; the root has depth 0.
    values:                  float32[N], log of the probability that the verifier's own text passes through the node.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of_state(cls, state: Sequence[Tensor], num_nodes: int) -> Tree:
        """The first `num_nodes` nodes of a growth state; see `yggrt.artifacts.DRAFT_STATE`."""
        return cls(*[part.numpy()[:num_nodes] for part in state[:4]])

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return self.tokens.size


@dataclass(frozen=True, slots=True)
class VerifyCut:
    """The nodes handed to the verifier, most valuable first; row 0 is the root. Arrays this small belong to the host.

    nodes:     int64[W], growth index of each row.
    tokens:    int64[W]
    parents:   int64[W], row of the parent; parents[0] == 0.
    depths:    int64[W]
    ancestors: bool[W, W], [i, j] is True when row j is row i or an ancestor of it.
    """

    nodes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    ancestors: NDArray[np.bool_]


def ancestor_matrix(parents: NDArray[np.int64], depth: int) -> NDArray[np.bool_]:
    """Which nodes each node may attend to: its ancestors and itself.

    parents: int64[N], parent of each node, parents[0] == 0.
    depth:   depth of the deepest node.
    Returns: bool[N, N], [i, j] is True when j is i or an ancestor of i.
    """
    nodes = np.arange(parents.size)
    matrix = np.zeros((parents.size, parents.size), dtype=np.bool_)
    ancestor = nodes
    for _ in range(depth + 1):  # over depths, never over nodes
        matrix[nodes, ancestor] = True
        ancestor = parents[ancestor]
    return matrix


def order_by_value(tree: Tree) -> NDArray[np.int64]:
    """Nodes of a tree, most valuable first; the root is the first.

    Sorting is stable, and ancestors are at least as valuable and earlier, so parents precede children.
    """
    return np.argsort(-tree.values, kind="stable")


def cut_most_valuable(tree: Tree, order: NDArray[np.int64], width: int, depth: int) -> VerifyCut:
    """The `width` most valuable nodes of a tree: one of the nested subtrees the verifier may be given.

    order: of `order_by_value`; depth: depth of the deepest node.
    Returns a cut of min(width, tree.num_nodes) rows.
    Source: design, "Verification width"; the maximum-value-subtree DP is the test oracle.
    """
    nodes = order[:width]
    row_of = np.zeros(tree.num_nodes, dtype=np.int64)
    row_of[nodes] = np.arange(nodes.size)
    parents = row_of[tree.parents[nodes]]
    return VerifyCut(nodes, tree.tokens[nodes], parents, tree.depths[nodes], ancestor_matrix(parents, depth))
