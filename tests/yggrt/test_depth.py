"""The depth network at work: evaluated inside `verify`, the choice it makes, and output that does not depend on it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests import toy
from tests.yggrt.test_pace import make_pace
from yggrt.artifacts import DEPTH_HEADS, DEPTH_UNITS
from yggrt.bundle import load
from yggrt.depth import DepthNetwork
from yggrt.pace import Pace
from yggrt.tree import PLAIN, TreeShape

DEPTHS = (0, 1, 2, 4)


def random_network(hidden_size: int, seed: int, depths: tuple[int, ...] = DEPTHS) -> DepthNetwork:
    """Expects something else after every row."""
    chance = np.random.default_rng(seed)
    first = chance.normal(size=(hidden_size + 1, DEPTH_UNITS)).astype(np.float32)
    second = chance.normal(size=(DEPTH_UNITS + 1, len(depths))).astype(np.float32)
    return DepthNetwork.of_arrays(depths, tuple(1 + depth for depth in depths), first, second)


def with_network(pace: Pace, network: DepthNetwork) -> Pace:
    pace._network = network
    return pace


def expecting(*tokens: float) -> np.ndarray:
    """What `verify` gives when the network expects so many tokens of each depth."""
    return np.array([*tokens, *[0.0] * (DEPTH_HEADS - len(tokens))], np.float32)


@pytest.mark.parametrize(
    "tokens, depth",
    [((1, 1.05, 1.1, 1.1), 0), ((1, 1.9, 2.0, 2.0), 1), ((1, 1.9, 2.9, 3.0), 2), ((1, 1.9, 2.8, 4.7), 4)],
)
def test_the_depth_is_the_one_worth_most(tokens, depth):
    """A pass takes a tenth of a plain step here, a row beyond the first 0.15 of one."""
    pace = with_network(make_pace(DEPTHS), random_network(32, 0))
    assert shape_for(pace, expecting(*tokens)).draft_depth == depth


def shape_for(pace: Pace, tokens: np.ndarray, behind: bool = False) -> TreeShape:
    """What the pace chooses where the network expects so many tokens of each depth."""
    worth = pace.worth(tokens[None], 64, behind)
    return pace.shape(None if worth is None else worth[0])


def test_a_drafter_that_has_to_read_first_must_promise_more():
    pace = with_network(make_pace(DEPTHS), random_network(32, 0))
    nearly = expecting(1, 1.32, 0, 0)  # a depth of 1 costs 0.3 plain steps more, and 0.1 to read
    assert shape_for(pace, nearly).draft_depth == 1
    assert shape_for(pace, nearly, behind=True).draft_depth == 0


def test_promises_that_are_not_kept_bound_the_depth_and_then_pause_it():
    pace = with_network(make_pace(DEPTHS), random_network(32, 0))
    always_deep, depths = expecting(1, 2, 3, 5), []
    for _ in range(60):
        shape = shape_for(pace, always_deep)
        depths.append(shape.draft_depth)
        pace.observe(shape.draft_depth, shape.verify_width, 64, 1)
    assert depths[0] == 4 and {1, 2, 4} == set(depths) - {0}
    assert depths == sorted(depths[: depths.index(0)], reverse=True) + depths[depths.index(0) :]
    assert depths.count(0) > 30


def test_a_new_request_may_draft_deep_again():
    pace = with_network(make_pace(DEPTHS), random_network(32, 0))
    for _ in range(60):
        pace.observe(shape_for(pace, expecting(1, 2, 3, 5)).draft_depth, 9, 64, 1)
    pace.start()
    assert shape_for(pace, expecting(1, 2, 3, 5)).draft_depth == 4


def test_without_a_network_what_verify_says_is_ignored():
    assert shape_for(make_pace(DEPTHS), expecting(9, 1, 1, 1)) == make_pace(DEPTHS).shape(None)


class AnyDepth(Pace):
    """Draws the depth of every iteration, whatever was expected."""

    chance = random.Random(0)

    def shape(self, worth):
        depth = self.chance.choice((0, 1, 2, 3, 4))
        return TreeShape(self.draft_width, depth, min(9, 1 + self.draft_width * depth))


def any_depth() -> AnyDepth:
    pace = make_pace(DEPTHS)
    pace.__class__ = AnyDepth
    return pace  # type: ignore[return-value]


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_a_depth_that_changes_at_random_changes_no_token(verifier, kind):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(2, 4, 9))
    engine.pace = any_depth()
    for seed in range(3):
        prompt = [random.Random(seed).randrange(3, toy.VOCAB_SIZE) for _ in range(6)]
        result = engine.generate(prompt, max_new_tokens=90, ignore_eos=True)
        assert list(result.token_ids) == toy.hf_greedy(verifier, prompt, 90)
        assert len([count for count in result.stats.depth_histogram if count]) == 5
        assert sum(result.stats.depth_histogram) == result.stats.iterations
        assert result.stats.depth_histogram[0] == result.stats.plain_iterations


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_a_network_that_expects_anything_changes_no_token(verifier, kind):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(2, 4, 9))
    network = random_network(32, 1)
    engine.decoder.depth_layers = network.tensors()
    engine.pace = with_network(make_pace(DEPTHS, draft_s=0.01, row_s=0.01), network)
    prompt = [5, 9, 17]
    result = engine.generate(prompt, max_new_tokens=90, ignore_eos=True)
    assert list(result.token_ids) == toy.hf_greedy(verifier, prompt, 90)
    assert sum(count > 0 for count in result.stats.depth_histogram) > 1


def test_the_row_that_counts_is_the_one_accepted_last(verifier):
    """Speculatively, after any tree, the network reads the row that plain decoding would give it."""
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 3, 9))
    network = random_network(32, 2)
    decoder = engine.decoder
    decoder.depth_layers = network.tensors()
    tokens = [5, 9, 17, 30]
    by_length = {}
    decoder.reset()
    outcome = decoder.prefill(tokens)
    plain = [*tokens]
    for _ in range(60):
        plain += outcome.tokens
        by_length[len(plain)] = outcome.next_tokens.copy()
        assert np.allclose(network.expected_tokens(outcome.hidden.numpy()[None])[0], outcome.next_tokens, atol=1e-4)
        outcome = decoder.decode(plain, PLAIN)
    decoder.reset()
    outcome, lengths = decoder.prefill(tokens), []
    while len(tokens) + len(outcome.tokens) <= max(by_length):
        tokens += outcome.tokens
        lengths.append(len(outcome.tokens))
        assert np.allclose(outcome.next_tokens, by_length[len(tokens)], atol=1e-3)
        outcome = decoder.decode(tokens, TreeShape(4, 3, 9))
    assert max(lengths) > 2 and min(lengths[1:]) == 1


def test_a_compiled_verifier_evaluates_the_network(toy_bundle):
    engine = load(toy_bundle.path)
    hidden_size = engine.bundle.manifest.verifier.hidden_size
    network = random_network(hidden_size, 3)
    engine.decoder.depth_layers = network.tensors()
    with engine.its_threads():
        outcome = engine.decoder.prefill([5, 9, 17, 30])
        for _ in range(3):
            expected = network.expected_tokens(outcome.hidden.float().numpy()[None])[0]
            assert np.allclose(outcome.next_tokens, expected, atol=1e-4) and np.ptp(expected) > 0.1
            outcome = engine.decoder.decode([5, 9, 17, 30, *outcome.tokens], PLAIN)


def test_switching_depth_makes_nothing_that_was_not_there(verifier):
    """After every depth has been met once at an extent, no mask, row, range or extent is made again."""
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(2, 4, 9))
    decoder = engine.decoder
    tokens = [5, 9, 17]
    decoder.prefill(tokens)
    shapes = [TreeShape(2, depth, 1 + 2 * depth) for depth in (1, 2, 3, 4)]

    def once_each() -> None:
        for shape in shapes:
            decoder.decode(tokens, shape)
            decoder.verifier_cache.num_committed = len(tokens)
            decoder.verifier_cache.moved()
            decoder.drafter_cache.moved()
        decoder.decode(tokens, PLAIN)

    once_each()
    made = [decoder._rows, decoder._masks, decoder._ranges, decoder._extents]
    before = [set(each) for each in made]
    caches = decoder.verifier_cache, decoder.drafter_cache
    places = [buffer.data_ptr() for cache in caches for buffer in cache.buffers]
    once_each()
    assert [set(each) for each in made] == before
    assert [buffer.data_ptr() for cache in caches for buffer in cache.buffers] == places


def test_the_layers_come_back_bit_for_bit():
    chance = np.random.default_rng(5)
    first = chance.normal(size=(17, DEPTH_UNITS)).astype(np.float32)
    second = chance.normal(size=(DEPTH_UNITS + 1, 2)).astype(np.float32)
    network = DepthNetwork.of_arrays((0, 3), (1, 4), first, second)
    found = network.layers
    assert found[0].tobytes() == first.tobytes() and found[1][:, :2].tobytes() == second.tobytes()
    assert not found[1][:, 2:].any()
    assert [part.numpy().tobytes() for part in network.tensors()] == [part.tobytes() for part in found]
    assert torch.equal(network.tensors()[0], torch.from_numpy(first))
