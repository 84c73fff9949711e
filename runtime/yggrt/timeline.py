"""Iterations on a time line, as planned and as they ran: a picture for the terminal, and Chrome's trace format."""

from __future__ import annotations

from collections.abc import Sequence

from yggrt.lanes import Span
from yggrt.plan import ScheduleStudy
from yggrt.schedule import Planned, StageSchedule, lay_out

WIDTH = 60
"""Characters of a picture's time axis."""

PLANNED, MEASURED = 1, 2
"""Process numbers of a trace."""


def planned_round(schedule: StageSchedule, study: ScheduleStudy | None) -> tuple[Planned, ...]:
    """A round by the stages' measured times; nothing where none were measured."""
    return () if study is None else lay_out(schedule, study.seconds(schedule), study.handoff_s)


def measured_round(schedule: StageSchedule, spans: Sequence[Span]) -> tuple[Planned, ...]:
    """A round as it ran: the one of median length."""
    rounds: dict[int, list[Span]] = {}
    for span in spans:
        if span.round >= 0:
            rounds.setdefault(span.round, []).append(span)
    if not rounds:
        return ()
    by_length = sorted(rounds.values(), key=lambda own: max(s.ended for s in own) - min(s.started for s in own))
    own = {span.stage: span for span in by_length[len(by_length) // 2]}
    began = min(span.started for span in own.values())
    return tuple(
        Planned(stage, own[stage.name].started - began, own[stage.name].ended - began)
        for stage in schedule.stages
        if stage.name in own
    )


def draw_round(title: str, schedule: StageSchedule, planned: Sequence[Planned]) -> str:
    """A line a stage, lane by lane: a bar where it runs, and when, in milliseconds from the round's start."""
    over = max((each.ends_s for each in planned), default=0.0)
    lines = [f"{title}: {over * 1e3:.2f} ms an iteration" if planned else f"{title}: nothing was measured"]
    for lane, cores in enumerate(schedule.lanes):
        where = f"{cores} core{'s' if cores > 1 else ''}" if cores else "another thread"
        caller = ", the caller's thread" if lane == schedule.lane_of("emit") else ""
        own = [each for each in planned if each.stage.lane == lane]
        if own:
            lines.append(f"  lane {lane} ({where}{caller})")
        for each in own:
            first = round(each.begins_s / over * WIDTH) if over else 0
            last = max(first + 1, round(each.ends_s / over * WIDTH) if over else 0)
            bar = " " * min(first, WIDTH - 1) + "█" * (last - first)
            name = each.stage.name + (" (before)" if each.stage.lag else "")
            lines.append(f"    {name:<14}|{bar:<{WIDTH}}| {each.begins_s * 1e3:7.3f} to {each.ends_s * 1e3:7.3f}")
    return "\n".join(lines)


def chrome_trace(schedule: StageSchedule, study: ScheduleStudy | None, spans: Sequence[Span]) -> dict[str, object]:
    """Plain JSON data for chrome://tracing and Perfetto: what ran, and beside each round what was planned for it."""
    origin = min((span.started for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for process, name in ((PLANNED, "planned"), (MEASURED, "measured")):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        for lane, cores in enumerate(schedule.lanes):
            label = {"name": f"lane {lane}: {cores} cores" if cores else f"lane {lane}: a thread"}
            events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": lane, "args": label})

    def add(process: int, name: str, lane: int, round_: int, started: float, seconds: float) -> None:
        events.append(
            {
                "name": name,
                "cat": "stage",
                "ph": "X",
                "pid": process,
                "tid": lane,
                "ts": (started - origin) * 1e6,
                "dur": seconds * 1e6,
                "args": {"iteration": round_},
            }
        )

    began: dict[int, float] = {}
    for span in spans:
        add(MEASURED, span.stage, span.lane, span.round, span.started, span.ended - span.started)
        if span.round >= 0:
            began[span.round] = min(began.get(span.round, span.started), span.started)
    for round_, started in sorted(began.items()):
        for each in planned_round(schedule, study):
            seconds = each.ends_s - each.begins_s
            add(PLANNED, each.stage.name, each.stage.lane, round_, started + each.begins_s, seconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
