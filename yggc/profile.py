"""Seconds per step, measured on the very artifacts that will run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch

from yggc.config import DEFAULT_SHAPE, LARGEST_SHAPE
from yggc.emit import CompiledStep, Measured
from yggrt.artifacts import (
    Step,
    attention_windows,
    draft_inputs,
    fused_draft_inputs,
    load_kernels,
    load_package,
    load_weights,
    verify_inputs,
)
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache
from yggrt.plan import DraftGraph, LatencyPoint, identity_table
from yggrt.tree import TreeShape

Key = TypeVar("Key", bound=Hashable)

PLAIN_WIDTHS = (1, 2, 4, 8)
PROFILE_EXTENT = 256
REPEATS = 15
WARM_UPS = 2


def measure_steps(steps: list[CompiledStep], kernels: Path, dtype: torch.dtype, num_threads: int) -> Measured:
    """Time `verify` by width, and each fused draft against the same draft pass by pass, at extent PROFILE_EXTENT.

    steps: `verify`, `draft`, then the fused drafts.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        decoder = _make_decoder(steps, kernels, dtype)
        return Measured(_time_verify(decoder, PLAIN_WIDTHS), _time_drafts(decoder))
    finally:
        torch.set_num_threads(threads_before)


def _make_decoder(steps: list[CompiledStep], kernels: Path, dtype: torch.dtype) -> Decoder:
    load_kernels(kernels)
    verify, draft = steps[:2]
    weights = {path: load_weights(path) for path in {step.weights for step in steps}}
    inputs = {
        "verify": verify_inputs(attention_windows(verify.layouts), verify.limits, dtype),
        "draft": draft_inputs(draft.limits),
    }
    loaded = {
        step.role: Step(
            step.role,
            load_package(step.package, weights[step.weights]),
            inputs.get(step.role) or fused_draft_inputs(step.limits),
            step.limits,
        )
        for step in steps
    }
    fused = {int(step.role.removeprefix("draft.d")): loaded[step.role] for step in steps if step.is_fused}
    table = identity_table(draft.limits.num_children, draft.limits.num_knots)
    return Decoder(
        loaded["verify"],
        loaded["draft"],
        fused,
        DEFAULT_SHAPE.draft_width,
        KvCache(verify.layouts, verify.limits, dtype),
        KvCache(draft.layouts, draft.limits, dtype),
        torch.tensor(table.log_a).view(table.num_ranks, table.num_knots),
        max_context=min(verify.limits.kv_rows, draft.limits.kv_rows) - LARGEST_SHAPE.capacity - 1,
        plain_width=1,
    )


def _text(decoder: Decoder, num_nodes: int) -> list[int]:
    """Committed tokens, any, after which a tree of num_nodes still lies within PROFILE_EXTENT."""
    return [0] * max(2, min(PROFILE_EXTENT, decoder.max_context) - num_nodes - 1)


def _time_verify(decoder: Decoder, widths: tuple[int, ...]) -> tuple[LatencyPoint, ...]:
    tokens = _text(decoder, max(widths))
    extent = decoder.verifier_cache.extent(len(tokens) + 1)

    def run(width: int) -> Callable[[], object]:
        def step() -> None:
            decoder.plain_width = width
            decoder.decode_plain(tokens)

        return step

    timed = interleaved({width: run(width) for width in widths})
    return tuple(LatencyPoint("verify", width, extent, *timed[width]) for width in widths)


def _time_drafts(decoder: Decoder) -> tuple[DraftGraph, ...]:
    graphs = []
    for depth in sorted(decoder.fused):
        shape = TreeShape(decoder.draft_width, depth, 1)
        tokens = _text(decoder, shape.capacity)
        fused = dict(decoder.fused)

        def run(chosen: dict[int, Step], shape: TreeShape = shape, tokens: list[int] = tokens) -> Callable[[], object]:
            def draft() -> None:
                decoder.fused = chosen
                decoder.draft_tree(tokens, shape)

            return draft

        timed = interleaved({"passes": run({}), "fused": run(fused)})
        decoder.fused = fused
        passes_s, fused_s = timed["passes"][0], timed["fused"][0]
        graphs.append(DraftGraph(depth, fused_s < passes_s, passes_s, fused_s))
    return tuple(graphs)


def interleaved(runs: dict[Key, Callable[[], object]]) -> dict[Key, tuple[float, float]]:
    """Median seconds of each run and half the distance between its quartiles; a busy moment meets them all."""
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for repeat in range(REPEATS + WARM_UPS):
        for key, run in runs.items():
            started = perf_counter()
            run()
            if repeat >= WARM_UPS:
                seconds[key].append(perf_counter() - started)
    spreads = {}
    for key, samples in seconds.items():
        ordered = sorted(samples)
        spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 2
        spreads[key] = (median(samples), spread)
    return spreads
