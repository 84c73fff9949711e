"""The search against brute force, on made-up text and curves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from yggc.search_tree import (
    ROUNDS,
    SETTLED,
    SMALLEST_GAIN,
    TIE,
    Candidate,
    Scored,
    choose,
    pace_of,
    policy_of,
    reason_for_plain,
    score,
    search_tree,
)  # fmt: skip
from yggc.simulate import GrownText, Prices, Simulated, add_up
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import HostSeconds

WIDTHS = (1, 2, 3, 5)
DEPTHS = (1, 2, 3)


def made_prices(draft_s: float, row_s: float = 1.0, seed: int = 0) -> Prices:
    """Verify curves with noise of their own, so not monotone; a pass takes draft_s, a little more where it is wide."""
    rng = np.random.default_rng(seed)
    points = [
        LatencyPoint("verify", width, 0, 64, 10.0 + row_s * (width - 1) + rng.uniform(0, 0.5), 0.0) for width in WIDTHS
    ]
    points += [
        LatencyPoint("draft", width, depth, 64, depth * draft_s * (1 + 0.1 * width), 0.0)
        for width in (1, 2) for depth in DEPTHS
    ]  # fmt: skip
    return Prices(StepTimes(points), HostSeconds(0.1, 0.2), 1, WIDTHS, None)


def made_text(width: int, skill: float, seed: int, roots: int = 30) -> GrownText:
    """A text whose trees are chains (width 1) or combs (width 2), right with the chance that their values tell."""
    rng = np.random.default_rng(seed)
    capacity = 1 + width * max(DEPTHS)
    values, on_path = np.zeros((roots, capacity), np.float32), np.zeros((roots, capacity), bool)
    on_path[:, 0] = True
    for root in range(roots):
        alive, value = True, 0.0
        for depth in range(max(DEPTHS)):
            chance = float(np.clip(skill + rng.uniform(-0.3, 0.3), 0.05, 0.95))
            hit = rng.random() < chance
            other = rng.random() < (1 - chance) / 2
            first = 1 + depth * width
            values[root, first] = value + np.log(chance)
            on_path[root, first] = alive and hit
            if width == 2:
                values[root, first + 1] = value + np.log((1 - chance) / 2)
                on_path[root, first + 1] = alive and not hit and other
            alive, value = alive and hit, value + np.log(chance)
    return GrownText(width, 5, roots + 1, values, on_path)


def brute_force(text: GrownText, depth: int, prices: Prices, token_s: float) -> tuple[float, int]:
    """(seconds, tokens) of a text, root by root and width by width, in plain Python; falling back as yggrt does."""
    at, seconds, behind = 0, 0.0, False
    pace = pace_of(Candidate(text.draft_width, 8), depth, replace(prices, token_s=token_s))
    while at < text.num_roots:
        wanted = min(pace.shape(None).draft_depth, text.budget - 2 - at)
        if wanted == 0:
            pace.observe(0, 1, 64, 1)
            seconds += float(prices.times.verify_s([1], 64)[0]) + prices.host.plain_s
            at, behind = at + 1, True
            continue
        nodes = sorted(range(1 + text.draft_width * wanted), key=lambda node: (-text.values[at][node], node))
        options = []
        for width in WIDTHS:
            rows = nodes[:width]
            cost = float(prices.times.verify_s([min(width, len(nodes))], 64)[0])
            worth = sum(np.exp(np.float32(text.values[at][node])) for node in rows) - cost / token_s
            options.append((worth, -len(rows), cost, int(sum(text.on_path[at][node] for node in rows))))
        _, rows_less, cost, emitted = max(options, key=lambda option: option[0])
        pace.observe(wanted, -rows_less, 64, min(emitted, text.num_roots - at))
        seconds += cost + prices.times.draft_s(text.draft_width, wanted, 64) + prices.host.speculative_s
        if behind:  # the drafter reads what was decoded plainly
            seconds += prices.times.draft_s(text.draft_width, 1, 64)
        behind = False
        at += min(emitted, text.num_roots - at)
    return seconds, text.num_roots


@pytest.mark.field(32)
@pytest.mark.parametrize("seed, draft_s", [(0, 0.3), (2, 0.3), (4, 0.3), (5, 0.3), (3, 1.5), (5, 1.5), (5, 4.0)])
def test_the_search_equals_brute_force_over_everything_it_may_choose(seed, draft_s):
    prices = made_prices(draft_s, seed=seed)
    texts = {width: [made_text(width, 0.3 + 0.1 * seed, 10 * seed + each) for each in range(2)] for width in (1, 2)}
    found = search_tree(
        {Candidate(1, 1): DEPTHS, Candidate(2, 8): DEPTHS},
        lambda candidate, depth, everything: texts[candidate.draft_width],
        prices,
    )
    plain = float(prices.times.verify_s([1], 64)[0]) + prices.host.plain_s
    best = plain
    for width in (1, 2):
        for depth in DEPTHS:
            token_s = plain
            for _ in range(ROUNDS):  # lambda is what the tree itself reaches
                parts = [brute_force(text, depth, prices, token_s) for text in texts[width]]
                reached = sum(part[0] for part in parts) / sum(part[1] for part in parts)
                best = min(best, reached)
                if abs(reached - token_s) < SETTLED * token_s:
                    break
                token_s = reached
    fastest = found.ranking[0].simulated.tpot_s
    assert fastest == pytest.approx(best)
    assert found.chosen.simulated.tpot_s <= fastest * (1 + TIE) or fastest > plain / SMALLEST_GAIN


@pytest.mark.field(32)
def test_a_dearer_drafter_is_used_less_and_never_faster():
    texts = {width: [made_text(width, 0.6, each) for each in range(4)] for width in (1, 2)}
    work, speedups = [], []
    for draft_s in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0):
        found = search_tree(
            {Candidate(1, 1): DEPTHS, Candidate(2, 8): DEPTHS},
            lambda candidate, depth, everything: texts[candidate.draft_width],
            made_prices(draft_s),
        )
        work.append(found.chosen.depth)
        speedups.append(found.ranking[0].speedup)
    assert speedups == sorted(speedups, reverse=True)
    assert work[-1] == 0 and all(first >= second for first, second in zip(work, work[1:], strict=False))


@pytest.mark.field(29, 42)
def test_an_unrelated_drafter_gives_plain_decoding_and_says_why():
    texts = [replace(made_text(2, 0.5, each), on_path=np.eye(1, 7, dtype=bool).repeat(30, 0)) for each in range(3)]
    found = search_tree({Candidate(2, 8): DEPTHS}, lambda *_: texts, made_prices(0.5))
    assert found.chosen.depth == 0 and found.verify_widths == (1,)
    policy = policy_of(found.chosen.candidate, found.chosen.depth, found.verify_widths, None)
    assert policy.draft_depths == (0,) and policy.default_shape.draft_depth == 0
    reason = reason_for_plain(found)
    assert reason.startswith("no speculation: it does not pay here") and "1.00 tokens per iteration" in reason


def scored(width: int, depth: int, tpot_s: float) -> Scored:
    return Scored(Candidate(width, 8), depth, 1.0, Simulated(100, 50, 100 * tpot_s, 1000.0), 1)


def test_of_trees_that_are_as_good_the_one_that_drafts_least_is_chosen():
    entries = [scored(1, 0, 10.0), scored(8, 4, 7.0), scored(4, 2, 7.02), scored(2, 1, 7.3)]
    assert choose(entries) is entries[2]
    assert choose([scored(1, 0, 10.0), scored(2, 1, 9.96)]).depth == 0  # less than a prediction may be off by
    with pytest.raises(ValueError, match="plain decoding must be among"):
        choose(entries[1:])


@pytest.mark.field(30)
def test_curves_that_differ_by_a_little_noise_give_the_same_plan():
    texts = {width: [made_text(width, 0.6, each) for each in range(4)] for width in (1, 2)}

    def chosen(noise: float) -> tuple[Candidate, int]:
        prices = made_prices(1.0)
        points = [
            LatencyPoint("verify", width, 0, 64, float(prices.times.verify_s([width], 64)[0]) * (1 + noise), 0.0)
            for width in WIDTHS
        ]
        points += [
            LatencyPoint("draft", width, depth, 64, prices.times.draft_s(width, depth, 64) * (1 - noise), 0.0)
            for width in (1, 2) for depth in DEPTHS
        ]  # fmt: skip
        found = search_tree(
            {Candidate(1, 1): DEPTHS, Candidate(2, 8): DEPTHS},
            lambda candidate, depth, everything: texts[candidate.draft_width],
            replace(prices, times=StepTimes(points)),
        )
        return found.chosen.candidate, found.chosen.depth

    assert chosen(0.0) == chosen(0.02) == chosen(-0.02)


def test_fallback_depths_are_halves_down_to_plain_decoding():
    texts = [made_text(1, 0.93, each, roots=60) for each in range(3)]
    found = search_tree({Candidate(1, 1): DEPTHS}, lambda *_: texts, made_prices(0.05, row_s=0.2))
    assert found.chosen.depth == 3
    assert policy_of(found.chosen.candidate, found.chosen.depth, found.verify_widths, None).draft_depths == (0, 1, 3)
    assert add_up([score(Candidate(1, 1), 0, texts, made_prices(1.0)).simulated]).iterations == 180
