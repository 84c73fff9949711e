"""Which trees to grow: the draft width, depth and children per node with the most tokens per second.

Every candidate is simulated on the calibration's text with the curves of the machine, the verify width chosen root by
root against lambda, and lambda itself being the candidate's own tokens per second (found by iteration, which only ever
rises: Dinkelbach's method for a ratio). Plain decoding is a candidate like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from yggc.simulate import GrownText, Prices, Simulated, add_up, outcomes, replay
from yggrt.pace import Pace
from yggrt.plan import TreePolicy
from yggrt.tree import TreeShape, depths_to_fall_back_to

SMALLEST_GAIN = 1.005
"""Speculation must be this much faster than plain decoding, over all the text, to be chosen. Little, because falling
back bounds what it can lose on the texts where it does not pay."""

TIE = 0.01
"""Candidates closer than this to the best are as good; the one with the least drafting is taken."""

FINALIST = 0.04
"""Of the best after screening: whoever is closer is simulated on all texts."""

SHALLOW = 4
"""Deeper trees are grown only where the deepest of these was the best."""

MOST_FINALISTS = 2
"""Of different draft widths: at small depths the children per node make no difference."""

ROUNDS = 6
SETTLED = 1e-4


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to grow trees. children_per_node: K."""

    draft_width: int
    children_per_node: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate at one depth, 0 being plain decoding.

    token_s: seconds a token takes, and is worth. num_texts: how many it was simulated on.
    """

    candidate: Candidate
    depth: int
    token_s: float
    simulated: Simulated
    num_texts: int

    @property
    def speedup(self) -> float:
        return self.simulated.plain_tpot_s / self.simulated.tpot_s


def score(candidate: Candidate, depth: int, texts: Sequence[GrownText], prices: Prices) -> Scored:
    """Simulate with the lambda that the candidate itself reaches, falling back where a text does not pay."""
    token_s = add_up([replay(text, 0, prices) for text in texts]).tpot_s
    best: Scored | None = None
    for _ in range(ROUNDS):
        priced = replace(prices, token_s=token_s)
        pace = pace_of(candidate, depth, priced) if depth else None
        simulated = add_up([replay(text, depth, priced, pace) for text in texts])
        if best is None or simulated.tpot_s < best.simulated.tpot_s:
            best = Scored(candidate, depth, token_s, simulated, len(texts))
        if depth == 0 or abs(simulated.tpot_s - token_s) < SETTLED * token_s:
            break
        token_s = simulated.tpot_s
    assert best is not None
    return best


def pace_of(candidate: Candidate, depth: int, prices: Prices) -> Pace:
    """The runtime's choices with this tree, any measured verify width among them."""
    assert prices.token_s is not None
    policy = policy_of(candidate, depth, fitting(prices.verify_widths, candidate, depth), None)
    return Pace(policy, prices.times, prices.host, prices.plain_width, prices.token_s)


def fitting(widths: Sequence[int], candidate: Candidate, depth: int) -> tuple[int, ...]:
    """The verify widths that a tree can fill, its own size the last of them."""
    capacity = 1 + candidate.draft_width * depth
    return tuple(sorted({min(width, capacity) for width in widths}))


def choose(scored: Iterable[Scored]) -> Scored:
    """The fastest; of those within TIE of it the one that drafts least; plain decoding below SMALLEST_GAIN.

    Raises ValueError when plain decoding is not among them.
    """
    entries = list(scored)
    plain = next((entry for entry in entries if entry.depth == 0), None)
    if plain is None:
        raise ValueError("plain decoding must be among the candidates")
    best = min(entries, key=lambda entry: entry.simulated.tpot_s)
    if best.speedup < SMALLEST_GAIN:
        return plain
    near = [entry for entry in entries if entry.depth and entry.simulated.tpot_s <= best.simulated.tpot_s * (1 + TIE)]
    return min(near, key=_drafting)


def _drafting(entry: Scored) -> tuple[int, int, float]:
    """Sorts by how much is drafted."""
    return (entry.candidate.draft_width * entry.depth, entry.depth, entry.simulated.tpot_s)


Grow = Callable[[Candidate, int, bool], Sequence[GrownText]]
"""(candidate, depth, all texts or the sample alone) to trees."""


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """What was tried and chosen.

    ranking: every candidate and depth, the fastest first; those simulated on all texts ahead of those only screened.
    """

    chosen: Scored
    ranking: tuple[Scored, ...]
    verify_widths: tuple[int, ...]


def search_tree(depths_of: Mapping[Candidate, Sequence[int]], grow: Grow, prices: Prices) -> TreeSearch:
    """Screen all candidates on a sample of the texts, then simulate the best of them on all.

    depths_of: depths to try of every candidate, ascending. prices: `verify_widths` is every width that was measured.
    """
    screened: list[Scored] = []
    for candidate, depths in depths_of.items():
        shallow = [depth for depth in depths if depth <= SHALLOW] or depths[:1]
        texts = grow(candidate, shallow[-1], False)
        found = [score(candidate, depth, texts, prices) for depth in (0, *shallow)]
        if min(found, key=lambda entry: entry.simulated.tpot_s).depth == shallow[-1] < depths[-1]:
            texts = grow(candidate, depths[-1], False)  # deeper may be better still
            found += [score(candidate, depth, texts, prices) for depth in depths if depth > shallow[-1]]
        screened += found
    bound = min(entry.simulated.tpot_s for entry in screened) * (1 + FINALIST)
    near_best = [entry for entry in screened if entry.depth and entry.simulated.tpot_s <= bound]
    near_best.sort(key=lambda entry: entry.simulated.tpot_s)
    tied = [entry for entry in near_best if entry.simulated.tpot_s <= near_best[0].simulated.tpot_s * (1 + 2 * TIE)]
    tied.sort(key=_drafting)
    ordered = [*near_best[:1], *tied, *near_best]  # the best, then what is as good with less drafting
    by_width: dict[int, Candidate] = {}
    for entry in ordered:
        by_width.setdefault(entry.candidate.draft_width, entry.candidate)
    finalists = list(by_width.values())[:MOST_FINALISTS]
    finals: list[Scored] = []
    menus: dict[Candidate, Sequence[GrownText]] = {}
    for candidate in finalists:
        near = [entry.depth for entry in screened if entry.candidate == candidate and entry.simulated.tpot_s <= bound]
        texts = menus[candidate] = grow(candidate, max(near), True)
        finals += [score(candidate, depth, texts, prices) for depth in sorted({0, *near})]
    chosen = choose(finals or screened)
    others = [entry for entry in screened if entry.candidate not in menus]
    ranking = tuple(
        entry for group in (finals, others) for entry in sorted(group, key=lambda entry: entry.simulated.tpot_s)
    )
    widths: tuple[int, ...] = (1,)
    if chosen.depth:
        widths = used_widths(chosen.depth, menus[chosen.candidate], replace(prices, token_s=chosen.token_s))
    return TreeSearch(chosen, ranking, widths)


def used_widths(depth: int, texts: Sequence[GrownText], prices: Prices, share: float = 0.01) -> tuple[int, ...]:
    """The menu: measured widths up to the largest that at least `share` of the roots ask for. prices: with lambda."""
    asked = sorted(int(width) for text in texts for width in outcomes(text, depth, prices).verified)
    largest = asked[min(len(asked) - 1, int(len(asked) * (1 - share)))]
    return tuple(width for width in prices.verify_widths if width < largest) + (largest,)


def policy_of(
    candidate: Candidate, depth: int, verify_widths: tuple[int, ...], vocabulary: tuple[int, ...] | None
) -> TreePolicy:
    """The plan's policy, with the depths to fall back to."""
    width = candidate.draft_width if depth else 1
    shape = TreeShape(width, depth, verify_widths[-1])
    depths = depths_to_fall_back_to(depth)
    return TreePolicy(width, depths, verify_widths, candidate.children_per_node, vocabulary, shape)


def reason_for_plain(search: TreeSearch) -> str:
    """Why speculation was not chosen, in one line."""
    tried = [entry for entry in search.ranking if entry.depth]
    if not tried:
        return "no speculation: no tree fits the context"
    best = tried[0]
    cost = best.simulated.seconds / best.simulated.iterations / best.simulated.plain_tpot_s
    return (
        f"no speculation: it does not pay here. The best tree tried (width {best.candidate.draft_width}, depth "
        f"{best.depth}) gives {best.simulated.tokens_per_iteration:.2f} tokens per iteration, which takes {cost:.2f} "
        f"times a plain step; at least {SMALLEST_GAIN:.3f} times plain decoding is asked for, {best.speedup:.3f} is "
        "reached"
    )
