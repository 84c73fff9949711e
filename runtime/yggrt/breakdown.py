"""`yggrt bench --breakdown`: where an iteration's time goes, against what the machine's memory allows.

Wall times come from unobserved runs, medians of interleaved repeats. Their split into linears, attention, head and rest
comes from one observed run of the same artifact, whose calls carry names (`cpp.enable_kernel_profile`), as shares.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent

from yggrt.artifacts import ROWS_PREFIX, load_weights
from yggrt.engine import Engine
from yggrt.executor import SEQUENCE, Decoder, Iteration
from yggrt.tree import PLAIN, TreeShape

EXTENT = 256
REFERENCE_SHAPE = TreeShape(draft_width=8, draft_depth=3, verify_width=8)
"""Timed beside the plan's own shape, so that bundles can be compared."""
REPEATS = 15
BANDWIDTH_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Of the buffer that is read: far more than the caches, and long enough for a launch and a wait not to count."""
LINEAR_CALLS = ("cpu_ygg_linear",)
ATTENTION_CALLS = ("cpu_ygg_attention",)


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of step.

    seconds:      median wall time; spread_s half the distance between its quartiles.
    bytes_read:   weights and KV rows it must read at least once.
    share_of_bandwidth: seconds that reading them takes at the measured bandwidth, over `seconds`.
    linears, attention, head, rest: shares of the time, adding up to 1; None where the artifact names no calls.
    """

    name: str
    seconds: float
    spread_s: float
    bytes_read: int
    share_of_bandwidth: float
    linears: float | None
    attention: float | None
    head: float | None
    rest: float | None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """All costs of a bundle on this machine. bandwidth: bytes per second read by all threads."""

    bandwidth: float
    costs: tuple[Cost, ...]
    host_seconds: tuple[tuple[str, float], ...]


def measure(engine: Engine) -> Breakdown:
    """Time the steps of a bundle at extent EXTENT, with the engine's threads."""
    decoder, shape = engine.decoder, engine.shape
    shapes = [shape]
    if shape != REFERENCE_SHAPE and REFERENCE_SHAPE.capacity <= decoder.draft.limits.max_nodes:
        shapes.append(REFERENCE_SHAPE)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(engine.num_threads)
    try:
        bandwidth = read_bandwidth(decoder.device)
        tokens = [
            token % engine.vocab_size
            for token in range(1000, 1000 + EXTENT - max(each.capacity for each in shapes) - 8)
        ]
        decoder.reset()
        decoder.prefill(tokens)
        decoder.prefill_drafter(tokens)
        runs = _runs(decoder, tokens, shapes)
        seconds = _interleaved(runs)
        costs = tuple(_cost(engine, name, run, seconds[name], bandwidth) for name, run in runs.items())
        return Breakdown(bandwidth, costs, _host_seconds(decoder, tokens, shape))
    finally:
        decoder.reset()
        torch.set_num_threads(threads_before)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which all of a device reads its memory: the best of several sums over a large buffer."""
    num_bytes = BANDWIDTH_BYTES[device.type]
    buffer = torch.ones(num_bytes // 4, device=device)
    best = min(_seconds(lambda: buffer.sum().item()) for _ in range(7))
    return num_bytes / best


@dataclass(frozen=True, slots=True)
class _Run:
    """One thing to time. verifier_steps, drafter_steps: how often each model's layers run, in fused drafts too."""

    call: Callable[[], object]
    verifier_steps: int
    drafter_steps: int


def _runs(decoder: Decoder, tokens: list[int], shapes: Sequence[TreeShape]) -> dict[str, _Run]:
    """The steps to time, by name."""

    def plain(width: int) -> Callable[[], object]:
        def run() -> object:
            chosen, decoder.plain_width = decoder.plain_width, width
            try:
                return decoder.decode(tokens, PLAIN)
            finally:
                decoder.plain_width = chosen

        return run

    widths = sorted({1, decoder.plain_width, *(shape.verify_width for shape in shapes)})
    runs = {f"verify W={width}": _Run(plain(width), 1, 0) for width in widths}
    for shape in shapes:
        one_pass = TreeShape(shape.draft_width, 1, 1)
        passes = (one_pass, shape) if shape.draft_depth > 1 else (one_pass,)
        for drafted in passes:
            name = f"draft W={drafted.draft_width} D={drafted.draft_depth}"
            runs[name] = _Run(partial(decoder.draft_tree, tokens, drafted), 0, drafted.draft_depth)
    for shape in shapes:
        name = f"iteration {shape.draft_width}/{shape.draft_depth}/{shape.verify_width}"
        runs[name] = _Run(partial(decoder.decode, tokens, shape), 1, shape.draft_depth)
    return runs


def _interleaved(runs: dict[str, _Run]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 2):
        for name, run in runs.items():
            taken = _seconds(run.call)
            if repeat >= 2:  # the first calls warm up
                seconds[name].append(taken)
    return seconds


def _seconds(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


def _cost(engine: Engine, name: str, run: _Run, samples: Sequence[float], bandwidth: float) -> Cost:
    ordered = sorted(samples)
    seconds = median(ordered)
    bytes_read = run.verifier_steps * _step_bytes(engine, "verify") + run.drafter_steps * _step_bytes(engine, "draft")
    is_one_model = 0 in (run.verifier_steps, run.drafter_steps)
    num_steps = run.verifier_steps + run.drafter_steps
    linears, attention, head, rest = _shares(run.call, num_steps, seconds) if is_one_model else (None,) * 4
    return Cost(
        name=name,
        seconds=seconds,
        spread_s=(ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 2,
        bytes_read=bytes_read,
        share_of_bandwidth=bytes_read / bandwidth / seconds,
        linears=linears,
        attention=attention,
        head=head,
        rest=rest,
    )


def _step_bytes(engine: Engine, role: str) -> int:
    """Least bytes of a step: the model's weights once, and EXTENT rows of its KV cache."""
    decoder = engine.decoder
    cache = decoder.verifier_cache if role == "verify" else decoder.drafter_cache
    rows = sum(buffer[:, :EXTENT].numel() * buffer.element_size() for buffer in cache.buffers)
    return _weight_bytes(engine, role) + rows


def _weight_bytes(engine: Engine, role: str) -> int:
    """Bytes of weights one step reads: all but an embedding of its own, of which it looks up a few rows."""
    assert engine.bundle is not None
    (artifact,) = (entry for entry in engine.bundle.manifest.artifacts if entry.role == role)
    weights = load_weights(engine.bundle.path / artifact.weights)
    return sum(
        value.numel() * value.element_size() for name, value in weights.items() if not name.startswith(ROWS_PREFIX)
    )


def _shares(
    run: Callable[[], object], num_steps: int, seconds: float
) -> tuple[float | None, float | None, float | None, float | None]:
    """(linears, attention, head, rest) of one observed run of `num_steps` steps: a step's last linear is its head.

    seconds: of an unobserved run; observing adds to what lies between the calls, and so to the rest alone.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells stderr of every start, and of a missing CUDA driver
    with profile() as observed:
        run()
    events = sorted(observed.function_events, key=lambda event: event.time_range.start)
    linears = [_event_seconds(event) for event in events if any(call in event.name for call in LINEAR_CALLS)]
    attention = sum(_event_seconds(event) for event in events if any(call in event.name for call in ATTENTION_CALLS))
    if not linears:
        return None, None, None, None
    per_step = len(linears) // num_steps
    head = sum(linears[per_step - 1 :: per_step])
    body = sum(linears) - head
    total = max(seconds, body + attention + head)
    return body / total, attention / total, head / total, (total - body - attention - head) / total


def _event_seconds(event: FunctionEvent) -> float:
    return float(event.time_range.end - event.time_range.start) * 1e-6


def _host_seconds(decoder: Decoder, tokens: list[int], shape: TreeShape) -> tuple[tuple[str, float], ...]:
    """Host seconds of an iteration by part, medians."""
    parts: dict[str, list[float]] = {"prune": [], "accept": [], "move": [], "between calls": []}
    for _ in range(REPEATS):
        compiled_before, iteration, around = decoder.compiled_s, Iteration(tokens, shape), 0.0
        for stage in SEQUENCE:
            taken = _seconds(partial(decoder.stages[stage], iteration))
            if stage in parts:
                parts[stage].append(taken)
            else:
                around += taken
        parts["between calls"].append(around - (decoder.compiled_s - compiled_before))
    return tuple((name, median(samples)) for name, samples in parts.items())


def describe(breakdown: Breakdown) -> str:
    """The costs as a table."""
    lines = [
        f"memory is read at {breakdown.bandwidth / 1e9:.1f} GB/s; extent {EXTENT}",
        f"{'step':<20}{'ms':>9}{'± ms':>8}{'MB read':>9}{'of bandwidth':>14}"
        f"{'linears':>9}{'attention':>11}{'head':>7}{'rest':>7}",
    ]
    for cost in breakdown.costs:
        shares = "".join(
            f"{'-' if share is None else f'{share:.0%}':>{width}}"
            for share, width in ((cost.linears, 9), (cost.attention, 11), (cost.head, 7), (cost.rest, 7))
        )
        lines.append(
            f"{cost.name:<20}{cost.seconds * 1e3:>9.2f}{cost.spread_s * 1e3:>8.2f}{cost.bytes_read / 1e6:>9.0f}"
            f"{cost.share_of_bandwidth:>14.0%}{shares}"
        )
    total = next(cost.seconds for cost in breakdown.costs if cost.name.startswith("iteration"))
    host = sum(seconds for _, seconds in breakdown.host_seconds)
    parts = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in breakdown.host_seconds)
    lines.append(f"host: {parts}; {host / total:.1%} of an iteration")
    return "\n".join(lines)
