"""Does a step say what its model says? Asked of every model before it is compiled, and of every verifier after.

The oracle is the model itself, run once by transformers with its own attention. A family whose attention does more than
its interface tells, or a compiler that errs, is so refused when a bundle is built, and never answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from yggc.export import StepModule, allocate_kv, example_inputs
from yggc.graphs import DraftPass, VerifyStep
from yggrt.artifacts import MASK_VALUE, RunStep, attention_windows
from yggrt.errors import BuildError, CheckpointError

NUM_TOKENS = 24
PIECES = (7, 1, 11, 5)
"""Rows of the steps that the probe is run in; none is a width that steps are traced with."""

EXTENT = 61
"""KV rows that these steps read, likewise."""

BOUNDS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest accepted length of the difference of all logits, of the length of the logits, by dtype. Measured on 41 tiny
families: at most 1e-6 in float32; in bfloat16 at most 0.01, but for a mixture of experts (0.06).
The demo verifier: 1e-6 and 0.013. An attention that was missed (Doge's) gives 0.2."""

RunRows = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
"""(tokens [W], positions [W], slots [W], masks [W, S]) to logits [W, V]."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text that means nothing, and the logits that the model itself gives to it.

    tokens: int64[T]; logits: [T, V], V as large as the model's output layer.
    """

    tokens: Tensor
    logits: Tensor


def make_probe(model: PreTrainedModel, vocab_size: int) -> Probe:
    """Run the model on a probe, before its attention is replaced. vocab_size: tokens of the tokenizer.

    Raises CheckpointError where its logits are not finite.
    """
    length = min(NUM_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", None) or NUM_TOKENS)
    tokens = (torch.arange(length) * 7919 + 11) % vocab_size
    with torch.no_grad():
        logits = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0].cpu()
    if not logits.isfinite().all():
        raise CheckpointError(
            f"{type(model).__name__}: its logits are not finite in {str(logits.dtype).removeprefix('torch.')}; its "
            "weights are damaged, or want another --dtype"
        )
    return Probe(tokens, logits)


def check_module(step: StepModule, probe: Probe) -> None:
    """Raises CheckpointError where the module of a step, run eagerly, does not say what its model says."""
    module = step.module
    assert isinstance(module, VerifyStep | DraftPass)
    buffers, still = allocate_kv(step), torch.zeros(1, dtype=torch.int64, device=step.device)
    vocabulary = getattr(module, "vocabulary", None)
    columns = torch.arange(module.vocab_size, device=step.device)

    def run_rows(tokens: Tensor, positions: Tensor, slots: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        return module.run_model(tokens, positions, slots, masks, (still, still), buffers, rows=None)[0]

    difference = _difference(step, run_rows, probe, (columns if vocabulary is None else vocabulary(columns)).cpu())
    if not difference <= BOUNDS[step.dtype]:
        raise CheckpointError(
            f"{type(module.model).__name__} cannot be decoded in trees: run row by row its logits differ from its own "
            f"by {100 * difference:.1f} %. Its attention does more than transformers' interface tells; models with "
            "plain attention, full or with a sliding window, are accepted"
        )


def check_compiled(step: StepModule, run: RunStep, probe: Probe) -> None:
    """Raises BuildError where a compiled `verify` does not say what its model says."""
    buffers = allocate_kv(step)

    def run_rows(tokens: Tensor, positions: Tensor, slots: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        given = {"tokens": tokens, "positions": positions, "slots": slots}
        given |= {f"mask.{kind}": mask for kind, mask in enumerate(masks)}
        examples = example_inputs(step, {"W": len(tokens), "S": masks[0].shape[1]})
        flat = [given.get(spec.name, example) for spec, example in zip(step.inputs, examples, strict=True)]
        return run([*flat, *buffers])[3]

    assert isinstance(step.module, VerifyStep)
    difference = _difference(step, run_rows, probe, torch.arange(step.module.vocab_size))
    if not difference <= BOUNDS[step.dtype]:
        raise BuildError(
            f"the compiled {step.role} differs from its model by {100 * difference:.1f} % of its logits, so it is not "
            "kept: the compiler errs. Try another C++ compiler (CXX) or another version of torch"
        )


def _difference(step: StepModule, run_rows: RunRows, probe: Probe, columns: Tensor) -> float:
    """Length of the difference of the logits over the length of the model's own, of these columns."""
    found = torch.cat(_logits_in_pieces(step, run_rows, probe.tokens)).double()
    own = probe.logits[:, columns].double()
    return float((found - own).norm() / own.norm())


def _logits_in_pieces(step: StepModule, run_rows: RunRows, tokens: Tensor) -> list[Tensor]:
    """Run the tokens in steps of several widths, their KV rows scattered: slots are not positions."""
    extent = min(EXTENT, step.limits.kv_rows - 1)
    slots = 1 + torch.randperm(extent - 1, generator=torch.Generator().manual_seed(0))[: len(tokens)]
    logits, begin = [], 0
    for width in PIECES:
        rows = torch.arange(begin, min(begin + width, len(tokens)))
        begin += width
        if not len(rows):
            break
        masks = []
        for window in attention_windows(step.layouts):
            distance = rows[:, None] - torch.arange(len(tokens))[None, :]
            visible = (distance >= 0) & (distance < (window or len(tokens)))
            mask = torch.full((len(rows), extent), MASK_VALUE, dtype=step.dtype)
            mask[:, slots] = torch.where(visible, 0.0, MASK_VALUE).to(step.dtype)
            masks.append(mask)
        with torch.no_grad():
            given = [each.to(step.device) for each in (tokens[rows], rows, slots[rows], *masks)]
            logits.append(run_rows(given[0], given[1], given[2], tuple(given[3:])).cpu())
    return logits
