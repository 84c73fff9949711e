"""Curves between measured points."""

import pytest

from yggrt.latency import LatencyPoint, StepTimes


def verify(width: int, extent: int, seconds: float) -> LatencyPoint:
    return LatencyPoint("verify", width, 0, extent, seconds, 0.0)


def draft(width: int, depth: int, extent: int, seconds: float) -> LatencyPoint:
    return LatencyPoint("draft", width, depth, extent, seconds, 0.0)


def test_measured_points_come_back_though_the_curve_is_not_monotone():
    times = StepTimes([verify(1, 128, 17.0), verify(4, 128, 14.0), verify(8, 128, 18.0)])
    assert times.verify_s([1, 4, 8], 128).tolist() == [17.0, 14.0, 18.0]
    assert times.verify_s([2, 6], 128).tolist() == [16.0, 16.0]


def test_time_grows_with_the_extent_beyond_the_last_measured_one():
    times = StepTimes([verify(1, 128, 10.0), verify(1, 512, 14.0)])
    assert times.verify_s([1], 64)[0] == 10.0
    assert times.verify_s([1], 320)[0] == 12.0
    assert times.verify_s([1], 896)[0] == 18.0


def test_drafts_are_interpolated_over_their_depths():
    times = StepTimes([verify(1, 128, 10.0), draft(4, 1, 128, 1.0), draft(4, 2, 128, 2.0), draft(4, 4, 128, 4.5)])
    assert [times.draft_s(4, depth, 128) for depth in (0, 1, 2, 3, 4)] == [0.0, 1.0, 2.0, 3.25, 4.5]
    with pytest.raises(ValueError, match="no draft of width 8"):
        times.draft_s(8, 1, 128)


def test_curves_without_a_verify_step_are_refused():
    with pytest.raises(ValueError, match="no verify step"):
        StepTimes([draft(1, 1, 128, 1.0)])


@pytest.mark.parametrize("role, width, depth, extent", [("guess", 1, 0, 1), ("verify", 1, 1, 1), ("draft", 1, 0, 1)])
def test_impossible_points_are_refused(role, width, depth, extent):
    with pytest.raises(ValueError, match="role|depth"):
        LatencyPoint(role, width, depth, extent, 1.0, 0.0)
