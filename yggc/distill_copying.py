"""The copying head of a distilled drafter: two attention heads that find what followed the last time.

The last head of the first layer looks one token back and notes the token it sees, in directions of the residual stream
that are hardly used. The last head of the last layer looks for places where that note is the token at hand, and says
what stands there. Answers repeat their prompts and themselves, and a small drafter does not find this circuit in tens
of millions of tokens; so it is built in before training, and a term of the loss keeps both heads to their task.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from yggc.distill_data import Block, run_rows

LOOK_SCORE = 36.0
"""Attention score of the token before; of its neighbours it is 0.85 of that."""
MATCH_SCORE = 14.0
"""Attention score of a place that the current token was noted at, others being spread around 0."""
SPOKEN_LOGIT = 5.0
"""What the head adds to the logit of a token that it looks at alone."""
NOTE_SCALE = 0.75
"""Of a note's parts, beside the root mean square of the residual stream that they are added to."""
MOST_SCORE = 60.0
FAR_ANGLE = 1.2e-3
"""Radians that a pair of dimensions may turn per token to be compared over long distances."""
NEAR_ANGLE = 0.02
"""From which it serves to tell neighbours apart."""
FIT_SLOTS = 1 << 14
KEPT_DIRECTIONS = 0.8
"""Of the hidden size, the strongest, that tokens are told apart by."""
RIDGE = 1e-3
GUIDED_PAIRS = 1 << 22
"""Slots times slots of the rows whose attention is looked at in a step."""
ALREADY = 0.5
"""Attention to the token before from which a drafter has the head already."""


def can_copy(config: LlamaConfig) -> bool:
    """Whether a drafter of this shape has heads to spare: two layers, two heads, enough slow dimensions."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return config.num_hidden_layers >= 2 and heads == groups and heads >= 2 and len(_slow_pairs(config)) >= 4


def _head_size(config: LlamaConfig) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _angles(config: LlamaConfig) -> Tensor:
    """Radians per token of each pair of a head's dimensions, float64[D / 2]."""
    half = _head_size(config) // 2
    theta: float = (config.rope_parameters or {})["rope_theta"]  # type: ignore[assignment, index]
    steps = torch.arange(half, dtype=torch.float64) / half
    return torch.tensor(theta, dtype=torch.float64) ** -steps


def _slow_pairs(config: LlamaConfig) -> Tensor:
    return (_angles(config) < FAR_ANGLE).nonzero()[:, 0]


class Guide:
    """Watches the two heads while the drafter runs.

    It reads what goes into their layers' attention, so that a drafter runs as fast as without it.
    """

    def __init__(self, drafter: LlamaForCausalLM) -> None:
        self._drafter = drafter
        self._layers = (drafter.model.layers[0], drafter.model.layers[-1])
        self._inputs: dict[int, Tensor] = {}
        self._hooks = [
            layer.input_layernorm.register_forward_hook(partial(self._keep, index))
            for index, layer in enumerate(self._layers)
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, index: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self._inputs[index] = output

    def loss(self, block: Block) -> Tensor:
        """How far both heads look elsewhere, nats, in the rows that the drafter has just run."""
        wanted = wanted_attention(block, self._rows(block))
        total = torch.zeros((), device=self._drafter.device)
        for index, targets in enumerate((wanted.before, wanted.copied)):
            scores = self._scores(index, block, wanted.seen)
            share = torch.logsumexp(scores.masked_fill(~targets, -math.inf), 2) - torch.logsumexp(scores, 2)
            has = targets.any(2)
            total = total - share[has].sum() / has.sum().clamp(min=1)
        return total

    @torch.inference_mode()
    def shares(self, block: Block) -> tuple[float, float]:
        """Attention to the token before, and to a right token to copy where there is one: in rows that just ran."""
        wanted = wanted_attention(block, self._rows(block))
        found = []
        for index, targets in enumerate((wanted.before, wanted.copied)):
            attention = self._scores(index, block, wanted.seen).softmax(2)
            found.append((attention * targets).sum(2)[targets.any(2)].mean().item())
        return found[0], found[1]

    def _rows(self, block: Block) -> int:
        length = block.tokens.shape[1]
        return max(1, min(len(block.tokens), GUIDED_PAIRS // length**2))

    def _scores(self, index: int, block: Block, seen: Tensor) -> Tensor:
        """Of the last head of a layer: float32[rows, length, length]."""
        rows, length, _ = seen.shape
        attention, size = self._layers[index].self_attn, _head_size(self._drafter.config)
        inputs = self._inputs[index][:rows].float()
        positions = torch.arange(length, device=inputs.device) - block.starts[:rows].long()
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self._drafter.model.rotary_emb
        cosine, sine = rotary(inputs, positions)
        query, key = (inputs @ part.weight[-size:].float().T for part in (attention.q_proj, attention.k_proj))
        query, key = apply_rotary_pos_emb(query[:, None], key[:, None], cosine, sine)
        scores = (query[:, 0] @ key[:, 0].transpose(1, 2)) * size**-0.5
        return scores.masked_fill(~seen, -math.inf)


@dataclass(frozen=True, slots=True)
class WantedAttention:
    """Which slots are seen from each slot of some rows, and which of them the heads should look at.

    All bool[rows, length, length]. before: the slot before; copied: slots whose token is the verifier's next choice
    and comes after the token at hand.
    """

    seen: Tensor
    before: Tensor
    copied: Tensor


def wanted_attention(block: Block, num_rows: int) -> WantedAttention:
    """Of a block's first rows."""
    tokens, starts = block.tokens[:num_rows].long(), block.starts[:num_rows].long()
    choices = block.top_ids[:num_rows, :, 0].long()
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    seen = (starts[:, :, None] == starts[:, None, :]) & (slots[:, None] >= slots)
    before = seen & (slots[:, None] - 1 == slots)
    previous = torch.where(slots > starts, tokens.roll(1, dims=1), -1)
    copied = seen & (previous[:, None, :] == tokens[:, :, None]) & (tokens[:, None, :] == choices[:, :, None])
    return WantedAttention(seen, before, copied)


@torch.no_grad()
def build_copying_head(drafter: LlamaForCausalLM, blocks: Sequence[Block]) -> None:
    """Turn the last heads of the first and last layer into a copying head, for tokens as they are in `blocks`.

    A drafter that has learned already loses what the two heads did and keeps the rest. One that has such a head is left
    as it is.
    """
    guide = Guide(drafter)
    run = _Run(drafter, _sample(blocks))
    looks_back, _ = guide.shares(run.block)
    guide.close()
    if looks_back > ALREADY:
        return
    config, size = drafter.config, _head_size(drafter.config)
    first, last = drafter.model.layers[0].self_attn, drafter.model.layers[-1].self_attn
    slow, head = _slow_pairs(config), slice(-size, None)
    places = torch.cat((slow, slow + size // 2))  # a pair lies half a head apart
    for attention in (first, last):
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight[head] = 0
        attention.o_proj.weight[:, head] = 0

    # one token back: through the direction in which all normed embeddings have nearly the same part
    run.again()
    inputs = run.first
    mean = inputs.mean(0)
    constant = _regression(inputs, torch.ones(len(inputs), 1, dtype=torch.float64))[0]
    angles = _angles(config)
    strength = torch.where(angles > NEAR_ANGLE, angles.sqrt(), 0.0)
    strength = (LOOK_SCORE * math.sqrt(size) * strength / strength.sum()).sqrt()
    query = torch.cat((strength, torch.zeros_like(strength)))
    key = torch.cat((strength * angles.cos(), strength * angles.sin()))
    _assign(first.q_proj.weight[head], query[:, None] * constant)
    _assign(first.k_proj.weight[head], key[:, None] * constant)

    # the note: of all that tells tokens apart, what the last layer too can read of the token at hand
    centre = torch.eye(len(mean), dtype=torch.float64) - mean[:, None] * constant
    white = _whitening(inputs @ centre.T, int(KEPT_DIRECTIONS * len(mean))).T @ centre
    later = run.last - run.last.mean(0)
    shared = (inputs @ white.T).T @ (later @ _whitening(later, len(mean))) / len(inputs)
    note = torch.linalg.svd(shared)[0][:, : len(places)].T @ white
    quiet = torch.linalg.eigh(run.residual.T @ run.residual)[1][:, : len(places)]
    scale = NOTE_SCALE * run.attended.square().mean().sqrt()
    _assign(first.v_proj.weight[head][: len(places)], note)
    _assign(first.o_proj.weight[:, head][:, : len(places)], quiet * scale)

    # the match: the note of the token at hand against those of the tokens before each place
    run.again()
    noted = inputs @ note.T
    follows = run.follows
    before = noted.roll(1, dims=0)[follows]
    read_key, read_query = _regression(run.last[follows], before), _regression(run.last, noted)
    shown = (run.last[follows] @ read_key.T * before).sum() / before.square().sum()
    asked = (run.last @ read_query.T * noted).sum() / noted.square().sum()
    score = min(MATCH_SCORE / (shown * asked).item(), MOST_SCORE)
    gain = math.sqrt(score * math.sqrt(size) / len(places))
    key_rows, query_rows = torch.zeros(2, size, config.hidden_size, dtype=torch.float64)
    key_rows[places], query_rows[places] = gain * read_key, gain * read_query
    _assign(last.k_proj.weight[head], key_rows)
    _assign(last.q_proj.weight[head], query_rows)

    # what is said: the token looked at, in the strongest directions of the embedding
    table: Any = drafter.get_input_embeddings().weight
    centred = table.cpu().double()[run.block.tokens.flatten().long().cpu()]
    centred = centred - centred.mean(0)
    directions = _whitening(centred, size)
    _assign(last.v_proj.weight[head], _regression(run.last, centred @ directions))
    norm = drafter.model.norm.weight.detach().cpu().double()
    final_scale = run.final.square().mean().sqrt()
    _assign(last.o_proj.weight[:, head], directions * (SPOKEN_LOGIT / size) * final_scale / norm[:, None])


class _Run:
    """A drafter on some rows, and what flows through it: float64[slots, hidden] on the CPU.

    first, last: what goes into the first and the last layer's attention.
    attended, residual, final: the residual stream after the first attention, before the last layer, and at the end.
    follows: bool[slots], whether a slot's conversation has one before it.
    """

    first: Tensor
    last: Tensor
    attended: Tensor
    residual: Tensor
    final: Tensor

    def __init__(self, drafter: LlamaForCausalLM, block: Block) -> None:
        self._drafter, self.block = drafter, block
        self.follows = (block.starts.cpu() != torch.arange(block.tokens.shape[1])).flatten()
        self.again()

    def again(self) -> None:
        """Run the drafter as it is now."""
        model = self._drafter.model
        first, last = model.layers[0], model.layers[-1]
        hooks = [
            first.input_layernorm.register_forward_hook(partial(self._keep, None, "first")),
            first.post_attention_layernorm.register_forward_hook(partial(self._keep, "attended", None)),
            last.input_layernorm.register_forward_hook(partial(self._keep, "residual", "last")),
            model.norm.register_forward_hook(partial(self._keep, "final", None)),
        ]
        try:
            run_rows(self._drafter, self.block)
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(
        self, before: str | None, after: str | None, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        for name, value in ((before, inputs[0]), (after, output)):
            if name is not None:
                setattr(self, name, value.detach().flatten(0, 1).cpu().double())


def _sample(blocks: Sequence[Block]) -> Block:
    """Rows of the shortest blocks, spread over them, about FIT_SLOTS slots in all."""
    length = min(block.tokens.shape[1] for block in blocks)
    alike = [block for block in blocks if block.tokens.shape[1] == length]
    rows = max(1, FIT_SLOTS // length // len(alike))
    return Block(*(torch.cat([getattr(block, field.name)[:rows] for block in alike]) for field in fields(Block)))


def _assign(place: Tensor, values: Tensor) -> None:
    place.copy_(values.to(place.device, place.dtype))


def _regression(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Ridge regression: [outputs, inputs], which times an input gives about its output."""
    square = inputs.T @ inputs / len(inputs)
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
    return torch.linalg.solve(square, inputs.T @ outputs / len(inputs)).T


def _whitening(centred: Tensor, count: int) -> Tensor:
    """The strongest `count` directions of some vectors, scaled to parts of variance 1: [size, count]."""
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    variances, directions = variances.flip(0)[:count], directions.flip(1)[:, :count]
    return directions / variances.clamp(min=1e-6 * variances[0]).sqrt()
