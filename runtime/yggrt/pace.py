"""How much to draft and to verify in the next iteration.

The verify width is the one that is worth most: expected tokens - lambda * seconds, by the drafter's calibrated values
and the plan's curves. The draft depth is the plan's, until speculation loses on the text at hand: then shallower, then
plain decoding, and a new try later.

Invariant: what iterations can lose against plain decoding, by the plan's curves, is bounded, see `Pace`; reading a
prompt into the drafter comes on top. Nothing here changes which token
comes next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from yggrt.latency import StepTimes
from yggrt.plan import HostSeconds, TreePolicy
from yggrt.tree import TreeShape

DEBT = 0.5
"""Tokens that a depth may lose on plain decoding before a shallower one takes its place."""

CREDIT = 1.0
"""Most that past gains count for: what was earned on an earlier part of a text does not pay for a later one."""

FIRST_PAUSE = 24
"""Plain iterations before speculation is tried again; twice as many after each try that failed."""

TRIAL_DEBT = 0.25
"""What a new try after a pause may lose."""


class Pace:
    """The choices of one engine, request by request. The arguments are those of a plan; see `yggrt.plan.Plan`.

    Gains are counted in tokens: those an iteration emitted, less those plain decoding would have made in the time the
    plan's curves give it. A depth is left when they fall below -DEBT, so a request loses at most DEBT and one iteration
    on each depth of the menu, then TRIAL_DEBT and one iteration for every pause, and pauses double.
    """

    def __init__(
        self, policy: TreePolicy, times: StepTimes, host: HostSeconds, plain_width: int, token_s: float
    ) -> None:
        self.draft_width = policy.draft_width
        self.depths = tuple(depth for depth in policy.draft_depths if depth <= policy.default_shape.draft_depth)
        self.verify_widths = policy.verify_widths
        self._times, self._host = times, host
        self._plain_width, self._token_s = plain_width, token_s
        self._menu = np.array(policy.verify_widths)
        self._costs: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}
        self.start()

    def start(self) -> None:
        """A new request."""
        self._level = len(self.depths) - 1
        self._balance = 0.0
        self._pause = FIRST_PAUSE
        self._plain_left = 0
        self._limit = DEBT
        self.num_fallbacks = 0

    def shape(self) -> TreeShape:
        """The tree of the next iteration, with the widest cut of the menu that it fills; depth 0 is plain decoding."""
        depth = 0 if self._plain_left > 0 else self.depths[self._level]
        return TreeShape(self.draft_width, depth, min(self.verify_widths[-1], 1 + self.draft_width * depth))

    def verify_width(self, values: NDArray[np.float32], extent: int) -> int:
        """W_v of the menu that is worth most. values: float32[N], logs, most valuable first, the root's 0 among them.

        Source: design, "Verification width".
        """
        menu, key = np.minimum(self._menu, values.size), (extent, values.size)
        if key not in self._costs:
            self._costs[key] = self._times.verify_s(menu.tolist(), extent) / self._token_s
        worth = np.cumsum(np.exp(values))[menu - 1] - self._costs[key]
        return int(menu[int(np.argmax(worth))])

    def iteration_s(self, depth: int, verify_width: int, extent: int) -> float:
        """Seconds of an iteration by the plan's curves, host included; depth 0 is a plain one."""
        key = (depth, verify_width, extent)
        if key not in self._seconds:
            self._seconds[key] = (
                float(self._times.verify_s([verify_width if depth else self._plain_width], extent)[0])
                + self._times.draft_s(self.draft_width, depth, extent)
                + (self._host.speculative_s if depth else self._host.plain_s)
            )
        return self._seconds[key]

    def observe(self, depth: int, verify_width: int, extent: int, emitted: int) -> None:
        """What came of an iteration of `shape()`, or of one cut short near the end of a text."""
        if depth == 0:
            self._plain_left = max(0, self._plain_left - 1)
            return
        cost = self.iteration_s(depth, verify_width, extent) / self.iteration_s(0, 1, extent)
        self._balance = min(self._balance + emitted - cost, CREDIT)
        if self._balance >= CREDIT:
            self._limit, self._pause = DEBT, FIRST_PAUSE
            if self._level + 1 < len(self.depths) and self.num_fallbacks:
                self._level, self._balance = self._level + 1, 0.0
        elif self._balance < -self._limit:
            self._fall_back()

    def _fall_back(self) -> None:
        self._balance = 0.0
        self.num_fallbacks += 1
        if self._level > 0 and self.depths[self._level - 1] > 0:
            self._level -= 1
            return
        self._plain_left = self._pause
        self._pause *= 2
        self._limit = TRIAL_DEBT
