"""The choices of an iteration: the verify width by worth, the depth by what speculation earns, and bounded losses."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests import oracle, toy
from yggrt import pace as pace_module
from yggrt.artifacts import DEPTH_HEADS
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.pace import DEBT, FIRST_PAUSE, TRIAL_DEBT, Pace
from yggrt.plan import HostSeconds, TreePolicy
from yggrt.tree import TreeShape

WIDTHS = (1, 2, 3, 4, 6, 9)
NOTHING = np.zeros(DEPTH_HEADS, np.float32)


def make_pace(depths=(0, 1, 2, 4), draft_width=2, token_s=10.0, draft_s=1.0, row_s=1.5, follows_clock=False) -> Pace:
    """Verify takes 10 s and row_s more a row beyond the first; a pass draft_s; plain decoding 10 s."""
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + row_s * (width - 1), 0.0) for width in WIDTHS]
    points += [LatencyPoint("draft", draft_width, depth, 64, draft_s * depth, 0.0) for depth in depths if depth]
    shape = TreeShape(draft_width, depths[-1], min(9, 1 + draft_width * depths[-1]))
    policy = TreePolicy(draft_width, depths, WIDTHS[: 1 + WIDTHS.index(shape.verify_width)], 8, None, shape)
    return Pace(policy, StepTimes(points), HostSeconds(0.0, 0.5), 1, token_s, None, follows_clock)


@pytest.mark.parametrize("seed", range(6))
def test_the_verify_width_is_worth_most_over_all_subtrees(seed):
    chance = random.Random(seed)
    pace = make_pace()
    parents, values = [0], [0.0]
    for node in range(1, 9):
        parent = chance.randrange(node)
        parents.append(parent)
        values.append(values[parent] - chance.choice([0.05, 0.4, 1.5]))
    chances = np.exp(values).tolist()
    ordered = np.sort(np.array(values, dtype=np.float32))[::-1]
    found = pace.verify_width(ordered, 64)
    worth = {
        width: oracle.best_subtree(parents, chances, width) - (10.0 + 1.5 * (width - 1)) / 10.0 for width in WIDTHS
    }
    assert worth[found] == pytest.approx(max(worth.values()), abs=1e-5)


def test_worthless_nodes_are_not_verified_and_sure_ones_are():
    pace = make_pace()
    assert pace.verify_width(np.log(np.array([1, 0.1, 0.05, 0.02, 0.01], dtype=np.float32)), 64) == 1
    assert pace.verify_width(np.log(np.array([1, 0.9, 0.8, 0.1, 0.01], dtype=np.float32)), 64) == 3


def play(pace: Pace, emit, count: int, slower=None) -> tuple[float, list[int]]:
    """Tokens gained over plain decoding, and the depths, over `count` iterations. emit: depth to tokens.

    slower: depth to what an iteration takes over what the curves say, which is then measured.
    """
    gained, depths = 0.0, []
    pace.start()
    for _ in range(count):
        shape = pace.shape(None)
        emitted = emit(shape.draft_depth)
        rows = shape.verify_width if shape.draft_depth else 1
        seconds = pace.iteration_s(shape.draft_depth, rows, 64) * (slower(shape.draft_depth) if slower else 1.0)
        gained += emitted - seconds / (pace.iteration_s(0, 1, 64) * (slower(0) if slower else 1.0))
        pace.observe(shape.draft_depth, rows, 64, emitted, seconds if slower else None)
        depths.append(shape.draft_depth)
    return gained, depths


@pytest.mark.field(33)
def test_a_drafter_that_is_never_right_loses_no_more_than_is_stated():
    pace = make_pace()
    gained, depths = play(pace, lambda depth: 1, 1000)
    worst = max(pace.iteration_s(depth, 9, 64) for depth in (1, 2, 4)) / pace.iteration_s(0, 1, 64) - 1
    num_tries, pause, total = 0, FIRST_PAUSE, 0
    while total < 1000:
        num_tries, total, pause = num_tries + 1, total + pause, pause * 2
    assert -gained <= 3 * (DEBT + worst) + num_tries * (TRIAL_DEBT + worst)
    assert depths[0] == 4 and depths.index(2) < depths.index(1) < depths.index(0)  # shallower, then plain
    assert 1 in depths[depths.index(0) :]  # and tried again
    assert depths.count(0) > 900


@pytest.mark.field(33)
def test_text_that_becomes_known_again_is_drafted_again_at_full_depth():
    pace = make_pace()
    turns = iter(range(10_000))
    _, depths = play(pace, lambda depth: 1 if next(turns) < 60 else 1 + depth, 400)
    assert 0 in depths[:60] and depths[-1] == 4


def test_good_text_never_falls_back():
    pace = make_pace()
    _, depths = play(pace, lambda depth: 1 + depth, 300)
    assert set(depths) == {4} and pace.num_fallbacks == 0


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_machine_that_slowed_drafts_since_it_was_measured_is_noticed(noise):
    """Drafts gain by the curves and lose by the clock; so they do with every third iteration disturbed."""
    chance = random.Random(0)

    def slower(depth: int) -> float:
        return (1.5 if depth else 1.0) * (1 + noise * chance.random() * (chance.random() < 0.34))

    def emit_after(turns):  # plain iterations are seen at first too
        return lambda depth: 2 if next(turns) >= 40 and depth else 1

    paces = [make_pace(depths=(0, 1), follows_clock=clock) for clock in (False, True)]
    (by_curves, drafted), (by_clock, depths) = (
        play(pace, emit_after(iter(range(10_000))), 800, slower) for pace in paces
    )
    assert drafted.count(0) < 100 and by_curves < -60
    assert depths.count(0) > 600 and by_clock > 0.4 * by_curves


def test_a_drift_follows_the_median_and_is_bounded():
    drift = pace_module.Drift()
    assert drift.of_drafts == 1.0
    for turn in range(400):
        drift.observe(False, 1.0 if turn % 5 else 30.0, 1.0)
        drift.observe(True, 1.2 if turn % 5 else 30.0, 1.0)
    assert drift.of_drafts == pytest.approx(1.2, rel=0.03)
    for _ in range(400):
        drift.observe(True, 90.0, 1.0)
    assert drift.of_drafts == pytest.approx(np.exp(pace_module.MOST_DRIFT))


def test_an_earlier_gain_does_not_pay_for_a_long_loss():
    pace = make_pace()
    turns = iter(range(10_000))
    _, depths = play(pace, lambda depth: 1 + depth if next(turns) < 200 else 1, 220)
    assert depths[199] == 4 and 0 in depths[200:]


def test_a_policy_without_drafts_decodes_plainly():
    pace = make_pace(depths=(0,), draft_width=1)
    assert pace.shape(None) == TreeShape(1, 0, 1)
    pace.observe(0, 1, 64, 1)
    assert pace.shape(None).draft_depth == 0


@pytest.mark.field(33, 42)
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_the_engine_says_the_same_whatever_the_pace_chooses(verifier, kind, monkeypatch):
    monkeypatch.setattr(pace_module, "FIRST_PAUSE", 3)
    prompt = [5, 9, 23, 41]
    expected = toy.hf_greedy(verifier, prompt, 60)
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(2, 4, 9))
    engine.pace = make_pace()
    found = engine.generate(prompt, max_new_tokens=60)
    assert list(found.token_ids) == expected
    stats = found.stats
    assert stats.iterations == sum(stats.acceptance_histogram)
    if kind == "never":
        assert stats.fallbacks >= 3 and stats.plain_iterations > 20
        assert any("was decoded plainly" in notice for notice in stats.notices)
        assert stats.expected_length >= 1.0
    if kind == "always":
        assert stats.fallbacks == 0 and stats.acceptance_length > 1.5
