"""Stage schedules: which stage of an iteration runs where, in what order, and what it waits for.

A schedule is data that `yggrt.lanes` interprets. It runs in rounds, one for each iteration: every lane, a thread with
its cores, runs its stages in the order they are written, each after the stages of other lanes that it waits for; the
round ends when all lanes have. Invariant: a `StageSchedule` that exists keeps every true dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STAGES = ("head", "grow", "tail", "prune", "verify", "accept", "depth", "next_head", "move", "emit")
"""
head:      the first draft pass, of the root; nothing where the head draft ahead of time was for this root.
grow:      the other draft passes, or all of them where one graph fuses them.
tail:      the tail draft: the nodes of the last pass are run before it is known whether they are accepted. By itself it
           saves nothing, since a head draft runs the token before the root in any case; it finds better guesses.
prune:     the cut that the verifier gets, its rows and masks.
verify:    the verifier's step.
accept:    the path that the verifier agrees with, the tokens to emit.
depth:     what the next iteration's depths are worth, for every row that was verified.
next_head: the head draft ahead of time: the next root is guessed and its draft pass run.
move:      the accepted path becomes the committed prefix of both KV caches.
emit:      text and stop strings, and the caller's own work with a piece of text.
"""
COMPILED = ("head", "grow", "tail", "verify", "next_head")
"""Stages that run compiled steps and so need cores; the others are the host's."""
OPTIONAL = ("tail", "depth", "next_head")


@dataclass(frozen=True, slots=True)
class Dependency:
    """`after` in iteration i needs what `before` did in iteration i - `iterations`."""

    before: str
    after: str
    iterations: int = 0


DEPENDENCIES = (
    Dependency("head", "grow"),
    Dependency("grow", "tail"),
    Dependency("grow", "prune"),
    Dependency("prune", "verify"),
    Dependency("verify", "accept"),
    Dependency("verify", "depth"),
    Dependency("accept", "move"),
    Dependency("accept", "emit"),
    Dependency("grow", "next_head"),
    Dependency("prune", "next_head"),  # the guess is a node that is not verified
    Dependency("tail", "next_head"),  # one of those that the tail draft added, for the most part
    Dependency("grow", "move"),
    Dependency("tail", "move"),  # a draft pass applies the moves that are owed to the drafter's cache
    Dependency("next_head", "move"),
    Dependency("move", "head", 1),
    Dependency("depth", "head", 1),
    Dependency("next_head", "head", 1),
    Dependency("emit", "emit", 1),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a schedule.

    lane:  index of the lane that runs it.
    lag:   iterations that it is behind the others of its round: 0, or for `emit` 1.
    after: stages of other lanes, of the same round, that it waits for.
    """

    name: str
    lane: int
    lag: int
    after: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.name not in STAGES:
            raise ValueError(f"unknown stage {self.name!r:.80}; known: {', '.join(STAGES)}")
        if self.lag not in ((0, 1) if self.name == "emit" else (0,)):
            raise ValueError(f"stage {self.name} lags by {self.lag} iterations; 0 is accepted, for emit 1 too")


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The stages of one iteration, those of a lane in the order it runs them. Raises ValueError for an unsound one.

    lanes:        cores of each lane; 0 for a thread of the host's alone. The lane of `emit` is the caller's thread.
    verify_width: W_v fixed with the depth beforehand (the fused mode); None cuts every tree by value (the split mode).
    """

    lanes: tuple[int, ...]
    verify_width: int | None
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        check_schedule(self)

    def lane_of(self, name: str) -> int:
        """Index of the lane that runs a stage."""
        return next(stage.lane for stage in self.stages if stage.name == name)

    def has(self, name: str) -> bool:
        """Whether the stage is part of it."""
        return any(stage.name == name for stage in self.stages)

    @property
    def looks_ahead(self) -> bool:
        """Whether anything is drafted ahead of time; drafts then go pass by pass, not through a fused graph."""
        return self.has("tail") or self.has("next_head")

    @property
    def mode(self) -> str:
        """ "split" or "fused"."""
        return "split" if self.verify_width is None else "fused"


def check_schedule(schedule: StageSchedule) -> None:
    """Prove that a schedule keeps every true dependency in every run, and ends. Raises ValueError saying what does not.

    In a round two stages are in order where one lane's order and the waits lead from one to the other; a round is over
    before the next begins. So a dependency holds where the later stage runs rounds later, or in the same one in order.
    """
    names = [stage.name for stage in schedule.stages]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"the schedule names a stage twice: {', '.join(repeated)}")
    missing = [name for name in STAGES if name not in names and name not in OPTIONAL]
    if missing:
        raise ValueError(f"the schedule lacks the stage {', '.join(missing)}")
    if not schedule.lanes or min(schedule.lanes) < 0:
        raise ValueError(f"lanes of {schedule.lanes} cores; at least one lane, and cores from 0 are accepted")
    if schedule.verify_width is not None and schedule.verify_width < 1:
        raise ValueError(f"verify_width={schedule.verify_width} must be at least 1")
    for stage in schedule.stages:
        if not 0 <= stage.lane < len(schedule.lanes):
            raise ValueError(f"stage {stage.name} is on lane {stage.lane}; there are {len(schedule.lanes)}")
        if stage.name in COMPILED and schedule.lanes[stage.lane] == 0:
            raise ValueError(f"stage {stage.name} runs a compiled step, but its lane has no cores")
        unknown = sorted(set(stage.after) - set(names))
        if unknown:
            raise ValueError(f"stage {stage.name} waits for {unknown!s:.80}, which the schedule does not have")
    idle = sorted(set(range(len(schedule.lanes))) - {stage.lane for stage in schedule.stages})
    if idle:
        raise ValueError(f"lane {idle[0]} has no stage")
    earlier = _earlier_stages(schedule)
    by_name = {stage.name: stage for stage in schedule.stages}
    for needed in DEPENDENCIES:
        if needed.before not in by_name or needed.after not in by_name:
            continue
        rounds = needed.iterations + by_name[needed.after].lag - by_name[needed.before].lag
        if rounds < 0 or (rounds == 0 and needed.before not in earlier[needed.after]):
            raise ValueError(f"stage {needed.after} may run before {needed.before}, whose outcome it needs")


def _earlier_stages(schedule: StageSchedule) -> dict[str, set[str]]:
    """By stage, those that certainly end before it begins in a round. Raises ValueError for waits in a circle."""
    waits_for = {stage.name: set(stage.after) for stage in schedule.stages}
    last: dict[int, str] = {}
    for stage in schedule.stages:
        if stage.lane in last:
            waits_for[stage.name].add(last[stage.lane])
        last[stage.lane] = stage.name
    earlier: dict[str, set[str]] = {}
    while len(earlier) < len(waits_for):
        ready = [name for name, needed in waits_for.items() if name not in earlier and needed <= earlier.keys()]
        if not ready:
            stuck = sorted(set(waits_for) - set(earlier))
            raise ValueError(f"stages wait for each other in a circle: {', '.join(stuck)}")
        for name in ready:
            earlier[name] = set().union(waits_for[name], *(earlier[before] for before in waits_for[name]))
    return earlier


def sequential_schedule(cores: int, depth: bool = False, ahead: Sequence[str] = ()) -> StageSchedule:
    """One stage after the other in the caller's thread: the schedule that is always possible.

    depth: whether a depth network chooses. ahead: of "tail" and "next_head", those to run too.
    """
    names = [name for name in STAGES if name not in OPTIONAL or name in ahead or (name == "depth" and depth)]
    return StageSchedule((cores,), None, tuple(Stage(name, 0, 0, ()) for name in names))


@dataclass(frozen=True, slots=True)
class Planned:
    """When a stage begins and ends in a round, in seconds from its start."""

    stage: Stage
    begins_s: float
    ends_s: float


def lay_out(schedule: StageSchedule, seconds: Mapping[str, float], handoff_s: float) -> tuple[Planned, ...]:
    """When each stage of a round runs, in the schedule's order.

    seconds:   by stage, on the cores that its lane has.
    handoff_s: what it takes a lane to see that another has come so far, at a round's start and end too.
    """
    caller = schedule.lane_of("emit")
    at = [0.0 if lane == caller else handoff_s for lane in range(len(schedule.lanes))]
    found: dict[str, Planned] = {}
    left = list(schedule.stages)
    while left:
        lanes_seen: set[int] = set()
        for stage in list(left):
            first_of_lane = stage.lane not in lanes_seen
            lanes_seen.add(stage.lane)
            if first_of_lane and all(name in found for name in stage.after):
                waits = [found[name].ends_s + handoff_s for name in stage.after if found[name].stage.lane != stage.lane]
                begins = max([at[stage.lane], *waits])
                at[stage.lane] = begins + seconds[stage.name]
                found[stage.name] = Planned(stage, begins, at[stage.lane])
                left.remove(stage)
                break
    return tuple(found[stage.name] for stage in schedule.stages)


def round_seconds(schedule: StageSchedule, seconds: Mapping[str, float], handoff_s: float) -> float:
    """Seconds of a round: until the last lane has ended, and the caller knows."""
    caller = schedule.lane_of("emit")
    ends = [
        planned.ends_s + (0.0 if planned.stage.lane == caller else handoff_s)
        for planned in lay_out(schedule, seconds, handoff_s)
    ]
    return max(ends)


def describe_schedule(schedule: StageSchedule) -> str:
    """One line: the lanes with their stages in order, and the mode."""
    lanes = []
    for lane, cores in enumerate(schedule.lanes):
        stages = " > ".join(
            stage.name
            + (" of the iteration before" if stage.lag else "")
            + (f" (after {', '.join(stage.after)})" if stage.after else "")
            for stage in schedule.stages
            if stage.lane == lane
        )
        where = f"{cores} core{'s' if cores > 1 else ''}" if cores else "another thread"
        lanes.append(f"on {where}: {stages}")
    return f"{schedule.mode}; {'; '.join(lanes)}"
