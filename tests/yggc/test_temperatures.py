"""Above temperature 0: the table of places, and the choice between drawn trees, favourites, chains and no draft."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests import toy
from yggc import temperatures
from yggc.simulate import Prices
from yggc.temperatures import WarmText, chances_of_places, place_table, rank_table, study_temperatures, warm_text
from yggc.trace import TracedText
from yggrt.accept import DraftLaw, traverse
from yggrt.artifacts import LOG_Q_MIN
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import HostSeconds
from yggrt.tree import TreeShape


class Coins:
    """A `Chance` that turns nothing down but what it must, and counts."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def coin(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def draw(self, weights) -> int:
        return int(self.random.choice(weights.size, p=weights / weights.sum()))


def test_the_chances_of_places_are_those_of_the_accept_rule():
    """Of three drawn children, which one `traverse` takes: counted against the chances, places 0 to 2 and none."""
    p, q = np.array([0.1, 0.35, 0.15, 0.4]), np.array([0.6, 0.3, 0.1])
    count = 6000
    expected = chances_of_places(np.tile(p[:3], (count, 1)), np.tile(q, (count, 1)), 3, np.random.default_rng(0))
    taken = np.zeros(3)
    chance = Coins(1)
    for _ in range(count):
        drawn = chance.random.choice(3, 3, replace=False, p=q)
        tokens, parents = np.array([9, *drawn]), np.zeros(4, np.int64)
        path, _ = traverse(
            tokens, parents, lambda row: p.copy(), lambda row: DraftLaw(np.arange(3), q.copy()), chance
        )  # fmt: skip
        if len(path) > 1:
            taken[path[1] - 1] += 1
    np.testing.assert_allclose(taken / count, expected.mean(axis=0), atol=0.02)


def test_a_drafter_that_is_right_is_accepted_at_once_and_one_that_is_wrong_never():
    law_q = np.array([[0.5, 0.3, 0.2]] * 20)
    random = np.random.default_rng(0)
    assert chances_of_places(law_q, law_q, 3, random)[:, 0] == pytest.approx(1.0)
    assert not chances_of_places(np.zeros((20, 3)), law_q, 3, random).any()
    hot = np.array([[1.0, 0.0]] * 4000)
    half = chances_of_places(hot, np.full((4000, 2), 0.5), 2, random).mean(axis=0)
    assert half == pytest.approx([0.5, 0.5], abs=0.04)  # the first draw, else the second
    assert np.isfinite(chances_of_places(hot, hot[:, ::-1].copy(), 2, random)).all()


def made_text(chances: np.ndarray, q: np.ndarray) -> WarmText:
    count, size = q.shape
    log_q = np.maximum(np.log(q), LOG_Q_MIN).astype(np.float32)
    text = TracedText(
        "made", False, count, (1, 2), (3,) * count, np.zeros((count, 1), np.float32), np.ones(count, np.float32),
        np.tile(np.arange(size), (count, 1)), log_q,
    )  # fmt: skip
    return WarmText(text, chances)


def test_the_table_of_places_falls_with_the_place_and_goes_by_the_entropy():
    sure, unsure = np.array([0.9, 0.06, 0.04]), np.array([0.4, 0.35, 0.25])
    q = np.concatenate([np.tile(sure, (400, 1)), np.tile(unsure, (400, 1))])
    chances = np.concatenate([np.tile(sure, (400, 1)), np.tile(unsure[::-1] * 0.6, (400, 1))])  # right, and half wrong
    table = place_table([made_text(chances, q)], 1.0, 5, 65)
    rows = np.exp(np.array(table.log_a)).reshape(5, 65)
    assert (np.diff(rows, axis=0) <= 1e-12).all()
    at = {name: float((law * np.log(law)).sum()) for name, law in (("sure", sure), ("unsure", unsure))}
    firsts = {name: np.exp(table.log_acceptance(0, place)) for name, place in at.items()}
    assert firsts["sure"] == pytest.approx(1.0, abs=0.04)
    wanted = chances_of_places(chances[400:], q[400:], 1, np.random.default_rng(5)).mean()
    assert firsts["unsure"] == pytest.approx(wanted, abs=0.06)


def test_the_table_of_ranks_holds_the_verifiers_chances():
    q = np.tile([0.6, 0.3, 0.1], (500, 1))
    table = rank_table([made_text(q * [0.5, 1.0, 1.0], q)], 3, 65)
    assert np.exp(table.log_acceptance(0, np.log(0.6))) == pytest.approx(0.3, abs=0.03)
    assert np.exp(table.log_acceptance(1, np.log(0.3))) == pytest.approx(0.3, abs=0.03)


def engine_and_texts(verifier, kind: str, count: int):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(8, 4, 16))
    rng = np.random.default_rng(3)
    texts = []
    for _ in range(count):
        prompt = tuple(rng.integers(3, toy.VOCAB_SIZE, 6).tolist())
        empty = np.zeros((0, 1), np.float32)
        texts.append(
            TracedText("toy", False, 12, prompt, (), empty, np.zeros(0, np.float32), empty.astype(np.int64), empty)
        )
    return engine, texts


def test_a_warm_text_is_what_sampling_gives(verifier):
    engine, (text, *_) = engine_and_texts(verifier, "sometimes", 1)
    warm = warm_text(engine, text, 0.9, seed=4)
    found = engine.generate(text.prompt_ids, max_new_tokens=12, ignore_eos=True, temperature=0.9, seed=4, plain=True)
    assert warm.traced.answer_ids == found.token_ids
    assert warm.chances.shape == warm.traced.children.shape == (12, engine.decoder.draft.limits.num_drawn)
    assert (warm.chances.sum(axis=1) <= 1 + 1e-6).all() and (np.diff(warm.traced.child_log_q, axis=1) <= 0).all()


def prices_of(pass_s: float) -> Prices:
    """Verify takes 10 s and half a second for every further row; a pass so long."""
    widths = (1, 2, 3, 4, 6, 9, 16)
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + 0.5 * (width - 1), 0.0) for width in widths]
    points += [
        LatencyPoint("draft", width, depth, 64, pass_s * depth, 0.0) for width in (1, 2, 4, 8) for depth in (1, 4)
    ]
    return Prices(StepTimes(points), HostSeconds(0.0, 0.0), 1, widths, None)


@pytest.mark.parametrize("kind, cheap", list(itertools.product(toy.DRAFTERS, [True, False])))
def test_what_pays_is_chosen(verifier, kind, cheap, monkeypatch):
    monkeypatch.setattr(temperatures, "TEMPERATURES", (0.7,))
    engine, texts = engine_and_texts(verifier, kind, 8)
    said: list[str] = []
    found = study_temperatures(engine, texts[:5], texts[5:], prices_of(0.5 if cheap else 30.0), 8, said.append)
    assert len(said) == 1 and said[0].startswith("temperature 0.7: ")
    assert [policy.chosen for policy in found] == [False] * (len(found) - 1) + [True]
    assert {(policy.draws, policy.children_per_node) for policy in found if policy.shape.draft_depth} == {
        (False, 8), (True, 1), (True, 8)
    }  # fmt: skip
    assert all(policy.shape.verify_width > 2 for policy in found if policy.draws and policy.children_per_node == 8)
    best = found[-1]
    if kind == "never" or not cheap:
        assert best.shape.draft_depth == 0 and best.prediction.speedup == 1.0
    if kind == "always" and cheap:
        assert best.draws and best.prediction.speedup > 1.5 and best.prediction.tokens_per_iteration > 2
    assert not engine.modes


def test_a_slow_model_is_studied_on_fewer_texts():
    assert temperatures.num_texts(0.1) == (16, 12)
    fit, held_out = temperatures.num_texts(0.3)
    answers = len(temperatures.TEMPERATURES) * (5 * fit + 4 * held_out)
    assert 6 < held_out < fit < 16 and answers * 0.3 == pytest.approx(0.85 * temperatures.STUDY_S, rel=0.1)
    assert temperatures.num_texts(60.0) == (6, 6)


def test_an_answer_takes_reading_and_every_token(verifier):
    _, texts = engine_and_texts(verifier, "always", 3)
    texts = [replace(text, answer_ids=tuple(range(count))) for text, count in zip(texts, (4, 6, 8), strict=True)]
    assert temperatures.mean_answer_s(texts, prices_of(0.5)) == pytest.approx(10.0 + 0.5 * 5 + 6 * 10.0)
