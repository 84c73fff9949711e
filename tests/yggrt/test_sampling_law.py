"""The law of what is emitted above temperature 0, enumerated over every outcome of every draw: equal to the verifier's.

A randomised program that draws through `Chance` is run once for every sequence of outcomes that has a chance; the
chances of the runs that emit the same text add up to the text's. No sampling, no tolerance for noise. The same proof
must fail for every shortcut known to be biased.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from yggrt.accept import Chance, DraftLaw, Law, traverse, walk

EXACT = 1e-12
VOCAB = 3
BIASED = 0.01


class EveryOutcome:
    """A `Chance` that follows a script of outcomes, and beyond its end takes the first that is possible."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.weight = 1.0

    def _choose(self, chances: Law) -> int:
        possible = np.flatnonzero(chances > 0).tolist()
        place = len(self.taken)
        outcome = self.script[place] if place < len(self.script) else possible[0]
        self.taken.append(outcome)
        self.options.append(possible)
        self.weight *= float(chances[outcome])
        return outcome

    def coin(self, probability: float) -> bool:
        return self._choose(np.array([1.0 - probability, probability])) == 1

    def draw(self, weights: Law) -> int:
        return self._choose(weights / weights.sum())


def every_run(program: Callable[[Chance], tuple[int, ...]]):
    """(result, chance) of every way the program can go."""
    script: list[int] = []
    while True:
        chance = EveryOutcome(script)
        yield program(chance), chance.weight
        while chance.taken:
            last, options = chance.taken.pop(), chance.options.pop()
            later = options[options.index(last) + 1 :]
            if later:
                script = [*chance.taken, later[0]]
                break
        else:
            return


@dataclass(frozen=True)
class Pair:
    """Laws after every prefix: the verifier's p, and the q that the drafter draws from (M ids and their chances)."""

    vocab: int
    p: Callable[[tuple[int, ...]], Law]
    q: Callable[[tuple[int, ...]], DraftLaw]


def total_variation(program, pair: Pair, length: int) -> float:
    """Distance between what a program emits, continued by sampling to `length`, and sampling alone."""

    def continued(prefix: tuple[int, ...], weight: float, law) -> None:
        if len(prefix) == length:
            law[prefix] += weight
            return
        for token, chance in enumerate(pair.p(prefix)):
            if chance > 0:
                continued((*prefix, token), weight * float(chance), law)

    emitted: dict = defaultdict(float)
    for text, weight in every_run(program):
        emitted[text[:length]] += weight
    found: dict = defaultdict(float)
    for text, weight in emitted.items():
        continued(text, weight, found)
    wanted: dict = defaultdict(float)
    continued((), 1.0, wanted)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
    return 0.5 * sum(abs(found[text] - wanted[text]) for text in {*found, *wanted})


# ---- slot-EGT: the reference ----


@dataclass
class Slots:
    """A tree of slots, in the order they were added: parent, place among its siblings, value; and the tokens drawn."""

    tokens: list[int]
    parents: list[int]
    places: list[int]
    values: list[float]
    paths: list[tuple[int, ...]]
    dead: list[bool]


def bucket_acceptance(draft: DraftLaw, place: int) -> float:
    """a_k(h): chance that the k-th sibling is accepted, by how sure the drafter is; falling with k."""
    entropy = -float(sum(c * np.log(c) for c in draft.chances if c > 0))
    return (0.8 if entropy < 0.6 else 0.5) * 0.6**place


def grow(pair: Pair, width: int, depth: int, chance: Chance) -> Slots:
    """Passes that each add the `width` most valuable slots of the pool and draw their tokens without replacement."""
    tree = Slots([-1], [0], [0], [1.0], [()], [False])
    drafts: dict[int, DraftLaw] = {}
    pool: list[tuple[float, int, int]] = []  # value, parent, place
    fresh = [0]
    for _ in range(depth):
        for node in fresh:
            if tree.dead[node]:
                continue
            drafts[node] = pair.q(tree.paths[node])
            left = tree.values[node]
            for place in range(width + 1):
                rate = bucket_acceptance(drafts[node], place)
                pool.append((left * rate, node, place))
                left *= 1.0 - rate
        pool.sort(key=lambda slot: (-slot[0], slot[1], slot[2]))
        taken, pool = pool[:width], pool[width:]
        fresh = []
        for value, parent, place in sorted(taken, key=lambda slot: (slot[1], slot[2])):
            fresh.append(len(tree.tokens))
            before = [tree.tokens[each] for each in range(1, len(tree.tokens)) if tree.parents[each] == parent]
            draft = drafts[parent]
            chances = np.where(np.isin(draft.ids, before), 0.0, draft.chances)
            is_dead = not chances.sum() > 0
            token = -1 if is_dead else int(draft.ids[chance.draw(chances / chances.sum())])
            for name, item in zip(
                ("tokens", "parents", "places", "values", "paths", "dead"),
                (token, parent, place, value, (*tree.paths[parent], token), is_dead),
                strict=True,
            ):
                getattr(tree, name).append(item)
    return tree


def verify(pair: Pair, tree: Slots, kept: list[int], chance: Chance, rule: str = "traversal", draft_of=None):
    """Emitted tokens: the accepted path of the kept nodes (tree order; dead ones left out) and what follows."""
    rows = [node for node in kept if not tree.dead[node]]
    row_of = {node: row for row, node in enumerate(rows)}
    tokens = np.array([tree.tokens[node] for node in rows])
    parents = np.array([row_of[tree.parents[node]] for node in rows])
    laws = lambda row: pair.p(tree.paths[rows[row]])  # noqa: E731
    drafted = draft_of or (lambda row: pair.q(tree.paths[rows[row]]))
    path, bonus = (
        traverse(tokens, parents, lambda row: laws(row).copy(), drafted, chance)
        if rule == "traversal"
        else walk(tokens, parents, lambda row: chance.draw(laws(row)))
    )
    return (*(int(tokens[row]) for row in path[1:]), bonus)


def best_slots(tree: Slots, count: int) -> list[int]:
    """The `count` most valuable slots, in tree order; values fall along paths and siblings, so they form a subtree."""
    order = sorted(range(len(tree.tokens)), key=lambda node: (-tree.values[node], node))
    return sorted(order[:count])


# ---- pairs ----


def random_law(chance: np.random.Generator, vocab: int, kind: str) -> Law:
    law = chance.dirichlet(np.full(vocab, 0.7))
    if kind == "one-hot":
        law = np.eye(vocab)[int(chance.integers(vocab))]
    elif kind == "zero mass":
        law[chance.integers(vocab)] = 0.0
    elif kind == "truncated":
        law[np.argsort(law)[: vocab // 2]] = 0.0
    return law / law.sum()


def make_pair(vocab: int, kind_p: str, kind_q: str, seed: int) -> Pair:
    known_p: dict[tuple[int, ...], Law] = {}
    known_q: dict[tuple[int, ...], DraftLaw] = {}

    def p(prefix: tuple[int, ...]) -> Law:
        if prefix not in known_p:
            known_p[prefix] = random_law(np.random.default_rng([seed, 1, *prefix]), vocab, kind_p)
        return known_p[prefix]

    def q(prefix: tuple[int, ...]) -> DraftLaw:
        if prefix not in known_q:
            chance = np.random.default_rng([seed, 2, *prefix])
            ids = np.arange(vocab)
            if kind_q == "equal":
                law = p(prefix)
            elif kind_q == "nearly equal":
                law = p(prefix) + 1e-9 * chance.random(vocab)
            elif kind_q == "cut head":
                ids = np.sort(chance.permutation(vocab)[: vocab - 1])
                law = random_law(chance, vocab, "random")[ids]
            else:
                law = random_law(chance, vocab, kind_q)
            known_q[prefix] = DraftLaw(ids, law / law.sum())
        return known_q[prefix]

    return Pair(vocab, p, q)


KINDS = [
    ("random", "random"), ("random", "one-hot"), ("one-hot", "random"), ("random", "equal"), ("random", "nearly equal"),
    ("zero mass", "random"), ("random", "zero mass"), ("truncated", "random"), ("truncated", "truncated"),
    ("random", "cut head"), ("zero mass", "cut head"), ("one-hot", "one-hot"),
]  # fmt: skip


@pytest.mark.field(7)
@pytest.mark.field(11)
@pytest.mark.parametrize("kind_p, kind_q", KINDS)
@pytest.mark.parametrize(
    "vocab, width, depth, count", [(3, 2, 2, 5), (3, 2, 2, 4), (4, 2, 2, 3), (3, 1, 3, 4), (5, 2, 1, 3)]
)
def test_slot_egt_with_traversal_has_the_verifiers_law(kind_p, kind_q, vocab, width, depth, count):
    pair = make_pair(vocab, kind_p, kind_q, seed=vocab + width)

    def program(chance: Chance) -> tuple[int, ...]:
        tree = grow(pair, width, depth, chance)
        return verify(pair, tree, best_slots(tree, count), chance)

    assert total_variation(program, pair, depth + 1) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_a_deeper_tree_has_it_too(seed):
    pair = make_pair(3, "zero mass", "random", seed)

    def program(chance: Chance) -> tuple[int, ...]:
        return verify(pair, tree := grow(pair, 2, 3, chance), best_slots(tree, 5), chance)

    assert total_variation(program, pair, 4) < EXACT


def test_a_threshold_on_slot_values_fixed_beforehand_keeps_the_law():
    pair = make_pair(4, "random", "random", 5)

    def program(chance: Chance) -> tuple[int, ...]:
        tree = grow(pair, 2, 2, chance)
        return verify(pair, tree, [node for node, value in enumerate(tree.values) if value > 0.2], chance)

    assert total_variation(program, pair, 3) < EXACT


# ---- what is biased ----


def favourites(pair: Pair, count: int, depth: int) -> Slots:
    """A tree nobody drew: the drafter's best `count` children of every node."""
    tree = Slots([-1], [0], [0], [1.0], [()], [False])
    nodes = [0]
    for _ in range(depth):
        nodes = [
            add(tree, parent, token, place)
            for parent in nodes
            for place, token in enumerate(best(pair, tree, parent, count))
        ]
    return tree


def best(pair: Pair, tree: Slots, parent: int, count: int) -> list[int]:
    draft = pair.q(tree.paths[parent])
    return [int(draft.ids[place]) for place in np.argsort(-draft.chances)[:count]]


def add(tree: Slots, parent: int, token: int, place: int) -> int:
    tree.tokens.append(token)
    tree.parents.append(parent)
    tree.places.append(place)
    tree.values.append(0.5 ** len(tree.tokens))
    tree.paths.append((*tree.paths[parent], token))
    tree.dead.append(False)
    return len(tree.tokens) - 1


def drawn_values(pair: Pair, tree: Slots) -> list[float]:
    """The drafter's own chance of every path that was drawn."""
    values = [1.0]
    for node in range(1, len(tree.tokens)):
        draft = pair.q(tree.paths[tree.parents[node]])
        values.append(values[tree.parents[node]] * float(draft.chances[draft.ids == tree.tokens[node]].sum()))
    return values


def top_k_as_if_drawn(pair: Pair, chance: Chance):
    tree = favourites(pair, 2, 2)
    return tree, range(len(tree.tokens)), None


def pruned_by_what_was_drawn(pair: Pair, chance: Chance):
    tree = grow(pair, 2, 2, chance)
    values = drawn_values(pair, tree)
    return tree, sorted(sorted(range(len(values)), key=lambda node: -values[node])[:3]), None


def width_by_what_was_drawn(pair: Pair, chance: Chance):
    tree = grow(pair, 2, 2, chance)
    values = drawn_values(pair, tree)
    worth = {count: sum(values[node] for node in best_slots(tree, count)) - 0.3 * count for count in (1, 2, 3, 4)}
    return tree, best_slots(tree, max(worth, key=worth.__getitem__)), None


def dead_slot_kept(pair: Pair, chance: Chance):
    """One that had nothing left to draw holds the first token that was not drawn, as if it had been likely."""
    tree = grow(pair, 2, 1, chance)
    for node in range(1, len(tree.tokens)):
        if tree.dead[node]:
            tree.tokens[node] = next(token for token in range(pair.vocab) if token not in tree.tokens)
            tree.paths[node], tree.dead[node] = (tree.tokens[node],), False

    def generous(row: int) -> DraftLaw:
        draft = pair.q(())
        return DraftLaw(draft.ids, np.maximum(draft.chances, 1e-6))

    return tree, range(len(tree.tokens)), generous


def sorted_siblings(key):
    def made(pair: Pair, chance: Chance):
        tree = grow(pair, 2, 2, chance)
        order = sorted(
            range(len(tree.tokens)), key=lambda node: (len(tree.paths[node]), tree.parents[node], key(pair, tree, node))
        )
        return tree, order, None

    return made


def second_slot_without_the_first(pair: Pair, chance: Chance):
    tree = grow(pair, 2, 1, chance)
    return tree, [node for node in range(len(tree.tokens)) if node == 0 or tree.places[node] == 1], None


def drawn_chance(pair: Pair, tree: Slots, node: int) -> float:
    return -drawn_values(pair, tree)[node]


BIASES = {
    "top-k children verified as if drawn": (top_k_as_if_drawn, "random"),
    "a drawn tree pruned by its own q": (pruned_by_what_was_drawn, "random"),
    "the width chosen by drawn values": (width_by_what_was_drawn, "random"),
    "a dead slot kept as a sibling": (dead_slot_kept, "one-hot"),
    "siblings sorted by id": (sorted_siblings(lambda pair, tree, node: tree.tokens[node]), "random"),
    "siblings sorted by q": (sorted_siblings(drawn_chance), "random"),
    "the second slot kept without the first": (second_slot_without_the_first, "random"),
}


@pytest.mark.parametrize("name", BIASES)
def test_every_known_bias_fails_the_same_proof(name):
    make, kind_q = BIASES[name]

    def worst(rule: str) -> float:
        distances = []
        for seed in range(2):
            pair = make_pair(VOCAB, "random", kind_q, seed)

            def program(chance: Chance, pair: Pair = pair) -> tuple[int, ...]:
                tree, kept, draft_of = make(pair, chance)
                return verify(pair, tree, list(kept), chance, rule, draft_of)

            distances.append(total_variation(program, pair, 3))
        return max(distances)

    assert worst("traversal") > BIASED
    assert worst("walk") < EXACT  # sampling from the verifier and walking is exact on any tree


def test_equal_laws_turn_nothing_down_and_divide_by_nothing():
    pair = make_pair(3, "random", "equal", 1)

    def program(chance: Chance) -> tuple[int, ...]:
        tree = grow(pair, 2, 2, chance)
        text = verify(pair, tree, best_slots(tree, 5), chance)
        assert len(text) >= 2
        return text

    assert total_variation(program, pair, 3) < EXACT
