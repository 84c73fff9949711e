"""The graph of an iteration's stages, and the search for the schedule that runs it in the least time.

The search is exhaustive over what a schedule may choose: which drafts ahead of time there are, which lanes share the
cores, which lane each stage runs on, and in which order. A part is left out only where a bound says that it cannot win.
The stages that nothing can overtake stay on the first lane: lanes are alike, and handing over would only add waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from yggrt.plan import StageTime
from yggrt.schedule import (
    COMPILED,
    DEPENDENCIES,
    OPTIONAL,
    STAGES,
    Stage,
    StageSchedule,
    describe_schedule,
    round_seconds,
    sequential_schedule,
)

CHAIN = ("head", "grow", "prune", "verify", "accept", "move")
"""On the first lane, each needing the one before."""

LEAST_HITS = 0.2
"""Share of iterations whose next root must be guessed rightly for a head draft ahead of time to be looked at."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to choose the verify width, and the tokens an iteration gives with it. verify_width: None by value."""

    verify_width: int | None
    tokens_per_iteration: float


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What the search knows.

    times:     of stages by cores and mode; a lane may have only cores that all of its stages were timed with.
    handoff_s: what it takes one lane to see that another has come so far.
    tail_hits, hits: share of iterations whose next root is guessed rightly, with the tail draft and without.
    has_depth: whether a depth network chooses the depth.
    """

    num_threads: int
    times: tuple[StageTime, ...]
    handoff_s: float
    tail_hits: float
    hits: float
    has_depth: bool
    modes: tuple[Mode, ...]

    def seconds(self, lane_of: Mapping[str, int], lanes: Sequence[int], verify_width: int | None) -> dict[str, float]:
        """By stage, with what a right guess saves of the head draft taken off."""
        way = (verify_width, "tail" in lane_of or "next_head" in lane_of)
        known = {
            (time.stage, time.cores): time.seconds
            for time in self.times
            if (time.verify_width, time.looks_ahead) == way
        }
        found = {name: known[name, lanes[lane] if name in COMPILED else 0] for name, lane in lane_of.items()}
        if "next_head" in lane_of:
            found["head"] *= 1 - (self.tail_hits if "tail" in lane_of else self.hits)
        return found

    def predicted_s(self, schedule: StageSchedule) -> float:
        """Seconds of an iteration."""
        lane_of = {stage.name: stage.lane for stage in schedule.stages}
        seconds = self.seconds(lane_of, schedule.lanes, schedule.verify_width)
        return round_seconds(schedule, seconds, self.handoff_s)

    def token_s(self, schedule: StageSchedule) -> float:
        """Seconds of a token."""
        (tokens,) = (mode.tokens_per_iteration for mode in self.modes if mode.verify_width == schedule.verify_width)
        return self.predicted_s(schedule) / tokens


def stage_graph(stages: Sequence[str], lagging: bool = False) -> nx.DiGraph:
    """The true dependencies of these stages within a round, an edge each.

    lagging: whether `emit` runs a round later, where it waits for nothing.
    Nodes say which resource they need: "cores" or "host".
    """
    graph = nx.DiGraph()
    for name in stages:
        graph.add_node(name, resource="cores" if name in COMPILED else "host")
    for each in DEPENDENCIES:
        waits = each.iterations == 0 and not (lagging and each.after == "emit")
        if waits and each.before in graph and each.after in graph:
            graph.add_edge(each.before, each.after)
    return graph


def best_order(
    graph: nx.DiGraph, lane_of: Mapping[str, int], seconds: Mapping[str, float], handoff_s: float, caller: int
) -> tuple[float, tuple[str, ...]]:
    """The order of stages, their lanes given, in which the round is shortest: (its seconds, the stages).

    Branch and bound over all orders. What is left of the longest path through a stage bounds what follows it.
    caller: the lane that begins at once and ends the round; the others do both a handoff later and earlier.
    """
    left_s = _longest_paths(graph, lane_of, seconds, handoff_s, caller)
    lanes = sorted(set(lane_of.values()))
    best: tuple[float, tuple[str, ...]] = (float("inf"), ())

    def extend(order: tuple[str, ...], ends: dict[str, float], free: dict[int, float], reached: float) -> None:
        nonlocal best
        if len(order) == len(graph):
            best = (reached, order)
            return
        begins = {}
        for name in graph:
            if name not in ends and all(before in ends for before in graph.predecessors(name)):
                waits = [
                    ends[before] + (handoff_s if lane_of[before] != lane_of[name] else 0.0)
                    for before in graph.predecessors(name)
                ]
                begins[name] = max([free[lane_of[name]], *waits])
        if max(reached, *(begins[name] + left_s[name] for name in begins)) >= best[0]:
            return
        for name in begins:  # in the graph's order, so that of equal orders the listed one is found first
            end = begins[name] + seconds[name]
            over = end + (0.0 if lane_of[name] == caller else handoff_s)
            extend((*order, name), {**ends, name: end}, {**free, lane_of[name]: end}, max(reached, over))

    extend((), {}, {lane: 0.0 if lane == caller else handoff_s for lane in lanes}, 0.0)
    return best


def _longest_paths(
    graph: nx.DiGraph, lane_of: Mapping[str, int], seconds: Mapping[str, float], handoff_s: float, caller: int
) -> dict[str, float]:
    """By stage, the least time from its begin to the round's end: no order can be faster."""
    left: dict[str, float] = {}
    for name in reversed(list(nx.topological_sort(graph))):
        after = [
            left[other] + (handoff_s if lane_of[other] != lane_of[name] else 0.0) for other in graph.successors(name)
        ]
        end = 0.0 if lane_of[name] == caller else handoff_s
        left[name] = seconds[name] + max([end, *after])
    return left


def rank_schedules(costs: StageCosts, count: int) -> list[StageSchedule]:
    """The `count` schedules with the least predicted seconds per token, the best first, and last the sequential one
    where it is none of them.

    For every choice of drafts ahead of time, lanes and lane of each stage, the order that is best. Of those that are as
    good the one with the fewest lanes and stages is ahead.
    """
    found: list[tuple[float, int, int, str, StageSchedule]] = []
    for placed in _placements(costs):
        bound = placed.least_s(costs) / placed.mode.tokens_per_iteration
        if len(found) == count and bound > found[-1][0]:
            continue
        made = placed.ordered(costs)
        entry = (costs.token_s(made), len(made.lanes), len(made.stages), describe_schedule(made), made)
        found = sorted([*found, entry], key=lambda each: each[:4])[:count]
    ranked = [made for *_, made in found]
    plain = sequential_schedule(costs.num_threads, costs.has_depth)
    return ranked if plain in ranked else [*ranked, plain]


@dataclass(frozen=True, slots=True)
class _Placement:
    """A schedule but for the order of its stages."""

    mode: Mode
    lanes: tuple[int, ...]
    lane_of: Mapping[str, int]
    lag: int

    def graph(self) -> nx.DiGraph:
        return stage_graph(tuple(self.lane_of), lagging=self.lag == 1)

    def least_s(self, costs: StageCosts) -> float:
        """Seconds of a round that no order is below: what the stages of one lane take."""
        seconds = costs.seconds(self.lane_of, self.lanes, self.mode.verify_width)
        caller = self.lane_of["emit"]
        by_lane = [
            sum(seconds[name] for name, lane in self.lane_of.items() if lane == each)
            + (0.0 if each == caller else 2 * costs.handoff_s)
            for each in range(len(self.lanes))
        ]
        return max(by_lane)

    def ordered(self, costs: StageCosts) -> StageSchedule:
        """With the best order, and no more waits than the dependencies need."""
        graph = self.graph()
        seconds = costs.seconds(self.lane_of, self.lanes, self.mode.verify_width)
        _, order = best_order(graph, self.lane_of, seconds, costs.handoff_s, self.lane_of["emit"])
        runs = graph.copy()
        for lane in range(len(self.lanes)):
            runs.add_edges_from(itertools.pairwise([name for name in order if self.lane_of[name] == lane]))
        needed = nx.transitive_reduction(runs)
        stages = []
        for lane in range(len(self.lanes)):
            for name in order:
                if self.lane_of[name] == lane:
                    waits = tuple(sorted(each for each in needed.predecessors(name) if self.lane_of[each] != lane))
                    stages.append(Stage(name, lane, self.lag if name == "emit" else 0, waits))
        return StageSchedule(self.lanes, self.mode.verify_width, tuple(stages))


def _placements(costs: StageCosts) -> Iterator[_Placement]:
    for mode in costs.modes:
        for ahead in _drafts_ahead(costs):
            names = tuple(
                name
                for name in STAGES
                if name not in OPTIONAL or name in ahead or (name == "depth" and costs.has_depth)
            )
            free = tuple(name for name in names if name not in CHAIN)
            for lanes in _lanes(costs, bool(ahead)):
                for chosen in itertools.product(range(len(lanes)), repeat=len(free)):
                    lane_of = dict.fromkeys(names, 0) | dict(zip(free, chosen, strict=True))
                    uses_all = set(lane_of.values()) == set(range(len(lanes)))
                    if uses_all and all(lanes[lane_of[name]] for name in names if name in COMPILED):
                        for lag in (0, 1) if lane_of["emit"] != 0 else (0,):
                            yield _Placement(mode, lanes, lane_of, lag)


def _drafts_ahead(costs: StageCosts) -> list[tuple[str, ...]]:
    """What may be drafted ahead of time: nothing, or the next root where it is guessed often enough."""
    found: list[tuple[str, ...]] = [()]
    if costs.tail_hits >= LEAST_HITS:
        found.append(("tail", "next_head"))
    if costs.hits >= LEAST_HITS:
        found.append(("next_head",))
    return found


def _lanes(costs: StageCosts, drafts_ahead: bool) -> list[tuple[int, ...]]:
    """All cores together, or split between two lanes; with a thread for the host's stages, or without."""
    threads = costs.num_threads
    timed = {time.cores for time in costs.times if time.looks_ahead}
    splits = [(first, threads - first) for first in range(1, threads)] if drafts_ahead else []
    cores = [(threads,), *(split for split in splits if set(split) <= timed)]
    return [(*each, *thread) for each in cores for thread in ((), (0,))]
