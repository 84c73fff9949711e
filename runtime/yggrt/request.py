"""One request: its tokens, what it may still say, and the stages of an iteration that are about text and choices.

Invariant: `accept` keeps no token past an end-of-sequence token or the budget, so an iteration never begins where the
text is over, but for a stop string that `emit` has still to find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from yggrt.errors import ArtifactError
from yggrt.executor import Decoder, Iteration, Round
from yggrt.pace import Pace
from yggrt.sampling import TokenChooser
from yggrt.stats import Recorder
from yggrt.text import OutputStream
from yggrt.tree import PLAIN, TreeShape


class Request:
    """What the iterations of one request share.

    tokens:  the committed ones; eos_ids: those that end the text; budget: tokens it may get.
    shape:   of the trees where there is no pace; of depth 0 for a request without the drafter.
    chooser: chooses tokens in place of the verifier's argmax.
    draws:   whether the trees are drawn; nothing then depends on the clock, and W_v not on what was drawn, so that the
             law is the verifier's and a seed gives one text.
    verify_width: W_v where it does not follow the values.
    looks_ahead:  whether anything is drafted ahead of time.
    ended:   whether the text is over, whatever is still to be emitted.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokens: list[int],
        output: OutputStream,
        eos_ids: frozenset[int],
        budget: int,
        shape: TreeShape,
        pace: Pace | None,
        chooser: TokenChooser | None,
        draws: bool,
        drafter_context: int,
        verify_width: int | None,
        looks_ahead: bool,
        recorder: Recorder,
    ) -> None:
        self.decoder, self.tokens, self.output, self.recorder = decoder, tokens, output, recorder
        self.eos_ids, self.budget = eos_ids, budget
        self.shape, self.pace, self.chooser, self.draws = shape, pace, chooser, draws
        self.drafter_context, self.verify_width, self.looks_ahead = drafter_context, verify_width, looks_ahead
        self.ended = False
        self._remaining = budget
        self._kept: tuple[int, ...] = ()  # of the last iteration, not yet among `tokens`
        self._outcome: Round | None = None
        self._compiled_s = 0.0  # inside compiled steps until the last iteration
        self._worth: NDArray[np.float64] | None = None  # of the next depths, by row of the last verifier step
        self.stages: Mapping[str, Callable[[Iteration], None]] = {
            **decoder.stages,
            "accept": self._accept,
            "depth": self._depth,
            "emit": self.emit,
        }
        if pace is not None:
            pace.start()

    def read_prompt(self) -> None:
        """Prefill, and the first token."""
        decoder, started = self.decoder, perf_counter()
        first = decoder.prefill(self.tokens, self.chooser)
        read = perf_counter()
        _require_finite(first.gaps)
        self._keep(first)
        self._outcome = first
        self.recorder.gaps += first.gaps
        self.output.push(first.tokens[0])
        drafting = perf_counter()
        if not self.ended and self._within_limits(self.shape).draft_depth:
            decoder.prefill_drafter([*self.tokens, *self._kept])  # whatever the first depth will be
        ended = perf_counter()
        self._compiled_s = decoder.compiled_s
        self.recorder.prompt_read(read - started, ended - drafting, ended - started, decoder.compiled_s)
        if self.pace is not None:
            self._worth = self.pace.worth(first.by_depth, first.extent, False)

    def next_iteration(self) -> Iteration:
        """What the next iteration is to do; the last one is over."""
        assert self._outcome is not None
        self.tokens += self._kept
        self._kept = ()
        shape, pace = self.shape, self.pace
        if pace is not None:
            shape = pace.shape(None if self._worth is None else self._worth[self._outcome.row])
        shape = self._within_limits(shape)
        choose_width = None
        if self.verify_width is not None:
            narrow = min(self.verify_width, shape.verify_width)
            shape = TreeShape(shape.draft_width, shape.draft_depth, narrow)
        elif pace is not None and not self.draws:
            choose_width = pace.verify_width
        ahead = 0
        if self.looks_ahead and shape.draft_depth and not self.draws:
            ahead = min(shape.draft_depth + 1, self._remaining - 1, self.drafter_context - len(self.tokens))
        return Iteration(self.tokens, shape, choose_width, self.chooser, max(ahead, 0))

    def _within_limits(self, shape: TreeShape) -> TreeShape:
        """A tree no deeper than the drafter and the budget allow.

        The budget ends with the context at the latest, so no node's position is beyond it.
        """
        num_tokens = len(self.tokens) + len(self._kept)
        depth = min(shape.draft_depth, self._remaining - 1)
        if depth > 0 and num_tokens + depth > self.drafter_context:
            depth = 0
            self.recorder.notice(f"decoded plainly past the drafter's context of {self.drafter_context} tokens")
        if depth == shape.draft_depth:
            return shape
        if depth == 0:
            return PLAIN
        return TreeShape(shape.draft_width, depth, min(shape.verify_width, 1 + depth * shape.draft_width))

    def _accept(self, iteration: Iteration) -> None:
        self.decoder.stages["accept"](iteration)
        outcome = iteration.result()
        _require_finite(outcome.gaps)
        iteration.kept = self._keep(outcome)
        self._outcome = outcome
        if self.pace is not None:
            depth = iteration.shape.draft_depth
            compiled_s = self.decoder.compiled_s - self._compiled_s
            self._compiled_s += compiled_s
            clock = None if self.draws else compiled_s
            self.pace.observe(depth, outcome.num_verified, outcome.extent, len(iteration.kept), clock)
            iteration.fallbacks = self.pace.num_fallbacks

    def _keep(self, outcome: Round) -> tuple[int, ...]:
        """The outcome's tokens up to the end of the text."""
        kept = outcome.tokens[: self._remaining]
        for place, token in enumerate(kept):
            if token in self.eos_ids:
                kept = kept[: place + 1]
                self.ended = True
                break
        self._remaining -= len(kept)
        self.ended = self.ended or self._remaining == 0
        self._kept = kept
        return kept

    def _depth(self, iteration: Iteration) -> None:
        if self.pace is not None:
            self._worth = self.pace.worth(iteration.outputs[4].numpy(), iteration.extent, iteration.behind)

    def emit(self, iteration: Iteration) -> None:
        """Text of the tokens kept, up to a stop string."""
        emitted = 0
        for token in iteration.kept:
            emitted += 1
            if self.output.push(token):
                break
        self.recorder.iteration(iteration.result(), iteration.shape.draft_depth, emitted, iteration.fallbacks)


def _require_finite(gaps: tuple[float, ...]) -> None:
    """A gap is not a number exactly where the verifier's logits are not."""
    if any(gap != gap for gap in gaps):
        raise ArtifactError(
            "the verifier's logits are not finite here; its weights or this dtype do not hold. Try --dtype float32."
        )
