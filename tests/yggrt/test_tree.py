"""Trees: sizes, masks, and the nested cuts handed to the verifier."""

import random

import numpy as np
import pytest
import torch

from tests import oracle
from yggrt.tree import Tree, TreeShape, ancestor_matrix, cut_most_valuable, order_by_value


def random_tree(seed: int, size: int) -> Tree:
    """A tree whose children are never more valuable than their parents."""
    chance = random.Random(seed)
    parents, depths, values = [0], [0], [0.0]
    for node in range(1, size):
        parent = chance.randrange(node)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        values.append(values[parent] - chance.choice([0.0, 0.1, 0.5, 2.0]))
    return Tree(np.arange(size) + 100, np.array(parents), np.array(depths), np.array(values, dtype=np.float32))


@pytest.mark.field(4)
@pytest.mark.parametrize("parents, depth", [([0], 0), ([0, 0, 0], 1), ([0, 0, 0, 1, 1, 3, 4], 3)])
def test_mask_matches_ancestor_walk(parents, depth):
    assert ancestor_matrix(np.array(parents), depth).tolist() == oracle.mask(parents)


@pytest.mark.parametrize("seed", range(8))
def test_cut_is_the_most_valuable_subtree(seed):
    tree = random_tree(seed, 10)
    depth = int(tree.depths.max())
    chances = np.exp(tree.values).tolist()
    for width in range(1, 11):
        cut = cut_most_valuable(tree, order_by_value(tree), width, depth)
        total = sum(chances[node] for node in cut.nodes.tolist())
        assert total == pytest.approx(oracle.best_subtree(tree.parents.tolist(), chances, width))


@pytest.mark.parametrize("seed", range(8))
def test_cut_keeps_parents_before_children_and_its_own_ancestors(seed):
    tree = random_tree(seed, 24)
    depth = int(tree.depths.max())
    for width in (1, 2, 7, 24, 40):
        cut = cut_most_valuable(tree, order_by_value(tree), width, depth)
        nodes, parents = cut.nodes.tolist(), cut.parents.tolist()
        assert nodes[0] == 0 and len(nodes) == min(width, 24)
        assert all(parents[row] < row for row in range(1, len(nodes)))
        assert [nodes[parent] for parent in parents] == [tree.parents.tolist()[node] for node in nodes]
        assert cut.tokens.tolist() == [100 + node for node in nodes]
        assert cut.ancestors.tolist() == oracle.mask(parents)


def test_a_tree_is_the_first_nodes_of_a_state():
    tree = random_tree(0, 10)
    state = [torch.from_numpy(part) for part in (tree.tokens, tree.parents, tree.depths, tree.values)]
    partial = Tree.of_state(state, num_nodes=4)
    assert partial.num_nodes == 4
    assert sorted(cut_most_valuable(partial, order_by_value(partial), 10, 9).nodes.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (2, 3, 8)])
def test_impossible_shapes_are_refused(sizes):
    with pytest.raises(ValueError, match="verify_width|draft_width"):
        TreeShape(*sizes)
