"""Seconds per step, measured on the very artifacts that will run."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from yggrt.artifacts import MASK_VALUE, Step
from yggrt.kvcache import KvCache
from yggrt.plan import LatencyPoint

PLAIN_WIDTHS = (1, 2, 4, 8)
PROFILE_EXTENT = 256
REPEATS = 15


def time_verify(step: Step, cache: KvCache, widths: tuple[int, ...], extent: int) -> tuple[LatencyPoint, ...]:
    """Median seconds of the verifier's step by width, interleaved so that a busy moment meets every width.

    spread_s is half the distance between the quartiles.
    """
    step.bind(cache.buffers, cache.layouts, cache.dtype)
    num_masks = sum(spec.name.startswith("mask.") for spec in step.inputs)
    inputs = {}
    for width in widths:
        row = torch.zeros(width, dtype=torch.int64)
        mask = torch.full((width, extent), MASK_VALUE, dtype=cache.dtype)
        mask[:, 0] = 0.0
        inputs[width] = (row, row, row, *[mask] * num_masks, cache.move_src, cache.move_dst)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(REPEATS + 2):
        for width in widths:
            started = perf_counter()
            step(*inputs[width])
            if repeat >= 2:  # the first calls warm up
                seconds[width].append(perf_counter() - started)
    points = []
    for width, samples in seconds.items():
        ordered = sorted(samples)
        spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 2
        points.append(LatencyPoint("verify", width, extent, median(samples), spread))
    return tuple(points)
