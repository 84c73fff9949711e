"""The copying head of a distilled drafter: it copies as soon as it is built, and training keeps it."""

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from yggc.distill_copying import Guide, build_copying_head, can_copy, wanted_attention
from yggc.distill_data import ROLE_ANSWER, TOP_TOKENS, Block, run_rows
from yggc.distill_training import Trainer, drafter_config, make_drafter

VOCABULARY, LENGTH, HIDDEN = 900, 192, 128


def repeated_text(seed: int, rows: int = 12) -> Block:
    """Random tokens that come a second time; the verifier would say just that."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(3, VOCABULARY, (rows, LENGTH // 2), generator=generator)
    return block_of(torch.cat((half, half), dim=1), torch.zeros(rows, LENGTH))


def block_of(tokens: Tensor, starts: Tensor) -> Block:
    rows, length = tokens.shape
    choices = torch.zeros(rows, length, TOP_TOKENS, dtype=torch.int32)
    choices += torch.arange(TOP_TOKENS, dtype=torch.int32)
    choices[:, :-1, 0] = tokens[:, 1:]
    logprobs = torch.full((rows, length, TOP_TOKENS), -9.0, dtype=torch.float16)
    logprobs[..., 0] = -0.01
    roles = torch.full((rows, length), ROLE_ANSWER, dtype=torch.int8)
    return Block(tokens.int(), starts.int(), roles, choices, logprobs)


def toy_drafter(layers: int = 2) -> LlamaForCausalLM:
    config = drafter_config(layers, HIDDEN, VOCABULARY, 512, 1, (2,), 1e5)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)) + 1.0
    return make_drafter(config, embedding, 0)


@torch.no_grad()
def copied_share(drafter: LlamaForCausalLM, block: Block) -> float:
    """Of the second halves' tokens, those that the drafter says."""
    logits = run_rows(drafter, block) @ drafter.get_input_embeddings().weight.T
    second = slice(LENGTH // 2, LENGTH - 1)
    return (logits.argmax(2)[:, second] == block.tokens[:, LENGTH // 2 + 1 :]).float().mean().item()


@pytest.mark.parametrize("layers", [2, 3])
def test_a_drafter_copies_before_it_has_learned_anything(layers):
    drafter = toy_drafter(layers)
    unseen = repeated_text(8)
    assert copied_share(drafter, unseen) < 0.05
    build_copying_head(drafter, [repeated_text(7)])
    assert copied_share(drafter, unseen) > 0.6
    guide = Guide(drafter)
    run_rows(drafter, unseen)
    before, copied = guide.shares(unseen)
    assert before > 0.6 and copied > 0.6


def test_only_the_last_heads_of_two_layers_are_built_over():
    drafter = toy_drafter(3)
    kept = {name: value.clone() for name, value in drafter.named_parameters()}
    build_copying_head(drafter, [repeated_text(7)])
    for name, value in drafter.named_parameters():
        rows_alike = (value == kept[name]).reshape(value.shape[0], -1).all(1)
        if "self_attn" not in name or "layers.1." in name:
            assert rows_alike.all(), name
        elif "o_proj" in name:
            assert torch.equal(value[:, : HIDDEN - 64], kept[name][:, : HIDDEN - 64]), name
        else:
            assert rows_alike[: HIDDEN - 64].all() and not rows_alike[HIDDEN - 64 :].any(), name


def test_a_head_that_is_there_is_left_as_it_is():
    drafter = toy_drafter()
    build_copying_head(drafter, [repeated_text(7)])
    kept = {name: value.clone() for name, value in drafter.named_parameters()}
    build_copying_head(drafter, [repeated_text(9)])
    assert all(torch.equal(value, kept[name]) for name, value in drafter.named_parameters())


def test_training_keeps_the_head_and_a_new_one_is_not_found_by_itself():
    block, unseen = repeated_text(7, rows=24), repeated_text(8)
    shares = {}
    for built in (True, False):
        drafter = toy_drafter()
        if built:
            build_copying_head(drafter, [block])
        trainer = Trainer(drafter, [block], 0, 4 * LENGTH, torch.float32)
        for step in range(20):
            trainer.step(step, 20)
        shares[built] = copied_share(drafter, unseen)
    assert shares[True] > 0.7 and shares[False] < 0.1


def test_the_guide_sees_the_attention_that_the_model_has():
    drafter = toy_drafter()
    build_copying_head(drafter, [repeated_text(7)])
    drafter.set_attn_implementation("eager")
    block = repeated_text(5, rows=2)
    guide = Guide(drafter)
    attentions = drafter.model(block.tokens.long(), output_attentions=True, use_cache=False).attentions
    wanted = wanted_attention(block, 2)
    for index, layer in enumerate((0, -1)):
        scores = guide._scores(index, block, wanted.seen)
        assert torch.allclose(scores.softmax(2), attentions[layer][:, -1], atol=1e-5)
    targets = (wanted.before, wanted.copied)
    expected = sum(
        -(attention[:, -1] * target).sum(2)[target.any(2)].log().mean()
        for attention, target in zip((attentions[0], attentions[-1]), targets, strict=True)
    )
    assert guide.loss(block).item() == pytest.approx(expected.item(), rel=1e-4)


def test_wanted_attention_is_what_the_words_say():
    chance = random.Random(4)
    tokens = torch.tensor([[chance.randrange(4) for _ in range(30)] for _ in range(3)])
    starts = torch.tensor([[0] * 30, [0] * 11 + [11] * 19, [0] * 5 + [5] * 10 + [15] * 15])
    block = block_of(tokens, starts)
    block.top_ids[:, -1, 0] = 2
    wanted = wanted_attention(block, 3)
    for row in range(3):
        for slot in range(30):
            start, choice = int(starts[row, slot]), int(block.top_ids[row, slot, 0])
            for place in range(30):
                seen = start <= place <= slot
                follows = place > start and tokens[row, place - 1] == tokens[row, slot]
                assert wanted.seen[row, slot, place] == seen
                assert wanted.before[row, slot, place] == (seen and place == slot - 1)
                assert wanted.copied[row, slot, place] == bool(seen and follows and tokens[row, place] == choice)


@pytest.mark.parametrize(
    "layers, hidden, able", [(1, 128, False), (2, 64, False), (2, 128, True), (2, 192, True), (4, 256, True)]
)
def test_shapes_with_heads_to_spare_can_copy(layers, hidden, able):
    assert can_copy(drafter_config(layers, hidden, VOCABULARY, 512, 1, (2,), 1e5)) == able
