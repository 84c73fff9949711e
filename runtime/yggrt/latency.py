"""Seconds per step as a build measured them, between the measured points too.

Times are linear between neighbouring points and nothing more is assumed: a wider step may well be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROLES = ("verify", "draft")


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """A measured step: median seconds, and half the distance between the quartiles.

    role:   "verify", or "draft" for a whole draft.
    width:  rows of the step; W_d, nodes added by each pass of a draft.
    depth:  passes of a draft, 0 for verify.
    extent: KV rows read.
    """

    role: str
    width: int
    depth: int
    extent: int
    seconds: float
    spread_s: float

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r:.80}; known: {', '.join(ROLES)}")
        if self.width < 1 or self.extent < 1 or self.depth < 0 or (self.depth == 0) != (self.role == "verify"):
            raise ValueError(f"{self.role} at width {self.width}, depth {self.depth}, extent {self.extent}")
        if self.seconds <= 0 or self.spread_s < 0:
            raise ValueError(f"latency of {self.seconds} s, spread {self.spread_s} s")


class StepTimes:
    """The curves of one plan or profile. Raises ValueError when the points hold no `verify`."""

    def __init__(self, points: Sequence[LatencyPoint]) -> None:
        self._lines: dict[tuple[str, int, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._verify: dict[int, list[float]] = {}  # by extent: seconds of every measured width
        by_step: dict[tuple[str, int, int], dict[int, float]] = {}
        for point in points:
            by_step.setdefault((point.role, point.width, point.depth), {})[point.extent] = point.seconds
        for step, seconds in by_step.items():
            extents = sorted(seconds)
            self._lines[step] = (np.array(extents, float), np.array([seconds[extent] for extent in extents]))
        self.verify_widths = sorted(width for role, width, _ in self._lines if role == "verify")
        if not self.verify_widths:
            raise ValueError("the curves hold no verify step")

    def verify_s(self, widths: Sequence[int], extent: int) -> NDArray[np.float64]:
        """Seconds of a verifier step by width, float64[len(widths)]."""
        if extent not in self._verify:
            self._verify[extent] = [self._at_extent(("verify", width, 0), extent) for width in self.verify_widths]
        return _interpolate(widths, self.verify_widths, self._verify[extent])

    def draft_s(self, width: int, depth: int, extent: int) -> float:
        """Seconds of a draft of `depth` passes that add `width` nodes each; 0 for depth 0.

        Raises ValueError for a width that was not measured.
        """
        if depth == 0:
            return 0.0
        depths = sorted(key[2] for key in self._lines if key[:2] == ("draft", width))
        if not depths:
            raise ValueError(f"the curves hold no draft of width {width}")
        known = [self._at_extent(("draft", width, each), extent) for each in depths]
        return float(_interpolate([depth], depths, known)[0])

    def _at_extent(self, step: tuple[str, int, int], extent: int) -> float:
        extents, seconds = self._lines[step]
        return float(_interpolate([extent], list(extents), list(seconds))[0])


def _interpolate(places: Sequence[int], known: Sequence[float], values: Sequence[float]) -> NDArray[np.float64]:
    """Linear between the known places and, by the outermost two, beyond the last; below the first its own value."""
    at, xs, ys = np.asarray(places, float), np.asarray(known, float), np.asarray(values, float)
    found: NDArray[np.float64] = np.interp(at, xs, ys)
    if len(xs) > 1:
        slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        found = np.where(at > xs[-1], ys[-1] + slope * (at - xs[-1]), found)
    return found
