"""Choosing a schedule: guesses counted as the engine makes them, the measured winner kept, nothing left changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import toy
from tests.test_lossless import sharpened
from tests.yggc.test_simulate import prices_for, traced
from tests.yggrt.test_schedule import overlapped
from yggc import schedule as module
from yggc.schedule import (
    SteadyPace,
    beside_each_other,
    choose_schedule,
    count_guesses,
    measure_handoff,
    middle,
    modes_of,
    study_schedule,
)
from yggc.simulate import grow_text
from yggrt.bundle import table_tensor
from yggrt.plan import ScheduleStudy, TreePolicy, TriedSchedule, identity_table
from yggrt.schedule import sequential_schedule
from yggrt.tree import TreeShape

SHAPES = [TreeShape(1, 2, 2), TreeShape(4, 2, 6), TreeShape(2, 1, 2)]


def grown_for(engine, text, shape: TreeShape, deeper: int = 1):
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    return grow_text(engine, text, TreeShape(shape.draft_width, shape.draft_depth + deeper, 1), table)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ahead", [("tail", "next_head"), ("next_head",)], ids=len)
def test_guesses_are_counted_as_the_engine_makes_them(verifier, shape, ahead):
    model = sharpened(verifier)
    engine = toy.make_engine(toy.make_drafter("always", model), model, shape, spare_passes=1)
    prices = prices_for(engine, (shape.verify_width,))
    text = traced(engine, 1, 60)
    found = count_guesses([grown_for(engine, text, shape)], shape.draft_depth, prices)
    engine.use_schedule(sequential_schedule(1, ahead=ahead))
    stats = engine.generate(list(text.prompt_ids), max_new_tokens=60, ignore_eos=True).stats
    hits = found.tail_hits if "tail" in ahead else found.hits
    assert found.tokens == 59 and abs(found.iterations - stats.iterations) <= 1
    assert abs(hits - engine.decoder.num_guessed) <= 2  # nothing is guessed where the budget ends
    assert hits > 5 or "tail" not in ahead


def test_trees_that_cannot_be_deeper_have_no_tail_to_guess_from(verifier):
    shape = TreeShape(2, 2, 3)
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, shape)
    found = count_guesses([grown_for(engine, traced(engine, 0, 30), shape, 0)], 2, prices_for(engine, (3,)))
    assert found.tail_hits == 0 and found.iterations > 0


def test_the_fused_mode_has_the_width_with_most_tokens_per_second(verifier):
    shape = TreeShape(2, 2, 5)
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, shape, spare_passes=1)
    grown = [grown_for(engine, traced(engine, seed, 40), shape) for seed in range(2)]
    prices = prices_for(engine, (1, 2, 3, 4, 6), token_s=10.0)
    (split, _), (fused, _) = modes_of(grown, 2, prices)
    assert split.verify_width is None and fused.verify_width in (1, 2, 3, 4)
    alone = {}
    for width in (1, 2, 3, 4):
        fixed = replace(prices, verify_widths=(width,), token_s=None)
        guesses = count_guesses(grown, 2, fixed)
        seconds = fixed.times.verify_s([width], 64)[0] + fixed.times.draft_s(2, 2, 64) + 0.5
        alone[width] = seconds / (guesses.tokens / guesses.iterations)
    assert fused.verify_width == min(alone, key=lambda width: alone[width])


def made_study(*token_s: float, error_s: float = 0.0) -> ScheduleStudy:
    """The sequential schedule's seconds per token first."""
    schedules = (sequential_schedule(2, True), overlapped())
    tried = [TriedSchedule(each, 1.0, 1.0, s, error_s) for each, s in zip(schedules, token_s, strict=False)]
    return ScheduleStudy((), 0.0, 0.0, 0.0, tuple(tried))


def test_the_measured_winner_is_kept_where_it_wins_by_more_than_a_tie():
    plain = sequential_schedule(2, True)
    assert choose_schedule(made_study(1.0, 1.1)) == plain
    assert choose_schedule(made_study(1.0, 0.995)) == plain
    assert choose_schedule(made_study(1.0, 0.98)) == overlapped()
    assert choose_schedule(made_study(1.0, 0.98, error_s=0.005)) == overlapped()
    assert choose_schedule(made_study(1.0, 0.98, error_s=0.02)) == plain  # it may be chance


def test_errors_leave_out_what_all_schedules_share_in_a_turn():
    """Turns differ by half; one schedule takes a tenth less in each of them."""
    turns = np.array([1.0, 1.5, 1.2, 0.9])
    (first_s, first_error), (second_s, second_error) = beside_each_other([turns.tolist(), (0.9 * turns).tolist()])
    assert second_s == pytest.approx(0.9 * first_s) == pytest.approx(0.9 * 1.15)
    assert first_error < 1e-12 and second_error < 1e-12
    noise = np.array([0.05, -0.05, 0.05, -0.05])
    (_, error), _ = beside_each_other([(1 + noise).tolist(), [1.0] * 4])
    assert 0.02 < error < 0.04  # two standard errors of half the noise, the mean's own share being half
    assert beside_each_other([[1.0], [2.0]]) == [(1.0, 0.0), (2.0, 0.0)]


def test_the_middle_counts_all_but_outliers():
    assert middle([1.0] * 8 + [0.0, 100.0]) == 1.0
    assert middle([1.0, 3.0] * 10) == 2.0
    assert middle([2.0]) == 2.0


def test_one_lane_sees_another_in_far_less_than_a_step():
    assert 0 <= measure_handoff(1, 50) < 0.01


def test_a_study_runs_the_best_few_and_leaves_the_engine_as_it_was(verifier, monkeypatch):
    monkeypatch.setattr(module, "TIMED_TURNS", 1)
    monkeypatch.setattr(module, "TRIED_TURNS", 1)
    monkeypatch.setattr(module, "WARM_UPS", 1)
    shape = TreeShape(2, 2, 3)
    model = sharpened(verifier)
    engine = toy.make_engine(toy.make_drafter("always", model), model, shape, spare_passes=1)
    texts = [traced(engine, seed, 30) for seed in range(2)]
    prices = prices_for(engine, (1, 2, 3), token_s=10.0)
    policy = TreePolicy(2, (0, 1, 2), (1, 2, 3), engine.decoder.draft.limits.num_children, None, shape)
    pace = SteadyPace(policy, prices.times, prices.host, 1, 10.0)
    before = (engine.executor.schedule, engine.pace)
    grown = [grown_for(engine, text, shape) for text in texts]
    said: list[str] = []
    chosen, study = study_schedule(engine, pace, grown, texts, prices, False, said.append)
    assert (engine.executor.schedule, engine.pace) == before
    tried = [each.schedule for each in study.tried]
    assert chosen in tried and sequential_schedule(1) in tried and len(set(tried)) == len(tried) >= 4
    predicted = [each.predicted_s / each.tokens_per_iteration for each in study.tried[:4]]
    assert predicted == sorted(predicted)
    for each in study.tried:
        assert study.seconds(each.schedule) and each.measured_s > 0
    assert said and study.tail_hits > 0.2
    assert any(time.looks_ahead for time in study.times)
