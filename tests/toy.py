"""Tiny deterministic models and engines over eager steps: the fixture of the lossless tests.

A 2-layer random fp32 Llama with a vocabulary of 64, and three drafters: itself (agrees always), a noised copy
(sometimes) and an unrelated model (never, but by chance).
"""

from __future__ import annotations

import copy
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from yggc.export import StepModule, draft_pass, eager_run, verify_step
from yggrt.artifacts import Step, StepLimits
from yggrt.depth import DepthNetwork
from yggrt.engine import Engine
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache, rows_needed
from yggrt.plan import identity_table
from yggrt.text import TextCodec
from yggrt.tree import TreeShape

VOCAB_SIZE = 64
NUM_KNOTS = 33
MAX_CONTEXT = 192
DRAFTERS = ("always", "sometimes", "never")
COPIED_LOG_A = tuple(math.log(rate) for rate in (0.2, 0.5, 0.7, 0.9))
"""What the text said the last time comes again the likelier the more of it matched."""


def make_llama(seed: int, **overrides: object) -> LlamaForCausalLM:
    """A random Llama whose greedy text is varied: weights are large, so that the argmax follows the context."""
    sizes: dict = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.35, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).eval()


def make_drafter(kind: str, verifier: PreTrainedModel) -> PreTrainedModel:
    """One of DRAFTERS for this verifier."""
    if kind == "never":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
        return make_llama(99, vocab_size=verifier.config.vocab_size, **sizes)
    drafter = copy.deepcopy(verifier)
    if kind == "sometimes":
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.12 * parameter.std() * torch.randn_like(parameter)
    return drafter


def make_limits(
    shape: TreeShape, max_context: int = MAX_CONTEXT, children: int | None = None, drawn: int = 16
) -> StepLimits:
    """Limits that hold one tree shape. children: K; max(W_d, 8) where not given. drawn: M, or K where that is more."""
    children = children or max(shape.draft_width, 8)
    return StepLimits(
        kv_rows=rows_needed(max_context, shape.capacity),
        max_width=512,
        max_moves=max(shape.draft_depth, 1),
        max_nodes=max(shape.capacity, 2),
        pool_size=shape.pool_size,
        num_children=children,
        num_drawn=max(drawn, children),
        num_knots=NUM_KNOTS,
    )


def make_steps(
    drafter: PreTrainedModel,
    verifier: PreTrainedModel,
    limits: StepLimits,
    vocab_size: int = VOCAB_SIZE,
    vocabulary: tuple[int, ...] | None = None,
) -> tuple[StepModule, StepModule]:
    """(verify, draft) step modules of copies of the models. vocabulary: ids the drafter's head is cut to."""
    return (
        verify_step(copy.deepcopy(verifier), vocab_size, limits),
        draft_pass(copy.deepcopy(drafter), vocab_size, limits, vocabulary),
    )


def make_engine(
    drafter: PreTrainedModel,
    verifier: PreTrainedModel,
    shape: TreeShape,
    *,
    eos_ids: tuple[int, ...] = (),
    max_context: int = MAX_CONTEXT,
    drafter_context: int = 512,
    plain_width: int = 1,
    codec: TextCodec | None = None,
    vocab_size: int = VOCAB_SIZE,
    children: int | None = None,
    vocabulary: tuple[int, ...] | None = None,
    spare_passes: int = 0,
    network: DepthNetwork | None = None,
    copied_log_a: tuple[float, ...] = (),
) -> Engine:
    """An engine over eager steps. children: K; 1 with a draft width of 1 makes the tree a chain.

    spare_passes: of drafts ahead of time, that the steps hold beside the shape's own.
    """
    deepest = TreeShape(shape.draft_width, shape.draft_depth + spare_passes, shape.verify_width)
    limits = make_limits(deepest, max_context, children)
    verify, draft = make_steps(drafter, verifier, limits, vocab_size, vocabulary)
    decoder = Decoder(
        Step("verify", eager_run(verify), verify.inputs, limits),
        Step("draft", eager_run(draft), draft.inputs, limits),
        {},
        shape.draft_width,
        KvCache(verify.layouts, limits, verify.dtype),
        KvCache(draft.layouts, limits, draft.dtype),
        table(limits),
        max_context,
        plain_width,
        network,
        copied_log_a=copied_log_a,
    )
    return Engine(decoder, shape, codec, frozenset(eos_ids), vocab_size, drafter_context, torch.get_num_threads())


def table(limits: StepLimits) -> torch.Tensor:
    """An acceptance table that takes the drafter at its word."""
    found = identity_table(limits.num_children, NUM_KNOTS)
    return torch.tensor(found.log_a).view(found.num_ranks, found.num_knots)


def slot_table(limits: StepLimits) -> torch.Tensor:
    """A table for trees that are drawn: a surer drafter's children are worth more, later ones less."""
    places = torch.arange(limits.num_children)[:, None]
    sureness = torch.linspace(0.5, 0.9, limits.num_knots)[None, :]
    return torch.log(sureness * 0.5 ** places.float())


def hf_greedy(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_ids: tuple[int, ...] = ()
) -> list[int]:
    """What transformers' own greedy search says."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=max_new_tokens, eos_token_id=list(eos_ids) or None, pad_token_id=0,
        )  # fmt: skip
    return ids[0, len(prompt) :].tolist()
