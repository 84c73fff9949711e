"""Seconds per step, measured on the very artifacts that will run.

Everything is timed in turns, at all extents, so that a moment in which others use the machine meets all steps alike and
is outvoted; the first calls warm up and are left out; a time is a median. A busy machine is waited for, and measured
again where times waver (others on the same hardware do not show as busy); both are told of where they stay so. Others
can also slow a machine steadily for a minute, which no spread tells: so a build looks twice, some time apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import TypeVar

from torch import Tensor

from yggc.config import DRAFT_WIDTHS, SIZES
from yggrt.artifacts import Step, StepLimits
from yggrt.engine import Engine, GenerationStats
from yggrt.executor import Decoder, Round
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import DraftGraph, HostSeconds
from yggrt.tree import PLAIN, TreeShape

Key = TypeVar("Key", bound=Hashable)

TIMED_DEPTHS = (1, 2, 4, 8)
EXTENTS = (128, 512, 2048)
REPEATS = 11
HOST_REPEATS = 5
WARM_UPS = 2
HOST_TOKENS = 24

WHOLE_HEAD = "draft with its whole head"

BUSY_SHARE = 0.15
"""Share of all cores that others may use while steps are timed."""
IDLE_WAIT_S = 120.0
UNSTEADY = 0.1
"""Median over all steps of spread by seconds from which they are measured again."""
ATTEMPTS = 3
WATCH_S = 0.5
DRIFT = 0.05
"""Median over all steps of the change between two looks at the machine from which it is looked at once more."""


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """What a pair's steps take on this machine.

    points: see `yggrt.latency`. host: of an iteration.
    whole_head: draft passes of a drafter whose output layer is not cut, at the first extent; empty where none is cut.
    """

    points: tuple[LatencyPoint, ...]
    host: HostSeconds
    whole_head: tuple[LatencyPoint, ...]

    @property
    def unsteadiness(self) -> float:
        """Median over all steps of how far its quartiles lie apart, as a share of its seconds."""
        return median(point.spread_s / point.seconds for point in self.points)

    @property
    def points_of_whole_head(self) -> tuple[LatencyPoint, ...]:
        """The points with drafts at what they take uncut: an output layer costs the same in every pass and extent."""
        cut = {(p.width, p.depth, p.extent): p.seconds for p in self.points}
        extra = {p.width: p.seconds - cut[p.width, p.depth, p.extent] for p in self.whole_head}
        return tuple(
            replace(point, seconds=max(point.seconds + point.depth * extra[point.width], 1e-9))
            if point.role == "draft"
            else point
            for point in self.points
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a run, and half the distance between its quartiles."""

    seconds: float
    spread_s: float


def measure_steps(
    engine: Engine,
    whole_head: Engine | None = None,
    verify_widths: Sequence[int] = SIZES["cpu"].verify_widths,
    drafts: Sequence[TreeShape] | None = None,
) -> LatencyProfile:
    """Time `verify` by width, drafts by width and depth, and the host's share, at every extent the context holds.

    whole_head: an engine of the same pair whose drafter's output layer is not cut, where the other's is.
    drafts: those to time; DRAFT_WIDTHS at TIMED_DEPTHS where None.
    """
    limits = engine.decoder.draft.limits
    shapes = _drafts_to_time(limits) if drafts is None else drafts
    points, uncut = time_steps(engine, verify_widths, shapes, _extents(engine.max_context), whole_head)
    return LatencyProfile(points, _time_host(engine), uncut)


def time_steps(
    engine: Engine,
    verify_widths: Sequence[int],
    drafts: Sequence[TreeShape],
    extents: Sequence[int],
    whole_head: Engine | None = None,
    repeats: int = REPEATS,
) -> tuple[tuple[LatencyPoint, ...], tuple[LatencyPoint, ...]]:
    """Steps of an engine, and with `whole_head` its draft passes at the first extent; each as often as `repeats` says.

    verify_widths: those wider than the engine's trees are left out, as drafts beyond the drafter's context are.
    """
    decoder = engine.decoder
    limits = decoder.draft.limits
    widths = [width for width in verify_widths if width < limits.max_nodes] or [1]
    runs: dict[tuple[str, int, int, int], Callable[[], object]] = {}
    for extent in extents:
        tokens = [0] * (extent - 1)
        for width in widths:
            runs["verify", width, 0, extent] = partial(_verify, decoder, tokens, width)
        within = min(extent, engine.drafter_context)
        before_tree = tokens[: max(2, within - limits.max_nodes)]
        for shape in drafts if within == extent or extent == extents[0] else ():
            size = (shape.draft_width, shape.draft_depth, extent)
            runs["draft", *size] = partial(_draft, decoder, before_tree, shape)
            if whole_head is not None and extent == extents[0] and shape.draft_depth == 1:
                runs[WHOLE_HEAD, *size] = partial(_draft, whole_head.decoder, before_tree, shape)
    cool = partial(_verify, decoder, [0] * (extents[0] - 1), widths[0])  # caches are as another model leaves them
    decoders = [each.decoder for each in (engine, whole_head) if each is not None]
    with engine.its_threads():  # the host's share is measured apart, and added to every iteration
        timings = time_in_turns(runs, repeats, before=cool, clock=lambda: sum(each.compiled_s for each in decoders))
    decoder.reset()
    points: list[LatencyPoint] = []
    uncut: list[LatencyPoint] = []
    for (role, width, depth, extent), timing in timings.items():
        name = "draft" if role == WHOLE_HEAD else role
        point = LatencyPoint(name, width, depth, extent, timing.seconds, timing.spread_s)
        (uncut if role == WHOLE_HEAD else points).append(point)
    return tuple(points), tuple(uncut)


def _drafts_to_time(limits: StepLimits) -> list[TreeShape]:
    """DRAFT_WIDTHS at TIMED_DEPTHS, as far as a step's limits go."""
    return [
        TreeShape(width, depth, 1)
        for width in DRAFT_WIDTHS
        if width <= limits.num_children
        for depth in TIMED_DEPTHS
        if 1 + width * depth <= limits.max_nodes and depth <= limits.max_moves
    ]


def measure_until_steady(
    measure: Callable[[], LatencyProfile], say: Callable[[str], object], attempts: int = ATTEMPTS
) -> tuple[LatencyProfile, str | None]:
    """Measure again while times waver, and keep the steadiest; with a notice where none was steady."""
    found = [measure()]
    while found[-1].unsteadiness > UNSTEADY and len(found) < attempts:
        say(f"  the machine is unsteady (times waver by {found[-1].unsteadiness:.0%}); measuring again")
        found.append(measure())
    best = min(found, key=lambda each: each.unsteadiness)
    if best.unsteadiness <= UNSTEADY:
        return best, None
    return best, f"steps were timed on an unsteady machine (times waver by {best.unsteadiness:.0%}); figures may be off"


def look_again(
    first: LatencyProfile, measure: Callable[[], LatencyProfile], say: Callable[[str], object], attempts: int = ATTEMPTS
) -> LatencyProfile:
    """Measure some time after `first`, and again where the machine has changed; every step as the looks at it agree."""
    looks = [first, measure()]
    while (drift := _drift(looks[-2], looks[-1])) > DRIFT and len(looks) < attempts:
        say(f"  the machine has changed since steps were timed (times differ by {drift:.0%}); measuring again")
        looks.append(measure())
    return agreed(looks)


def agreed(looks: Sequence[LatencyProfile]) -> LatencyProfile:
    """The median of several profiles, step by step. looks: of the same steps."""

    def medians(of_looks: Iterable[tuple[LatencyPoint, ...]]) -> tuple[LatencyPoint, ...]:
        return tuple(
            replace(
                same[0],
                seconds=median(point.seconds for point in same),
                spread_s=median(point.spread_s for point in same),
            )
            for same in zip(*of_looks, strict=True)
        )

    plain_s = median(look.host.plain_s for look in looks)
    speculative_s = median(look.host.speculative_s for look in looks)
    return LatencyProfile(
        medians(look.points for look in looks),
        HostSeconds(plain_s, speculative_s),
        medians(look.whole_head for look in looks),
    )


def _drift(before: LatencyProfile, after: LatencyProfile) -> float:
    pairs = zip(before.points, after.points, strict=True)
    return median(abs(second.seconds / first.seconds - 1) for first, second in pairs)


def _extents(max_context: int) -> list[int]:
    """Extents to measure at: those of EXTENTS that a request can reach, or all of its context."""
    return [extent for extent in EXTENTS if extent <= max_context] or [max_context]


def _verify(decoder: Decoder, tokens: list[int], width: int) -> Round:
    chosen, decoder.plain_width = decoder.plain_width, width
    try:
        return decoder.decode(tokens, PLAIN)
    finally:
        decoder.plain_width = chosen


def _draft(decoder: Decoder, tokens: list[int], shape: TreeShape) -> None:
    """The rows before the tree are taken to be there: what they hold costs nothing."""
    decoder.drafter_cache.num_committed = len(tokens)
    decoder.draft_tree(tokens, shape)


def _time_host(engine: Engine) -> HostSeconds:
    """Seconds an iteration spends outside compiled steps, from short answers given both ways in turns."""
    shape, pace = engine.shape, engine.pace
    prompt = [token % engine.vocab_size for token in range(100, 132)]
    count = min(HOST_TOKENS, engine.max_context - len(prompt))
    samples: dict[bool, list[float]] = {True: [], False: []}
    engine.shape, engine.pace = TreeShape(min(4, shape.draft_width), 1, 2), None
    try:
        for repeat in range(HOST_REPEATS + WARM_UPS):
            for plain in samples:
                result = engine.generate(prompt, max_new_tokens=count, ignore_eos=True, plain=plain)
                if repeat >= WARM_UPS:
                    samples[plain].append(host_seconds(result.stats))
    finally:
        engine.shape, engine.pace = shape, pace
    return HostSeconds(median(samples[True]), median(samples[False]))


def host_seconds(stats: GenerationStats) -> float:
    """Seconds per iteration outside compiled steps."""
    assert stats.tpot_s is not None and stats.host_share is not None
    return stats.host_share * stats.tpot_s * (stats.new_tokens - 1) / stats.iterations


def time_drafts(engine: Engine, extent: int = EXTENTS[0]) -> tuple[DraftGraph, ...]:
    """Each fused draft of the engine against the same draft pass by pass."""
    decoder = engine.decoder
    fused = dict(decoder.fused)
    graphs = []
    try:
        for depth in sorted(fused):
            shape = TreeShape(decoder.draft_width, depth, 1)
            tokens = [0] * max(2, min(extent, engine.max_context, engine.drafter_context) - shape.capacity)

            def run(graphs: dict[int, Step], tokens: list[int] = tokens, shape: TreeShape = shape) -> None:
                decoder.fused = graphs
                decoder.draft_tree(tokens, shape)

            cool = partial(_verify, decoder, tokens, 1)
            with engine.its_threads():
                timed = time_in_turns({"passes": partial(run, {}), "fused": partial(run, fused)}, before=cool)
            passes_s, fused_s = timed["passes"].seconds, timed["fused"].seconds
            graphs.append(DraftGraph(depth, fused_s < passes_s, passes_s, fused_s))
        return tuple(graphs)
    finally:
        decoder.fused = fused


TUNING_GAIN = 0.02
"""By how much compile options must be faster than the default ones to be taken."""


class Alternatives:
    """The same step compiled in several ways, in one engine.

    role:  `verify.wN`, or a `draft.dN` of the engine's draft width.
    steps: by what they were compiled with, the default first; they are bound to the engine's caches.
    """

    def __init__(self, engine: Engine, role: str, steps: Mapping[str, Step]) -> None:
        self._engine, self._decoder, self._steps = engine, engine.decoder, steps
        self._verifies, self._number = role.startswith("verify"), int(re.sub(r"\D", "", role))
        cache = self._decoder.verifier_cache if self._verifies else self._decoder.drafter_cache
        for step in steps.values():
            step.bind(cache.buffers, cache.layouts, cache.dtype)
        self._shape = TreeShape(self._decoder.draft_width, 0 if self._verifies else self._number, 1)
        longest = min(EXTENTS[0], engine.max_context, engine.drafter_context)
        count = max(2, longest - max(self._number, self._shape.capacity))
        self._tokens = [(7919 * place + 11) % engine.vocab_size for place in range(count)]

    def _run_verify(self, step: Step) -> Tensor:
        """Logits [V] after the last token."""
        decoder, before = self._decoder, self._decoder.by_width
        decoder.by_width = {self._number: step}
        try:
            return _verify(decoder, self._tokens, self._number).outputs[3][0]
        finally:
            decoder.by_width = before

    def _run_draft(self, step: Step) -> None:
        decoder, before = self._decoder, self._decoder.fused
        decoder.fused = {self._number: step}
        try:
            _draft(decoder, self._tokens, self._shape)
        finally:
            decoder.fused = before

    def deviations(self) -> dict[str, float]:
        """Of steps that verify: length of the difference of the logits from the first one's, over their own length."""
        if not self._verifies:
            return {}
        self._decoder.reset()
        self._decoder.prefill(self._tokens[:-1])
        logits = {name: self._run_verify(step).double().cpu() for name, step in self._steps.items()}
        own = next(iter(logits.values()))
        return {name: float((each - own).norm() / own.norm()) for name, each in logits.items()}

    def time(self) -> dict[str, Timing]:
        """In turns."""
        run = self._run_verify if self._verifies else self._run_draft
        runs: dict[str, Callable[[], object]] = {name: partial(run, step) for name, step in self._steps.items()}
        with self._engine.its_threads():
            return time_in_turns(runs, clock=lambda: self._decoder.compiled_s)


def fastest(timings: Mapping[str, Timing]) -> str:
    """The first, or one that is faster by more than TUNING_GAIN and by more than the times of both waver."""
    first = next(iter(timings))
    best = min(timings, key=lambda name: timings[name].seconds)
    gain = timings[first].seconds - timings[best].seconds
    needed = max(TUNING_GAIN * timings[first].seconds, timings[first].spread_s + timings[best].spread_s)
    return best if gain > needed else first


def with_fused(points: Sequence[LatencyPoint], graphs: Sequence[DraftGraph], width: int) -> tuple[LatencyPoint, ...]:
    """The points, with fused drafts of `width` at what their graph takes, at depths that were not timed too."""
    times = StepTimes(points)
    found = list(points)
    for graph in graphs:
        if not graph.fused:
            continue
        share = graph.fused_s / graph.passes_s
        for extent in sorted({point.extent for point in points if point.role == "draft" and point.width == width}):
            seconds = times.draft_s(width, graph.depth, extent) * share
            key = ("draft", width, graph.depth, extent)
            spreads = [p.spread_s for p in found if (p.role, p.width, p.depth, p.extent) == key]
            found = [p for p in found if (p.role, p.width, p.depth, p.extent) != key]
            found.append(LatencyPoint(*key, seconds, *(spreads or [0.0])))
    return tuple(found)


def plain_width(points: Sequence[LatencyPoint]) -> int:
    """Rows of the step that decodes plainly the fastest: the narrowest, unless a wider one wins beyond the spread."""
    first = min(point.extent for point in points)
    ordered = sorted(
        (point for point in points if point.role == "verify" and point.extent == first), key=lambda point: point.width
    )
    best = ordered[0]
    for point in ordered[1:]:
        if point.seconds + point.spread_s < best.seconds - best.spread_s:
            best = point
    return best.width


def time_in_turns(
    runs: dict[Key, Callable[[], object]],
    repeats: int = REPEATS,
    synchronize: Callable[[], object] = lambda: None,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> dict[Key, Timing]:
    """Time each run `repeats` times, one after the other in every round; the first WARM_UPS rounds do not count.

    synchronize: waits for what a run left unfinished on its device; within the time measured.
    before:      runs ahead of each, outside the time measured.
    clock:       seconds that count; default all.
    """
    clock = clock or perf_counter
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + WARM_UPS):
        for key, run in runs.items():
            before()
            synchronize()
            started = clock()
            run()
            synchronize()
            if repeat >= WARM_UPS:
                seconds[key].append(clock() - started)
    timings = {}
    for key, samples in seconds.items():
        ordered = sorted(samples)
        spread = (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / 2
        timings[key] = Timing(median(ordered), spread)
    return timings


# ---- a busy machine ----


def busy_share(stat: Path = Path("/proc/stat"), watch_s: float = WATCH_S) -> float:
    """Share of all cores in use while this process sleeps; 0 where the system does not say."""
    try:
        first = _cpu_times(stat)
        sleep(watch_s)
        second = _cpu_times(stat)
    except (OSError, ValueError, IndexError):
        return 0.0
    spent = [after - before for before, after in zip(first, second, strict=True)]
    idle = spent[3] + spent[4]  # idle and waiting for a disk
    return 1.0 - idle / sum(spent) if sum(spent) else 0.0


def _cpu_times(stat: Path) -> list[int]:
    """Ticks of all cores: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]


def wait_until_idle(
    say: Callable[[str], object], measure: Callable[[], float] = busy_share, limit_s: float = IDLE_WAIT_S
) -> str | None:
    """Wait while others use the cores, at most `limit_s`; says that it waits.

    Returns a notice where the machine stayed busy.
    """
    started = monotonic()
    share = measure()
    if share > BUSY_SHARE:
        say(
            f"  the machine is busy ({share:.0%} of its cores in use); waiting up to {limit_s:.0f} s for a quiet moment"
        )
    while share > BUSY_SHARE:
        if monotonic() - started > limit_s:
            return f"steps were timed on a busy machine ({share:.0%} of its cores in use by others); figures may be off"
        share = measure()
    return None
