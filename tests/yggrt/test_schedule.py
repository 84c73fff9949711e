"""Stage schedules: what keeps the true dependencies is accepted, nothing else, and laid out as it will run."""

from __future__ import annotations

import itertools
import random

import pytest

from yggrt.schedule import (
    DEPENDENCIES,
    OPTIONAL,
    STAGES,
    Stage,
    StageSchedule,
    describe_schedule,
    lay_out,
    round_seconds,
    sequential_schedule,
)

CHAIN = ("head", "grow", "prune", "verify", "accept", "move")


def overlapped() -> StageSchedule:
    """Everything at once: drafts ahead of time on a core of their own, text and depth in the caller's thread."""
    chain = tuple(Stage(name, 0, 0, ("next_head",) if name == "move" else ()) for name in CHAIN)
    ahead = (Stage("tail", 1, 0, ("grow",)), Stage("next_head", 1, 0, ("prune",)))
    return StageSchedule((1, 1, 0), None, (*chain, *ahead, Stage("emit", 2, 1, ()), Stage("depth", 2, 0, ("verify",))))


def in_one_lane(names: tuple[str, ...], lag: int = 0) -> StageSchedule:
    return StageSchedule((1,), None, tuple(Stage(name, 0, lag if name == "emit" else 0, ()) for name in names))


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("ahead", [(), ("tail",), ("next_head",), ("tail", "next_head")])
def test_one_stage_after_the_other_is_sound(depth, ahead):
    names = [stage.name for stage in sequential_schedule(2, depth, ahead).stages]
    assert names == [name for name in STAGES if name not in OPTIONAL or name in ahead or (name == "depth" and depth)]


def test_every_order_in_one_lane_is_judged_by_the_dependencies():
    """All orders of all stages but the first three, which cannot be anywhere else."""
    rest = tuple(name for name in STAGES if name not in ("head", "grow", "prune"))
    judged = {True: 0, False: 0}
    for order in itertools.permutations(rest):
        names = ("head", "grow", "prune", *order)
        place = {name: index for index, name in enumerate(names)}
        sound = all(place[each.before] < place[each.after] for each in DEPENDENCIES if each.iterations == 0)
        judged[sound] += 1
        if sound:
            in_one_lane(names)
        else:
            with pytest.raises(ValueError, match="may run before"):
                in_one_lane(names)
    assert min(judged.values()) > 20


def run_by_chance(schedule: StageSchedule, chance: random.Random, rounds: int = 3) -> list[tuple[str, int]]:
    """A run of the schedule in which lanes take turns at random: (stage, iteration), in order."""
    lanes = [[stage for stage in schedule.stages if stage.lane == lane] for lane in range(len(schedule.lanes))]
    ran = []
    for number in range(rounds):
        left, done = [list(lane) for lane in lanes], set()
        while any(left):
            ready = [lane for lane in left if lane and set(lane[0].after) <= done]
            stage = chance.choice(ready).pop(0)
            done.add(stage.name)
            ran.append((stage.name, number - stage.lag))
    return ran


def test_what_is_accepted_keeps_every_dependency_however_lanes_take_turns_and_what_breaks_one_is_refused():
    chance = random.Random(0)
    names = list(STAGES)
    sound = unsound = 0
    for _ in range(4000):
        lanes = {name: chance.choice((0, 0, 0, 1)) for name in names}
        order = sorted(names, key=lambda name: STAGES.index(name) + chance.choice((0.0, 0.0, -2.5, 2.5)))
        stages = []
        for name in order:
            needed = [each.before for each in DEPENDENCIES if each.after == name and each.iterations == 0]
            waits = tuple(other for other in needed if chance.random() < 0.9)
            stages.append(Stage(name, lanes[name], chance.choice((0, 1)) if name == "emit" else 0, waits))
        try:
            schedule = StageSchedule((1, 1) if 1 in lanes.values() else (1,), None, tuple(stages))
        except ValueError as refusal:
            assert "may run before" in str(refusal) or "in a circle" in str(refusal) or "no stage" in str(refusal)
            unsound += 1
            continue
        sound += 1
        for _ in range(8):
            ran = run_by_chance(schedule, chance)
            place = {what: index for index, what in enumerate(ran)}
            for each in DEPENDENCIES:
                for iteration in range(3):
                    before, after = (each.before, iteration - each.iterations), (each.after, iteration)
                    if before in place and after in place:
                        assert place[before] < place[after], (schedule, each)
    assert sound > 100 and unsound > 1000


@pytest.mark.field(31)
def test_stages_that_wait_for_each_other_are_refused():
    stages = [Stage(name, 0, 0, ("next_head",) if name == "grow" else ()) for name in (*CHAIN, "emit")]
    with pytest.raises(ValueError, match="in a circle: .*next_head"):
        StageSchedule((1, 1), None, (*stages, Stage("next_head", 1, 0, ("prune",))))


def test_a_schedule_that_drafts_ahead_must_end_that_before_rows_are_moved():
    stages = overlapped().stages
    loose = tuple(Stage(s.name, s.lane, s.lag, () if s.name == "move" else s.after) for s in stages)
    with pytest.raises(ValueError, match="stage move may run before tail, whose outcome it needs"):
        StageSchedule((1, 1, 0), None, loose)


def test_stages_are_laid_out_as_their_lanes_and_waits_let_them():
    seconds = {"head": 2, "grow": 1, "tail": 3, "prune": 1, "verify": 4, "accept": 1, "depth": 1, "next_head": 1,
               "move": 1, "emit": 2}  # fmt: skip
    times = {name: float(value) for name, value in seconds.items()}
    planned = {each.stage.name: (each.begins_s, each.ends_s) for each in lay_out(overlapped(), times, 0.5)}
    assert planned == {
        "head": (0.5, 2.5), "grow": (2.5, 3.5), "prune": (3.5, 4.5), "verify": (4.5, 8.5), "accept": (8.5, 9.5),
        "tail": (4.0, 7.0), "next_head": (7.0, 8.0), "move": (9.5, 10.5), "emit": (0.0, 2.0), "depth": (9.0, 10.0),
    }  # fmt: skip
    assert round_seconds(overlapped(), times, 0.5) == 11.0
    alone = sequential_schedule(1, depth=True, ahead=("tail", "next_head"))
    assert round_seconds(alone, times, 0.5) == sum(seconds.values())


def test_a_schedule_is_described_in_a_line():
    assert describe_schedule(sequential_schedule(2)) == (
        "split; on 2 cores: head > grow > prune > verify > accept > move > emit"
    )
    assert describe_schedule(overlapped()) == (
        "split; on 1 core: head > grow > prune > verify > accept > move (after next_head); "
        "on 1 core: tail (after grow) > next_head (after prune); "
        "on another thread: emit of the iteration before > depth (after verify)"
    )
