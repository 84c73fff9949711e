"""The simulator against the engine, on toy pairs: the same trees, cuts, iterations, to the last one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import oracle, toy
from tests.yggrt.test_pace import WIDTHS, make_pace
from yggc.simulate import Prices, grow_text, nodes_on_path, outcomes, replay
from yggc.trace import trace_text
from yggrt.bench import BenchPrompt
from yggrt.bundle import table_tensor
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import HostSeconds, identity_table
from yggrt.tree import TreeShape

SHAPES = [
    TreeShape(1, 1, 2), TreeShape(1, 1, 1), TreeShape(1, 3, 4), TreeShape(2, 1, 3), TreeShape(2, 2, 3),
    TreeShape(2, 3, 7), TreeShape(4, 1, 4), TreeShape(4, 2, 6), TreeShape(8, 1, 9), TreeShape(8, 2, 5),
    TreeShape(8, 4, 16),
]  # fmt: skip


def traced(engine, seed: int, count: int):
    chance = random.Random(seed)
    prompt = [chance.randrange(3, toy.VOCAB_SIZE) for _ in range(5)]
    engine.encode_prompt = lambda text, raw=False: prompt
    text = trace_text(engine, BenchPrompt("toy", ""), False, count)
    assert text is not None
    return text


def prices_for(engine, verify_widths, token_s=None) -> Prices:
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + 1.5 * (width - 1), 0.0) for width in (1, 2, 3, 4, 6, 9, 16)]
    points += [LatencyPoint("draft", width, depth, 64, depth, 0.0) for width in (1, 2, 4, 8) for depth in (1, 2, 4)]
    return Prices(StepTimes(points), HostSeconds(0.0, 0.5), 1, verify_widths, token_s)


@pytest.mark.parametrize("copied", [(), toy.COPIED_LOG_A], ids=["drafted", "copied"])
@pytest.mark.parametrize("kind", ["sometimes", "never"])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.draft_width}x{shape.draft_depth}v{shape.verify_width}"
)
def test_a_fixed_shape_takes_the_engines_iterations_exactly(verifier, kind, shape, copied):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape, copied_log_a=copied)
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    prices = prices_for(engine, (shape.verify_width,))
    for seed in range(2):
        text = traced(engine, seed, 40)
        simulated = replay(grow_text(engine, text, shape, table, copied), shape.draft_depth, prices)
        stats = engine.generate(list(text.prompt_ids), max_new_tokens=40, ignore_eos=True).stats
        assert (simulated.tokens, simulated.iterations) == (39, stats.iterations)


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_a_pace_takes_the_engines_iterations_exactly(verifier, kind):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(2, 4, 9))
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    text = traced(engine, 3, 70)
    grown = grow_text(engine, text, TreeShape(2, 4, 1), table)
    simulated = replay(grown, 4, prices_for(engine, WIDTHS, token_s=10.0), make_pace())
    engine.pace = make_pace()
    stats = engine.generate(list(text.prompt_ids), max_new_tokens=70, ignore_eos=True).stats
    assert (simulated.tokens, simulated.iterations) == (69, stats.iterations)


def test_cuts_are_chosen_by_the_plans_times_and_paid_at_others(verifier):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(2, 4, 9))
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    grown = grow_text(engine, traced(engine, 3, 70), TreeShape(2, 4, 1), table)
    now = prices_for(engine, WIDTHS, token_s=4.0)
    points = [LatencyPoint("verify", width, 0, 64, 10.0, 0.0) for width in WIDTHS]  # wide cuts cost nothing more
    planned = replace(now, planned=StepTimes(points))
    by_plan, by_now = outcomes(grown, 4, planned), outcomes(grown, 4, now)
    assert (by_plan.verified == 9).all() and (by_now.verified < 9).any()
    widest = outcomes(grown, 4, replace(now, verify_widths=(9,)))
    assert np.array_equal(by_plan.seconds, widest.seconds)


def test_an_answer_that_ends_by_itself_ends_the_simulation(verifier):
    shape = TreeShape(4, 3, 9)
    engine = toy.make_engine(verifier, verifier, shape)
    free = traced(engine, 1, 40)
    engine.eos_ids = frozenset({free.answer_ids[17]})
    text = traced(engine, 1, 40)
    assert len(text.answer_ids) < 40 and text.budget == 40
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    simulated = replay(grow_text(engine, text, shape, table), 3, prices_for(engine, (9,)))
    stats = engine.generate(list(text.prompt_ids), max_new_tokens=40).stats
    assert (simulated.tokens, simulated.iterations) == (len(text.answer_ids) - 1, stats.iterations)


def test_one_growth_holds_the_shallower_trees_of_its_width(verifier):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 4, 9))
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    text = traced(engine, 0, 30)
    deep = grow_text(engine, text, TreeShape(4, 4, 1), table)
    for depth in (1, 2, 3):
        shallow = grow_text(engine, text, TreeShape(4, depth, 1), table)
        assert np.array_equal(deep.values[:, : 1 + 4 * depth], shallow.values)
        assert np.array_equal(deep.on_path[:, : 1 + 4 * depth], shallow.on_path)


@pytest.mark.parametrize("seed", range(10))
def test_nodes_on_the_path_are_those_a_walk_meets(seed):
    chance = random.Random(seed)
    parents, depths, tokens = [0], [0], [7]
    for node in range(1, 14):
        parent = chance.randrange(node)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(chance.randrange(3))
    continuation = [chance.randrange(3) for _ in range(chance.randrange(5))]
    met = oracle.nodes_on_path(tokens, parents, continuation)
    found = nodes_on_path(np.array(tokens), np.array(parents), np.array(depths), continuation)
    assert np.flatnonzero(found).tolist() == met


def test_plain_decoding_emits_one_token_an_iteration(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 2, 3))
    children = engine.decoder.draft.limits.num_children
    table = table_tensor(identity_table(children, toy.NUM_KNOTS), children)
    grown = grow_text(engine, traced(engine, 0, 12), TreeShape(2, 2, 1), table)
    simulated = replay(grown, 0, prices_for(engine, (1,)))
    assert (simulated.tokens, simulated.iterations, simulated.seconds) == (11, 11, 110.0)
    assert simulated.seconds == simulated.plain_seconds
    assert torch.equal(engine.decoder.table, table)
    assert outcomes(grown, 2, prices_for(engine, (1,))).emitted.tolist() == [1] * 11
