"""What the stages of an iteration do: draft passes, cut, verify, accept, and the KV bookkeeping between them.

Invariants, with n committed tokens before an iteration: the verifier's cache holds at least the first n - 1 of them and
the drafter's is brought to at least n - 2; no position reaches the context's end; nothing here changes which token
comes next, only how many come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yggrt.accept import accept_greedy, walk
from yggrt.artifacts import DRAFT_LAWS, DRAFT_ROWS, TREE, Step, attention_windows
from yggrt.copying import Copies
from yggrt.depth import DepthNetwork
from yggrt.kvcache import KvCache
from yggrt.masks import StepMask, prefix_mask
from yggrt.sampling import REFERENCE, DrawnTree, Laws, TokenChooser
from yggrt.tree import Tree, TreeShape, VerifyCut, cut_most_valuable, order_by_value

PREFILL_WIDTH = 256
SEQUENCE = ("head", "grow", "prune", "verify", "accept", "move")
"""An iteration without drafts ahead of time; see `yggrt.schedule.STAGES`."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one iteration gave.

    tokens:       the accepted path and the bonus token, in order.
    gaps:         top-2 gap of the verifier's logits where each of them was chosen.
    row:          row of the verifier's step where the last of them was chosen, 0 being the root's.
    outputs:      of that step, `yggrt.artifacts.VERIFY_OUTPUTS`; looked into where somebody asks.
    num_drafted:  nodes the drafter added to be verified.
    num_verified: rows the verifier ran, root included.
    extent:       KV rows the verifier read.
    expected:     tokens the drafted values promised; 1 without a draft.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    row: int
    outputs: Sequence[Tensor]
    num_drafted: int
    num_verified: int
    extent: int
    expected: float

    @property
    def hidden(self) -> Tensor:
        """[H], the verifier's last hidden state where the last token was chosen; to be read before the next step."""
        return self.outputs[2][self.row].cpu()

    @property
    def by_depth(self) -> NDArray[np.float32]:
        """float32[rows, DEPTH_HEADS], tokens the depth network expects of the next iteration after each row, by its
        depth; zeros without a network."""
        rows: NDArray[np.float32] = self.outputs[4].numpy()
        return rows

    @property
    def next_tokens(self) -> NDArray[np.float32]:
        """float32[DEPTH_HEADS], of `by_depth` where the last token was chosen."""
        row: NDArray[np.float32] = self.by_depth[self.row]
        return row


ChooseWidth = Callable[[NDArray[np.float32], int], int]
"""W_v for a tree: (log values, most valuable first, float32[N]; extent) to rows, at least 1."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a request's trees are drafted.

    table:       float32[K, B], log a; see `yggrt.artifacts.draft_inputs`. None for the decoder's own.
    copied_log_a: of what is copied beside a table, see `yggrt.copying.Copies.path`; nothing where children are drawn.
    temperature: children are drawn at; 0 takes the drafter's favourites.
    chooser:     of the request's tokens, which makes the noise for draws; None where there are none.
    """

    table: Tensor | None = None
    copied_log_a: Sequence[float] = ()
    temperature: float = 0.0
    chooser: TokenChooser | None = None

    @property
    def draws(self) -> bool:
        """Whether children are drawn, so that `traverse` may verify them."""
        return self.chooser is not None


@dataclass(slots=True)
class Iteration:
    """What is asked of one iteration, and what its stages leave for the later ones.

    tokens:       all committed ones, prefilled but the last.
    shape:        the tree to grow; depth 0 is a plain iteration.
    choose_width: rows to verify, up to the shape's verify width; None always takes that many.
    chooser:      chooses in place of the verifier's argmax.
    ahead_depth:  depth of the deepest node that drafts ahead of time may run, 0 for none.
    """

    tokens: Sequence[int]
    shape: TreeShape
    choose_width: ChooseWidth | None = None
    chooser: TokenChooser | None = None
    ahead_depth: int = 0
    copied: tuple[Tensor, Tensor] | None = None  # see `yggrt.copying.Copies.path`
    drafted: Sequence[Tensor] = ()  # rows and growth state after the last pass
    laws: list[Sequence[Tensor]] = field(default_factory=list)  # that children were drawn from, pass by pass
    num_passes: int = 0
    num_run: int = 0  # of the tree's nodes, those with drafter KV
    tree: Tree | None = None
    cut: VerifyCut | None = None
    verify_inputs: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
    extent: int = 0
    expected: float = 1.0
    outputs: Sequence[Tensor] = ()
    path: Sequence[int] = (0,)
    outcome: Round | None = None
    guess: NextHead | None = None
    kept: tuple[int, ...] = ()  # of the outcome's tokens, those that belong to the text
    fallbacks: int = 0  # so far, when it was accepted

    @property
    def behind(self) -> bool:
        """Whether the drafter has tokens to read after it before it can draft again."""
        return self.shape.draft_depth == 0

    def passed(self, outputs: Sequence[Tensor]) -> None:
        """A draft pass was run."""
        self.drafted, self.num_passes = outputs[: -len(DRAFT_LAWS)], self.num_passes + 1
        self.laws.append(outputs[-len(DRAFT_LAWS) :])

    def drawn_tree(self, cut: VerifyCut) -> DrawnTree:
        """The rows of a cut, and what their children were drawn from."""
        ids, log_q = self.laws[0]
        if len(self.laws) > 1:
            ids, log_q = (torch.cat(parts) for parts in zip(*self.laws, strict=True))
        return DrawnTree(cut.tokens, cut.parents, cut.nodes, ids, log_q)

    def result(self) -> Round:
        """What `accept` found."""
        assert self.outcome is not None
        return self.outcome


@dataclass(frozen=True, slots=True)
class NextHead:
    """A head draft ahead of time.

    parent, node: the guess: the verifier's text ends at `parent` and goes on with `node`, by growth order.
    token, depth: of the node.
    drafted:      rows and growth state after its first pass, as if it were the root at the old one's place.
    """

    parent: int
    node: int
    token: int
    depth: int
    drafted: Sequence[Tensor]


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
    table:      float32[K, B], log a by (rank, log q), of requests that do not bring their own; see `Drafting`.
    copied_log_a: of what is copied beside it, see `yggrt.copying.Copies.path`; empty copies nothing.
    network:    evaluated inside `verify`; None where no depth was learned.
    laws:       what tokens are drawn with above temperature 0.
    by_width:   steps that run as many rows alone, in place of `verify` in an iteration.
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
        by_width: Mapping[int, Step] | None = None,
        laws: Laws = REFERENCE,
        copied_log_a: Sequence[float] = (),
    ) -> None:
        self.verify, self.draft = verify, draft
        self.by_width, self.laws = by_width or {}, laws
        self.fused, self.draft_width = fused, draft_width
        self.verifier_cache, self.drafter_cache = verifier_cache, drafter_cache
        for step in (verify, *self.by_width.values()):
            step.bind(verifier_cache.buffers, verifier_cache.layouts, verifier_cache.dtype)
        for step in (draft, *fused.values()):
            step.bind(drafter_cache.buffers, drafter_cache.layouts, drafter_cache.dtype)
        self.table = table
        self.copied_log_a = copied_log_a
        self.max_context = max_context
        self.plain_width = plain_width
        sizes = {spec.name: [int(size) for size in spec.sizes] for spec in verify.inputs[-2:]}
        self.depth_layers = (
            (torch.zeros(sizes["depth_first"]), torch.zeros(sizes["depth_second"]))
            if network is None
            else network.tensors()
        )
        self.windows = attention_windows(verifier_cache.layouts)
        self.compiled_s = 0.0  # seconds inside compiled steps since `reset`, without those of drafts ahead of time
        self.num_guessed = 0  # head drafts since `reset` that were there already
        self._drafting = Drafting()
        self._temperature = torch.zeros(1)
        self._no_noise: dict[int, Tensor] = {}
        self.stages: Mapping[str, Callable[[Iteration], None]] = {
            "head": self._head,
            "grow": self._grow,
            "tail": self._tail,
            "prune": self._prune,
            "verify": self._verify,
            "accept": self._accept,
            "next_head": self._next_head,
            "move": self._move,
        }
        self.on_prefill: Callable[[int, int], object] | None = None
        self._rows: dict[tuple[int, int], _VerifyRows] = {}
        self._masks: dict[tuple[int, int, int], tuple[StepMask, ...]] = {}
        self._extents: dict[int, Tensor] = {}

        nodes, pool = draft.limits.max_nodes, draft.limits.pool_size
        self._copies = Copies(max_context, nodes)
        self._root = torch.zeros(2, dtype=torch.int64)
        self._tree_tokens = torch.zeros(nodes, dtype=torch.int64)
        self._root_array, self._tree_tokens_array = self._root.numpy(), self._tree_tokens.numpy()
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
        self._head_array = head.numpy()
        self._head_rows = head.unbind()
        self._head_ancestors = torch.zeros(2, nodes, dtype=torch.bool)
        guess = torch.zeros(4, 2, dtype=torch.int64)
        self._guess_array = guess.numpy()
        self._guess_rows = guess.unbind()
        self._guess_tokens = torch.zeros(nodes, dtype=torch.int64)
        self._guessed: NextHead | None = None  # that came true: the root of the next iteration, drafted already
        self._ranges: dict[tuple[int, int], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the steps run."""
        return self.verifier_cache.buffers[0].device

    def reset(self, drafting: Drafting | None = None) -> None:
        """Start a new sequence. drafting: default the drafter's favourites."""
        self._drafting = drafting or Drafting()
        self._temperature[0] = self._drafting.temperature
        self.verifier_cache.reset()
        self.drafter_cache.reset()
        self.compiled_s = 0.0
        self.num_guessed = 0
        self._guessed = None
        self._copies.reset()

    # Verifier

    def prefill(self, tokens: Sequence[int], chooser: TokenChooser | None = None) -> Round:
        """Run the prompt through the verifier. tokens: all committed ones, at least one. Returns the token after it.

        chooser: chooses in place of the verifier's argmax; here and below.
        """
        cache = self.verifier_cache
        outputs: list[Tensor] = []
        extent = 0
        while cache.num_committed < len(tokens):
            first = cache.num_committed
            last = min(first + PREFILL_WIDTH, len(tokens))
            positions = torch.arange(first, last)
            extent = cache.extent(last + 1)
            masks = [prefix_mask(positions, extent, window, cache.dtype) for window in self.windows]
            rows = torch.tensor(tokens[first:last]), positions, positions + 1
            outputs = self._run_verify(self.verify, rows, masks)
            cache.num_committed = last
            if self.on_prefill is not None:
                self.on_prefill(last, len(tokens))
        choices, gaps, _, logits, _ = outputs
        token = int(choices[-1]) if chooser is None else chooser.choose(logits[-1].cpu())
        return Round((token,), (float(gaps[-1]),), len(choices) - 1, outputs, 0, len(tokens), extent, 1.0)

    def flush_moves(self) -> None:
        """Apply the moves owed to both caches, so that their committed rows are in place."""
        cache = self.verifier_cache
        if cache.has_moves:
            padding = torch.zeros(1, dtype=torch.int64)
            self._run_verify(self.verify, [padding] * 3, [torch.zeros(1, 1, dtype=cache.dtype)] * len(self.windows))
        if self.drafter_cache.has_moves:
            self._run_drafter_rows([], 0)

    def _run_verify(self, step: Step, rows: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """rows: tokens, positions and slots."""
        cache = self.verifier_cache
        started = perf_counter()
        outputs = step(*rows, *masks, cache.move_src, cache.move_dst, *self.depth_layers)
        self.compiled_s += perf_counter() - started
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
        while cache.num_committed < len(tokens) - 2:
            first = cache.num_committed
            last = min(first + PREFILL_WIDTH, len(tokens) - 2)
            self._run_drafter_rows(tokens[first:last], first)
            cache.num_committed = last

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
        self._root_array[:] = 0, extent.numel()  # beyond the slots read: none of them is a node's
        self._run_draft((*rows.unbind(), ancestors), self._range(0, 1), self._range(0, 1), self._range(1, 1),
                        self._empty_state, self._zeros(1), self._copies.none, extent)  # fmt: skip

    def _run_draft(
        self,
        rows: Sequence[Tensor],
        expand_rows: Tensor,
        expand_nodes: Tensor,
        new_nodes: Tensor,
        state: Sequence[Tensor],
        noise: Tensor,
        copied: tuple[Tensor, Tensor],
        extent: Tensor,
        ahead: bool = False,
    ) -> list[Tensor]:
        """One pass. ahead: of a draft ahead of time, whose seconds are not the iteration's own."""
        cache, table = self.drafter_cache, self._table()
        started = perf_counter()
        outputs = self.draft(
            *rows, expand_rows, expand_nodes, new_nodes, self._root, *state, table, self._temperature, noise, *copied,
            extent, cache.move_src, cache.move_dst,
        )  # fmt: skip
        if not ahead:
            self.compiled_s += perf_counter() - started
        cache.moved()
        return outputs

    def _run_fused(self, step: Step, copied: tuple[Tensor, Tensor], extent: Tensor) -> Sequence[Tensor]:
        cache, table = self.drafter_cache, self._table()
        noise = self._noise(step.limits.max_nodes)
        started = perf_counter()
        outputs = step(
            *self._head_rows, self._root, table, self._temperature, noise, *copied, extent, cache.move_src,
            cache.move_dst,
        )  # fmt: skip
        self.compiled_s += perf_counter() - started
        cache.moved()
        return outputs

    def _table(self) -> Tensor:
        own = self._drafting.table
        return self.table if own is None else own

    def _noise(self, rows: int) -> Tensor:
        """For the draws of the nodes that a pass expands; see `yggrt.artifacts.draft_inputs`."""
        chooser = self._drafting.chooser
        return self._zeros(rows) if chooser is None else chooser.noise(rows, self.draft.limits.num_drawn)

    def _zeros(self, rows: int) -> Tensor:
        if rows not in self._no_noise:
            self._no_noise[rows] = torch.zeros(rows, self.draft.limits.num_drawn)
        return self._no_noise[rows]

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

    # The stages of one iteration; see `yggrt.schedule.STAGES`

    def decode(
        self,
        tokens: Sequence[int],
        shape: TreeShape,
        choose_width: ChooseWidth | None = None,
        chooser: TokenChooser | None = None,
    ) -> Round:
        """One iteration, stage after stage, with no draft ahead of time; the arguments are those of `Iteration`."""
        iteration = Iteration(tokens, shape, choose_width, chooser)
        for stage in SEQUENCE:
            self.stages[stage](iteration)
        return iteration.result()

    def draft_tree(self, tokens: Sequence[int], shape: TreeShape) -> Tree:
        """Grow a tree below the last committed token: draft_depth passes that add draft_width nodes each, or none."""
        iteration = Iteration(tokens, shape)
        self._head(iteration)
        self._grow(iteration)
        if iteration.tree is None:
            self._tree_tokens_array[0] = tokens[-1]
            return Tree.of_state(self._empty_state, 1)
        return iteration.tree

    def _head(self, iteration: Iteration) -> None:
        shape, tokens = iteration.shape, iteration.tokens
        guessed, self._guessed = self._guessed, None
        if shape.draft_depth == 0:
            return
        num_tokens = len(tokens)
        iteration.copied = self._copied(tokens)
        if guessed is not None:
            self._root_array[:] = num_tokens - 1, num_tokens
            iteration.drafted, iteration.num_passes = guessed.drafted, 1
            self.num_guessed += 1
            return
        self.prefill_drafter(tokens)
        head = self._head_array
        head[:, 0] = 0
        if num_tokens > 1:  # the token before the root: its row may be missing, running it again does no harm
            head[:, 0] = (tokens[-2], num_tokens - 2, num_tokens - 1, num_tokens - 1)
        head[:, 1] = (tokens[-1], num_tokens - 1, num_tokens, num_tokens)
        self._root_array[:] = num_tokens - 1, num_tokens
        self.drafter_cache.num_committed = num_tokens
        if self._fused_graph(iteration) is None:
            self._tree_tokens_array[0] = tokens[-1]
            first = (*self._head_rows, self._head_ancestors)
            outputs = self._run_draft(
                first, self._range(1, 1), self._range(0, 1), self._range(1, shape.draft_width), self._empty_state,
                self._noise(1), iteration.copied, self._tree_extent(iteration),
            )  # fmt: skip
            iteration.passed(outputs)

    def _copied(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the tree may copy; nothing where children are drawn, which the law of the draws has to hold."""
        drafting = self._drafting
        if drafting.draws:
            return self._copies.none
        return self._copies.path(tokens, self.copied_log_a if drafting.table is None else drafting.copied_log_a)

    def _fused_graph(self, iteration: Iteration) -> Step | None:
        """The graph with all passes of an iteration; None where there is none, or more passes are to follow."""
        shape = iteration.shape
        if iteration.ahead_depth or shape.draft_width != self.draft_width:
            return None
        return self.fused.get(shape.draft_depth)

    def _tree_extent(self, iteration: Iteration) -> Tensor:
        """For all passes of an iteration, those ahead of time too."""
        shape = iteration.shape
        passes = shape.draft_depth + (1 if iteration.ahead_depth else 0)
        most = min(1 + shape.draft_width * passes, self.draft.limits.max_nodes)
        return self._extent_tensor(len(iteration.tokens) + most)

    def _grow(self, iteration: Iteration) -> None:
        shape = iteration.shape
        if shape.draft_depth == 0:
            return
        if iteration.num_passes == 0:
            fused = self._fused_graph(iteration)
            assert fused is not None and iteration.copied is not None
            outputs = self._run_fused(fused, iteration.copied, self._tree_extent(iteration))
            iteration.tree = Tree.of_state(outputs, shape.capacity)
            iteration.laws.append(outputs[len(TREE) :])
            return
        while iteration.num_passes < shape.draft_depth:
            self._next_pass(iteration)
        iteration.num_run = 1 + shape.draft_width * (shape.draft_depth - 1)
        iteration.tree = Tree.of_state(iteration.drafted[len(DRAFT_ROWS) :], shape.capacity)

    def _next_pass(self, iteration: Iteration, ahead: bool = False) -> None:
        """Run the nodes that were added last, and add as many again."""
        width, passes = iteration.shape.draft_width, iteration.num_passes
        rows, state = iteration.drafted[: len(DRAFT_ROWS)], iteration.drafted[len(DRAFT_ROWS) :]
        assert iteration.copied is not None
        outputs = self._run_draft(
            rows, self._range(0, width), self._range(1 + (passes - 1) * width, width),
            self._range(1 + passes * width, width), state, self._noise(width), iteration.copied,
            self._tree_extent(iteration), ahead,
        )  # fmt: skip
        iteration.passed(outputs)

    def _tail(self, iteration: Iteration) -> None:
        shape = iteration.shape
        fits = 1 + shape.draft_width * (shape.draft_depth + 1) <= self.draft.limits.max_nodes
        if iteration.num_passes and shape.draft_depth <= iteration.ahead_depth and fits:
            self._next_pass(iteration, ahead=True)
            iteration.num_run = shape.capacity

    def _prune(self, iteration: Iteration) -> None:
        tokens, num_tokens, tree = iteration.tokens, len(iteration.tokens), iteration.tree
        cache = self.verifier_cache
        if tree is None:
            width = self.plain_width
            iteration.extent = cache.extent(num_tokens + 1)
            rows = self._verify_rows(width, 1)
            rows.array[:, 0] = (tokens[-1], num_tokens - 1, num_tokens)
            masks = self._step_masks(width, iteration.extent, 1)
            for mask in masks:
                mask.show_token(num_tokens)
        else:
            shape = iteration.shape
            order = order_by_value(tree)
            iteration.extent = cache.extent(num_tokens + min(shape.verify_width, tree.num_nodes))
            values = tree.values[order]
            width = shape.verify_width
            if iteration.choose_width is not None:
                width = min(iteration.choose_width(values, iteration.extent), width)
            cut = iteration.cut = cut_most_valuable(tree, order, width, shape.draft_depth)
            width = cut.nodes.size
            rows = self._verify_rows(width, width)
            rows.array[0] = cut.tokens
            rows.array[1] = cut.depths + (num_tokens - 1)
            rows.array[2] = rows.places + num_tokens
            masks = self._step_masks(width, iteration.extent, width)
            for mask in masks:
                mask.show_tree(cut.ancestors, cut.depths, num_tokens)
            iteration.expected = float(np.exp(values[:width]).sum())
        iteration.verify_inputs = rows.inputs, [mask.tensor for mask in masks]

    def _verify(self, iteration: Iteration) -> None:
        assert iteration.verify_inputs is not None
        rows, masks = iteration.verify_inputs
        iteration.outputs = self._run_verify(self.by_width.get(rows[0].shape[0], self.verify), rows, masks)

    def _accept(self, iteration: Iteration) -> None:
        choices, gaps, _, logits, _ = iteration.outputs
        cut, chooser = iteration.cut, iteration.chooser
        path, num_drafted, num_verified = [0], 0, 1
        if cut is not None:
            assert iteration.tree is not None
            num_drafted, num_verified = iteration.tree.num_nodes - 1, cut.nodes.size
        if chooser is None:
            chosen = choices.numpy()
            if cut is not None:
                path = accept_greedy(cut.tokens, cut.parents, chosen)
            emitted = tuple(chosen[path].tolist())
        elif cut is None:
            emitted = (chooser.choose(logits[0].cpu()),)
        else:
            if self._drafting.draws:
                path, bonus = chooser.traverse(iteration.drawn_tree(cut), logits.cpu())
            else:
                path, bonus = walk(cut.tokens, cut.parents, lambda row: chooser.choose(logits[row].cpu()))
            emitted = (*cut.tokens[path[1:]].tolist(), bonus)
        iteration.path = path
        iteration.outcome = Round(
            emitted, tuple(gaps.numpy()[path].tolist()), path[-1], iteration.outputs, num_drafted, num_verified,
            iteration.extent, iteration.expected,
        )  # fmt: skip

    def _next_head(self, iteration: Iteration) -> None:
        cut, shape, num_tokens = iteration.cut, iteration.shape, len(iteration.tokens)
        if cut is None or not iteration.num_passes or shape.draft_depth >= self.draft.limits.max_moves:
            return
        _, _, _, _, row_ancestors = iteration.drafted[: len(DRAFT_ROWS)]
        state = iteration.drafted[len(DRAFT_ROWS) :]
        tree = Tree.of_state(state, 1 + shape.draft_width * iteration.num_passes)
        node = guess_next_root(tree, cut)
        if node is None or tree.depths[node] > iteration.ahead_depth:
            return
        parent, depth, token = int(tree.parents[node]), int(tree.depths[node]), int(tree.tokens[node])
        rows = self._guess_array
        for column, each in enumerate((parent, node)):  # the parent's row may be missing, as in a head draft
            rows[:, column] = tree.tokens[each], num_tokens - 1 + tree.depths[each], num_tokens + each, num_tokens
        self._guess_tokens[0] = token
        ancestors = state[4][[parent, node]]
        empty = self._empty_state
        outputs = self._run_draft(
            (*self._guess_rows, ancestors), self._range(1, 1), self._range(0, 1), self._range(1, shape.draft_width),
            (self._guess_tokens, empty[1], state[2], *empty[3:]), self._noise(1), self._copies.none,
            self._tree_extent(iteration), ahead=True,
        )  # fmt: skip
        for moved in outputs[1:4]:  # positions, slots and visible rows, with the guess as the root
            moved += depth
        iteration.guess = NextHead(parent, node, token, depth, outputs[: -len(DRAFT_LAWS)])

    def _move(self, iteration: Iteration) -> None:
        """Owe both caches the moves that make the accepted path their committed prefix.

        Verifier rows lie in sorted order, drafter rows in growth order. Where the drafter did not run the last accepted
        node its row is left out: the next first pass runs that token again.
        """
        num_tokens, path, cut, guess = len(iteration.tokens), iteration.path[1:], iteration.cut, iteration.guess
        if cut is None:
            self.verifier_cache.num_committed = num_tokens
            return
        self.verifier_cache.owe_moves([num_tokens + row for row in path], num_tokens + 1)
        self.verifier_cache.num_committed = num_tokens + len(path)
        if self.drafter_cache.has_moves:  # no draft pass has run since: the guess was the whole draft
            self._run_drafter_rows([], 0)
        nodes = [int(cut.nodes[row]) for row in path]
        came_true = guess is not None and (nodes[-1] if nodes else 0, iteration.result().tokens[-1]) == (
            guess.parent,
            guess.token,
        )
        if came_true:
            assert guess is not None
            nodes.append(guess.node)
            self._guessed = guess
        elif nodes and nodes[-1] >= iteration.num_run:
            nodes.pop()
        self.drafter_cache.owe_moves([num_tokens + node for node in nodes], num_tokens + 1)
        self.drafter_cache.num_committed = num_tokens + len(nodes)


def guess_next_root(tree: Tree, cut: VerifyCut) -> int | None:
    """The node most likely to be the next root: the most valuable that is not verified, whose parent then is.

    tree: with the nodes of the tail draft. None where all nodes are verified, or nothing speaks for the others.
    """
    values = tree.values.copy()
    values[cut.nodes] = -np.inf
    node = int(values.argmax())
    return node if np.isfinite(values[node]) else None
