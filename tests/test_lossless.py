"""Losslessness, the heart of the suite: the engine emits exactly what the verifier alone emits.

Over tree shapes, drafters that agree always, sometimes and never, EOS sets, stop strings, budgets and prompt lengths;
through eager steps here, through compiled artifacts in test_lossless_compiled.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PreTrainedModel

from tests import toy
from tests.yggc.checkpoint_makers import make_tokenizer
from yggrt.copying import Copies
from yggrt.errors import ArtifactError
from yggrt.executor import Iteration
from yggrt.text import TextCodec, TextSpec
from yggrt.tree import PLAIN, TreeShape

SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(1, 5, 6),
    TreeShape(2, 3, 5),
    TreeShape(3, 4, 13),
    TreeShape(8, 4, 16),
    TreeShape(8, 2, 17),
    TreeShape(4, 6, 3),
    TreeShape(12, 3, 20),
]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, toy.VOCAB_SIZE) for _ in range(length)]


def make_sliding(window: int, seed: int) -> MistralForCausalLM:
    """A toy whose every layer has a sliding window."""
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=toy.VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=window, initializer_range=0.35,
        tie_word_embeddings=False,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that is surer of its choices, so that trees grow deep."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight *= 4
    return model


def name_of(shape: TreeShape) -> str:
    return f"{shape.draft_width}x{shape.draft_depth}v{shape.verify_width}"


@pytest.mark.field(4, 8, 9, 18)
@pytest.mark.parametrize("copied", [(), toy.COPIED_LOG_A], ids=["drafted", "copied"])
@pytest.mark.parametrize("kind", toy.DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_output_equals_plain_and_hugging_face(verifier, shape, kind, copied):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape, copied_log_a=copied)
    for length in (1, 2, 23):
        prompt = prompt_of(length, seed=length)
        expected = toy.hf_greedy(verifier, prompt, 30)
        speculative = engine.generate(prompt, max_new_tokens=30)
        plain = engine.generate(prompt, max_new_tokens=30, plain=True)
        assert list(speculative.token_ids) == expected
        assert list(plain.token_ids) == expected
        assert len(speculative.gaps) == len(plain.gaps) == 30
        assert speculative.finish_reason == plain.finish_reason == "length"


@pytest.mark.field(1)
@pytest.mark.parametrize("kind", ["always", "sometimes"])
def test_every_token_in_turn_as_eos_stops_at_its_first_occurrence(verifier, kind):
    drafter = toy.make_drafter(kind, verifier)
    engine = toy.make_engine(drafter, verifier, TreeShape(8, 4, 16))
    prompt = prompt_of(6)
    free = engine.generate(prompt, max_new_tokens=24)
    for eos in sorted(set(free.token_ids)):
        for others in ((), (eos + 1,)) if eos % 3 == 0 else ((),):
            engine.eos_ids = frozenset({eos, *others})
            expected = toy.hf_greedy(verifier, prompt, 24, (eos, *others))
            for plain in (False, True):
                found = engine.generate(prompt, max_new_tokens=24, plain=plain)
                assert list(found.token_ids) == expected
                assert len(found.gaps) == len(expected)
                assert found.finish_reason == "eos"
    assert engine.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == free.token_ids


@pytest.mark.field(3)
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_budget_is_met_exactly(verifier, kind):
    shape = TreeShape(4, 4, 12)
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape)
    prompt = prompt_of(5)
    expected = toy.hf_greedy(verifier, prompt, 12)
    for budget in (0, 1, 2, shape.draft_depth, shape.draft_depth + 1, shape.draft_depth + 2, 12):
        for plain in (False, True):
            found = engine.generate(prompt, max_new_tokens=budget, plain=plain)
            assert list(found.token_ids) == expected[:budget]
            assert found.finish_reason == "length"


@pytest.mark.field(2)
@pytest.mark.parametrize("kind", ["always", "sometimes"])
def test_stop_strings_cut_the_same_text_wherever_they_fall(kind):
    tokenizer = make_tokenizer(300)
    model = toy.make_llama(3, vocab_size=300)
    codec = TextCodec(tokenizer, TextSpec(None, None, None, None, None, ()))
    engine = toy.make_engine(toy.make_drafter(kind, model), model, TreeShape(8, 4, 16), codec=codec, vocab_size=300)
    free = engine.generate("the world", raw=True, max_new_tokens=24, plain=True)
    assert len(free.text) > 12
    for start in range(0, len(free.text) - 3, 3):
        for size in (1, 3):
            stop = free.text[start : start + size]
            plain = engine.generate("the world", raw=True, max_new_tokens=24, plain=True, stop=stop)
            pieces = engine.stream("the world", raw=True, max_new_tokens=24, stop=[stop, "never said"])
            streamed = "".join(pieces)
            found = pieces.result
            assert found is not None
            assert (found.text, found.token_ids, found.finish_reason) == (
                plain.text, plain.token_ids, plain.finish_reason
            )  # fmt: skip
            assert streamed == found.text == free.text[: free.text.index(stop)]
            assert found.finish_reason == "stop"


def test_prompts_up_to_the_context_limit(verifier):
    context = 40
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, TreeShape(8, 4, 16), max_context=context)
    for length in (1, 2, 3, 34, 37, 38, 39):
        prompt = prompt_of(length)
        found = engine.generate(prompt, max_new_tokens=100)
        assert len(found.token_ids) == context - length
        assert list(found.token_ids) == toy.hf_greedy(verifier, prompt, context - length)
        assert found.token_ids == engine.generate(prompt, max_new_tokens=100, plain=True).token_ids
    with pytest.raises(ValueError, match="at most 39 fit"):
        engine.generate(prompt_of(40))


def test_no_node_of_a_tree_has_a_position_beyond_the_context():
    """Learned positions are rows of a table: one too many is an error or another row."""
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=toy.VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=40, initializer_range=0.35,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    engine = toy.make_engine(toy.make_drafter("sometimes", model), model, TreeShape(4, 6, 9), max_context=40)
    for length in (1, 20, 33, 38, 39):
        prompt = prompt_of(length)
        found = engine.generate(prompt, max_new_tokens=100)
        assert list(found.token_ids) == toy.hf_greedy(model, prompt, 40 - length)


@pytest.mark.field(16, 42)
def test_past_the_drafters_context_it_decodes_plainly_and_says_so(verifier, monkeypatch):
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, TreeShape(8, 4, 16), drafter_context=20)
    prompt, reached = prompt_of(10), []
    head = engine.decoder.stages["head"]

    def watched(iteration: Iteration) -> None:
        if iteration.shape.draft_depth:
            reached.append(len(iteration.tokens) + iteration.shape.draft_depth)
        head(iteration)

    monkeypatch.setattr(engine.decoder, "stages", {**engine.decoder.stages, "head": watched})
    found = engine.generate(prompt, max_new_tokens=40)
    assert list(found.token_ids) == toy.hf_greedy(verifier, prompt, 40)
    assert found.stats.notices == ("decoded plainly past the drafter's context of 20 tokens",)
    assert 15 < max(reached) <= 20


@pytest.mark.parametrize("plain_width", [1, 2, 4, 8])
def test_plain_decoding_is_the_same_at_every_width(verifier, plain_width):
    engine = toy.make_engine(verifier, verifier, TreeShape(1, 1, 2), plain_width=plain_width)
    assert list(engine.generate(prompt_of(9), max_new_tokens=20, plain=True).token_ids) == toy.hf_greedy(
        verifier, prompt_of(9), 20
    )


@pytest.mark.field(5)
def test_a_drafter_that_is_the_verifier_is_always_accepted(verifier):
    shape = TreeShape(1, 4, 5)
    engine = toy.make_engine(toy.make_drafter("always", verifier), verifier, shape, max_context=512, children=1)
    found = engine.generate(prompt_of(5), max_new_tokens=501)
    assert list(found.token_ids) == toy.hf_greedy(verifier, prompt_of(5), 501)
    assert found.stats.acceptance_histogram == (0, 0, 0, 0, 0, 100)
    assert found.stats.acceptance_length == 5.0


@pytest.mark.field(4, 5, 24)
@pytest.mark.parametrize("kind", ["always", "sometimes"])
@pytest.mark.parametrize("shape", [TreeShape(8, 4, 16), TreeShape(3, 6, 19), TreeShape(1, 4, 5)], ids=name_of)
@pytest.mark.parametrize("model", ["unsure", "sure", "sliding"])
def test_after_every_iteration_both_caches_equal_a_fresh_prefill(verifier, model, shape, kind):
    if model != "unsure":
        verifier = sharpened(make_sliding(window=2, seed=3) if model == "sliding" else verifier)
    drafter = toy.make_drafter(kind, verifier)
    decoder = toy.make_engine(drafter, verifier, shape).decoder
    fresh = toy.make_engine(drafter, verifier, shape).decoder
    tokens = prompt_of(7)
    tokens += decoder.prefill(tokens).tokens
    most_accepted = 0
    for iteration in range(8):
        depth = iteration % (shape.draft_depth + 1)  # shallower trees and plain steps between full ones
        if depth == 0:
            outcome = decoder.decode(tokens, PLAIN)
        else:
            width = min(shape.verify_width, 1 + depth * shape.draft_width)
            outcome = decoder.decode(tokens, TreeShape(shape.draft_width, depth, width))
        tokens += outcome.tokens
        most_accepted = max(most_accepted, len(outcome.tokens) - 1)
        decoder.flush_moves()
        assert decoder.verifier_cache.num_committed == len(tokens) - 1
        fresh.reset()
        fresh.prefill(tokens)
        fresh.prefill_drafter([*tokens, 0, 0])
        for mine, theirs in (
            (decoder.verifier_cache, fresh.verifier_cache),
            (decoder.drafter_cache, fresh.drafter_cache),
        ):
            last = mine.num_committed + 1
            for buffer, expected in zip(mine.buffers, theirs.buffers, strict=True):
                torch.testing.assert_close(buffer[:, 1:last], expected[:, 1:last], rtol=1e-4, atol=1e-5)
    if model == "sure" and kind == "always":
        assert most_accepted == shape.draft_depth  # rows were moved from the deepest nodes too


@pytest.mark.parametrize("window", [4, 9, 16])
@pytest.mark.parametrize("kind", ["always", "never"])
def test_sliding_windows_count_positions_not_slots(window, kind):
    model = make_sliding(window, seed=1)
    engine = toy.make_engine(toy.make_drafter(kind, model), model, TreeShape(8, 4, 16))
    prompt = prompt_of(12)
    expected = toy.hf_greedy(model, prompt, 40)
    assert list(engine.generate(prompt, max_new_tokens=40).token_ids) == expected
    assert list(engine.generate(prompt, max_new_tokens=40, plain=True).token_ids) == expected


def test_a_self_drafter_with_a_sliding_window_is_always_accepted():
    model = make_sliding(window=6, seed=2)
    engine = toy.make_engine(model, model, TreeShape(1, 4, 5), children=1)
    assert engine.generate(prompt_of(12), max_new_tokens=101).stats.acceptance_length == 5.0


@pytest.mark.field(8, 17)
@pytest.mark.parametrize("kind", ["always", "never"])
def test_bfloat16_differs_from_plain_only_at_a_near_tie(verifier, kind):
    from yggrt.bench import NEAR_TIE, Pair, first_difference

    model = copy.deepcopy(verifier).bfloat16()
    engine = toy.make_engine(toy.make_drafter(kind, verifier).bfloat16(), model, TreeShape(8, 4, 16))
    for seed in range(4):
        prompt = prompt_of(9, seed)
        plain = engine.generate(prompt, max_new_tokens=40, plain=True)
        pair = Pair("toy", plain, engine.generate(prompt, max_new_tokens=40))
        difference = first_difference(seed, pair, NEAR_TIE["bfloat16"])
        assert difference is None or difference.allowed, difference


@pytest.mark.field(17)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_drafter_with_logits_that_are_not_finite_changes_nothing(verifier, poison):
    drafter = toy.make_drafter("always", verifier)
    drafter.lm_head.weight.data[7] = poison
    engine = toy.make_engine(drafter, verifier, TreeShape(8, 4, 16))
    assert list(engine.generate(prompt_of(6), max_new_tokens=30).token_ids) == toy.hf_greedy(verifier, prompt_of(6), 30)


@pytest.mark.field(17)
def test_a_verifier_with_logits_that_are_not_numbers_is_an_error(verifier):
    broken = copy.deepcopy(verifier)
    broken.lm_head.weight.data[7] = float("nan")
    engine = toy.make_engine(verifier, broken, TreeShape(2, 2, 3))
    with pytest.raises(ArtifactError, match="not finite"):
        engine.generate(prompt_of(6), max_new_tokens=5)


def test_a_request_copies_from_its_own_text_alone(verifier, monkeypatch):
    engine = toy.make_engine(
        toy.make_drafter("never", verifier), verifier, TreeShape(2, 2, 5), copied_log_a=toy.COPIED_LOG_A
    )
    offered, path = [], Copies.path

    def keep(*args):
        found = path(*args)
        offered.append(found[0].tolist())
        return found

    monkeypatch.setattr(Copies, "path", keep)
    engine.generate(prompt_of(20, 1) * 2, max_new_tokens=8)
    own, said = prompt_of(12, 2) * 2, len(offered)
    engine.generate(own, max_new_tokens=8)
    later = offered[said:]
    offered.clear()
    toy.make_engine(
        toy.make_drafter("never", verifier), verifier, TreeShape(2, 2, 5), copied_log_a=toy.COPIED_LOG_A
    ).generate(own, max_new_tokens=8)
    assert later == offered and any(token >= 0 for tokens in later for token in tokens)
