"""Which tokens the drafter's output layer keeps: the output layer over the whole vocabulary is most of a small pass.

A token that is cut is never drafted (q = 0), which costs acceptance and nothing else: the verifier decides. The tokens
kept are those that the drafter itself gives most of its probability to while it answers the shipped prompts.
Source: FR-Spec (arXiv 2502.14856), which ranks tokens by their frequency in a corpus; design, section 4.
"""

from __future__ import annotations

import json
import random
from importlib.resources import files

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from yggc.checkpoints import silence_libraries
from yggc.distill_data import fill_slots
from yggrt.errors import CheckpointError
from yggrt.text import TextCodec, TextSpec

COVERAGE = 0.98
"""Share of the drafter's probability that the kept tokens must hold."""

STEP = 1024  # kept tokens come in multiples of this
NUM_ANSWERS = 32
ANSWER_TOKENS = 128
NEVER = -1  # an end-of-sequence id that no model says; None would mean the model's own
SMALLEST_VOCABULARY = 8 * STEP  # below it the whole output layer is cheap


def choose_draft_vocabulary(
    model: PreTrainedModel, tokenizer: Tokenizer, text: TextSpec, vocab_size: int, context: int, seed: int = 0
) -> tuple[int, ...] | None:
    """Ids the output layer keeps, ascending; None where cutting does not pay.

    model: the drafter, as transformers loads it. vocab_size: tokens of the tokenizer.
    context: positions the drafter can attend to; one too short for an answer keeps its output layer whole.
    Raises CheckpointError when the drafter's logits are not finite.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        return None
    prompts = prompt_ids(tokenizer, text, seed)
    if prompts.shape[1] + ANSWER_TOKENS > context:
        return None
    usage = token_usage(model, prompts, vocab_size, seed)
    order = torch.argsort(usage, descending=True, stable=True)
    covered = torch.cumsum(usage[order], dim=0) / usage.sum()
    needed = int((covered < COVERAGE).sum()) + 1
    size = -(-needed // STEP) * STEP
    if size > vocab_size // 2:
        return None
    return tuple(sorted(order[:size].tolist()))


def prompt_ids(tokenizer: Tokenizer, text: TextSpec, seed: int) -> Tensor:
    """Shipped prompts as a batch int64[NUM_ANSWERS, length]: each cut from the left to the shortest one's length."""
    codec = TextCodec(tokenizer, text)
    shipped = json.loads((files("yggc") / "data" / "distill" / "prompts.json").read_text(encoding="utf-8"))
    dice = random.Random(seed)
    openings = dice.choices(
        shipped["openings"], [opening.get("weight", 1.0) for opening in shipped["openings"]], k=NUM_ANSWERS
    )
    rows = []
    for opening in openings:
        prompt = fill_slots(opening["text"], shipped["slots"], dice)
        rows.append(
            codec.encode_chat([{"role": "user", "content": prompt}]) if text.chat_template else codec.encode(prompt)
        )
    rows = [row for row in rows if row]
    length = min(map(len, rows))
    return torch.tensor([row[-length:] for row in rows])


def token_usage(model: PreTrainedModel, prompts: Tensor, vocab_size: int, seed: int) -> Tensor:
    """Probability the model gives each token, summed over the positions of answers it samples itself; float64[V]."""
    usage = UsageCounter(vocab_size)
    with silence_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=GenerationConfig(
                do_sample=True, top_k=0, max_new_tokens=ANSWER_TOKENS, eos_token_id=NEVER, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([usage]),
        )
    return usage.total


class UsageCounter(LogitsProcessor):
    """Adds up the probabilities of every sampling step of `generate`, and keeps tokens beyond the tokenizer unsaid."""

    def __init__(self, vocab_size: int) -> None:
        self.total = torch.zeros(vocab_size, dtype=torch.float64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: float32[rows, logits]."""
        if bool((torch.isnan(scores) | torch.isposinf(scores)).any()):  # -inf only bars a token
            raise CheckpointError("the drafter's logits are not finite in float32; its weights are damaged")
        known = self.total.numel()
        self.total += torch.softmax(scores[:, :known].float(), dim=-1).sum(dim=0)
        scores[:, known:] = -torch.inf
        return scores
