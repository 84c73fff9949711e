"""The stage schedule of a plan: stages timed, schedules searched, the best few run, the fastest kept.

Stages are timed inside real answers to the calibration's prompts, one after the other, with every number of cores that
a lane may have. How often the next root would be guessed rightly is found on the traced text before any is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from yggc.profile import WARM_UPS
from yggc.simulate import GrownText, Prices, outcomes
from yggc.stages import LEAST_HITS, Mode, StageCosts, rank_schedules
from yggc.trace import TracedText
from yggrt.engine import Engine
from yggrt.lanes import LaneExecutor, Span
from yggrt.pace import Pace
from yggrt.plan import ScheduleStudy, StageTime, TriedSchedule
from yggrt.schedule import COMPILED, Stage, StageSchedule, sequential_schedule
from yggrt.tree import TreeShape

MOST_TRIED = 5
"""Schedules that are run and timed."""

TIE = 0.01
"""A schedule with several lanes must give a token in this much less time than those with one, beyond its error."""

SIDE_CORES = (1, 2, 4, 8, 16)
"""Cores that a lane beside the first may be given."""

ANSWER_TOKENS = 25
TIMED_TURNS = 3
TRIED_TURNS = 12
"""Of every way to run, after WARM_UPS that are left out; an answer each."""

HANDOFF_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Guesses:
    """What the traced text says of one way to cut: iterations, tokens, and next roots guessed rightly with and without
    the tail draft."""

    iterations: int
    tokens: int
    tail_hits: int
    hits: int


class SteadyPace(Pace):
    """The plan's choices of the verify width, with the deepest tree of the plan's own depth in every iteration."""

    def shape(self, worth: NDArray[np.float64] | None) -> TreeShape:
        depth = self.depths[-1]
        return TreeShape(self.draft_width, depth, min(self.verify_widths[-1], 1 + self.draft_width * depth))


def count_guesses(texts: Sequence[GrownText], depth: int, prices: Prices) -> Guesses:
    """Follow the texts from root to root and guess at each.

    texts: grown a pass deeper than `depth`, so that the tail draft's nodes are there, unless no tree may be so large.
    prices: with the menu to cut by.
    """
    found = Guesses(0, 0, 0, 0)
    for grown in texts:
        taken = outcomes(grown, depth, prices)
        width = grown.draft_width
        sizes = (1 + width * (depth + 1), 1 + width * depth)
        root = 0
        while root < grown.num_roots:
            verified = int(taken.verified[root])
            order = np.argsort(-grown.values[root, : sizes[1]], kind="stable")
            hits = [size <= grown.values.shape[1] and _guessed(grown, root, size, order[:verified]) for size in sizes]
            emitted = min(int(taken.emitted[root]), grown.num_roots - root)
            found = Guesses(
                found.iterations + 1, found.tokens + emitted, found.tail_hits + hits[0], found.hits + hits[1]
            )
            root += emitted
    return found


def _guessed(grown: GrownText, root: int, size: int, cut: NDArray[np.int64]) -> bool:
    """Whether the most valuable of the first `size` nodes that are not verified is on the text's path."""
    values = grown.values[root, :size].copy()
    values[cut] = -np.inf
    node = int(values.argmax())
    return bool(np.isfinite(values[node]) and grown.on_path[root, node])


def modes_of(texts: Sequence[GrownText], depth: int, prices: Prices) -> tuple[tuple[Mode, Guesses], ...]:
    """The split mode, and the fused one with the fixed verify width that gives most tokens per second."""
    split = count_guesses(texts, depth, prices)
    fixed: list[tuple[float, Mode, Guesses]] = []
    for width in prices.verify_widths:
        if width <= 1 + texts[0].draft_width * depth:
            alone = Prices(prices.times, prices.host, prices.plain_width, (width,), None)
            guesses = count_guesses(texts, depth, alone)
            seconds = sum(float(outcomes(grown, depth, alone).seconds.mean()) for grown in texts) / len(texts)
            mode = Mode(width, guesses.tokens / guesses.iterations)
            fixed.append((seconds / mode.tokens_per_iteration, mode, guesses))
    _, mode, guesses = min(fixed, key=lambda each: each[0])
    return (Mode(None, split.tokens / split.iterations), split), (mode, guesses)


def study_schedule(
    engine: Engine,
    pace: Pace,
    grown: Sequence[GrownText],
    texts: Sequence[TracedText],
    prices: Prices,
    has_depth: bool,
    say: Callable[[str], object],
) -> tuple[StageSchedule, ScheduleStudy]:
    """Time the stages, search, run the best few, keep the fastest.

    engine: of the plan's steps, free to be used; pace: by the plan, steady; grown: trees a pass deeper than the plan's;
    texts: what to answer; prices: with the plan's menu and lambda; has_depth: whether a depth network chooses.
    """
    depth = pace.depths[-1]
    (split, guesses), (fused, _) = modes_of(grown, depth, prices)
    tail_hits, hits = guesses.tail_hits / guesses.iterations, guesses.hits / guesses.iterations
    schedule_before, pace_before, fused_before = engine.executor.schedule, engine.pace, engine.decoder.fused
    engine.pace = pace
    try:
        looks_ahead = max(tail_hits, hits) >= LEAST_HITS
        times = _time_stages(engine, texts, has_depth, (split, fused), looks_ahead)
        handoff_s = measure_handoff(engine.num_threads)
        costs = StageCosts(engine.num_threads, times, handoff_s, tail_hits, hits, has_depth, (split, fused))
        ranked = rank_schedules(costs, MOST_TRIED)
        say(f"  trying {len(ranked)} schedules")
        turns = _run_in_turns(engine, ranked, texts)
    finally:
        engine.pace, engine.decoder.fused = pace_before, fused_before
        engine.use_schedule(schedule_before)
        engine.decoder.reset()
    tokens = {mode.verify_width: mode.tokens_per_iteration for mode in (split, fused)}
    tried = []
    for schedule, (measured_s, error_s) in zip(ranked, beside_each_other(turns), strict=True):
        predicted_s = costs.predicted_s(schedule)
        tried.append(TriedSchedule(schedule, tokens[schedule.verify_width], predicted_s, measured_s, error_s))
    study = ScheduleStudy(times, handoff_s, tail_hits, hits, tuple(tried))
    return choose_schedule(study), study


def choose_schedule(study: ScheduleStudy) -> StageSchedule:
    """The measured winner; of those in one lane where no other beats them by more than TIE and more than its error."""
    plain = min((each for each in study.tried if len(each.schedule.lanes) == 1), key=lambda each: each.token_s)

    def at_worst(each: TriedSchedule) -> float:
        """Seconds per token."""
        return (each.measured_s + each.error_s) / each.tokens_per_iteration

    best = min(study.tried, key=at_worst)
    return best.schedule if at_worst(best) < plain.token_s * (1 - TIE) else plain.schedule


def _time_stages(
    engine: Engine, texts: Sequence[TracedText], has_depth: bool, modes: Sequence[Mode], looks_ahead: bool
) -> tuple[StageTime, ...]:
    """What every stage takes, one after the other, by cores and mode. looks_ahead: whether drafts ahead of time may be
    worth it, and so are timed."""
    threads = engine.num_threads
    runs = {}
    for mode in modes:
        runs[threads, mode.verify_width, False] = sequential_schedule(threads, has_depth)
        if looks_ahead:
            sides = [cores for cores in SIDE_CORES if cores < threads]
            for cores in {threads, *sides, *(threads - cores for cores in sides)}:
                runs[cores, mode.verify_width, True] = sequential_schedule(cores, has_depth, ("tail", "next_head"))
    spans: dict[tuple[int, int | None, bool], list[Span]] = {key: [] for key in runs}
    for turn in range(TIMED_TURNS + WARM_UPS):
        for key, schedule in runs.items():
            engine.use_schedule(StageSchedule(schedule.lanes, key[1], schedule.stages))
            found: list[Span] = []
            engine.executor.spans = found
            _answer(engine, texts[turn % len(texts)])
            if turn >= WARM_UPS:
                spans[key] += found
    times = []
    for (cores, width, ahead), found in spans.items():
        for stage in runs[cores, width, ahead].stages:
            is_compiled = stage.name in COMPILED
            if is_compiled or cores == threads:
                seconds = middle([span.ended - span.started for span in found if span.stage == stage.name])
                times.append(StageTime(stage.name, cores if is_compiled else 0, width, ahead, seconds))
    return tuple(times)


def _answer(engine: Engine, text: TracedText) -> None:
    engine.generate(list(text.prompt_ids), max_new_tokens=min(ANSWER_TOKENS, text.budget), ignore_eos=True)


def _run_in_turns(engine: Engine, schedules: Sequence[StageSchedule], texts: Sequence[TracedText]) -> list[list[float]]:
    """Seconds of a round, by schedule and turn; in a turn all of them answer the same prompt."""
    turns: list[list[float]] = [[] for _ in schedules]
    for turn in range(TRIED_TURNS + WARM_UPS):
        for schedule, seconds in zip(schedules, turns, strict=True):
            engine.use_schedule(schedule)  # so that no thread of another is left, see `LaneExecutor.on_lane`
            _answer(engine, texts[turn % len(texts)])
            if turn >= WARM_UPS:
                seconds.append(middle(engine.executor.rounds))
    return turns


def beside_each_other(turns: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Mean seconds of a round of each schedule, and two standard errors of it; seconds: by schedule and turn.

    What is the same for all schedules of a turn, as its prompt and the machine's mood are, is left out of the errors.
    """
    seconds = np.array(turns)
    means = seconds.mean(axis=1)
    shares = seconds / seconds.mean(axis=0)
    count = seconds.shape[1]
    errors = shares.std(axis=1, ddof=1) / np.sqrt(count) if count > 1 else np.zeros(len(turns))
    return [(float(mean), float(2 * error * mean)) for mean, error in zip(means, errors, strict=True)]


def middle(samples: Sequence[float]) -> float:
    """Mean without the tenth at either end: outliers do not count, and all verify widths do."""
    ordered = sorted(samples)
    cut = len(ordered) // 10
    return fmean(ordered[cut : len(ordered) - cut])


def measure_handoff(num_threads: int, count: int = HANDOFF_ROUNDS) -> float:
    """Seconds one lane needs to see that another has come so far: of empty rounds, half of what a second lane adds."""
    alone = sequential_schedule(num_threads)
    stages = tuple(stage for stage in alone.stages if stage.name != "emit")
    beside = StageSchedule((num_threads, 0), None, (*stages, Stage("emit", 1, 1, ())))
    medians = []
    for schedule in (alone, beside):
        executor = LaneExecutor(schedule)
        for _ in range(count):
            list(executor.round(lambda stage: None))
        medians.append(median(executor.rounds))
    return max(0.0, medians[1] - medians[0]) / 2
