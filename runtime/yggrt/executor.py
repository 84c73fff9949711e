"""One iteration after another: draft passes, cut, verify, accept, and the KV bookkeeping between them.

Invariants, with n committed tokens before an iteration: the verifier's cache holds at least the first n - 1 of them and
the drafter's is brought to at least n - 2; no position reaches the context's end; nothing here changes which token
comes next, only how many come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yggrt.accept import accept_greedy, walk
from yggrt.artifacts import DRAFT_ROWS, Step, attention_windows
from yggrt.depth import DepthNetwork
from yggrt.kvcache import KvCache
from yggrt.masks import StepMask, prefix_mask
from yggrt.tree import Tree, TreeShape, VerifyCut, cut_most_valuable, order_by_value

PREFILL_WIDTH = 256
STAGES = ("prefill", "draft_prefill", "draft", "cut", "verify", "plain", "accept")
COMPILED_STAGES = ("prefill", "draft_prefill", "draft", "verify", "plain")


@dataclass(frozen=True, slots=True)
class Round:
    """What one iteration gave.

    tokens:       the accepted path and the bonus token, in order.
    gaps:         top-2 gap of the verifier's logits where each of them was chosen.
    hidden:       [H], the verifier's last hidden state where the last of them was chosen.
    num_drafted:  nodes the drafter added.
    num_verified: rows the verifier ran, root included.
    extent:       KV rows the verifier read.
    expected:     tokens the drafted values promised; 1 without a draft.
    next_tokens:  float32[DEPTH_HEADS], tokens the depth network expects of the next iteration, by depth; zeros without.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    hidden: Tensor
    num_drafted: int
    num_verified: int
    extent: int
    expected: float
    next_tokens: NDArray[np.float32]


ChooseWidth = Callable[[NDArray[np.float32], int], int]
"""W_v for a tree: (log values, most valuable first, float32[N]; extent) to rows, at least 1."""


ChooseToken = Callable[[Tensor], int]
"""The next token, from the verifier's logits [V] after all tokens before it."""


class StageClock:
    """Seconds inside compiled steps and in host code, by stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def add(self, stage: str, started: float) -> float:
        """Charge the time since `started` to a stage; returns now."""
        now = perf_counter()
        self.seconds[stage] += now - started
        return now


class _VerifyRows:
    """Tokens, positions and slots of W rows: as a step takes them, and as the host writes them."""

    def __init__(self, width: int) -> None:
        rows = torch.zeros(3, width, dtype=torch.int64)
        self.inputs = rows.unbind()
        self.array = rows.numpy()
        self.places = np.arange(width)


class Decoder:
    """Decodes one sequence at a time with a drafter and a verifier.

    fused:      by depth, the graphs that draft a whole tree of `draft_width` at once; other trees grow pass by pass.
    table:      float32[K, B], log a by (rank, log q); see `yggrt.artifacts.draft_inputs`.
    network:    evaluated inside `verify`; None where no depth was learned.
    on_prefill: called with (tokens of the prompt read, tokens of the prompt) as the prefill goes on; None for nobody.
    """

    def __init__(
        self,
        verify: Step,
        draft: Step,
        fused: Mapping[int, Step],
        draft_width: int,
        verifier_cache: KvCache,
        drafter_cache: KvCache,
        table: Tensor,
        max_context: int,
        plain_width: int,
        network: DepthNetwork | None = None,
    ) -> None:
        self.verify, self.draft = verify, draft
        self.fused, self.draft_width = fused, draft_width
        self.verifier_cache, self.drafter_cache = verifier_cache, drafter_cache
        verify.bind(verifier_cache.buffers, verifier_cache.layouts, verifier_cache.dtype)
        for step in (draft, *fused.values()):
            step.bind(drafter_cache.buffers, drafter_cache.layouts, drafter_cache.dtype)
        self.table = table
        self.max_context = max_context
        self.plain_width = plain_width
        sizes = {spec.name: [int(size) for size in spec.sizes] for spec in verify.inputs[-2:]}
        self.depth_layers = (
            (torch.zeros(sizes["depth_first"]), torch.zeros(sizes["depth_second"]))
            if network is None
            else network.tensors()
        )
        self.windows = attention_windows(verifier_cache.layouts)
        self.clock = StageClock()
        self.on_prefill: Callable[[int, int], object] | None = None
        self._rows: dict[tuple[int, int], _VerifyRows] = {}
        self._masks: dict[tuple[int, int, int], tuple[StepMask, ...]] = {}
        self._extents: dict[int, Tensor] = {}

        nodes, pool = draft.limits.max_nodes, draft.limits.pool_size
        self._root = torch.zeros(2, dtype=torch.int64)
        self._tree_tokens = torch.zeros(nodes, dtype=torch.int64)
        ancestors = torch.zeros(nodes, nodes, dtype=torch.bool)
        ancestors[0, 0] = True
        self._empty_state: tuple[Tensor, ...] = (
            self._tree_tokens,
            torch.zeros(nodes, dtype=torch.int64),
            torch.zeros(nodes, dtype=torch.int64),
            torch.zeros(nodes),
            ancestors,
            torch.full((pool,), -torch.inf),
            torch.zeros(pool, dtype=torch.int64),
            torch.zeros(pool, dtype=torch.int64),
        )
        head = torch.zeros(4, 2, dtype=torch.int64)  # tokens, positions, slots, num_visible of the first pass's rows
        self._head = head.numpy()
        self._head_rows = head.unbind()
        self._head_ancestors = torch.zeros(2, nodes, dtype=torch.bool)
        self._ranges: dict[tuple[int, int], Tensor] = {}

    def reset(self) -> None:
        """Start a new sequence."""
        self.verifier_cache.reset()
        self.drafter_cache.reset()
        self.clock = StageClock()

    # Verifier

    def prefill(self, tokens: Sequence[int], choose: ChooseToken | None = None) -> Round:
        """Run the prompt through the verifier. tokens: all committed ones, at least one. Returns the token after it.

        choose: in place of the verifier's argmax; here and below.
        """
        started = perf_counter()
        cache = self.verifier_cache
        outputs: list[Tensor] = []
        extent = 0
        while cache.num_committed < len(tokens):
            first = cache.num_committed
            last = min(first + PREFILL_WIDTH, len(tokens))
            positions = torch.arange(first, last)
            extent = cache.extent(last + 1)
            masks = [prefix_mask(positions, extent, window, cache.dtype) for window in self.windows]
            outputs = self._run_verify((torch.tensor(tokens[first:last]), positions, positions + 1), masks)
            cache.num_committed = last
            if self.on_prefill is not None:
                self.on_prefill(last, len(tokens))
        self.clock.add("prefill", started)
        choices, gaps, hidden, logits, by_depth = outputs
        token = int(choices[-1]) if choose is None else choose(logits[-1])
        return Round((token,), (float(gaps[-1]),), hidden[-1], 0, len(tokens), extent, 1.0, by_depth.numpy()[-1])

    def decode_plain(self, tokens: Sequence[int], choose: ChooseToken | None = None) -> Round:
        """One iteration without a draft: run the last committed token, in a step of the fastest width."""
        width, num_tokens = self.plain_width, len(tokens)
        extent = self.verifier_cache.extent(num_tokens + 1)
        rows = self._verify_rows(width, 1)
        rows.array[:, 0] = (tokens[-1], num_tokens - 1, num_tokens)
        masks = self._step_masks(width, extent, 1)
        for mask in masks:
            mask.show_token(num_tokens)
        started = perf_counter()
        choices, gaps, hidden, logits, by_depth = self._run_verify(rows.inputs, [mask.tensor for mask in masks])
        self.clock.add("plain", started)
        self.verifier_cache.num_committed = num_tokens
        token = int(choices.numpy()[0]) if choose is None else choose(logits[0])
        return Round((token,), (float(gaps.numpy()[0]),), hidden[0], 0, 1, extent, 1.0, by_depth.numpy()[0])

    def flush_moves(self) -> None:
        """Apply the moves owed to both caches, so that their committed rows are in place."""
        cache = self.verifier_cache
        if cache.has_moves:
            padding = torch.zeros(1, dtype=torch.int64)
            self._run_verify([padding] * 3, [torch.zeros(1, 1, dtype=cache.dtype)] * len(self.windows))
        if self.drafter_cache.has_moves:
            self._run_drafter_rows([], 0)

    def _run_verify(self, rows: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """rows: tokens, positions and slots."""
        cache = self.verifier_cache
        outputs = self.verify(*rows, *masks, cache.move_src, cache.move_dst, *self.depth_layers)
        cache.moved()
        return outputs

    def _verify_rows(self, width: int, num_rows: int) -> _VerifyRows:
        key = (width, num_rows)
        if key not in self._rows:
            self._rows[key] = _VerifyRows(width)
        return self._rows[key]

    def _step_masks(self, width: int, extent: int, num_rows: int) -> tuple[StepMask, ...]:
        key = (width, extent, num_rows)
        if key not in self._masks:
            dtype = self.verifier_cache.dtype
            self._masks[key] = tuple(StepMask(width, extent, dtype, window, num_rows) for window in self.windows)
        return self._masks[key]

    # Drafter

    def prefill_drafter(self, tokens: Sequence[int]) -> None:
        """Bring the drafter's cache to all but the last two committed tokens, which the first pass runs itself."""
        cache = self.drafter_cache
        started = perf_counter()
        while cache.num_committed < len(tokens) - 2:
            first = cache.num_committed
            last = min(first + PREFILL_WIDTH, len(tokens) - 2)
            self._run_drafter_rows(tokens[first:last], first)
            cache.num_committed = last
        self.clock.add("draft_prefill", started)

    def _run_drafter_rows(self, tokens: Sequence[int], first_position: int) -> None:
        """Run committed tokens through the drafter for their KV rows alone; none of them runs a padding row."""
        width = max(len(tokens), 1)
        rows = torch.zeros(4, width, dtype=torch.int64)
        if tokens:
            rows[0] = torch.tensor(tokens)
            rows[1] = torch.arange(first_position, first_position + width)
            rows[2] = rows[3] = rows[1] + 1
        ancestors = torch.zeros(width, self.draft.limits.max_nodes, dtype=torch.bool)
        extent = self._extent_tensor(first_position + width + 1)
        self._root[0], self._root[1] = 0, extent.numel()  # beyond the slots read: none of them is a node's
        self._run_draft((*rows.unbind(), ancestors), self._range(0, 1), self._range(0, 1), self._range(1, 1),
                        self._empty_state, extent)  # fmt: skip

    def draft_tree(self, tokens: Sequence[int], shape: TreeShape) -> Tree:
        """Grow a tree below the last committed token: draft_depth passes that add draft_width nodes each."""
        self.prefill_drafter(tokens)
        num_tokens = len(tokens)
        head = self._head
        head[:, 0] = 0
        if num_tokens > 1:  # the token before the root: its row may be missing, running it again does no harm
            head[:, 0] = (tokens[-2], num_tokens - 2, num_tokens - 1, num_tokens - 1)
        head[:, 1] = (tokens[-1], num_tokens - 1, num_tokens, num_tokens)
        self._root[0], self._root[1] = num_tokens - 1, num_tokens
        extent = self._extent_tensor(num_tokens + shape.capacity)
        if shape.draft_depth in self.fused and shape.draft_width == self.draft_width:
            state = self._run_fused(self.fused[shape.draft_depth], extent)
        else:
            state = self._run_passes(tokens[-1], shape, extent)
        self.drafter_cache.num_committed = num_tokens
        return Tree.of_state(state, shape.capacity)

    def _run_fused(self, step: Step, extent: Tensor) -> Sequence[Tensor]:
        cache = self.drafter_cache
        started = perf_counter()
        outputs = step(*self._head_rows, self._root, self.table, extent, cache.move_src, cache.move_dst)
        cache.moved()
        self.clock.add("draft", started)
        return outputs

    def _run_passes(self, root_token: int, shape: TreeShape, extent: Tensor) -> Sequence[Tensor]:
        width = shape.draft_width
        self._tree_tokens[0] = root_token
        rows: tuple[Tensor, ...] = (*self._head_rows, self._head_ancestors)
        state = self._empty_state
        expand_rows, expand_nodes = self._range(1, 1), self._range(0, 1)
        for depth in range(shape.draft_depth):
            added = self._range(1 + depth * width, width)
            started = perf_counter()
            outputs = self._run_draft(rows, expand_rows, expand_nodes, added, state, extent)
            self.clock.add("draft", started)
            rows, state = tuple(outputs[: len(DRAFT_ROWS)]), tuple(outputs[len(DRAFT_ROWS) :])
            expand_rows, expand_nodes = self._range(0, width), added
        return state

    def _run_draft(
        self,
        rows: tuple[Tensor, ...],
        expand_rows: Tensor,
        expand_nodes: Tensor,
        new_nodes: Tensor,
        state: tuple[Tensor, ...],
        extent: Tensor,
    ) -> list[Tensor]:
        cache = self.drafter_cache
        outputs = self.draft(
            *rows, expand_rows, expand_nodes, new_nodes, self._root, *state, self.table, extent,
            cache.move_src, cache.move_dst,
        )  # fmt: skip
        cache.moved()
        return outputs

    def _range(self, first: int, count: int) -> Tensor:
        key = (first, count)
        if key not in self._ranges:
            self._ranges[key] = torch.arange(first, first + count)
        return self._ranges[key]

    def _extent_tensor(self, num_rows: int) -> Tensor:
        extent = self.drafter_cache.extent(num_rows)
        if extent not in self._extents:
            self._extents[extent] = torch.arange(extent)
        return self._extents[extent]

    # One iteration

    def decode_speculative(
        self,
        tokens: Sequence[int],
        shape: TreeShape,
        choose_width: ChooseWidth | None = None,
        choose: ChooseToken | None = None,
    ) -> Round:
        """Draft a tree, verify its most valuable nodes, accept. tokens: all committed ones, prefilled but the last.

        choose_width: how many of them, up to the shape's verify width; None always takes that many.
        """
        num_tokens = len(tokens)
        tree = self.draft_tree(tokens, shape)
        started = perf_counter()
        order = order_by_value(tree)
        extent = self.verifier_cache.extent(num_tokens + min(shape.verify_width, tree.num_nodes))
        values = tree.values[order]
        width = shape.verify_width if choose_width is None else min(choose_width(values, extent), shape.verify_width)
        cut = cut_most_valuable(tree, order, width, shape.draft_depth)
        width = cut.nodes.size
        rows = self._verify_rows(width, width)
        rows.array[0] = cut.tokens
        rows.array[1] = cut.depths + (num_tokens - 1)
        rows.array[2] = rows.places + num_tokens
        masks = self._step_masks(width, extent, width)
        for mask in masks:
            mask.show_tree(cut.ancestors, cut.depths, num_tokens)
        expected = float(np.exp(values[:width]).sum())
        started = self.clock.add("cut", started)
        choices, gaps, hidden, logits, by_depth = self._run_verify(rows.inputs, [mask.tensor for mask in masks])
        started = self.clock.add("verify", started)
        if choose is None:
            chosen = choices.numpy()
            path = accept_greedy(cut.tokens, cut.parents, chosen)
            emitted = tuple(chosen[path].tolist())
        else:
            path, bonus = walk(cut.tokens, cut.parents, lambda row: choose(logits[row]))
            emitted = (*cut.tokens[path[1:]].tolist(), bonus)
        gaps_on_path = tuple(gaps.numpy()[path].tolist())
        self._commit(cut, path[1:], num_tokens)
        self.clock.add("accept", started)
        last = path[-1]
        return Round(
            emitted, gaps_on_path, hidden[last], tree.num_nodes - 1, width, extent, expected, by_depth.numpy()[last]
        )

    def _commit(self, cut: VerifyCut, path: list[int], num_tokens: int) -> None:
        """Owe both caches the moves that make the accepted path their committed prefix.

        path: accepted rows below the root. Verifier rows lie in sorted order, drafter rows in growth order. The
        drafter's row of the last accepted node is left out: the next first pass runs that token again.
        """
        self.verifier_cache.owe_moves([num_tokens + row for row in path], num_tokens + 1)
        self.verifier_cache.num_committed = num_tokens + len(path)
        inner = path[:-1]
        self.drafter_cache.owe_moves([num_tokens + int(cut.nodes[row]) for row in inner], num_tokens + 1)
        self.drafter_cache.num_committed = num_tokens + len(inner)
