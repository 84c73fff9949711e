"""What a tree policy would do on traced text, without running the verifier.

The trees are grown by the draft pass that the bundle runs, at every root of the text, so each policy meets the roots it
reaches. A tree of some depth holds the shallower ones of its width, and its nodes in order of value all cuts, so one
growth serves every depth and verify width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from yggc.trace import TracedText
from yggrt.engine import Engine
from yggrt.kvcache import EXTENT_BUCKET
from yggrt.latency import StepTimes
from yggrt.pace import Pace
from yggrt.plan import HostSeconds
from yggrt.tree import TreeShape


@dataclass(frozen=True, slots=True)
class GrownText:
    """The trees of one width at the T - 1 roots of a text: root i is its answer's token i.

    depths: int64[T - 1, N]; values: float32[T - 1, N], logs; both in growth order.
    on_path: bool[T - 1, N], whether the verifier's own text passes through the node.
    num_prompt: tokens of the prompt.
    """

    draft_width: int
    num_prompt: int
    budget: int
    values: NDArray[np.float32]
    on_path: NDArray[np.bool_]

    @property
    def num_roots(self) -> int:
        return self.values.shape[0]


def grow_text(
    engine: Engine, text: TracedText, shape: TreeShape, table: Tensor, copied_log_a: Sequence[float] = ()
) -> GrownText:
    """Grow a tree at every root of a text. table, copied_log_a: as the decoder takes them."""
    decoder = engine.decoder
    tokens = [*text.prompt_ids, *text.answer_ids]
    first, last = len(text.prompt_ids) + 1, len(tokens)
    table_before, decoder.table = decoder.table, table
    copied_before, decoder.copied_log_a = decoder.copied_log_a, copied_log_a
    fused_before, decoder.fused = decoder.fused, {}
    values, on_path = [], []
    decoder.reset()
    try:
        for length in range(first, last):
            with engine.its_threads():
                tree = decoder.draft_tree(tokens[:length], shape)
            values.append(tree.values.copy())
            on_path.append(nodes_on_path(tree.tokens, tree.parents, tree.depths, tokens[length:]))
    finally:
        decoder.table, decoder.copied_log_a, decoder.fused = table_before, copied_before, fused_before
        decoder.reset()
    empty = np.zeros((0, shape.capacity))
    return GrownText(
        shape.draft_width,
        len(text.prompt_ids),
        text.budget,
        np.stack(values) if values else empty.astype(np.float32),
        np.stack(on_path) if on_path else empty.astype(bool),
    )


def nodes_on_path(
    tokens: NDArray[np.int64], parents: NDArray[np.int64], depths: NDArray[np.int64], continuation: Sequence[int]
) -> NDArray[np.bool_]:
    """Which nodes of a tree the text goes through; the root is one. continuation: the text after the root."""
    deepest = int(depths.max(initial=0))
    said = np.full(deepest + 1, -1)
    count = min(deepest, len(continuation))
    said[1 : 1 + count] = continuation[:count]
    agrees = tokens == said[depths]
    agrees[0] = True
    at = parents
    for _ in range(deepest):  # a node is on the path when all its ancestors agree too
        agrees = agrees & agrees[at]
    return agrees


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What one depth does at every root of a text: int64[T - 1] rows verified and tokens emitted, float64 seconds."""

    verified: NDArray[np.int64]
    emitted: NDArray[np.int64]
    seconds: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What iterations cost, and a token is worth.

    times:   what steps take.    host: of an iteration.
    token_s: 1 / lambda; None verifies the widest cut of the menu always.
    planned: the times that cuts are chosen by, where those are others.
    """

    times: StepTimes
    host: HostSeconds
    plain_width: int
    verify_widths: tuple[int, ...]
    token_s: float | None
    planned: StepTimes | None = None

    def plain_s(self, extent: int) -> float:
        """Seconds of a plain iteration."""
        return float(self.times.verify_s([self.plain_width], extent)[0]) + self.host.plain_s

    def reading_s(self, draft_width: int, extent: int) -> float:
        """Seconds the drafter needs to read what was decoded plainly, before it drafts again."""
        return self.times.draft_s(draft_width, 1, extent)

    def choice_s(self, verify_widths: Sequence[int], extent: int) -> NDArray[np.float64]:
        """Seconds of verifier steps as the choice of a cut takes them to be, float64[len(verify_widths)]."""
        return (self.planned or self.times).verify_s(verify_widths, extent)


def outcomes(grown: GrownText, depth: int, prices: Prices) -> Outcomes:
    """Cut and accept at every root as the runtime does, see `yggrt.pace.Pace.verify_width`."""
    roots = grown.num_roots
    extents = extents_of(grown, 1 + grown.draft_width * depth if depth else 1, prices)
    if depth == 0:
        by_extent = {extent: prices.plain_s(extent) for extent in set(extents.tolist())}
        seconds = np.array([by_extent[extent] for extent in extents.tolist()])
        return Outcomes(np.ones(roots, np.int64), np.ones(roots, np.int64), seconds)
    capacity = 1 + grown.draft_width * depth
    values, on_path = grown.values[:, :capacity], grown.on_path[:, :capacity]
    order = np.argsort(-values, axis=1, kind="stable")
    menu = np.minimum(np.array(prices.verify_widths), capacity)
    verified = np.full(roots, menu[-1])
    seconds = np.zeros(roots)
    worth = np.cumsum(np.exp(np.take_along_axis(values, order, axis=1)), axis=1)[:, menu - 1]
    for extent in set(extents.tolist()):
        here = extents == extent
        if prices.token_s is not None:
            costs = prices.choice_s(menu.tolist(), extent)
            verified[here] = menu[np.argmax(worth[here] - costs / prices.token_s, axis=1)]
        drafting = prices.times.draft_s(grown.draft_width, depth, extent) + prices.host.speculative_s
        seconds[here] = prices.times.verify_s(verified[here].tolist(), extent) + drafting
    in_order = np.take_along_axis(on_path, order, axis=1)
    emitted = (in_order & (np.arange(capacity)[None, :] < verified[:, None])).sum(axis=1)
    return Outcomes(verified, emitted, seconds)


def extents_of(grown: GrownText, capacity: int, prices: Prices) -> NDArray[np.int64]:
    """KV rows the verifier reads at every root, in buckets: int64[T - 1]."""
    num_tokens = grown.num_prompt + 1 + np.arange(grown.num_roots)
    rows = num_tokens + min(capacity, prices.verify_widths[-1])
    return -(-rows // EXTENT_BUCKET) * EXTENT_BUCKET


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a policy does on some texts, the first token of each left out. seconds: by the curves."""

    tokens: int
    iterations: int
    seconds: float
    plain_seconds: float

    @property
    def tpot_s(self) -> float:
        return self.seconds / self.tokens

    @property
    def plain_tpot_s(self) -> float:
        return self.plain_seconds / self.tokens

    @property
    def tokens_per_iteration(self) -> float:
        return self.tokens / self.iterations


def add_up(parts: Sequence[Simulated]) -> Simulated:
    """Over several texts."""
    return Simulated(
        sum(part.tokens for part in parts),
        sum(part.iterations for part in parts),
        sum(part.seconds for part in parts),
        sum(part.plain_seconds for part in parts),
    )


def replay(
    grown: GrownText,
    depth: int | NDArray[np.int64],
    prices: Prices,
    pace: Pace | None = None,
    expected: NDArray[np.float32] | None = None,
) -> Simulated:
    """One text from its first root on, with trees of `depth`, or of the depths that `pace` asks for.

    depth:    of all trees, or of those at each root, int64[T - 1].
    expected: float32[at least T - 1, DEPTH_HEADS], what the depth network says at each root, where `pace` has one.
    """
    plain = outcomes(grown, 0, prices)
    by_root = np.broadcast_to(depth, grown.num_roots)
    plain_extents = extents_of(grown, 1, prices)
    by_depth = {0: plain}
    if pace is not None:
        pace.start()
    tokens = iterations = 0
    seconds = 0.0
    behind = False
    while tokens < grown.num_roots:
        plain_extent = int(plain_extents[tokens])
        wanted = int(by_root[tokens])
        if pace is not None:
            worth = None if expected is None else pace.worth(expected[tokens : tokens + 1], plain_extent, behind)
            wanted = pace.shape(None if worth is None else worth[0]).draft_depth
        wanted = min(wanted, grown.budget - 1 - tokens - 1)  # the budget's end, as the engine sees it
        if wanted not in by_depth:
            by_depth[wanted] = outcomes(grown, wanted, prices)
        here = by_depth[wanted]
        emitted = min(int(here.emitted[tokens]), grown.num_roots - tokens)
        if pace is not None:
            extent = int(extents_of(grown, 1 + grown.draft_width * wanted, prices)[tokens]) if wanted else plain_extent
            pace.observe(wanted, int(here.verified[tokens]), extent, emitted)
        seconds += float(here.seconds[tokens])
        if wanted and behind:
            seconds += prices.reading_s(grown.draft_width, plain_extent)
        behind = wanted == 0
        tokens += emitted
        iterations += 1
    return Simulated(tokens, iterations, seconds, float(plain.seconds.sum()))
