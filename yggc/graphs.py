"""The step modules that are exported: `VerifyStep` and `DraftPass` around an unmodified transformers model.

The model's own attention modules call `step_attention` (registered with transformers' AttentionInterface), which keeps
the KV cache itself: it writes this step's rows at their slots and attends to the first S rows. So no cache class of
transformers is involved, and no code here knows a model family.

Invariant: a step reads the KV rows it moves before it writes any, and writes only at `move_dst` and `slots`.
Input and output orders are `yggrt.artifacts.VERIFY_*` and `DRAFT_*` (Step ABI v5).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from yggc.kernels import HUGE_LOGIT, OPERATORS, draw_children
from yggrt.artifacts import DRAFT_LAWS, DRAFT_ROWS, LOG_Q_MIN, TREE, LayerLayout, StepLimits, attention_windows
from yggrt.errors import CheckpointError

ATTENTION_NAME = "ygg_step"


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's own attention, which lowering to the CPU's kernels replaces. Shapes as for `grouped_attention`."""
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention as two batched products for each KV head: no key is repeated for the heads that share it.

    Written with the views of which torch 2.11 can tell that they hold for every W and S.

    query: [1, heads, W, dim]; key, value: [1, kv_heads, S, dim]; mask: additive [1, 1, W, S].
    Returns [1, heads, W, value dim].
    """
    heads, width, dim = query.shape[1:]
    kv_heads = key.shape[1]
    sharing = heads // kv_heads
    grouped = query.reshape(kv_heads, sharing * width, dim)
    scores = torch.bmm(grouped, key[0].transpose(1, 2)).float() * (dim**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask[0, 0].repeat(sharing, 1)
    shares = torch.softmax(scores, dim=-1).to(value.dtype)
    rows = torch.bmm(shares, value[0]).unflatten(1, (sharing, width)).permute(2, 0, 1, 3).contiguous()
    return rows.flatten(1, 2).transpose(0, 1).unsqueeze(0)


SORTED_TOGETHER = 512
"""Columns of a block: the most that torch's compiler sorts in one kernel for a GPU."""


def best_children(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What the operator `children` gives, in torch's own operators; among equals the first column comes first."""
    logits = torch.nan_to_num(logits.float(), nan=-HUGE_LOGIT, posinf=HUGE_LOGIT, neginf=-HUGE_LOGIT)
    best, columns = largest(logits, count)
    return columns, best - torch.logsumexp(logits, dim=-1, keepdim=True)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their columns, in order.

    The largest of every block, then of those: a few launches, where `topk` over a vocabulary is dozens.
    values: [R, N], finite; count: at most N and half of SORTED_TOGETHER. Returns [R, count] and int64[R, count].
    """
    columns = torch.arange(values.shape[1], device=values.device).expand_as(values)
    while values.shape[1] > SORTED_TOGETHER:
        padding = -values.shape[1] % SORTED_TOGETHER
        blocks = functional.pad(values, (0, padding), value=-torch.inf).unflatten(1, (-1, SORTED_TOGETHER))
        best, places = torch.sort(blocks, dim=2, descending=True, stable=True)
        values = best[:, :, :count].flatten(1)
        columns = functional.pad(columns, (0, padding)).unflatten(1, (-1, SORTED_TOGETHER))
        columns = columns.gather(2, places[:, :, :count]).flatten(1)
    best, places = torch.sort(values, dim=1, descending=True, stable=True)
    return best[:, :count], columns.gather(1, places[:, :count])


def largest_first(values: Tensor) -> Tensor:
    """What the operator `order` gives, in torch's own operators."""
    return torch.sort(values, descending=True, stable=True).indices


@dataclass(frozen=True, slots=True)
class Operators:
    """What a step computes with beside its model. children, draw, order: as `yggc.kernels.OPERATORS`."""

    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
    children: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    draw: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
    order: Callable[[Tensor], Tensor]


KERNELS = Operators(sdpa, OPERATORS.children, OPERATORS.draw, OPERATORS.order)
"""For the CPU, where lowering puts kernels in their place."""

TORCH = Operators(grouped_attention, best_children, draw_children, largest_first)
"""For other devices, whose compiler sees nothing but torch."""


@dataclass(slots=True)
class _StepState:
    """What the attention functions of one step share while the model's forward runs."""

    operators: Operators
    slots: Tensor
    moves: tuple[Tensor, Tensor]
    masks: dict[int | None, Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    extent: int
    visited: list[int] = field(default_factory=list)


class _Active(threading.local):
    """The step that runs, or the record of layers that is made, innermost last; each thread has its own."""

    def __init__(self) -> None:
        self.stack: list[_StepState | list[LayerLayout]] = []


_active = _Active()


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over its KV buffers; called by the model's own attention modules.

    query: [1, heads, W, head_dim]; key, value: [1, kv_heads, W, head_dim] of this step's rows alone.
    Returns ([1, W, heads, head_dim], None).
    """
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if refused:
        raise CheckpointError(
            f"{type(module).__name__} asks for attention with {', '.join(refused)}; plain scaled-dot-product "
            "attention, full or with a sliding window, is accepted"
        )
    state = _active.stack[-1]
    if isinstance(state, list):
        state.append(LayerLayout(key.shape[1], key.shape[3], value.shape[3], sliding_window))
        output = sdpa(query, key, value, None, scaling)
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        state.visited.append(layer)
        key = _write_and_read(state.keys[layer], key, state)
        value = _write_and_read(state.values[layer], value, state)
        mask = state.masks.get(sliding_window, state.masks[None])
        output = state.operators.attention(query, key, value, mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def _write_and_read(buffer: Tensor, rows: Tensor, state: _StepState) -> Tensor:
    """Move and write KV rows in one scatter, then return the first S of them.

    buffer: [kv_heads, kv_rows, head_dim], mutated; rows: [1, kv_heads, W, head_dim].
    Returns [1, kv_heads, S, head_dim].
    """
    move_src, move_dst = state.moves
    targets = torch.cat((move_dst, state.slots))
    buffer[:, targets] = torch.cat((buffer[:, move_src], rows[0]), dim=1)
    return buffer[:, : state.extent].unsqueeze(0)


AttentionInterface.register(ATTENTION_NAME, step_attention)


@contextmanager
def _running(state: _StepState | list[LayerLayout]) -> Iterator[None]:
    _active.stack.append(state)
    try:
        yield
    finally:
        _active.stack.pop()


def layer_layouts(model: PreTrainedModel) -> tuple[LayerLayout, ...]:
    """What each layer keeps in its KV cache, found by running the model once on two tokens.

    Raises CheckpointError when the model's layers do not all call the attention interface, once each.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    recorded: list[LayerLayout] = []
    with _running(recorded), torch.no_grad():
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        model(input_ids=tokens, position_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    if len(recorded) != model.config.get_text_config().num_hidden_layers:
        raise CheckpointError(
            f"{type(model).__name__} has {model.config.num_hidden_layers} layers but {len(recorded)} of them use "
            "transformers' attention interface; models whose every layer keeps one KV cache are accepted"
        )
    return tuple(recorded)


class _CausalStep(nn.Module):
    """A causal language model that runs W rows against external KV buffers."""

    def __init__(
        self,
        model: PreTrainedModel,
        layouts: tuple[LayerLayout, ...],
        vocab_size: int,
        operators: Operators = KERNELS,
    ) -> None:
        super().__init__()
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self.operators = operators
        self.num_layers = len(layouts)
        self.windows = attention_windows(layouts)
        self.vocab_size = vocab_size
        self._head_input: list[Tensor] = []
        model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)

    def _keep_head_input(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._head_input.append(inputs[0])

    def run_model(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        masks: tuple[Tensor, ...],
        moves: tuple[Tensor, Tensor],
        kv_buffers: tuple[Tensor, ...],
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and last hidden states [R, H] of `rows` (all rows when None); V is the usable vocabulary."""
        state = _StepState(
            operators=self.operators,
            slots=slots,
            moves=moves,
            masks={window: mask[None, None] for window, mask in zip(self.windows, masks, strict=True)},
            keys=list(kv_buffers[0::2]),
            values=list(kv_buffers[1::2]),
            extent=masks[0].shape[1],
        )
        if None not in state.masks:  # every layer slides: the fallback for an unknown window is the only mask there is
            state.masks[None] = masks[0][None, None]
        keep = {} if rows is None else {"logits_to_keep": rows}
        with _running(state):
            output = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **keep)
        if sorted(state.visited) != list(range(self.num_layers)):
            raise CheckpointError(f"{type(self.model).__name__} visited layers {state.visited} of {self.num_layers}")
        hidden = self._head_input.pop()
        return output.logits[0, :, : self.vocab_size], hidden[0]


class VerifyStep(_CausalStep):
    """One verifier step over W rows; its outputs are `yggrt.artifacts.VERIFY_OUTPUTS`."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        masks: tuple[Tensor, ...],
        move_src: Tensor,
        move_dst: Tensor,
        depth_first: Tensor,
        depth_second: Tensor,
        kv_buffers: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        logits, hidden = self.run_model(tokens, positions, slots, masks, (move_src, move_dst), kv_buffers, None)
        best, choice = logits.max(dim=-1)
        columns = torch.arange(logits.shape[1], device=logits.device)
        others = logits.masked_fill(columns == choice[:, None], -torch.inf)  # fused into the reduction, never written
        gap = best.float() - others.amax(dim=-1).float()
        units = torch.addmm(depth_first[-1], hidden.float(), depth_first[:-1]).relu()
        expected = torch.addmm(depth_second[-1], units, depth_second[:-1])
        return choice, gap, hidden, logits, expected


class DraftPass(_CausalStep):
    """One pass of the drafter: run W rows, add the children of R of them to the pool, choose the A best as new nodes.

    See `yggrt.artifacts.DRAFT_INPUTS` for shapes. Prefill is the same graph with the outcome ignored.
    Source: paper, Equal-Growth Tree; design, section 5.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layouts: tuple[LayerLayout, ...],
        vocab_size: int,
        children_per_node: int,
        mask_value: float,
        vocabulary: tuple[int, ...] | None,
        operators: Operators = KERNELS,
    ) -> None:
        """vocabulary: ids the output layer is cut to, ascending; None keeps it whole."""
        if vocabulary is not None:
            cut_head(model, vocabulary)
        super().__init__(model, layouts, vocab_size if vocabulary is None else len(vocabulary), operators)
        self.vocabulary = None if vocabulary is None else CutVocabulary(vocabulary)
        self.children_per_node = children_per_node
        self.mask_value = mask_value

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        num_visible: Tensor,
        row_ancestors: Tensor,
        expand_rows: Tensor,
        expand_nodes: Tensor,
        new_nodes: Tensor,
        root: Tensor,
        tree_tokens: Tensor,
        tree_parents: Tensor,
        tree_depths: Tensor,
        tree_values: Tensor,
        tree_ancestors: Tensor,
        pool_values: Tensor,
        pool_tokens: Tensor,
        pool_parents: Tensor,
        acceptance_table: Tensor,
        temperature: Tensor,
        noise: Tensor,
        copied_tokens: Tensor,
        copied_log_a: Tensor,
        extent: Tensor,
        move_src: Tensor,
        move_dst: Tensor,
        kv_buffers: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        root_position, root_slot = root[0], root[1]
        dtype = kv_buffers[0].dtype
        masks = tuple(
            growth_mask(
                window, positions, num_visible, row_ancestors, tree_depths, root_position, root_slot, extent,
                self.mask_value, dtype,
            )
            for window in self.windows
        )  # fmt: skip
        logits, _ = self.run_model(tokens, positions, slots, masks, (move_src, move_dst), kv_buffers, rows=expand_rows)
        likely, log_q = self.operators.children(logits.contiguous(), noise.shape[1])
        if self.vocabulary is not None:
            likely = self.vocabulary(likely)
        child_tokens, places, law = self.operators.draw(likely, log_q, noise, temperature, self.children_per_node)
        log_a = log_acceptance(places, acceptance_table)
        sees = tree_ancestors[expand_nodes]
        copies = ~(sees & (tree_tokens != copied_tokens[tree_depths])).any(dim=1)  # nodes of the path that is copied
        below = tree_depths[expand_nodes] + 1
        child_tokens, log_a = offer_copied(child_tokens, log_a, copies, copied_tokens[below], copied_log_a[below])
        child_values = tree_values[expand_nodes][:, None] + log_a
        child_parents = expand_nodes[:, None].expand_as(child_tokens)

        candidate_values = torch.cat((pool_values, child_values.reshape(-1)))
        candidate_tokens = torch.cat((pool_tokens, child_tokens.reshape(-1)))
        candidate_parents = torch.cat((pool_parents, child_parents.reshape(-1)))
        order = self.operators.order(candidate_values)
        added = order[torch.arange(new_nodes.shape[0], device=order.device)]
        kept = order[torch.arange(pool_values.shape[0], device=order.device) + new_nodes.shape[0]]

        parents = candidate_parents[added]
        depths = tree_depths[parents] + 1
        ancestors = tree_ancestors[parents] | functional.one_hot(new_nodes, tree_tokens.shape[0]).bool()
        new_tokens = candidate_tokens[added]
        positions = root_position + depths
        return (
            new_tokens,
            positions,
            root_slot + new_nodes,
            positions - depths + 1,  # all committed rows, the root's included; spelled so as to be a row of its own
            ancestors,
            tree_tokens.index_put((new_nodes,), new_tokens),
            tree_parents.index_put((new_nodes,), parents),
            tree_depths.index_put((new_nodes,), depths),
            tree_values.index_put((new_nodes,), candidate_values[added]),
            tree_ancestors.index_put((new_nodes,), ancestors),
            candidate_values[kept],
            candidate_tokens[kept],
            candidate_parents[kept],
            likely,
            law,
        )


class CutVocabulary(nn.Module):
    """Columns of a cut output layer to token ids."""

    def __init__(self, vocabulary: tuple[int, ...]) -> None:
        super().__init__()
        self.ids: Tensor
        self.register_buffer("ids", torch.tensor(vocabulary))

    def forward(self, columns: Tensor) -> Tensor:
        return self.ids[columns]


class FusedDraft(nn.Module):
    """All passes of one depth in one graph: see `yggrt.artifacts.fused_draft_inputs`."""

    def __init__(self, one_pass: DraftPass, limits: StepLimits, draft_width: int, draft_depth: int) -> None:
        super().__init__()
        self.model, self.vocabulary = one_pass.model, one_pass.vocabulary
        self._pass = (one_pass,)  # no submodule: the weights keep the names they have in a draft pass, and are shared
        self.limits = limits
        self.draft_width, self.draft_depth = draft_width, draft_depth

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        num_visible: Tensor,
        root: Tensor,
        acceptance_table: Tensor,
        temperature: Tensor,
        noise: Tensor,
        copied_tokens: Tensor,
        copied_log_a: Tensor,
        extent: Tensor,
        move_src: Tensor,
        move_dst: Tensor,
        kv_buffers: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        nodes, pool, width = self.limits.max_nodes, self.limits.pool_size, self.draft_width
        index: dict[str, Any] = {"dtype": torch.int64, "device": tokens.device}
        tree_tokens = torch.cat((tokens[1:], torch.zeros(nodes - 1, **index)))
        none, empty_pool = torch.zeros(nodes, **index), torch.zeros(pool, **index)
        ancestors = torch.arange(nodes * nodes, **index).view(nodes, nodes) == 0  # the root sees itself
        state: tuple[Tensor, ...] = (
            tree_tokens, none, none, none.float(), ancestors, empty_pool - torch.inf, empty_pool, empty_pool,
        )  # fmt: skip
        rows: tuple[Tensor, ...] = (
            tokens,
            positions,
            slots,
            num_visible,
            torch.zeros(2, nodes, dtype=torch.bool, device=tokens.device),
        )
        expand_rows, expand_nodes = torch.arange(1, 2, **index), torch.arange(0, 1, **index)
        laws: list[tuple[Tensor, ...]] = []
        for depth in range(self.draft_depth):
            added = torch.arange(1 + depth * width, 1 + (depth + 1) * width, **index)
            outputs = self._pass[0](
                *rows, expand_rows, expand_nodes, added, root, *state, acceptance_table, temperature,
                noise[expand_nodes], copied_tokens, copied_log_a, extent, move_src, move_dst, kv_buffers,
            )  # fmt: skip
            rows, state = outputs[: len(DRAFT_ROWS)], outputs[len(DRAFT_ROWS) : -len(DRAFT_LAWS)]
            laws.append(outputs[-len(DRAFT_LAWS) :])
            expand_rows, expand_nodes = torch.arange(0, width, **index), added
            move_src = move_dst = torch.zeros(1, **index)  # the first pass has moved the rows
        return (*state[: len(TREE)], *(torch.cat(parts) for parts in zip(*laws, strict=True)))


def cut_head(model: PreTrainedModel, vocabulary: tuple[int, ...]) -> None:
    """Replace the model's output layer by its rows for `vocabulary`; an embedding tied to it stays whole."""
    whole = model.get_output_embeddings()
    rows = torch.tensor(vocabulary, device=whole.weight.device)
    cut = nn.Linear(whole.in_features, len(vocabulary), whole.bias is not None, whole.weight.device, whole.weight.dtype)
    with torch.no_grad():
        cut.weight.copy_(whole.weight[rows])
        if whole.bias is not None:
            cut.bias.copy_(whole.bias[rows])
    model.set_output_embeddings(cut)


def growth_mask(
    window: int | None,
    positions: Tensor,
    num_visible: Tensor,
    row_ancestors: Tensor,
    tree_depths: Tensor,
    root_position: Tensor,
    root_slot: Tensor,
    extent: Tensor,
    mask_value: float,
    dtype: torch.dtype,
) -> Tensor:
    """Additive mask [W, S] of a draft pass.

    Committed position p lies at slot p + 1, node i > 0 of the tree at root_slot + i; slot 0 is scratch and seen only by
    padding rows, whose `num_visible` is 0. A window counts positions, not slots.
    """
    slots = extent[None, :]
    node = extent - root_slot
    in_tree = (node >= 1) & (node < row_ancestors.shape[1])
    node = node.clamp(0, row_ancestors.shape[1] - 1)
    visible = (slots >= 1) & (slots <= num_visible[:, None])
    visible = visible | (row_ancestors[:, node] & in_tree[None, :])
    if window is not None:
        slot_positions = torch.where(in_tree, root_position + tree_depths[node], extent - 1)
        visible = visible & (positions[:, None] - slot_positions[None, :] < window)
    visible = visible | ((slots == 0) & (num_visible[:, None] == 0))
    return torch.where(visible, 0.0, mask_value).to(dtype)


def log_acceptance(log_q: Tensor, table: Tensor) -> Tensor:
    """Calibrated log a(rank, q) by linear interpolation on log q; siblings are scaled so that their a sum to at most 1.

    log_q: float32[R, K], best first, or what else the table goes by.
    table: float32[K, B], row k holds log a at B knots, evenly spaced from LOG_Q_MIN to 0.
    Returns float32[R, K].
    """
    last = table.shape[1] - 1
    place = (1.0 - log_q / LOG_Q_MIN).clamp(0.0, 1.0) * last
    below = place.floor().clamp(max=last - 1)
    index = below.long()
    fraction = place - below
    rank = torch.arange(table.shape[0], device=table.device)[None, :].expand_as(index)
    log_a = (1.0 - fraction) * table[rank, index] + fraction * table[rank, index + 1]
    return log_a - torch.logsumexp(log_a, dim=-1, keepdim=True).clamp(min=0.0)


def offer_copied(
    child_tokens: Tensor, log_a: Tensor, copies: Tensor, token: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Children with the token that may be copied among them: int64[R, K] and float32[R, K], log a.

    child_tokens, log_a: [R, K], of the drafter. copies: bool[R], nodes that lie on the path that is copied.
    token, log_rate:     [R], what comes after them there, and how sure that is. It takes the last child's place where
                         it is not among the children and more likely than that one; the others share what it leaves.
    """
    found = child_tokens == token[:, None]
    last = torch.arange(child_tokens.shape[1], device=child_tokens.device) == child_tokens.shape[1] - 1
    is_child = found.any(dim=1)
    offered = copies & (token >= 0) & (is_child | (log_rate > log_a[:, -1]))
    place = torch.where(is_child[:, None], found, last) & offered[:, None]
    left = torch.where(offered, torch.log1p(-log_rate.exp()), 0.0)
    log_a = torch.where(place, torch.maximum(log_a, log_rate[:, None]), log_a + left[:, None])
    return torch.where(place, token[:, None], child_tokens), log_a
