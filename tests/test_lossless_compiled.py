"""Losslessness through compiled artifacts: the toy bundle against plain decoding and Hugging Face, in fp32."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import yggrt
from tests import toy
from tests.conftest import FIXED_SHAPE
from yggc.export import eager_run, verify_step
from yggrt.artifacts import MASK_VALUE, Step, fused_draft_inputs, load_package, load_weights
from yggrt.engine import SampledMode
from yggrt.errors import ArtifactError, YggError
from yggrt.executor import Drafting, Iteration
from yggrt.kvcache import KvCache
from yggrt.sampling import SamplingOptions, TokenChooser
from yggrt.tree import PLAIN, TreeShape


@pytest.fixture(scope="module")
def engine(toy_bundle):
    loaded = yggrt.load(toy_bundle.path)
    loaded.shape = TreeShape(8, 4, 16)
    return loaded


@pytest.fixture(scope="module")
def model(toy_bundle):
    return AutoModelForCausalLM.from_pretrained(toy_bundle.verifier, dtype=torch.float32).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 300) for _ in range(length)]


def hf_within_tokenizer(model, prompt: list[int], count: int, vocab_size: int = 300) -> list[int]:
    """Greedy search of transformers with the padded columns masked."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :vocab_size].argmax()))
    return ids[len(prompt) :]


@pytest.mark.field(8, 13, 21)
@pytest.mark.parametrize("length", [1, 2, 5, 40, 70])
def test_compiled_output_equals_plain_and_hugging_face(engine, model, length):
    prompt = prompt_of(length, seed=length)
    expected = hf_within_tokenizer(model, prompt, 40)
    assert list(engine.generate(prompt, max_new_tokens=40, ignore_eos=True).token_ids) == expected
    assert list(engine.generate(prompt, max_new_tokens=40, ignore_eos=True, plain=True).token_ids) == expected


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("verify_width", [2, 5, 9])
def test_shallower_and_narrower_trees_of_one_artifact_say_the_same(engine, model, depth, verify_width):
    prompt = prompt_of(11, seed=3)
    before = engine.shape
    engine.shape = TreeShape(before.draft_width, depth, verify_width)
    try:
        found = engine.generate(prompt, max_new_tokens=24, ignore_eos=True)
    finally:
        engine.shape = before
    assert list(found.token_ids) == hf_within_tokenizer(model, prompt, 24)


@pytest.mark.field(8)
def test_a_token_has_the_same_logits_alone_and_in_a_tree_bit_for_bit(engine, monkeypatch):
    decoder = engine.decoder
    prompt = prompt_of(23, seed=8)

    def logits_by_position(advance) -> dict[int, torch.Tensor]:
        found = {}
        run = decoder.verify

        def watched(*inputs):
            outputs = run(*inputs)
            watched.last = (inputs[0], inputs[1], outputs[3])
            return outputs

        decoder.reset()
        tokens = list(prompt) + list(decoder.prefill(prompt).tokens)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "verify", watched)
            while len(tokens) < 70:
                emitted = list(advance(tokens).tokens)
                rows, positions, logits = watched.last
                path = [len(tokens) - 1 + step for step in range(len(emitted))]
                wanted = [tokens[-1], *emitted[:-1]]
                for position, token in zip(path, wanted, strict=True):
                    matches = ((positions == position) & (rows == token)).nonzero()[:, 0]
                    found[position] = logits[matches]
                tokens += emitted
        return found

    alone = logits_by_position(lambda tokens: decoder.decode(tokens, PLAIN))
    in_trees = logits_by_position(lambda tokens: decoder.decode(tokens, engine.shape))
    assert len(alone) >= 40
    several = 0
    for position in sorted(set(alone) & set(in_trees)):
        expected = alone[position][0]  # the other rows of a plain step are padding
        assert any(torch.equal(row, expected) for row in in_trees[position]), position
        several += 1
    assert several >= 40


def test_the_compiled_fused_draft_grows_the_tree_of_single_passes(engine, toy_bundle):
    decoder, shape = engine.decoder, FIXED_SHAPE
    entry = max(toy_bundle.cache.glob(f"draft.d{shape.draft_depth}-*"), key=lambda path: path.stat().st_mtime)
    weights = load_weights(toy_bundle.path / "draft.weights")
    limits = decoder.draft.limits
    step = Step(entry.name, load_package(entry / "step.pt2", weights), fused_draft_inputs(limits), limits)
    step.bind(decoder.drafter_cache.buffers, decoder.drafter_cache.layouts, decoder.drafter_cache.dtype)
    decoder.reset()
    tokens = prompt_of(12, seed=4)
    tokens += decoder.prefill(tokens).tokens
    before = decoder.fused
    try:
        for _ in range(3):  # pending moves too
            decoder.fused = {}
            cache = decoder.drafter_cache
            owed = (cache.has_moves, cache._src.copy(), cache._dst.copy())
            committed = decoder.drafter_cache.num_committed
            rows = [buffer.clone() for buffer in decoder.drafter_cache.buffers]
            by_passes = decoder.draft_tree(tokens, shape)
            for buffer, kept in zip(decoder.drafter_cache.buffers, rows, strict=True):
                buffer.copy_(kept)
            cache.has_moves, cache._src[:], cache._dst[:] = owed
            decoder.drafter_cache.num_committed = committed
            decoder.fused = {shape.draft_depth: step}
            at_once = decoder.draft_tree(tokens, shape)
            for name in ("tokens", "parents", "depths", "values"):
                assert np.array_equal(getattr(at_once, name), getattr(by_passes, name)), name
            tokens += decoder.decode(tokens, shape).tokens
    finally:
        decoder.fused = before


@pytest.mark.field(6)
def test_compiled_trees_that_are_drawn_have_the_law_of_plain_decoding(engine):
    """Two samples of three tokens, of which all but the first come out of trees."""
    limits = engine.decoder.draft.limits
    mode = SampledMode(1.0, True, FIXED_SHAPE, toy.slot_table(limits), None)
    before, engine.modes = engine.modes, (mode,)
    asked = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 1.0, "top_k": 3}
    try:
        found = [
            Counter(engine.generate(prompt_of(9, seed=2), plain=plain, seed=seed, **asked).token_ids for seed in seeds)
            for plain, seeds in ((True, range(600)), (False, range(600, 1200)))
        ]
    finally:
        engine.modes = before
    texts = [text for text in set(found[0]) | set(found[1]) if found[0][text] + found[1][text] >= 10]
    assert len(texts) >= 4
    square = sum((found[0][text] - found[1][text]) ** 2 / (found[0][text] + found[1][text]) for text in texts)
    assert square < len(texts) + 4.5 * np.sqrt(2 * len(texts)) + 4


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_the_compiled_pass_draws_what_the_traced_one_does(toy_bundle, engine, temperature):
    """Children of one node, and the law they were drawn from."""
    decoder, prompt = engine.decoder, prompt_of(12, seed=6)
    limits = decoder.draft.limits
    drafter = AutoModelForCausalLM.from_pretrained(toy_bundle.drafter, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = drafter(torch.tensor([prompt])).logits[0, -1, : engine.vocab_size]
    best = logits.topk(limits.num_drawn).indices.tolist()
    for seed in range(5):
        chooser = TokenChooser(SamplingOptions(temperature=temperature, seed=seed), prompt)
        noise = TokenChooser(SamplingOptions(temperature=temperature, seed=seed), prompt).noise(1, limits.num_drawn)[0]
        decoder.reset(Drafting(toy.slot_table(limits), (), temperature, chooser))
        iteration = Iteration(prompt, TreeShape(3, 1, 4))
        for stage in ("head", "grow"):
            decoder.stages[stage](iteration)
        tokens, log_q = (part[0] for part in iteration.laws[0])
        law = torch.log_softmax(logits[tokens] / temperature, 0)
        assert len(set(tokens.tolist()) & set(best)) >= len(best) - 2  # the drafter's weights are rounded to 8 bits
        torch.testing.assert_close(log_q, law, rtol=0.02, atol=0.06 / temperature)
        order = (log_q + noise).argsort(descending=True)[:3]
        assert iteration.tree.tokens[1:].tolist() == tokens[order].tolist()
    decoder.reset()


@pytest.mark.field(24)
def test_compiled_caches_equal_a_fresh_prefill(engine):
    decoder = engine.decoder
    decoder.reset()
    tokens = prompt_of(9, seed=5)
    tokens += decoder.prefill(tokens).tokens
    for _ in range(4):
        tokens += decoder.decode(tokens, engine.shape).tokens
    decoder.flush_moves()
    committed = {id(cache): cache.num_committed for cache in (decoder.verifier_cache, decoder.drafter_cache)}
    kept = {
        id(cache): [buffer[:, 1 : committed[id(cache)] + 1].clone() for buffer in cache.buffers]
        for cache in (decoder.verifier_cache, decoder.drafter_cache)
    }
    decoder.reset()
    decoder.prefill(tokens)
    decoder.prefill_drafter([*tokens, 0, 0])
    for cache in (decoder.verifier_cache, decoder.drafter_cache):
        for before, buffer in zip(kept[id(cache)], cache.buffers, strict=True):
            torch.testing.assert_close(before, buffer[:, 1 : committed[id(cache)] + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.field(21)
@pytest.mark.parametrize("width, extent", [(1, 1), (1, 64), (3, 37), (7, 128), (13, 66), (100, 129)])
def test_widths_and_extents_never_traced_match_eager(engine, model, width, extent):
    limits = engine.decoder.verify.limits
    step = verify_step(
        AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval(), 300, limits
    )
    torch.manual_seed(width)
    caches = [KvCache(step.layouts, limits, torch.float32) for _ in range(2)]
    for buffer, other in zip(caches[0].buffers, caches[1].buffers, strict=True):
        buffer.normal_()
        other.copy_(buffer)
    tokens = torch.randint(0, 300, (width,))
    slots = torch.randperm(extent)[:width] if width < extent else torch.zeros(width, dtype=torch.int64)
    mask = torch.where(torch.rand(width, extent) < 0.5, 0.0, MASK_VALUE)
    mask[:, 0] = 0.0
    idle = [0] * (limits.max_moves - 4)
    moves = torch.tensor([3, 0, 2, 1, *idle]), torch.tensor([1, 0, 0, 2, *idle])
    decoder = engine.decoder
    flat = [tokens, torch.arange(width), slots, mask, *moves, *decoder.depth_layers]
    expected = eager_run(step)([*flat, *caches[0].buffers])
    decoder.verify.bind(caches[1].buffers, step.layouts, torch.float32)
    try:
        found = decoder.verify(*flat)
    finally:
        decoder.verify.bind(decoder.verifier_cache.buffers, step.layouts, torch.float32)
    # rows that share slot 0 overwrite each other in any order: compare what does not depend on it
    if width < extent:
        torch.testing.assert_close(found[3], expected[3], rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(caches[1].buffers, caches[0].buffers, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    else:
        assert found[3].shape == expected[3].shape


@pytest.mark.field(20)
def test_wrong_inputs_are_refused_by_name(engine):
    verify = engine.decoder.verify
    moves = engine.decoder.verifier_cache.move_src, engine.decoder.verifier_cache.move_dst
    layers = engine.decoder.depth_layers
    rows, mask = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 64)
    wrong = {
        "tokens": (rows.int(), rows, rows, mask, *moves, *layers),
        "positions": (rows, rows[:1], rows, mask, *moves, *layers),
        "slots": (rows, rows, torch.zeros(4, dtype=torch.int64)[::2], mask, *moves, *layers),
        "mask.0": (rows, rows, rows, torch.zeros(2, 10**6), *moves, *layers),
        "move_src": (rows, rows, rows, mask, torch.zeros(99, dtype=torch.int64), moves[1], *layers),
        "depth_first": (rows, rows, rows, mask, *moves, layers[0][1:].contiguous(), layers[1]),
    }
    for name, inputs in wrong.items():
        with pytest.raises(ArtifactError, match=f"verify: input {name} is"):
            verify(*inputs)
    with pytest.raises(ArtifactError, match="got 1 inputs"):
        verify(rows)


def test_text_streams_and_messages_agree(engine):
    whole = engine.generate("the world tree", max_new_tokens=24)
    stream = engine.stream([{"role": "user", "content": "the world tree"}], max_new_tokens=24)
    assert "".join(stream) == whole.text
    assert stream.result is not None and stream.result.token_ids == whole.token_ids
    assert engine.generate("the world tree", raw=True, max_new_tokens=4).stats.prompt_tokens < whole.stats.prompt_tokens


def test_a_closed_stream_a_raising_callback_and_an_error_leave_the_engine_clean(engine):
    expected = engine.generate(prompt_of(5), max_new_tokens=20, ignore_eos=True).token_ids
    stream = engine.stream("the roots of the tree", max_new_tokens=200, ignore_eos=True)
    next(stream)
    with pytest.raises(YggError, match="unfinished stream"):
        engine.generate(prompt_of(5), max_new_tokens=4)
    stream.close()
    assert engine.generate(prompt_of(5), max_new_tokens=20, ignore_eos=True).token_ids == expected

    def interrupt(_piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate("the roots of the tree", max_new_tokens=50, ignore_eos=True, on_piece=interrupt)
    assert engine.generate(prompt_of(5), max_new_tokens=20, ignore_eos=True).token_ids == expected


def test_two_threads_are_served_in_turn_and_two_engines_live_together(engine, toy_bundle):
    other = yggrt.load(toy_bundle.path)
    prompts = [prompt_of(4 + index, seed=index) for index in range(4)]
    expected = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def answer(index: int) -> None:
        chosen = other if index % 4 == 3 else engine
        found[index] = chosen.generate(prompts[index], max_new_tokens=24, ignore_eos=True).token_ids

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(4)] == expected


def test_the_callers_thread_count_is_restored(engine):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stream = engine.stream(prompt_of(5), max_new_tokens=6)
        for _ in stream:
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.field(40)
def test_stats_add_up(engine):
    found = engine.generate(prompt_of(8), max_new_tokens=40, ignore_eos=True)
    stats = found.stats
    assert stats.new_tokens == len(found.token_ids) == len(found.gaps) == 40
    assert sum(stats.acceptance_histogram) == stats.iterations
    emitted = sum(length * count for length, count in enumerate(stats.acceptance_histogram))
    assert emitted == 39 and stats.acceptance_length == pytest.approx(39 / stats.iterations)
    assert 39 - stats.iterations <= stats.accepted <= stats.drafted
    assert stats.tokens_per_s == pytest.approx(1 / stats.tpot_s)
    assert 0 < stats.host_share < 1 and stats.ttft_s > 0
    assert {stage.stage for stage in stats.stages} >= {"head", "verify", "accept"}


@pytest.mark.field(38)
def test_prompts_that_cannot_be_served_are_refused_alike(engine):
    for plain in (False, True):
        with pytest.raises(ValueError, match="empty"):
            engine.generate([], plain=plain)
        with pytest.raises(ValueError, match="empty"):
            engine.generate("", raw=True, plain=plain)
        with pytest.raises(ValueError, match="token id 300"):
            engine.generate([300], plain=plain)
        with pytest.raises(ValueError, match="at most"):
            engine.generate([5] * 4000, plain=plain)
        with pytest.raises(ValueError, match="max_new_tokens"):
            engine.generate([5], max_new_tokens=-1, plain=plain)
    assert (
        engine.generate(" ", max_new_tokens=5).token_ids == engine.generate(" ", max_new_tokens=5, plain=True).token_ids
    )


def test_toy_drafter_is_accepted_sometimes(engine):
    """The compiled tests mean something: the fixture's drafter is neither always right nor always wrong."""
    histogram = engine.generate(prompt_of(8), max_new_tokens=60, ignore_eos=True).stats.acceptance_histogram
    assert sum(count > 0 for count in histogram[1:]) >= 2
