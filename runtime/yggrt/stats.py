"""What is counted while a request is answered, and what the user is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from yggrt.executor import Round


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one request spent in one stage."""

    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """How one request went.

    mode:              "speculative" or "plain", as asked for.
    iterations:        verifier calls after the prefill.
    plain_iterations:  those of them without a draft.
    depth_histogram:   entry i counts the iterations that drafted i passes.
    fallbacks:         how often the draft became shallower, or was left out for a while, because it did not pay.
    drafted, accepted: nodes the drafter added; drafted tokens that were emitted.
    acceptance_length: tokens emitted per iteration, bonus token included; 0 where there was no iteration.
    expected_length:   what the drafted values promised in its place, before anything was verified.
    acceptance_histogram: entry i counts the iterations that emitted i tokens.
    ttft_s, tpot_s:    seconds until the prompt is read and the first token chosen; seconds per token after it (None
                       below two tokens).
    tokens_per_s:      1 / tpot_s.
    host_share:        share of the iterations' time outside compiled steps.
    stages:            seconds by stage: "prefill", "draft_prefill" (the prompt, read into each model), and those of
                       `yggrt.schedule.STAGES`, which may have run beside each other.
    notices:           what the user should know, such as falling back to plain decoding.
    """

    mode: str
    prompt_tokens: int
    new_tokens: int
    iterations: int
    plain_iterations: int
    depth_histogram: tuple[int, ...]
    fallbacks: int
    drafted: int
    accepted: int
    acceptance_length: float
    expected_length: float
    acceptance_histogram: tuple[int, ...]
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    host_share: float | None
    stages: tuple[StageSeconds, ...]
    notices: tuple[str, ...]


class Recorder:
    """Counts one request; the consumer's own time between pieces is left out."""

    def __init__(self, prompt_tokens: int, plain: bool) -> None:
        self.mode = "plain" if plain else "speculative"
        self.prompt_tokens = prompt_tokens
        self.histogram: Counter[int] = Counter()
        self.depths: Counter[int] = Counter()
        self.drafted = self.accepted = self.fallbacks = 0
        self.expected = 0.0
        self.ttft_s: float | None = None
        self.prefill_s = self.draft_prefill_s = 0.0
        self.compiled_before_s = 0.0  # inside compiled steps until the first token
        self.gaps: list[float] = []
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def prompt_read(self, prefill_s: float, draft_prefill_s: float, ttft_s: float, compiled_s: float) -> None:
        """The first token was chosen. compiled_s: inside compiled steps so far."""
        self.prefill_s, self.draft_prefill_s, self.ttft_s = prefill_s, draft_prefill_s, ttft_s
        self.compiled_before_s = compiled_s

    def iteration(self, outcome: Round, depth: int, num_emitted: int, fallbacks: int) -> None:
        """An iteration has emitted its tokens. depth: draft passes; fallbacks: in the request so far."""
        self.gaps += outcome.gaps[:num_emitted]
        self.histogram[num_emitted] += 1
        self.depths[depth] += 1
        self.drafted += outcome.num_drafted
        self.accepted += min(num_emitted, len(outcome.tokens) - 1)
        self.expected += outcome.expected
        self.fallbacks = fallbacks

    def stats(
        self, new_tokens: int, decode_s: float, compiled_s: float, stages: Mapping[str, float]
    ) -> GenerationStats:
        """decode_s: of all iterations; compiled_s: inside compiled steps; stages: seconds of the iterations' stages."""
        iterations = sum(self.histogram.values())
        emitted = sum(length * count for length, count in self.histogram.items())
        tpot = decode_s / (new_tokens - 1) if new_tokens > 1 else None
        plain_iterations = self.depths[0]
        if self.fallbacks and plain_iterations:
            self.notice("a part was decoded plainly, since drafts did not pay on this text")
        reading = {"prefill": self.prefill_s, "draft_prefill": self.draft_prefill_s}
        return GenerationStats(
            mode=self.mode,
            prompt_tokens=self.prompt_tokens,
            new_tokens=new_tokens,
            iterations=iterations,
            plain_iterations=plain_iterations,
            depth_histogram=_as_tuple(self.depths),
            fallbacks=self.fallbacks,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_length=emitted / iterations if iterations else 0.0,
            expected_length=self.expected / iterations if iterations else 0.0,
            acceptance_histogram=_as_tuple(self.histogram),
            ttft_s=self.ttft_s,
            tpot_s=tpot,
            tokens_per_s=1 / tpot if tpot else None,
            host_share=1 - (compiled_s - self.compiled_before_s) / decode_s if decode_s else None,
            stages=tuple(StageSeconds(stage, seconds) for stage, seconds in {**reading, **stages}.items()),
            notices=tuple(self.notices),
        )


def _as_tuple(histogram: Counter[int]) -> tuple[int, ...]:
    """Counts by index, from 0 on."""
    return tuple(histogram[index] for index in range(max(histogram, default=0) + 1))
