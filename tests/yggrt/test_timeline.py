"""Time lines: the layout that is planned, the round that ran, and a trace that Chrome can read."""

from __future__ import annotations

import json

from tests.yggrt.test_plan import sample_study
from tests.yggrt.test_schedule import overlapped
from yggrt.lanes import Span
from yggrt.schedule import sequential_schedule
from yggrt.timeline import MEASURED, PLANNED, chrome_trace, draw_round, measured_round, planned_round

PLAIN = sequential_schedule(1)


def spans_of(*lengths: float) -> list[Span]:
    """Rounds of PLAIN in which every stage takes so long."""
    spans, at = [Span("prefill", 0, -1, 0.0, 100.0)], 100.0
    for number, length in enumerate(lengths):
        for stage in PLAIN.stages:
            spans.append(Span(stage.name, 0, number, at, at + length))
            at += length
    return spans


def test_the_measured_round_is_the_one_of_median_length():
    found = measured_round(PLAIN, spans_of(0.3, 0.1, 0.2))
    assert [each.stage.name for each in found] == [stage.name for stage in PLAIN.stages]
    assert abs(found[-1].ends_s - 0.2 * len(PLAIN.stages)) < 1e-9 and abs(found[0].begins_s) < 1e-9
    assert measured_round(PLAIN, []) == () == planned_round(PLAIN, None)


def test_a_picture_has_a_bar_for_every_stage_where_it_runs():
    schedule = overlapped()
    planned = planned_round(schedule, sample_study())
    lines = draw_round("planned", schedule, planned).splitlines()
    assert lines[0] == "planned: 4.17 ms an iteration"
    rows = {line.split()[0]: line for line in lines if "|" in line}
    assert set(rows) == {stage.name for stage in schedule.stages}
    assert all("█" in row and len(row) == len(rows["head"]) for row in rows.values())
    assert rows["head"].index("█") < rows["verify"].index("█")
    assert "emit (before)" in rows["emit"] and "lane 2 (another thread, the caller's thread)" in "\n".join(lines)
    assert draw_round("measured", schedule, ()) == "measured: nothing was measured"


def test_a_trace_holds_what_ran_and_beside_it_what_was_planned():
    trace = json.loads(json.dumps(chrome_trace(overlapped(), sample_study(), spans_of(0.1, 0.1))))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    measured = [event for event in events if event["pid"] == MEASURED]
    planned = [event for event in events if event["pid"] == PLANNED]
    assert len(measured) == 1 + 2 * len(PLAIN.stages) and len(planned) == 2 * len(overlapped().stages)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert min(event["ts"] for event in planned) >= 100e6 - 1
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"planned", "measured"} < names
