"""The executor of stage schedules: runs each lane's stages in its own thread, with no waits but the planned ones.

The caller's thread runs the lane of `emit`; every other lane has a thread and, where it has cores, a set of them.
Invariant: between rounds no thread runs a stage or holds anything of a request, whatever ended the last round.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import torch

from yggrt.schedule import Stage, StageSchedule

RunStage = Callable[[Stage], None]

OMP_PAUSE_HARD = 2
"""`omp_pause_hard` of OpenMP 5.0."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stage that ran: its lane and round, and when, by `time.perf_counter`."""

    stage: str
    lane: int
    round: int
    started: float
    ended: float


class LaneExecutor:
    """Runs the rounds of one schedule.

    seconds: by stage, spent in it so far; `reset` begins anew.
    rounds:  seconds of each round so far, without what the caller took between pieces of text.
    spans:   None; a list takes every stage that runs from then on.
    """

    def __init__(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self.seconds = {stage.name: 0.0 for stage in schedule.stages}
        self.rounds: list[float] = []
        self.spans: list[Span] | None = None
        self._lanes = [
            [stage for stage in schedule.stages if stage.lane == lane] for lane in range(len(schedule.lanes))
        ]
        self._caller = schedule.lane_of("emit")
        lane_of = {stage.name: stage.lane for stage in schedule.stages}
        waited_for = {name for stage in schedule.stages for name in stage.after if lane_of[name] != stage.lane}
        self._done = {name: threading.Event() for name in waited_for}
        self._failure: BaseException | None = None  # of another lane
        self._stopped = False
        self._others = [lane for lane in range(len(schedule.lanes)) if lane != self._caller]
        self._inboxes: list[SimpleQueue[Callable[[], float] | None]] = []  # of the other lanes, in their order
        self._workers: list[threading.Thread] = []
        self._ended: SimpleQueue[float] = SimpleQueue()
        self._num_running = 0

    @property
    def cores(self) -> int:
        """Cores of the caller's lane."""
        return self.schedule.lanes[self._caller]

    def reset(self) -> None:
        """A new request: counts begin at 0."""
        self._wait_for_lanes()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.rounds = []

    def close(self) -> None:
        """End the other lanes' threads now. The pools of threads that their steps had end with them."""
        self._wait_for_lanes()
        for inbox in self._inboxes:
            inbox.put(None)
        for worker in self._workers:
            worker.join()
        self._inboxes, self._workers = [], []

    def on_lane(self, name: str, cores: int, work: Callable[[], None]) -> None:
        """Do something in the lane of a stage with so many cores, and wait for it.

        A thread that calls compiled steps keeps a pool of threads for them, and where all pools together are larger
        than the machine their threads sleep between loops, which costs more than a step. So each lane's steps belong to
        one thread, and the caller's gives up its pool where its lane has none.
        """
        lane = self.schedule.lane_of(name)
        self._wait_for_lanes()
        self._failure, self._stopped = None, False
        if lane == self._caller:
            work()
            return
        if self.schedule.lanes[self._caller] == 0:
            _give_up_pool()
        self._hire()
        self._num_running += 1
        own = self.schedule.lanes[lane]
        self._inboxes[self._others.index(lane)].put(partial(self._guarded, partial(_with_cores, cores, own, work)))
        self._wait_for_lanes()
        self._raise_failure()

    def round(self, run: RunStage) -> Iterator[None]:
        """One round; yields once, when `emit` has run. Closing it there, or a stage that raises, ends the round.

        run: runs a stage; called from several threads, for stages that do not depend on each other.
        """
        self._wait_for_lanes()
        for event in self._done.values():
            event.clear()
        self._failure, self._stopped = None, False
        paused_s, started = 0.0, perf_counter()
        ended, last = started, started
        try:
            self._start_lanes(run)
            for stage in self._lanes[self._caller]:
                self._run_stage(stage, run)
                ended = perf_counter() - paused_s
                if stage.name == "emit" and not self._stopped:
                    paused = perf_counter()
                    yield
                    paused_s += perf_counter() - paused
        except BaseException:
            self._stop()
            raise
        finally:
            last = max(last, self._wait_for_lanes())
            self.rounds.append(max(ended, last) - started)
        self._raise_failure()

    def _raise_failure(self) -> None:
        """What another lane failed with."""
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    def _guarded(self, work: Callable[[], None]) -> float:
        """Work of another lane; returns when it ended."""
        try:
            work()
        except BaseException as error:
            self._failure = error
            self._stop()
        return perf_counter()

    def _run_lane(self, lane: int, run: RunStage) -> None:
        for stage in self._lanes[lane]:
            self._run_stage(stage, run)

    def _run_stage(self, stage: Stage, run: RunStage) -> None:
        for name in stage.after:
            if name in self._done:
                self._done[name].wait()
        if self._stopped:
            return
        started = perf_counter()
        run(stage)
        ended = perf_counter()
        self.seconds[stage.name] += ended - started
        if self.spans is not None:
            self.spans.append(Span(stage.name, stage.lane, len(self.rounds), started, ended))
        if stage.name in self._done:
            self._done[stage.name].set()

    def _stop(self) -> None:
        """End the round: nobody begins another stage, nobody waits."""
        self._stopped = True
        for event in self._done.values():
            event.set()

    def _start_lanes(self, run: RunStage) -> None:
        self._hire()
        for lane, inbox in zip(self._others, self._inboxes, strict=True):
            self._num_running += 1
            inbox.put(partial(self._guarded, partial(self._run_lane, lane, run)))

    def _wait_for_lanes(self) -> float:
        """Until no lane runs a stage. Returns when the last one ended."""
        last = 0.0
        while self._num_running:
            last = max(last, self._ended.get())
            self._num_running -= 1
        return last

    def _hire(self) -> None:
        """Start the other lanes' threads. They hold nothing of this executor between rounds and end with it."""
        if len(self._inboxes) == len(self._others):
            return
        usable = sorted(os.sched_getaffinity(0))
        shares_cores = sum(self.schedule.lanes) <= len(usable) and sum(1 for cores in self.schedule.lanes if cores) > 1
        taken = 0
        for lane in self._others:
            cores = self.schedule.lanes[lane]
            aside = shares_cores and cores and lane != self.schedule.lane_of("verify")
            own = usable[len(usable) - taken - cores : len(usable) - taken] if aside else []
            taken += len(own)
            inbox: SimpleQueue[Callable[[], float] | None] = SimpleQueue()
            worker = threading.Thread(
                target=_work, args=(inbox, self._ended, cores, own), name=f"yggrt lane {lane}", daemon=True
            )
            worker.start()
            self._ended.get()  # it has set what it needs to set
            self._inboxes.append(inbox)
            self._workers.append(worker)
            weakref.finalize(self, inbox.put, None)
        torch.set_num_threads(torch.get_num_threads())  # for threads of the caller's that are yet to begin


def _with_cores(cores: int, afterwards: int, work: Callable[[], None]) -> None:
    torch.set_num_threads(cores)
    try:
        work()
    finally:
        torch.set_num_threads(afterwards)


def _give_up_pool() -> None:
    """End the pool of threads that this thread's parallel loops left; its next loop makes another."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_HARD)


def _work(
    inbox: SimpleQueue[Callable[[], float] | None], ended: SimpleQueue[float], cores: int, own: list[int]
) -> None:
    """A lane's thread: runs what it is given. own: cores to stay on, which the threads of its steps inherit."""
    if own:
        os.sched_setaffinity(0, own)
    if cores:
        torch.set_num_threads(cores)  # of steps that this thread calls
    ended.put(perf_counter())
    while (task := inbox.get()) is not None:
        at = task()
        del task
        ended.put(at)
