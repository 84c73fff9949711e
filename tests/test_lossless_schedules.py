"""Losslessness under every schedule that the search can produce: the same tokens, text and finish reason.

Drafts ahead of time, lanes that run beside each other and text that is emitted a round later change when things happen,
never what is said. A request that fails or is given up leaves the engine as it was.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from tests import toy
from tests.test_lossless import make_sliding, prompt_of, sharpened
from tests.yggc.checkpoint_makers import make_tokenizer
from tests.yggc.test_stages import all_schedules
from tests.yggrt.test_depth import DEPTHS, random_network, with_network
from tests.yggrt.test_pace import make_pace
from tests.yggrt.test_schedule import overlapped
from yggc.stages import Mode
from yggrt.engine import Engine, SampledMode
from yggrt.executor import Iteration
from yggrt.schedule import StageSchedule, sequential_schedule
from yggrt.text import TextCodec, TextSpec
from yggrt.tree import TreeShape

SHAPE = TreeShape(3, 3, 7)
SCHEDULES = all_schedules(modes=(Mode(None, 1.5), Mode(4, 1.4)), depth=True)
SPLIT = [each for each in SCHEDULES if each.verify_width is None]
AHEAD = [each for each in SCHEDULES if each.has("next_head") and each.verify_width is None]
LAGGING = [each for each in SCHEDULES if any(stage.lag for stage in each.stages)]


def signature(schedule: StageSchedule) -> tuple[object, ...]:
    """What a schedule does in another way than others: one of each is enough where every one would take long."""
    stages = {stage.name: stage for stage in schedule.stages}
    ahead = "none"
    if schedule.has("next_head"):
        ahead = "aside" if stages["next_head"].lane else "in line"
    return (ahead, schedule.has("tail"), stages["emit"].lane > 0, stages["emit"].lag)


def one_of_each(schedules: list[StageSchedule]) -> list[StageSchedule]:
    return list({signature(each): each for each in schedules}.values())


ENDS = one_of_each([each for each in LAGGING + AHEAD if each in SPLIT])
"""Where text ends in another round than it was decided, or something is drafted beyond the end."""


def test_the_search_offers_every_kind():
    assert len(SCHEDULES) > 150 and len(AHEAD) > 50 and len(LAGGING) > 30
    assert {len(each.lanes) for each in SCHEDULES} == {1, 2, 3}
    assert len(one_of_each(SPLIT)) == 15


def test_every_schedule_says_the_same(verifier):
    """All of them, and every kind in the fused mode. The model is sure of its words, so that guesses come true."""
    verifier = sharpened(verifier)
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, spare_passes=1)
    prompt = prompt_of(9)
    expected = toy.hf_greedy(verifier, prompt, 16)
    for schedule in [*SPLIT, *one_of_each([each for each in SCHEDULES if each not in SPLIT])]:
        engine.use_schedule(schedule)
        found = engine.generate(prompt, max_new_tokens=16)
        assert list(found.token_ids) == expected, schedule
        assert len(found.gaps) == 16 and found.finish_reason == "length"
        assert sum(found.stats.acceptance_histogram) == found.stats.iterations


@pytest.mark.parametrize("model", ["sliding", "never"])
def test_every_kind_says_the_same_of_other_pairs(verifier, model):
    if model == "sliding":
        verifier = sharpened(make_sliding(window=3, seed=3))
    drafter = toy.make_drafter("never" if model == "never" else "sometimes", verifier)
    engine = toy.make_engine(drafter, verifier, SHAPE, spare_passes=1)
    prompt = prompt_of(9)
    expected = toy.hf_greedy(verifier, prompt, 20)
    for schedule in one_of_each(SPLIT):
        engine.use_schedule(schedule)
        assert list(engine.generate(prompt, max_new_tokens=20).token_ids) == expected, schedule


@pytest.mark.parametrize("shape", [TreeShape(1, 1, 2), TreeShape(1, 4, 3), TreeShape(8, 2, 5)], ids=str)
def test_guesses_that_come_true_change_no_token(verifier, shape):
    model = sharpened(verifier)
    engine = toy.make_engine(toy.make_drafter("always", model), model, shape, spare_passes=1)
    prompts = [prompt_of(1 + 5 * seed, seed) for seed in range(2)]
    expected = [toy.hf_greedy(model, prompt, 30) for prompt in prompts]
    for schedule in one_of_each(AHEAD):
        engine.use_schedule(schedule)
        came_true = 0
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert list(engine.generate(prompt, max_new_tokens=30).token_ids) == tokens
            came_true += engine.decoder.num_guessed
        assert came_true > (2 if schedule.has("tail") else -1), schedule


@pytest.mark.parametrize("schedule", one_of_each(AHEAD), ids=lambda each: str(signature(each)))
def test_after_every_iteration_the_drafters_cache_equals_a_fresh_prefill(verifier, schedule, monkeypatch):
    """Whether the guess came true or not."""
    model = sharpened(verifier)
    drafter = toy.make_drafter("sometimes", model)
    engine = toy.make_engine(drafter, model, SHAPE, spare_passes=1)
    fresh = toy.make_engine(drafter, model, SHAPE, spare_passes=1).decoder
    engine.use_schedule(schedule)
    decoder, checked = engine.decoder, []

    def checked_head(iteration, head=decoder.stages["head"]) -> None:
        """Before it drafts: rows of all committed tokens that it counts are there."""
        cache, tokens = decoder.drafter_cache, list(iteration.tokens)
        guessed = decoder._guessed
        decoder.flush_moves()
        fresh.reset()
        fresh.prefill_drafter([*tokens, 0, 0])
        last = cache.num_committed + 1
        for buffer, expected in zip(cache.buffers, fresh.drafter_cache.buffers, strict=True):
            torch.testing.assert_close(buffer[:, 1:last], expected[:, 1:last], rtol=1e-4, atol=1e-5)
        checked.append((cache.num_committed - len(tokens), guessed is not None))
        head(iteration)

    monkeypatch.setattr(decoder, "stages", {**decoder.stages, "head": checked_head})
    prompt = prompt_of(7)
    assert list(engine.generate(prompt, max_new_tokens=40).token_ids) == toy.hf_greedy(model, prompt, 40)
    assert all(behind >= -2 for behind, _ in checked)
    assert all(behind == 0 for behind, guessed in checked if guessed)


def test_a_guess_drafts_the_tree_that_a_head_draft_would(verifier, monkeypatch):
    """Not only the same words: the same nodes, so that nothing is lost by drafting ahead of time."""
    model = sharpened(verifier)
    engine = toy.make_engine(toy.make_drafter("always", model), model, SHAPE, spare_passes=1)
    prompt = prompt_of(9)
    trees: dict[bool, dict[int, list]] = {}
    for ahead in (False, True):
        engine.use_schedule(sequential_schedule(1, ahead=("tail", "next_head") if ahead else ()))
        decoder, seen = engine.decoder, trees.setdefault(ahead, {})

        def prune(iteration, stage=decoder.stages["prune"], seen=seen) -> None:
            if iteration.tree is not None:
                seen[len(iteration.tokens)] = [
                    part.tolist() for part in (iteration.tree.tokens, iteration.tree.parents)
                ]
            stage(iteration)

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "stages", {**decoder.stages, "prune": prune})
            engine.generate(prompt, max_new_tokens=60)
    assert trees[True] == trees[False] and decoder.num_guessed > 5


def test_a_guess_that_was_the_whole_draft_has_its_moves_applied(verifier):
    """One pass deep there is no draft pass between a guess and the next moves, unless something is guessed again."""
    drafter = toy.make_drafter("sometimes", verifier)
    decoder = toy.make_engine(drafter, verifier, TreeShape(2, 1, 3), spare_passes=1).decoder
    fresh = toy.make_engine(drafter, verifier, TreeShape(2, 1, 3), spare_passes=1).decoder
    overwritten = 0
    for seed in range(6):
        tokens = prompt_of(7, seed)
        decoder.reset()
        tokens += decoder.prefill(tokens).tokens
        decoder.prefill_drafter(tokens)
        for turn in range(30):
            rows = 2 + turn % 2  # all three nodes verified leave nothing to guess
            iteration = Iteration(tokens, TreeShape(2, 1, 3), lambda _values, _extent, rows=rows: rows, None, 2)
            for stage in ("head", "grow", "prune", "verify", "accept", "next_head"):
                decoder.stages[stage](iteration)
            overwritten += decoder.drafter_cache.has_moves and len(iteration.path) > 1
            decoder.stages["move"](iteration)
            tokens += iteration.result().tokens
        decoder.flush_moves()
        fresh.reset()
        fresh.prefill_drafter([*tokens, 0, 0])
        last = decoder.drafter_cache.num_committed + 1
        for buffer, expected in zip(decoder.drafter_cache.buffers, fresh.drafter_cache.buffers, strict=True):
            torch.testing.assert_close(buffer[:, 1:last], expected[:, 1:last], rtol=1e-4, atol=1e-5)
    assert overwritten > 3


@pytest.mark.field(1, 3)
@pytest.mark.parametrize("schedule", ENDS, ids=lambda each: str(signature(each)))
def test_ends_are_where_they_were(verifier, schedule):
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, SHAPE, max_context=40, spare_passes=1)
    engine.use_schedule(schedule)
    prompt = prompt_of(6)
    free = engine.generate(prompt, max_new_tokens=20)
    for budget in (0, 1, 2, 4):
        found = engine.generate(prompt, max_new_tokens=budget)
        assert found.token_ids == free.token_ids[:budget] and found.finish_reason == "length"
    for eos in sorted(set(free.token_ids))[::3]:
        engine.eos_ids = frozenset({eos})
        found = engine.generate(prompt, max_new_tokens=20)
        assert found.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
        assert found.finish_reason == "eos" and len(found.gaps) == len(found.token_ids)
    engine.eos_ids = frozenset()
    full = engine.generate(prompt_of(35), max_new_tokens=100)
    assert full.token_ids == engine.generate(prompt_of(35), max_new_tokens=100, plain=True).token_ids
    assert len(full.token_ids) == 5


@pytest.mark.field(2, 36)
@pytest.mark.parametrize("schedule", ENDS, ids=lambda each: str(signature(each)))
def test_stop_strings_and_streams_are_as_they_were(schedule):
    model = toy.make_llama(3, vocab_size=300)
    codec = TextCodec(make_tokenizer(300), TextSpec(None, None, None, None, None, ()))
    engine = toy.make_engine(
        toy.make_drafter("sometimes", model), model, SHAPE, spare_passes=1, codec=codec, vocab_size=300
    )
    free = engine.generate("the world", raw=True, max_new_tokens=24, plain=True)
    expected = [
        engine.generate("the world", raw=True, max_new_tokens=24, plain=True, stop=free.text[start : start + 3])
        for start in range(0, len(free.text) - 3, 11)
    ]
    engine.use_schedule(schedule)
    assert "".join(engine.stream("the world", raw=True, max_new_tokens=24)) == free.text
    for start, plain in zip(range(0, len(free.text) - 3, 11), expected, strict=True):
        stream = engine.stream("the world", raw=True, max_new_tokens=24, stop=free.text[start : start + 3])
        text, found = "".join(stream), stream.result
        assert found is not None and text == found.text == plain.text
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, "stop")


def test_sampled_text_is_the_same_with_the_same_seed(verifier):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, spare_passes=1)
    options = {"max_new_tokens": 30, "temperature": 0.9, "top_k": 20, "seed": 5}
    expected = engine.generate(prompt_of(4), plain=True, **options)
    for schedule in one_of_each(SPLIT):
        engine.use_schedule(schedule)
        assert engine.generate(prompt_of(4), **options).token_ids == expected.token_ids


def test_trees_are_drawn_alike_in_every_schedule(verifier):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, spare_passes=1)
    engine.modes = (SampledMode(1.0, True, SHAPE, toy.slot_table(engine.decoder.draft.limits), None),)
    texts = set()
    for schedule in one_of_each(SPLIT):
        engine.use_schedule(schedule)
        texts.add(engine.generate(prompt_of(4), max_new_tokens=30, temperature=0.9, top_k=20, seed=5).token_ids)
    assert len(texts) == 1


def test_the_learned_depth_does_not_depend_on_the_schedule(verifier):
    """Which tells that it is chosen from what is known before acceptance, wherever the stage runs."""
    network = random_network(32, 1)
    engine = toy.make_engine(
        toy.make_drafter("sometimes", verifier), verifier, TreeShape(2, 4, 9), spare_passes=1, network=network
    )
    engine.pace = with_network(make_pace(DEPTHS), network)
    prompt = prompt_of(6)
    depths = set()
    for schedule in one_of_each(SPLIT):
        engine.use_schedule(schedule)
        found = engine.generate(prompt, max_new_tokens=50, ignore_eos=True)
        assert list(found.token_ids) == toy.hf_greedy(verifier, prompt, 50)
        depths.add(found.stats.depth_histogram)
    assert len(depths) == 1 and len([count for count in depths.pop() if count]) > 2


def lanes_engine(verifier) -> Engine:
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, spare_passes=1)
    engine.use_schedule(overlapped())
    return engine


@pytest.mark.parametrize("stage", ["head", "grow", "tail", "prune", "verify", "accept", "next_head", "move"])
def test_a_stage_that_fails_leaves_the_engine_usable(verifier, stage, monkeypatch):
    engine = lanes_engine(verifier)
    expected = engine.generate(prompt_of(5), max_new_tokens=30).token_ids
    calls = []

    def failing(iteration, run=engine.decoder.stages[stage]) -> None:
        calls.append(stage)
        if len(calls) == 3:
            raise OSError(f"{stage} broke")
        run(iteration)

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "stages", {**engine.decoder.stages, stage: failing})
        with pytest.raises(OSError, match=f"{stage} broke"):
            engine.generate(prompt_of(5), max_new_tokens=30)
    assert engine.generate(prompt_of(5), max_new_tokens=30).token_ids == expected


def test_a_stream_that_is_given_up_leaves_no_lane_at_work(verifier, monkeypatch):
    model = toy.make_llama(3, vocab_size=300)
    codec = TextCodec(make_tokenizer(300), TextSpec(None, None, None, None, None, ()))
    engine = toy.make_engine(model, model, SHAPE, spare_passes=1, codec=codec, vocab_size=300)
    engine.use_schedule(overlapped())
    expected = engine.generate("the world", raw=True, max_new_tokens=30)
    at_work: set[str] = set()

    def slow(iteration, run=engine.decoder.stages["verify"]) -> None:
        at_work.add("verify")
        time.sleep(0.01)
        run(iteration)
        at_work.discard("verify")

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "stages", {**engine.decoder.stages, "verify": slow})
        for count in range(1, 4):
            stream = engine.stream("the world", raw=True, max_new_tokens=30)
            for _ in range(count):
                next(stream)
            stream.close()
            assert not at_work
    assert engine.generate("the world", raw=True, max_new_tokens=30).token_ids == expected.token_ids


def test_the_callers_thread_emits_and_its_settings_are_kept(verifier):
    model = toy.make_llama(3, vocab_size=300)
    codec = TextCodec(make_tokenizer(300), TextSpec(None, None, None, None, None, ()))
    engine = toy.make_engine(model, model, SHAPE, spare_passes=1, codec=codec, vocab_size=300)
    before, threads = torch.get_num_threads(), set()

    def on_piece(_piece: str) -> None:
        threads.add((threading.get_ident(), torch.get_num_threads()))

    for schedule in one_of_each(SPLIT):
        engine.use_schedule(schedule)
        engine.generate("the world", raw=True, max_new_tokens=12, on_piece=on_piece)
    assert threads == {(threading.get_ident(), before)}
    new: list[int] = []
    thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert new == [before]


def test_random_schedules_with_random_requests(verifier):
    """One engine, schedules and requests in any order: nothing stays behind from one to the next."""
    chance = random.Random(0)
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, spare_passes=1)
    for _ in range(40):
        engine.use_schedule(chance.choice(SCHEDULES))
        prompt = prompt_of(chance.randrange(1, 20), chance.randrange(100))
        count = chance.randrange(1, 20)
        assert list(engine.generate(prompt, max_new_tokens=count).token_ids) == toy.hf_greedy(verifier, prompt, count)


def test_steps_called_from_outside_have_no_other_lanes_threads_beside_them(verifier):
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, SHAPE, spare_passes=1)
    engine.use_schedule(next(each for each in SPLIT if len(each.lanes) > 1))
    before = set(threading.enumerate())
    expected = engine.generate(prompt_of(6), max_new_tokens=8).token_ids
    for _ in range(2):
        assert set(threading.enumerate()) - before
        with engine.its_threads():
            assert not set(threading.enumerate()) - before
        assert engine.generate(prompt_of(6), max_new_tokens=8).token_ids == expected
