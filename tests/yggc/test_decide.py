"""The search's last choice: whether the drafter's output layer is cut."""

from __future__ import annotations

import pytest

from tests import toy
from tests.yggc.test_simulate import traced
from yggc.decide import search
from yggc.profile import LatencyProfile, measure_steps
from yggc.trace import CalibrationTrace
from yggrt.latency import LatencyPoint
from yggrt.plan import HostSeconds
from yggrt.tree import TreeShape

SHAPE = TreeShape(8, 4, 16)
VOCABULARY = tuple(range(0, toy.VOCAB_SIZE, 3))


def made_profile(whole_head_s: float) -> LatencyProfile:
    """Drafts of 0.1 s a pass beside verifier steps of 10; with their whole head, whole_head_s more a pass."""
    shapes = [(width, depth) for width in (1, 2, 4, 8) for depth in (1, 2, 4)]
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + 0.1 * width, 0.0) for width in (1, 2, 4, 8, 16)]
    points += [LatencyPoint("draft", width, depth, 64, 0.1 * depth, 0.0) for width, depth in shapes]
    whole = [LatencyPoint("draft", width, 1, 64, 0.1 + whole_head_s, 0.0) for width in (1, 2, 4, 8)]
    return LatencyProfile(tuple(points), HostSeconds(0.0, 0.1), tuple(whole))


@pytest.fixture(scope="module")
def pair(verifier):
    """An engine with a cut head, one with the whole head, and the verifier's text."""
    drafter = toy.make_drafter("sometimes", verifier)
    cut = toy.make_engine(drafter, verifier, SHAPE, vocabulary=VOCABULARY)
    whole = toy.make_engine(drafter, verifier, SHAPE)
    texts = tuple(traced(cut, seed, 16) for seed in range(2))
    return cut, whole, CalibrationTrace("toy", "0" * 64, texts)


def test_a_head_that_costs_nothing_is_left_whole(pair):
    cut, whole, trace = pair
    decision = search(cut, made_profile(0.0), trace, VOCABULARY, whole)
    assert decision.policy.draft_vocabulary is None
    best = decision.tried[0]
    cut_trees = [tree for tree in decision.tried if not tree.whole_head]
    assert best.whole_head and best.tokens_per_iteration > cut_trees[0].tokens_per_iteration
    assert any(not tree.whole_head for tree in decision.tried)


def test_a_head_that_costs_more_than_it_brings_is_cut(pair):
    cut, whole, trace = pair
    decision = search(cut, made_profile(8.0), trace, VOCABULARY, whole)
    assert decision.policy.draft_vocabulary == VOCABULARY
    assert any(tree.whole_head for tree in decision.tried) and not decision.tried[0].whole_head


def test_drafts_with_the_whole_head_cost_the_same_more_in_every_pass_and_extent():
    points = [LatencyPoint("verify", 1, 0, 128, 9.0, 0.0)]
    points += [LatencyPoint("draft", 2, 1, extent, seconds, 0.0) for extent, seconds in ((128, 1.0), (512, 1.5))]
    points.append(LatencyPoint("draft", 2, 4, 128, 4.0, 0.0))
    measured = LatencyProfile(tuple(points), HostSeconds(0, 0), (LatencyPoint("draft", 2, 1, 128, 1.4, 0.0),))
    assert [point.seconds for point in measured.points_of_whole_head] == pytest.approx([9.0, 1.4, 1.9, 5.6])


def test_both_heads_are_timed_in_the_same_turns(verifier):
    small = TreeShape(2, 2, 3)
    cut = toy.make_engine(verifier, verifier, small, max_context=100, vocabulary=VOCABULARY)
    whole = toy.make_engine(verifier, verifier, small, max_context=100)
    measured = measure_steps(cut, whole)
    widths = {point.width for point in measured.points if point.role == "draft"}
    assert {(point.width, point.depth) for point in measured.whole_head} == {(width, 1) for width in widths}
    assert {point.extent for point in measured.whole_head} == {measured.points[0].extent}
    assert measure_steps(cut).whole_head == ()
