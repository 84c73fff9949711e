"""Brute-force oracles: slow, obvious versions of what the product computes."""

from __future__ import annotations

from itertools import combinations


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node, its parent, … and the root."""
    found = {node}
    while node != 0:
        node = parents[node]
        found.add(node)
    return found


def mask(parents: list[int]) -> list[list[bool]]:
    """Which nodes each node may attend to."""
    size = len(parents)
    return [[other in ancestors(parents, node) for other in range(size)] for node in range(size)]


def best_subtree(parents: list[int], values: list[float], width: int) -> float:
    """Largest total value of any subtree of `width` nodes that holds the root, over all of them."""
    others = range(1, len(parents))
    best = float("-inf")
    for chosen in combinations(others, width - 1):
        nodes = {0, *chosen}
        if all(parents[node] in nodes for node in chosen):
            best = max(best, sum(values[node] for node in nodes))
    return best


def accept(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], int]:
    """Walk from the root, looking through all rows for the child that is the verifier's choice."""
    path: list[int] = []
    at = 0
    while True:
        child = next((row for row in range(1, len(tokens)) if parents[row] == at and tokens[row] == choices[at]), None)
        if child is None:
            return path, choices[at]
        path.append(child)
        at = child


def grow(children, draft_width: int, draft_depth: int, num_children: int) -> tuple[list[int], list[int], list[float]]:
    """Equal-Growth Tree: tokens (below the root), parents and log values in growth order.

    children: function from a path of tokens below the root to [(token, log a)] of the next token, best first.
    Every pass adds the draft_width best candidates of the whole pool; nodes added by the last pass are not expanded.
    """
    tokens, parents, values = [-1], [0], [0.0]
    paths: list[tuple[int, ...]] = [()]
    pool: list[tuple[float, int, int]] = []  # value, parent, token; earlier entries win ties
    frontier = [0]
    for _ in range(draft_depth):
        for node in frontier:
            for token, log_a in children(paths[node])[:num_children]:
                pool.append((values[node] + log_a, node, token))
        pool.sort(key=lambda candidate: -candidate[0])
        added, pool = pool[:draft_width], pool[draft_width:]
        frontier = []
        for value, parent, token in added:
            frontier.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            values.append(value)
            paths.append((*paths[parent], token))
    return tokens, parents, values


def nodes_on_path(tokens: list[int], parents: list[int], continuation: list[int]) -> list[int]:
    """Nodes that spell the continuation from the root on, node by node; every such node, duplicates included."""
    met = [0]
    for node in range(1, len(tokens)):
        depth, at, agrees = 0, node, True
        path = []
        while at != 0:
            path.append(tokens[at])
            at = parents[at]
            depth += 1
        for said, drafted in zip(continuation, reversed(path), strict=False):
            agrees = agrees and said == drafted
        if agrees and depth <= len(continuation):
            met.append(node)
    return met
