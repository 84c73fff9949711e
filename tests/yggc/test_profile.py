"""Timing: warm-up, medians, unfinished work, busy machines."""

from __future__ import annotations

from statistics import median
from time import sleep

import pytest

from tests import toy
from yggc import profile
from yggc.export import fused_draft
from yggc.profile import (
    Alternatives,
    LatencyProfile,
    Timing,
    fastest,
    look_again,
    measure_steps,
    measure_until_steady,
    plain_width,
    time_in_turns,
    wait_until_idle,
    with_fused,
)
from yggrt.artifacts import Step
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import DraftGraph, HostSeconds
from yggrt.tree import TreeShape

STEP_S = 0.01


class HeldClock:
    """Time that passes only where a step says so; in place of the profile's own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.unfinished = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds

    def leave_running(self, seconds: float) -> None:
        """Work that goes on in a device after the call returned."""
        self.now += 1e-5
        self.unfinished = seconds

    def synchronize(self) -> None:
        self.now, self.unfinished = self.now + self.unfinished, 0.0


@pytest.fixture
def clock(monkeypatch) -> HeldClock:
    held = HeldClock()
    monkeypatch.setattr(profile, "perf_counter", held)
    return held


@pytest.mark.field(30)
def test_slow_first_calls_do_not_move_an_estimate(clock):
    calls = iter(range(1000))
    timed = time_in_turns({"step": lambda: clock.work(0.1 if next(calls) < 2 else STEP_S)}, repeats=3)
    assert timed["step"].seconds == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.field(30)
def test_some_delayed_calls_do_not_move_an_estimate(clock):
    calls = iter(range(1000))
    timed = time_in_turns({"step": lambda: clock.work(STEP_S * (4 if next(calls) % 5 == 3 else 1))})
    assert timed["step"].seconds == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.field(30)
def test_work_that_goes_on_after_a_call_returned_is_measured(clock):
    timed = time_in_turns({"step": lambda: clock.leave_running(5 * STEP_S)}, synchronize=clock.synchronize)
    assert timed["step"].seconds == pytest.approx(5 * STEP_S, rel=0.05)


def test_only_what_counts_is_a_steps_time(verifier):
    """The host's share of an iteration is measured apart; in a step's time too it would count twice."""
    engine = toy.make_engine(verifier, verifier, TreeShape(4, 2, 9), max_context=160)
    decoder = engine.decoder
    slow = {name: decoder.stages[name] for name in ("prune", "accept")}
    waited = 0.01

    def waiting(name: str):
        def stage(iteration) -> None:
            sleep(waited)
            slow[name](iteration)

        return stage

    decoder.stages = {**decoder.stages, **{name: waiting(name) for name in slow}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "time_in_turns", lambda runs, _repeats, **more: time_in_turns(runs, 1, **more))
        patch.setattr(profile, "HOST_REPEATS", 1)
        found = measure_steps(engine)
    seconds = [point.seconds for point in found.points if point.role == "verify"]
    assert median(seconds) < waited, "each would be twice that; some are, where something else runs beside"
    assert found.host.speculative_s > waited and found.host.plain_s > waited


@pytest.mark.field(30)
def test_what_others_left_running_is_not_charged_to_the_next_step(clock):
    timed = time_in_turns(
        {"step": lambda: clock.work(STEP_S)}, synchronize=clock.synchronize, before=lambda: clock.leave_running(1.0)
    )
    assert timed["step"].seconds == pytest.approx(STEP_S, rel=0.05)


def profile_of(*shares: float) -> LatencyProfile:
    """Steps of a second whose quartiles lie so far apart."""
    points = tuple(LatencyPoint("verify", 1 + width, 0, 128, 1.0, share) for width, share in enumerate(shares))
    return LatencyProfile(points, HostSeconds(0.0, 0.0), ())


def test_times_that_waver_are_taken_again_and_the_steadiest_are_kept():
    said: list[str] = []
    wavering, better, steady = profile_of(0.01, 0.5, 0.6), profile_of(0.2, 0.2, 0.2), profile_of(0.01, 0.02, 0.6)
    runs = iter((wavering, better, steady))
    assert measure_until_steady(lambda: next(runs), said.append) == (steady, None)
    assert said == [f"  the machine is unsteady (times waver by {share}); measuring again" for share in ("50%", "20%")]
    runs = iter((better, wavering, wavering))
    kept, notice = measure_until_steady(lambda: next(runs), said.append, attempts=3)
    assert kept == better and notice is not None and "unsteady machine (times waver by 20%)" in notice
    assert measure_until_steady(lambda: steady, lambda text: pytest.fail(text)) == (steady, None)


def test_a_machine_that_was_slow_for_a_while_is_looked_at_again():
    """Slower by a third and steadily so while some steps were timed: no spread tells."""

    def look(*seconds: float, host: float = 0.2) -> LatencyProfile:
        points = tuple(LatencyPoint("verify", 1 + width, 0, 128, each, 0.01) for width, each in enumerate(seconds))
        return LatencyProfile(points, HostSeconds(host, 2 * host), points[:1])

    slow, calm, later = look(1.0, 1.4, 1.5), look(1.02, 1.05, 1.1, host=0.1), look(1.01, 1.06, 1.12)
    said: list[str] = []
    runs = iter((calm, later))
    found = look_again(slow, lambda: next(runs), said.append)
    assert [point.seconds for point in found.points] == [1.01, 1.06, 1.12]  # the slow one is outvoted
    assert found.host == HostSeconds(0.2, 0.4) and found.whole_head == found.points[:1]
    assert said == ["  the machine has changed since steps were timed (times differ by 25%); measuring again"]
    runs = iter((later,))
    found = look_again(calm, lambda: next(runs), lambda text: pytest.fail(text))
    assert [point.seconds for point in found.points] == pytest.approx([1.015, 1.055, 1.11])
    runs = iter((calm, slow, calm))
    look_again(slow, lambda: next(runs), said.append, attempts=3)
    assert next(runs) == calm and len(said) == 2  # three looks at most


def test_a_busy_machine_is_waited_for_and_told_of():
    said: list[str] = []
    shares = iter([0.9, 0.8, 0.02])
    assert wait_until_idle(said.append, lambda: next(shares)) is None
    assert len(said) == 1 and "90% of its cores" in said[0]
    notice = wait_until_idle(said.append, lambda: 0.5, limit_s=0.0)
    assert notice is not None and "50% of its cores" in notice
    assert wait_until_idle(lambda text: pytest.fail(text), lambda: 0.01) is None


def test_plain_decoding_uses_a_wider_step_only_where_it_is_faster_beyond_the_spread():
    def curve(*seconds: float) -> list[LatencyPoint]:
        return [LatencyPoint("verify", 1 + index, 0, 128, each, 0.1) for index, each in enumerate(seconds)]

    assert plain_width(curve(10.0, 9.9, 12.0)) == 1
    assert plain_width(curve(10.0, 9.0, 12.0)) == 2


def test_points_of_fused_drafts_are_those_that_run():
    points = [LatencyPoint("verify", 1, 0, 128, 9.0, 0.0)]
    points += [LatencyPoint("draft", 4, 2, 128, 2.0, 0.0), LatencyPoint("draft", 8, 2, 128, 3.0, 0.0)]
    found = with_fused(points, [DraftGraph(2, True, 4.0, 3.0)], 4)
    assert {(point.width, point.depth): point.seconds for point in found} == {(1, 0): 9.0, (4, 2): 1.5, (8, 2): 3.0}
    points.append(LatencyPoint("draft", 4, 4, 128, 4.0, 0.0))
    deeper = StepTimes(with_fused(points, [DraftGraph(3, True, 4.0, 2.0)], 4))
    assert [deeper.draft_s(4, depth, 128) for depth in (2, 3, 4)] == [2.0, 1.5, 4.0]
    assert with_fused(points, [DraftGraph(2, False, 4.0, 5.0)], 4) == tuple(points)


def test_every_width_and_depth_that_fits_is_timed_and_the_engine_left_as_it_was(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(4, 2, 9), max_context=160)
    measured = measure_steps(engine)
    times = StepTimes(measured.points)
    assert times.verify_widths == [1, 2, 3, 4, 6, 8]
    drafts = {(point.width, point.depth) for point in measured.points if point.role == "draft"}
    assert drafts == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)}
    assert measured.host.plain_s > 0 and measured.host.speculative_s > 0
    assert engine.shape == TreeShape(4, 2, 9) and engine.decoder.plain_width == 1 and engine.pace is None


def test_no_step_is_timed_at_a_position_that_a_model_does_not_have(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 2, 3), max_context=100, drafter_context=48)
    decoder = engine.decoder
    last = {"verify": 0, "draft": 0}
    for name in last:
        step = getattr(decoder, name)

        def watched(*inputs, run=step._run, name=name):
            last[name] = max(last[name], int(inputs[0][1].max()))
            return run(*inputs)

        step._run = watched
    measure_steps(engine)
    assert 64 <= last["verify"] < 100 and 16 <= last["draft"] < 48


@pytest.mark.parametrize("role", ["verify.w2", "draft.d3"])
def test_the_same_step_compiled_in_several_ways_is_timed_in_turns(verifier, role):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 3, 4))
    decoder = engine.decoder
    verify, draft = toy.make_steps(verifier, verifier, decoder.draft.limits)
    module = verify if role.startswith("verify") else fused_draft(draft, 2, 3)
    run_module = toy.eager_run(module)
    order = []

    def made(name: str, seconds: float, error: float) -> Step:
        def run(arguments):
            order.append(name)
            sleep(seconds)
            outputs = run_module(arguments)
            if role.startswith("verify"):
                outputs[3] = outputs[3] * (1 + error)
            return outputs

        return Step(role, run, module.inputs, module.limits)

    before = dict(decoder.by_width), dict(decoder.fused)
    steps = {"default": made("default", 0.02, 0.0), "other": made("other", 0.0, 0.3)}
    beside = Alternatives(engine, role, steps)
    found = beside.time()
    assert order[:4] == ["default", "other"] * 2 and order.count("default") == order.count("other")
    assert found["default"].seconds > 0.02 and fastest(found) == "other"
    off = {"default": 0.0, "other": pytest.approx(0.3, rel=1e-3)}
    assert beside.deviations() == (off if role.startswith("verify") else {})
    assert (decoder.by_width, decoder.fused) == before


def test_other_compile_options_are_taken_where_they_are_faster_beyond_doubt():
    def chosen(*seconds_and_spreads: tuple[float, float]) -> str:
        names = ("default", "max-autotune", "coordinate-descent")
        return fastest({name: Timing(*each) for name, each in zip(names, seconds_and_spreads, strict=False)})

    assert chosen((1.0, 0.01), (0.95, 0.01), (0.9, 0.01)) == "coordinate-descent"
    assert chosen((1.0, 0.01), (0.99, 0.0), (1.1, 0.01)) == "default"  # 2 % is asked for
    assert chosen((1.0, 0.06), (0.9, 0.06), (1.0, 0.0)) == "default"  # the times waver by more
    assert chosen((1.0, 0.0)) == "default"
