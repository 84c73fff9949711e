"""The drafter of `yggc distill` and its training on what the verifier thought at every slot.

The output layer over the whole vocabulary is nearly all of the work, so its loss makes its own gradients, a chunk of
slots at a time, and no row of logits outlives its chunk. The order of the data follows from the seed and the step.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from yggc.distill_copying import Guide, can_copy
from yggc.distill_data import ROLE_ANSWER, Block, run_rows, top_tokens

WARMUP_STEPS = 100
MATRIX_RATE, EMBEDDING_RATE = 4e-3, 2e-3  # peak learning rates of Muon and AdamW
MATRIX_DECAY = 0.01
HARD_SHARE = 0.5  # of a target that lies on the verifier's first choice, the rest being its probabilities
KEPT_SHARE = (0.1, 0.3, 1.0)  # of the slots learned from, by role
SLOT_WEIGHT = (0.5, 0.5, 1.0)  # of a slot that is learned from, by role
HELD_OUT_SHARE = 0.02  # of the rows, for measuring agreement
HELD_OUT_SLOTS = 1 << 17
DRAWN_TOKENS = 4096  # that stand for all tokens which no target of a step holds; on the CPU
GUIDE_WEIGHT = 0.3  # of the copying head's term of the loss
EMBEDDING_SCALE = 0.05
MATRIX_SCALE = 0.06


def mlp_size(hidden: int) -> int:
    """16/3 of the hidden size: a shallow drafter has few and large products."""
    step = 64 if hidden >= 64 else 8
    return -(-hidden * 16 // (3 * step)) * step


def drafter_config(
    layers: int,
    hidden: int,
    vocab_size: int,
    context: int,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    rope_theta: float,
) -> LlamaConfig:
    """A small Llama with tied embedding and heads of 64."""
    head = min(64, hidden)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp_size(hidden),
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head,
        head_dim=head,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=list(eos_ids) if len(eos_ids) > 1 else eos_ids[0],
        pad_token_id=eos_ids[0],
    )


def make_drafter(config: LlamaConfig, verifier_embedding: Tensor, seed: int) -> LlamaForCausalLM:
    """An untrained drafter whose embedding is the principal part of the verifier's.

    verifier_embedding: float32[V, H]. Residual branches begin at zero.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = LlamaForCausalLM(config).float()
        for name, parameter in drafter.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=MATRIX_SCALE)
    table = verifier_embedding.double()
    width = min(config.hidden_size, table.shape[1])
    directions = torch.linalg.eigh(table.T @ table).eigenvectors.flip(1)[:, :width]
    directions = directions * directions.sum(dim=0).sign()  # the solver's sign is arbitrary
    parts = (table @ directions).float()
    with torch.no_grad():
        embedding = drafter.get_input_embeddings().weight
        embedding.normal_(std=EMBEDDING_SCALE, generator=torch.Generator().manual_seed(seed))
        embedding[:, :width] = parts.to(embedding.device) * (EMBEDDING_SCALE / parts.square().mean().sqrt())
    return drafter


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the output layer that stand for all of them in one step of training.

    ids:  int64[C]: the targets' tokens, then tokens drawn from all others.
    bias: float32[C], log of how many tokens each stands for: 0 for the targets' own.
    """

    ids: Tensor
    bias: Tensor


def draw_columns(wanted: Tensor, vocab_size: int, count: int, generator: torch.Generator) -> Columns:
    """The tokens wanted and `count` others, which stand for all that are left out.

    wanted: int64, token ids of any shape. The sum of exponentials over the columns has the whole sum as its mean, so
    that a step costs a fraction and learns the same.
    """
    is_wanted = torch.zeros(vocab_size, dtype=torch.bool)
    is_wanted[wanted.flatten()] = True
    targets, others = is_wanted.nonzero()[:, 0], (~is_wanted).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:count]]
    each = math.log(len(others) / len(drawn)) if len(drawn) else 0.0
    bias = torch.cat((torch.zeros(len(targets)), torch.full((len(drawn),), each)))
    return Columns(torch.cat((targets, drawn)), bias)


def _head_terms(logits: Tensor, ids: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and its gradient before the targets are taken off.

    logits: [N, V]; ids: int64[N, K]; target: float32[N, K], probabilities; scale: float32[N].
    """
    wide = logits.float()
    shift = wide.amax(dim=1)
    wanted = (wide.gather(1, ids) * target).sum(dim=1)
    weights = wide.sub_(shift[:, None]).exp_()
    total = weights.sum(dim=1)
    mass = target.sum(dim=1)
    loss = (((total.log() + shift) * mass - wanted) * scale).sum()
    return loss, weights.mul_((mass * scale / total)[:, None]).to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    """Cross entropy of hidden states through a tied output layer, with gradients made in the forward pass.

    bias: float32[V], added to the logits; None for none.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ids, target, scale, chunk, terms, bias=None):
        narrow = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ narrow.T if bias is None else torch.addmm(bias, hidden[part], narrow.T)
            part_loss, gradient = terms(logits, ids[part], target[part], scale[part])
            gradient.scatter_add_(1, ids[part], (-target[part] * scale[part, None]).to(gradient.dtype))
            hidden_gradient[part] = gradient @ narrow
            weight_gradient += gradient.T @ hidden[part]
            loss += part_loss
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(ctx, loss_gradient):
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * loss_gradient, weight_gradient * loss_gradient, None, None, None, None, None, None


class Trainer:
    """Trains a drafter on blocks; everything it needs to go on is in `save`.

    drafter: in float32.    dtype: of the matrix products.    rate: share of the learning rates.
    """

    def __init__(
        self,
        drafter: LlamaForCausalLM,
        blocks: list[Block],
        seed: int,
        batch_tokens: int,
        dtype: torch.dtype,
        rate: float = 1.0,
    ) -> None:
        self._drafter, self._seed, self._dtype, self._rate = drafter.train(), seed, dtype, rate
        self._device = drafter.device
        cuda = self._device.type == "cuda"
        self.batch_tokens = batch_tokens or (1 << 15 if cuda else 1 << 12)
        self._drawn = 0 if cuda else DRAWN_TOKENS
        self._chunk = 1 << 13 if cuda else 1 << 9
        self._split(blocks)
        self._guide = Guide(drafter) if can_copy(drafter.config) else None
        self._terms = self._compiled_terms(blocks[0].top_ids.shape[2]) if cuda else _head_terms
        named = dict(drafter.named_parameters())
        matrices = [value for name, value in named.items() if value.dim() == 2 and "embed" not in name]
        others = [value for name, value in named.items() if value.dim() != 2 or "embed" in name]
        self._optimizers = (
            torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=MATRIX_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=EMBEDDING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda),
        )
        self._epoch = -1
        self._batches: list[tuple[Block, Tensor]] = []
        self._recent: list[Tensor] = []

    def _compiled_terms(self, count: int) -> Callable:
        """`_head_terms` in two passes over the logits instead of ten, where this machine can compile."""
        compiled = torch.compile(_head_terms, dynamic=False)
        vocabulary = self._drafter.config.vocab_size
        logits = torch.zeros(self._chunk, vocabulary, dtype=self._dtype, device=self._device)
        ids = torch.zeros(self._chunk, count, dtype=torch.int64, device=self._device)
        target = torch.zeros(self._chunk, count, device=self._device)
        try:
            with torch.no_grad():
                compiled(logits, ids, target, target[:, 0].clone())
        except Exception:  # no compiler here, or one that fails: the same sums, slower
            return _head_terms
        return compiled

    def _split(self, blocks: list[Block]) -> None:
        """Rows for training and rows held out, put together by length."""
        self._pools: list[Block] = []
        self._held_out: list[Block] = []
        for length in sorted({block.tokens.shape[1] for block in blocks}):
            alike = [block for block in blocks if block.tokens.shape[1] == length]
            kept = [max(1, round(len(block.tokens) * (1 - HELD_OUT_SHARE))) for block in alike]
            self._pools.append(_join([_rows(block, slice(0, end)) for block, end in zip(alike, kept, strict=True)]))
            rest = [_rows(block, slice(end, None)) for block, end in zip(alike, kept, strict=True)]
            if any(len(block.tokens) for block in rest):
                self._held_out.append(_join(rest))
        self.num_tokens = sum(pool.tokens.numel() for pool in self._pools)

    def _batch(self, step: int) -> tuple[Block, Tensor]:
        """The pool and rows of a step: every row once an epoch, in an order of the epoch's own."""
        per_epoch = sum(-(-len(pool.tokens) // self._batch_rows(pool)) for pool in self._pools)
        epoch, place = divmod(step, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 10_007 + epoch)
            self._batches = [
                (pool, rows.to(self._device))
                for pool in self._pools
                for rows in torch.randperm(len(pool.tokens), generator=generator).split(self._batch_rows(pool))
            ]
            random.Random(f"{self._seed} {epoch}").shuffle(self._batches)
            self._epoch = epoch
        return self._batches[place]

    def _batch_rows(self, pool: Block) -> int:
        return max(1, self.batch_tokens // pool.tokens.shape[1])

    def step(self, step: int, num_steps: int) -> None:
        """One step of training; the rate rises over the warm-up and falls as a cosine to the last of `num_steps`."""
        factor = self._rate * min(1.0, (step + 1) / WARMUP_STEPS)
        if num_steps > WARMUP_STEPS:
            done = max(0, step - WARMUP_STEPS) / (num_steps - WARMUP_STEPS)
            factor *= 0.5 + 0.5 * torch.cos(torch.tensor(done * torch.pi)).item()
        for optimizer, rate in zip(self._optimizers, (MATRIX_RATE, EMBEDDING_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        pool, rows = self._batch(step)
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + step)
        block = _rows(pool, rows)
        hidden, roles, ids, logprobs = self._forward(block)
        kept = torch.rand(roles.shape, device=self._device, generator=generator) < self._by_role(KEPT_SHARE, roles)
        kept = kept.nonzero()[:, 0]
        scale = self._by_role(SLOT_WEIGHT, roles)[kept]
        target = logprobs[kept].float().exp() * (1 - HARD_SHARE)
        target[:, 0] += HARD_SHARE
        loss = self._loss(hidden.index_select(0, kept), ids[kept].long(), target, scale, generator)
        total = scale.sum().clamp(min=1)
        guided = 0.0 if self._guide is None else GUIDE_WEIGHT * self._guide.loss(block)
        (loss / total + guided).backward()
        nn.utils.clip_grad_norm_(self._drafter.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._recent = [*self._recent[-49:], (loss / total).detach()]

    def _by_role(self, values: tuple[float, ...], roles: Tensor) -> Tensor:
        return torch.tensor(values, device=self._device)[roles.long()]

    def _forward(self, block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states of every slot of a block, and its roles, ids and log-probabilities, one slot a row."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype == torch.bfloat16):
            hidden = run_rows(self._drafter, block)
        ids, logprobs = block.top_ids.flatten(0, 1), block.top_logprobs.flatten(0, 1)
        return hidden.to(self._dtype).flatten(0, 1), block.roles.flatten(), ids, logprobs

    def _loss(self, hidden: Tensor, ids: Tensor, target: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
        """Loss over slots, filled up to whole chunks so that a compiled chunk has one shape.

        On the CPU over the columns of `draw_columns` where those are few.
        """
        missing = -len(hidden) % self._chunk
        hidden, target = nn.functional.pad(hidden, (0, 0, 0, missing)), nn.functional.pad(target, (0, 0, 0, missing))
        ids, scale = nn.functional.pad(ids, (0, 0, 0, missing)), nn.functional.pad(scale, (0, missing))
        weight, bias = self._drafter.get_input_embeddings().weight, None
        if self._drawn:
            columns = draw_columns(ids, len(weight), self._drawn, generator)
            if len(columns.ids) < len(weight) // 2:
                place = torch.zeros(len(weight), dtype=torch.int64)
                place[columns.ids] = torch.arange(len(columns.ids))
                weight, bias, ids = weight.index_select(0, columns.ids), columns.bias, place[ids]
        return _HeadLoss.apply(hidden, weight, ids, target, scale, self._chunk, self._terms, bias)

    def recent_loss(self) -> float:
        """Mean loss of the last steps."""
        return torch.stack(self._recent).mean().item() if self._recent else float("nan")

    @torch.inference_mode()
    def agreement(self) -> tuple[float, float]:
        """How often the verifier's first choice is the drafter's first, or among its first eight: held-out answers."""
        first, eighth, total = 0.0, 0.0, 0
        weight = self._drafter.get_input_embeddings().weight
        for pool in self._held_out or self._pools:
            for rows in torch.arange(len(pool.tokens), device=self._device).split(self._batch_rows(pool)):
                hidden, roles, ids, _ = self._forward(_rows(pool, rows))
                answers = (roles == ROLE_ANSWER).nonzero()[:, 0]
                for part in answers.split(self._chunk):
                    logits = hidden[part] @ weight.to(hidden.dtype).T
                    hit = top_tokens(logits, min(8, logits.shape[1]))[1] == ids[part, :1]
                    first += hit[:, 0].sum().item()
                    eighth += hit.sum().item()
                    total += len(part)
                if total >= HELD_OUT_SLOTS:
                    break
        return first / max(1, total), eighth / max(1, total)

    def synchronized(self) -> float:
        """The time once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def save(self, path: Path, step: int) -> None:
        """Write weights and optimizers beside their place, then rename."""
        tensors = {f"weight.{name}": value.detach() for name, value in self._drafter.named_parameters()}
        for number, state in self._optimizer_states():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors["step"] = torch.tensor(step)
        unfinished = path.with_suffix(".part")
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> int:
        """Go on from a saved state; returns the next step."""
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in self._drafter.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
        for number, state in self._optimizer_states():
            prefix = f"optimizer.{number}."
            for name, value in tensors.items():
                if name.startswith(prefix):
                    state[name.removeprefix(prefix)] = value if name.endswith(".step") else value.to(self._device)
        if self._device.type == "cuda":
            self._move_steps()
        return int(tensors["step"])

    def _move_steps(self) -> None:
        """The fused AdamW keeps its step count on the device."""
        for _, state in self._optimizer_states():
            if "step" in state:
                state["step"] = state["step"].to(self._device)

    def _optimizer_states(self):
        """(number, state) of every parameter of every optimizer, in a fixed order."""
        parameters = [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        return [(number, optimizer.state[parameter]) for number, (optimizer, parameter) in enumerate(parameters)]


def _rows(block: Block, rows: slice | Tensor) -> Block:
    return Block(*(getattr(block, field.name)[rows] for field in fields(Block)))


def _join(blocks: list[Block]) -> Block:
    return Block(*(torch.cat([getattr(block, field.name) for block in blocks]) for field in fields(Block)))
