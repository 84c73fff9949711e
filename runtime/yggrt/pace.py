"""How much to draft and to verify in the next iteration.

The verify width is the one that is worth most: expected tokens - lambda * seconds, by the drafter's calibrated values
and the plan's curves. So is the draft depth where the plan holds a depth network, by what that expects of each;
otherwise the depth is the plan's. Where speculation loses on the text at hand it becomes shallower, then plain
decoding, with a new try later.

What one kind of step takes against another drifts with what else a machine does. Where that cannot show in a text, see
`yggrt.bundle.follows_clock`, the curves are corrected by the clock as iterations go on.

Invariant: what iterations can lose against plain decoding, by the curves, is bounded, see `Pace`; reading a prompt into
the drafter comes on top. Nothing here changes which token comes next.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from yggrt.depth import DepthNetwork
from yggrt.latency import StepTimes
from yggrt.plan import HostSeconds, TreePolicy
from yggrt.tree import TreeShape, depths_to_fall_back_to

DEBT = 1.0
"""Tokens that a depth may lose on plain decoding before a shallower one takes its place."""

CREDIT = 2.0
"""Most that past gains count for: what was earned on an earlier part of a text does not pay for a later one."""

FIRST_PAUSE = 32
"""Plain iterations before speculation is tried again; twice as many after each try that failed."""

TRIAL_DEBT = 0.25
"""What a new try after a pause may lose."""

MARGIN = 1.03
"""By how much a draft has to win to count as no loss: one that gains less than the curves may be off is not worth its
risk."""

DRIFT_STEP = 0.01
"""By how much one iteration moves the log of a drift; only its side counts, so that a drift follows the median."""

KNOWN_AFTER = 12
"""Iterations of either kind before their drifts are compared."""

MOST_DRIFT = 0.4
"""Largest log of the drift of speculative against plain iterations that is believed."""


class Drift:
    """What iterations take, over what the curves say. Outlives a request, since it is the machine's."""

    def __init__(self) -> None:
        self._log = [0.0, 0.0]
        self._seen = [0, 0]

    def observe(self, drafted: bool, seconds: float, predicted: float) -> None:
        """Compiled steps of one iteration took so long. drafted: whether they drafted."""
        self._log[drafted] += DRIFT_STEP if seconds > predicted * math.exp(self._log[drafted]) else -DRIFT_STEP
        self._seen[drafted] += 1

    @property
    def of_drafts(self) -> float:
        """Of speculative against plain iterations; 1 until both are known."""
        if min(self._seen) < KNOWN_AFTER:
            return 1.0
        return math.exp(max(-MOST_DRIFT, min(self._log[True] - self._log[False], MOST_DRIFT)))


class Pace:
    """The choices of one engine, request by request. The arguments are those of a plan; see `yggrt.plan.Plan`.

    follows_clock: whether the curves are corrected by what iterations take.

    Gains are counted in tokens: those an iteration emitted, less those plain decoding would have made in the time the
    plan's curves give it, and MARGIN. A depth is left when they fall below -DEBT, so a request loses at most DEBT and
    one iteration on each depth to fall back to, then TRIAL_DEBT and one iteration for every pause, and pauses double. A
    depth that was fallen back to is the most that the network may choose.
    """

    def __init__(
        self,
        policy: TreePolicy,
        times: StepTimes,
        host: HostSeconds,
        plain_width: int,
        token_s: float,
        network: DepthNetwork | None = None,
        follows_clock: bool = False,
    ) -> None:
        self.draft_width = policy.draft_width
        self._drift = Drift() if follows_clock else None
        steps_down = depths_to_fall_back_to(policy.default_shape.draft_depth)
        self.depths = tuple(depth for depth in policy.draft_depths if depth in steps_down)
        self.verify_widths = policy.verify_widths
        self._network = network
        self._learned_costs: dict[tuple[int, bool], NDArray[np.float64]] = {}
        self._reading_s: dict[int, float] = {}
        self._times, self._host = times, host
        self._plain_width, self._token_s = plain_width, token_s
        self._menu = np.array(policy.verify_widths)
        self._costs: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}
        self.predicted_s = 0.0  # of the compiled steps of all iterations observed, by the curves
        self.start()

    def start(self) -> None:
        """A new request."""
        self._level = len(self.depths) - 1
        self._balance = 0.0
        self._pause = FIRST_PAUSE
        self._plain_left = 0
        self._limit = DEBT
        self._behind = False  # whether the drafter has committed tokens to read before it can draft again
        self.num_fallbacks = 0

    def worth(self, by_depth: NDArray[np.float32], extent: int, behind: bool) -> NDArray[np.float64] | None:
        """What each depth of the next iteration is worth: expected tokens - lambda * seconds, float64[rows, depths].

        by_depth: float32[rows, DEPTH_HEADS], as `verify` gave them; extent: KV rows that it read.
        behind:   whether the drafter has committed tokens to read before it can draft again.
        None without a depth network. It does not depend on which row is accepted, so that it need not wait for that.
        """
        network = self._network
        if network is None:
            return None
        key = (extent, behind)
        if key not in self._learned_costs:
            sizes = zip(network.depths, network.verify_widths, strict=True)
            seconds = [self._next_s(depth, width, extent, behind) for depth, width in sizes]
            self._learned_costs[key] = np.array(seconds) / self._token_s
        worth: NDArray[np.float64] = by_depth[:, : len(network.depths)] - self._learned_costs[key]
        return worth

    def shape(self, worth: NDArray[np.float64] | None) -> TreeShape:
        """The tree of the next iteration, with the widest cut of the menu that it fills; depth 0 is plain decoding.

        worth: float64[depths], of `worth`, in the row that was accepted last.
        """
        if self._plain_left > 0:
            depth = 0
        elif self._network is None or worth is None:
            depth = self.depths[self._level]
        else:
            depths = self._network.depths
            if self._level + 1 < len(self.depths):  # none deeper than was fallen back to
                worth = worth[: np.searchsorted(depths, self.depths[self._level], side="right")]
            depth = depths[int(np.argmax(worth))]
        return TreeShape(self.draft_width, depth, min(self.verify_widths[-1], 1 + self.draft_width * depth))

    def _next_s(self, depth: int, verify_width: int, extent: int, behind: bool) -> float:
        """Seconds of the next iteration, with what the drafter has to read first."""
        seconds = self.iteration_s(depth, verify_width, extent)
        if depth and behind:
            if extent not in self._reading_s:
                self._reading_s[extent] = self._times.draft_s(self.draft_width, 1, extent)
            seconds += self._reading_s[extent]
        return seconds

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

    def observe(
        self, depth: int, verify_width: int, extent: int, emitted: int, compiled_s: float | None = None
    ) -> None:
        """What came of an iteration of `shape()`, or of one cut short near the end of a text.

        compiled_s: seconds of its compiled steps, where they were measured.
        """
        seconds = self._next_s(depth, verify_width, extent, self._behind)
        self._behind = depth == 0
        predicted_s = seconds - (self._host.speculative_s if depth else self._host.plain_s)
        self.predicted_s += predicted_s
        if self._drift is not None and compiled_s is not None:
            self._drift.observe(depth > 0, compiled_s, predicted_s)
            if depth:
                seconds *= self._drift.of_drafts
        if depth == 0:
            self._plain_left = max(0, self._plain_left - 1)
            return
        cost = MARGIN * seconds / self.iteration_s(0, 1, extent)
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
