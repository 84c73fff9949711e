"""The acceptance table, and the trace it is made from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random

import numpy as np
import pytest

from tests import toy
from yggc import trace as trace_module
from yggc.calibrate import LARGEST, SMALLEST, fit_copied, fit_table, log_loss, non_decreasing
from yggc.trace import (
    CalibrationTrace,
    TracedText,
    make_trace,
    read_prompt_set,
    read_trace,
    shipped_prompts,
    trace_text,
    write_trace,
)
from yggrt.artifacts import LOG_Q_MIN
from yggrt.bench import BenchPrompt
from yggrt.copying import LONGEST_MATCH
from yggrt.errors import TraceFormatError
from yggrt.plan import identity_table
from yggrt.tree import TreeShape

SHA256 = "0123456789abcdef" * 4


def made_text(num_tokens: int, rule, seed: int = 0, held_out: bool = False) -> TracedText:
    """A text whose children are right with the chance rule(rank, q)."""
    rng = np.random.default_rng(seed)
    q = np.sort(rng.dirichlet(np.full(4, 0.7), num_tokens), axis=1)[:, ::-1]
    children = np.tile(np.arange(1, 5), (num_tokens, 1))
    answer = []
    for row in q:
        chances = [rule(rank, each) for rank, each in enumerate(row)]
        answer.append(int(rng.choice(5, p=[1 - sum(chances), *chances])))
    answer = [token or 9 for token in answer]
    log_q = np.maximum(np.log(np.maximum(q, 1e-30)), LOG_Q_MIN).astype(np.float32)
    hidden, gaps = np.zeros((num_tokens, 3), np.float32), np.ones(num_tokens, np.float32)
    return TracedText("made", held_out, num_tokens, (1, 2), tuple(answer), hidden, gaps, children, log_q)


def test_a_planted_table_is_recovered():
    def rule(rank: int, q: float) -> float:
        return 0.5 * q if rank == 0 else 0.9 * q

    table = fit_table([made_text(6000, rule)], 4, 65)
    for rank, q in ((0, 0.9), (0, 0.6), (1, 0.3), (1, 0.2)):
        assert math.exp(table.log_acceptance(rank, math.log(q))) == pytest.approx(rule(rank, q), rel=0.15)


@pytest.mark.field(33)
def test_a_fitted_table_predicts_other_text_better_than_the_drafters_own_probabilities():
    def rule(rank: int, q: float) -> float:
        return q * q if rank == 0 else q / 3

    table = fit_table([made_text(1500, rule)], 4, 65)
    other = [made_text(1500, rule, seed=1)]
    assert log_loss(other, table) < 0.97 * log_loss(other, identity_table(4, 65))


def text_of(prompt: list[int], answer: list[int]) -> TracedText:
    """A text of which only the tokens matter."""
    count = len(answer)
    hidden, gaps, log_q = np.zeros((count, 1), np.float32), np.ones(count, np.float32), np.zeros((count, 1), np.float32)
    children = np.zeros((count, 1), np.int64)
    return TracedText("made", False, count, tuple(prompt), tuple(answer), hidden, gaps, children, log_q)


def test_how_often_copies_are_right_is_counted_by_the_length_of_the_match():
    """Answers that go on with what followed the last token, from 1 in 2 to always the longer it has gone well."""
    chance = random.Random(0)
    rates = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.0]
    texts = []
    for _ in range(60):
        prompt = list(range(100, 160))
        answer, at, length = [], 0, 0
        for _ in range(80):
            if length and chance.random() < rates[min(length, LONGEST_MATCH) - 1]:
                at, length = at + 1, length + 1
            else:
                at, length = chance.randrange(40), 1
            if at >= 60:
                break
            answer.append(prompt[at])
        texts.append(text_of(prompt, answer))
    found = [math.exp(value) for value in fit_copied(texts)]
    assert len(found) == LONGEST_MATCH and found == sorted(found)
    assert found[0] < 0.7 and found[-1] > 0.9 and found[-1] <= LARGEST
    assert found[1] == pytest.approx(0.6, abs=0.15)


def test_a_text_without_repetition_says_nothing_of_copies():
    assert fit_copied([text_of([1, 2, 3], [4, 5, 6, 7])]) == ()
    few = [math.exp(value) for value in fit_copied([text_of([1, 2], [1, 2, 9])])]
    assert few == sorted(few) and all(0.3 < rate < 0.7 for rate in few)


def test_a_table_is_clamped_and_grows_with_q_even_from_little_text():
    table = fit_table([made_text(5, lambda rank, q: q if rank == 0 else 0.0)], 4, 33)
    rows = np.exp(np.array(table.log_a)).reshape(4, 33)
    assert (np.diff(rows, axis=1) >= -1e-12).all()
    assert rows.min() >= SMALLEST * 0.999 and rows.max() <= LARGEST * 1.001
    with pytest.raises(ValueError, match="at least one text"):
        fit_table([], 4, 33)


def test_non_decreasing_is_the_nearest_such_sequence():
    rng = random.Random(0)
    for _ in range(20):
        values = np.array([rng.random() for _ in range(4)])
        weights = np.array([rng.uniform(0.5, 2) for _ in range(4)])
        found = non_decreasing(values, weights)
        assert (np.diff(found) >= 0).all()
        loss = (weights * (found - values) ** 2).sum()
        grid = np.linspace(0, 1, 15)
        best = min(
            (weights * (np.array([a, b, c, d]) - values) ** 2).sum()
            for a in grid for b in grid[grid >= a] for c in grid[grid >= b] for d in grid[grid >= c]
        )  # fmt: skip
        assert loss <= best + 1e-9


def test_the_trace_holds_the_verifiers_text_and_the_drafters_children(verifier):
    drafter = toy.make_drafter("sometimes", verifier)
    engine = toy.make_engine(drafter, verifier, TreeShape(8, 2, 9))
    engine.encode_prompt = lambda text, raw=False: [ord(letter) % 60 + 3 for letter in text]
    text = trace_text(engine, BenchPrompt("letters", "abc"), False, 20)
    assert text is not None
    assert list(text.answer_ids) == toy.hf_greedy(verifier, list(text.prompt_ids), 20)
    assert text.hidden.shape == (20, 32) and text.gaps.shape == (20,)
    import torch

    with torch.no_grad():
        ids = torch.tensor([[*text.prompt_ids, *text.answer_ids]])
        verified = verifier(ids, output_hidden_states=True).hidden_states[-1][0]
        log_q = torch.log_softmax(drafter(ids).logits[0], dim=-1)
    assert np.allclose(text.hidden, verified[2:22].numpy(), atol=1e-4)
    best = log_q[2:22].topk(8)
    assert (text.children == best.indices.numpy()).mean() > 0.99
    assert np.allclose(text.child_log_q, best.values.clamp(min=LOG_Q_MIN).numpy(), atol=1e-3)


def sample_trace() -> CalibrationTrace:
    texts = (made_text(6, lambda rank, q: 0.2), made_text(4, lambda rank, q: 0.1, seed=1, held_out=True))
    return CalibrationTrace("a set", SHA256, texts)


def test_a_trace_comes_back_equal(tmp_path):
    write_trace(tmp_path / "t", sample_trace())
    found = read_trace(tmp_path / "t")
    assert (found.name, found.sha256, found.num_tokens) == ("a set", SHA256, 10)
    assert len(found.fit) == len(found.held_out) == 1
    for one, other in zip(found.texts, sample_trace().texts, strict=True):
        for field in dataclasses.fields(TracedText):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_damaged_traces_give_only_our_error(tmp_path):
    path = tmp_path / "t"
    write_trace(path, sample_trace())
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        path.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(TraceFormatError):
            read_trace(path)
        damaged = bytearray(data)
        damaged[rng.randrange(min(900, len(data)))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(TraceFormatError):
            read_trace(path)


def test_a_trace_of_another_version_is_refused_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "TRACE_VERSION", 7)
    write_trace(tmp_path / "t", sample_trace())
    monkeypatch.undo()
    with pytest.raises(TraceFormatError, match="trace version '7'; this yggc reads 1. Calibrate again"):
        read_trace(tmp_path / "t")


def test_the_shipped_prompts_are_of_many_kinds_and_have_a_held_out_part():
    shipped = shipped_prompts()
    kinds = [prompt.category for prompt in shipped.prompts]
    assert len(set(kinds)) == 8 and len(set(shipped.prompts)) == len(shipped.prompts) == 80
    for kind in set(kinds):
        held = [out for prompt, out in zip(shipped.prompts, shipped.held_out, strict=True) if prompt.category == kind]
        assert 0 < sum(held) < len(held)


def test_of_a_users_prompts_every_fifth_is_held_out_unless_they_say_otherwise(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {index}"}) + "\n" for index in range(10)))
    assert read_prompt_set(path).held_out == tuple(index % 5 == 4 for index in range(10))
    path.write_text('{"prompt": "a", "held_out": true}\n{"prompt": "b"}\n')
    assert read_prompt_set(path).held_out == (True, False)
    path.write_text('{"prompt": "a", "held_out": true}\n')
    with pytest.raises(ValueError, match="every prompt is held out"):
        read_prompt_set(path)


def test_prompts_that_do_not_fit_are_left_out(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 1, 2), max_context=40)
    engine.encode_prompt = lambda text, raw=False: [3] * len(text)
    prompts = trace_module.PromptSet("p", SHA256, (BenchPrompt("a", "x" * 39), BenchPrompt("a", "xyz")), (False, False))
    assert len(make_trace(engine, prompts, 5).texts) == 1
    with pytest.raises(ValueError, match="no calibration prompt of p fits"):
        make_trace(engine, dataclasses.replace(prompts, prompts=prompts.prompts[:1], held_out=(False,)), 5)


def test_texts_leave_the_drafter_room_for_the_deepest_tree(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 4, 2), max_context=100, drafter_context=30)
    engine.encode_prompt = lambda text, raw=False: [3] * len(text)
    text = trace_text(engine, BenchPrompt("a", "x" * 20), False, 50)
    assert text is not None and text.budget == 30 - 4 - 20
    assert trace_text(engine, BenchPrompt("a", "x" * 25), False, 50) is None
