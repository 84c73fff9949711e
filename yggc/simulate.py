"""What a tree policy would do on traced text, without running the verifier.

The trees are grown by the draft pass that the bundle runs, at every root of the text, so each policy meets the roots it
reaches. A tree of some depth holds the shallower ones of its width, and its nodes in order of value all cuts, so one
growth serves every depth and verify width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
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
    engine: Engine, text: TracedText, shape: TreeShape, table: Tensor, max_roots: int | None = None
) -> GrownText:
    """Grow a tree at every root of a text, or at the first `max_roots`. table: as the decoder takes it."""
    decoder = engine.decoder
    tokens = [*text.prompt_ids, *text.answer_ids]
    first, last = len(text.prompt_ids) + 1, len(tokens)
    if max_roots is not None:
        last = min(last, first + max_roots)
    table_before, decoder.table = decoder.table, table
    fused_before, decoder.fused = decoder.fused, {}
    threads_before = torch.get_num_threads()
    torch.set_num_threads(engine.num_threads)
    values, on_path = [], []
    try:
        decoder.reset()
        for length in range(first, last):
            tree = decoder.draft_tree(tokens[:length], shape)
            parents, depths = tree.parents.numpy()[: shape.capacity], tree.depths.numpy()[: shape.capacity]
            values.append(tree.values.numpy()[: shape.capacity].copy())
            on_path.append(nodes_on_path(tree.tokens.numpy()[: shape.capacity], parents, depths, tokens[length:]))
    finally:
        decoder.table, decoder.fused = table_before, fused_before
        decoder.reset()
        torch.set_num_threads(threads_before)
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

    token_s: 1 / lambda; None verifies the widest cut of the menu always.
    """

    times: StepTimes
    host: HostSeconds
    plain_width: int
    verify_widths: tuple[int, ...]
    token_s: float | None

    def plain_s(self, extent: int) -> float:
        """Seconds of a plain iteration."""
        return float(self.times.verify_s([self.plain_width], extent)[0]) + self.host.plain_s


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
        costs = prices.times.verify_s(prices.verify_widths, extent)
        if prices.token_s is not None:
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


ChooseDepth = Callable[[], int]
Observe = Callable[[int, int, int, int], None]


def replay(grown: GrownText, depth: int, prices: Prices, pace: Pace | None = None) -> Simulated:
    """One text from its first root on, with trees of `depth`, or of the depths that `pace` asks for."""
    plain = outcomes(grown, 0, prices)
    by_depth = {0: plain}
    if pace is not None:
        pace.start()
    tokens = iterations = 0
    seconds = 0.0
    while tokens < grown.num_roots:
        wanted = depth if pace is None else pace.shape().draft_depth
        wanted = min(wanted, grown.budget - 1 - tokens - 1)  # the budget's end, as the engine sees it
        if wanted not in by_depth:
            by_depth[wanted] = outcomes(grown, wanted, prices)
        here = by_depth[wanted]
        emitted = min(int(here.emitted[tokens]), grown.num_roots - tokens)
        if pace is not None:
            capacity = 1 + grown.draft_width * wanted
            extent = int(extents_of(grown, capacity if wanted else 1, prices)[tokens])
            pace.observe(wanted, int(here.verified[tokens]), extent, emitted)
        seconds += float(here.seconds[tokens])
        tokens += emitted
        iterations += 1
    return Simulated(tokens, iterations, seconds, float(plain.seconds.sum()))
