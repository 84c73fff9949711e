"""The executor of schedules: as planned in time, and free again whatever ended a round."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from tests.yggrt.test_schedule import overlapped
from yggrt.lanes import LaneExecutor
from yggrt.schedule import Stage, StageSchedule, lay_out, round_seconds, sequential_schedule

OVERLAPPED = overlapped()


def rounds(executor: LaneExecutor, run: Callable[[Stage], None], count: int = 1) -> None:
    for _ in range(count):
        list(executor.round(run))


def test_stages_run_once_a_round_in_the_threads_of_their_lanes():
    executor = LaneExecutor(OVERLAPPED)
    ran: list[tuple[str, str]] = []
    rounds(executor, lambda stage: ran.append((stage.name, threading.current_thread().name)), 3)
    for stage in OVERLAPPED.stages:
        threads = {thread for name, thread in ran if name == stage.name}
        assert len([name for name, _ in ran if name == stage.name]) == 3 and len(threads) == 1
        assert (threads == {threading.current_thread().name}) == (stage.lane == OVERLAPPED.lane_of("emit"))
    assert len(executor.rounds) == 3


def test_waits_hold_under_any_delay():
    executor = LaneExecutor(OVERLAPPED)
    ended: dict[str, float] = {}
    began: dict[str, float] = {}

    def run(stage: Stage) -> None:
        began[stage.name] = time.perf_counter()
        time.sleep(hash((stage.name, len(ended))) % 4 / 1000)
        ended[stage.name] = time.perf_counter()

    for _ in range(20):
        rounds(executor, run)
        for stage in OVERLAPPED.stages:
            for before in stage.after:
                assert ended[before] <= began[stage.name]
        ended.clear()


def behind(name: str) -> set[str]:
    """Stages of OVERLAPPED that cannot begin before a stage has ended: after it in its lane, or waiting for it."""
    found: set[str] = set()
    while True:
        held = {name, *found}
        lanes = {stage.lane: [each.name for each in OVERLAPPED.stages if each.lane == stage.lane]
                 for stage in OVERLAPPED.stages}  # fmt: skip
        more = {stage.name for stage in OVERLAPPED.stages if held & set(stage.after)}
        more |= {late for lane in lanes.values() for place, late in enumerate(lane) if held & set(lane[:place])}
        if more <= found:
            return found
        found |= more


@pytest.mark.parametrize("failing", [stage.name for stage in OVERLAPPED.stages])
def test_a_stage_that_fails_ends_the_round_and_nothing_else(failing):
    executor = LaneExecutor(OVERLAPPED)
    began: list[str] = []

    def run(stage: Stage) -> None:
        began.append(stage.name)
        if stage.name == failing:
            raise OSError(f"{stage.name} broke")

    with pytest.raises(OSError, match=f"{failing} broke"):
        rounds(executor, run)
    assert not set(began) & behind(failing)
    began.clear()
    failing = "nothing"
    rounds(executor, run, 2)
    assert sorted(began) == sorted(2 * [stage.name for stage in OVERLAPPED.stages])


def test_a_round_given_up_between_pieces_leaves_no_stage_running():
    executor = LaneExecutor(OVERLAPPED)
    running: set[str] = set()

    def run(stage: Stage) -> None:
        running.add(stage.name)
        time.sleep(0.01)
        running.discard(stage.name)

    for _ in range(3):
        given_up = executor.round(run)
        next(given_up)  # `emit` has run; others are at work
        given_up.close()
        assert not running
    rounds(executor, run)


def test_what_the_caller_takes_between_pieces_is_not_counted():
    for schedule in (sequential_schedule(1), OVERLAPPED):
        executor = LaneExecutor(schedule)
        rounds(executor, lambda stage: None)  # starts the lanes
        for _ in executor.round(lambda stage: time.sleep(0.005) if stage.name == "verify" else None):
            time.sleep(0.05)
        assert 0.005 <= executor.rounds[-1] < 0.045


def test_threads_end_with_the_executor_and_hold_nothing_of_it():
    executor = LaneExecutor(OVERLAPPED)
    rounds(executor, lambda stage: None)
    workers = [thread for thread in executor._workers if thread.is_alive()]
    assert len(workers) == 2
    gc.disable()
    try:
        gone = weakref.ref(executor)
        del executor
        assert gone() is None
    finally:
        gc.enable()
    for thread in workers:
        thread.join(5)
        assert not thread.is_alive()


def test_sequential_rounds_start_no_thread():
    executor = LaneExecutor(sequential_schedule(1, depth=True, ahead=("tail", "next_head")))
    ran: set[int] = set()
    rounds(executor, lambda stage: ran.add(threading.get_ident()))
    assert executor._workers == [] and ran == {threading.get_ident()}


def test_spans_tell_what_ran_where_and_when():
    executor = LaneExecutor(OVERLAPPED)
    executor.spans = []
    rounds(executor, lambda stage: time.sleep(0.001), 2)
    assert sorted((span.stage, span.lane, span.round) for span in executor.spans) == sorted(
        (stage.name, stage.lane, number) for stage in OVERLAPPED.stages for number in range(2)
    )
    for span in executor.spans:
        assert span.ended - span.started >= 0.001
    by_lane = sorted((span.lane, span.started, span.ended) for span in executor.spans)
    for (lane, _, ended), (other, started, _) in zip(by_lane, by_lane[1:], strict=False):
        assert lane != other or ended <= started


def test_stages_of_known_length_take_what_was_predicted():
    """Waits of 5 ms and more, laid beside each other, end when the layout says."""
    seconds = {"head": 0.005, "grow": 0.005, "tail": 0.02, "prune": 0.0, "verify": 0.03, "accept": 0.0, "depth": 0.005,
               "next_head": 0.01, "move": 0.0, "emit": 0.02}  # fmt: skip
    for schedule in (OVERLAPPED, sequential_schedule(1, depth=True, ahead=("tail", "next_head"))):
        executor = LaneExecutor(schedule)
        rounds(executor, lambda stage: None)
        rounds(executor, lambda stage: time.sleep(seconds[stage.name]), 7)
        taken = executor.rounds[1:]
        predicted = round_seconds(schedule, seconds, 0.0)
        assert predicted <= min(taken) < 1.05 * predicted + 0.002
        executor.spans = []
        rounds(executor, lambda stage: time.sleep(seconds[stage.name]))
        planned = {each.stage.name: each.begins_s for each in lay_out(schedule, seconds, 0.0)}
        started = min(span.started for span in executor.spans)
        for span in executor.spans:
            assert span.started - started >= planned[span.stage] - 1e-4


def test_a_schedule_with_a_host_lane_alone_has_no_cores_of_its_own():
    stages = tuple(Stage(name, 0, 0, ()) for name in ("head", "grow", "prune", "verify", "accept", "move"))
    executor = LaneExecutor(StageSchedule((2, 0), None, (*stages, Stage("emit", 1, 1, ()))))
    assert executor.cores == 0
    rounds(executor, lambda stage: None)
