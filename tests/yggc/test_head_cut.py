"""The cut output layer: exact for the tokens it keeps, never drafts another, and changes no output."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests import toy
from tests.yggc.checkpoint_makers import CHAT_TEMPLATE, make_tokenizer
from yggc import head_cut
from yggc.graphs import cut_head
from yggrt.errors import CheckpointError
from yggrt.text import TextSpec
from yggrt.tree import TreeShape

KEPT = tuple(range(3, 64, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_the_kept_logits_are_the_whole_models_and_the_embedding_stays(tied):
    whole = toy.make_llama(5, tie_word_embeddings=tied)
    cut = copy.deepcopy(whole)
    cut_head(cut, KEPT)
    tokens = torch.randint(0, toy.VOCAB_SIZE, (1, 9))
    with torch.no_grad():
        expected = whole(tokens, use_cache=False).logits[..., list(KEPT)]
        torch.testing.assert_close(cut(tokens, use_cache=False).logits, expected)
    assert cut.get_input_embeddings().weight.shape[0] == toy.VOCAB_SIZE


def test_a_bias_is_cut_along():
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    whole = GPTNeoXForCausalLM(config).eval()
    whole.set_output_embeddings(torch.nn.Linear(16, 64, bias=True))
    cut = copy.deepcopy(whole)
    cut_head(cut, KEPT)
    tokens = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        torch.testing.assert_close(
            cut(tokens, use_cache=False).logits, whole(tokens, use_cache=False).logits[..., list(KEPT)]
        )


@pytest.mark.parametrize("kind", ["always", "sometimes"])
def test_only_kept_tokens_are_drafted_and_the_output_is_the_same(verifier, kind):
    shape = TreeShape(8, 3, 12)
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape, vocabulary=KEPT)
    prompt = [5, 40, 22, 9]
    engine.decoder.prefill(prompt)
    assert set(engine.decoder.draft_tree(prompt, shape).tokens.tolist()[1:]) <= set(KEPT)
    found = engine.generate(prompt, max_new_tokens=40)
    assert list(found.token_ids) == toy.hf_greedy(verifier, prompt, 40)


def test_usage_follows_the_probabilities_and_is_repeatable():
    model = toy.make_llama(6)
    model.lm_head.weight.data[:8] *= 3  # eight tokens with extreme logits
    prompts = torch.randint(0, 64, (4, 5))
    usage = head_cut.token_usage(model, prompts, 60, seed=1)
    assert usage.shape == (60,) and float(usage.sum()) == pytest.approx(4 * head_cut.ANSWER_TOKENS, rel=0.2)
    assert set(usage.topk(4).indices.tolist()) <= set(range(8))
    assert torch.equal(usage, head_cut.token_usage(model, prompts, 60, seed=1))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
def test_prompts_are_a_batch_with_and_without_a_chat_template(template):
    text = TextSpec(template, "<|im_start|>", "<|im_end|>", None, None, (2,))
    prompts = head_cut.prompt_ids(make_tokenizer(), text, seed=0)
    assert prompts.shape[0] == head_cut.NUM_ANSWERS and prompts.shape[1] >= 4
    assert torch.equal(prompts, head_cut.prompt_ids(make_tokenizer(), text, seed=0))


def test_the_smallest_set_that_covers_is_chosen_and_small_vocabularies_are_left_whole(monkeypatch):
    text = TextSpec(None, None, None, None, None, ())
    usage = torch.zeros(20_000, dtype=torch.float64)
    usage[torch.arange(0, 20_000, 5)] = 1.0  # 4,000 tokens in use
    monkeypatch.setattr(head_cut, "token_usage", lambda *_: usage)
    chosen = head_cut.choose_draft_vocabulary(None, make_tokenizer(), text, 20_000, 2048)
    assert len(chosen) == 4096 and list(chosen) == sorted(set(chosen)) and set(range(0, 20_000, 5)) <= set(chosen)
    monkeypatch.setattr(head_cut, "token_usage", lambda *_: torch.ones(20_000, dtype=torch.float64))
    assert head_cut.choose_draft_vocabulary(None, make_tokenizer(), text, 20_000, 2048) is None
    assert head_cut.choose_draft_vocabulary(None, make_tokenizer(), text, 300, 2048) is None
    monkeypatch.setattr(head_cut, "token_usage", lambda *_: usage)
    assert head_cut.choose_draft_vocabulary(None, make_tokenizer(), text, 20_000, head_cut.ANSWER_TOKENS) is None


@pytest.mark.field(17)
def test_a_drafter_whose_logits_are_not_finite_is_named():
    model = toy.make_llama(6)
    model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        head_cut.token_usage(model, torch.randint(0, 64, (2, 5)), 60, seed=1)
