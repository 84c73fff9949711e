"""What a request makes of the verifier's law, and drawing from it: temperature, top-k, top-p, min-p, penalty, seed.

The meaning and the order are those of transformers: penalty, temperature, top-k, top-p, min-p. A request draws one
number for each of its tokens, in their order, from a generator of its own. Invariant: what is drawn depends on the
logits, the options and the seed alone, so that plain and speculative decoding with one seed say the same. Chances are
float32, their sums float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below it are temperature 0."""

DRAW_BLOCK = 256
"""Tokens whose chances are summed together before one of them is looked for."""

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen, with transformers' meaning.

    temperature: 0 takes the most likely token.
    top_k: how many tokens to draw from, the most likely ones; 0 for all.
    top_p: share of the law to draw from, the most likely tokens first.
    min_p: least chance of a token, as a share of the most likely one's.
    repetition_penalty: above 1 tokens of the prompt and the text become less likely; holds at temperature 0 too.
    seed:  None for another text each time.
    Raises ValueError where one of them is nonsense.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, math.inf, "a number from 0")
        _require_number("top_p", self.top_p, 0.0, 1.0, "a number above 0, at most 1", above=True)
        _require_number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "a number above 0", above=True)
        _require_integer("top_k", self.top_k)
        if self.seed is not None:
            _require_integer("seed", self.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_argmax(self) -> bool:
        """Whether the verifier's own argmax is the answer, so that its logits need not be looked at."""
        return self.is_greedy and self.repetition_penalty == 1.0


def _require_number(name: str, value: object, low: float, high: float, accepted: str, above: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: {accepted} is accepted")


def _require_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: an integer from 0 is accepted")


class TokenChooser:
    """Chooses the tokens of one request, one after another.

    history: tokens of the prompt.
    """

    def __init__(self, options: SamplingOptions, history: Sequence[int]) -> None:
        self.options = options
        self._generator = np.random.default_rng(options.seed)
        self._seen = dict.fromkeys(history)

    def choose(self, logits: Tensor) -> int:
        """The next token. logits: [V], the verifier's after all tokens chosen so far. It counts as said from now on."""
        scores = logits.float().numpy()
        if self.options.repetition_penalty != 1.0:
            scores = penalized(scores, list(self._seen), self.options.repetition_penalty)
        if self.options.is_greedy:
            token = int(scores.argmax())
        else:
            token = draw(law(scores, self.options), self._generator.random())
        self._seen[token] = None
        return token


def penalized(scores: Scores, seen: Sequence[int], penalty: float) -> Scores:
    """Logits with the repetition penalty. scores: float32[V]; seen: tokens of the prompt and the text."""
    scores = scores.copy()
    said = scores[seen]
    scores[seen] = np.where(said < 0, said * penalty, said / penalty)
    return scores


def law(scores: Scores, options: SamplingOptions) -> Scores:
    """The law to draw from, up to a factor: float32[V], the most likely token at 1. scores: float32[V], penalized."""
    scores = scores / np.float32(options.temperature)
    if 0 < options.top_k < scores.size:
        least = np.partition(scores, -options.top_k)[-options.top_k]
        scores = np.where(scores < least, np.float32(-np.inf), scores)
    chances: Scores = np.exp(scores - scores.max())
    if options.top_p < 1.0:
        chances = _most_likely(chances, options.top_p)
    if options.min_p > 0.0:
        chances = np.where(chances < options.min_p, np.float32(0), chances)
    return chances


def _most_likely(chances: Scores, share: float) -> Scores:
    """The fewest tokens, the most likely first, that hold `share` of the law; the others at 0."""
    total = float(chances.sum(dtype=np.float64))
    likely = np.flatnonzero(chances >= (1 - share) * total / chances.size)  # the others hold less than 1 - share
    ordered = likely[np.argsort(-chances[likely], kind="stable")]
    sums = chances[ordered].cumsum(dtype=np.float64)
    kept = ordered[: max(1, int(np.searchsorted(sums, share * total)) + 1)]
    found = np.zeros_like(chances)
    found[kept] = chances[kept]
    return found


def draw(chances: Scores, number: float) -> int:
    """The token at which the running sum of a law passes this share of it. chances: float32[V]; number: from 0 below 1.

    Sums are float64, of blocks first, then within one.
    """
    blocks = np.pad(chances, (0, -chances.size % DRAW_BLOCK)).reshape(-1, DRAW_BLOCK)
    sums = blocks.sum(axis=1, dtype=np.float64).cumsum()
    at = number * sums[-1]
    block = min(int(np.searchsorted(sums, at, side="right")), int(sums.argmax()))
    within = blocks[block].cumsum(dtype=np.float64) + (sums[block - 1] if block else 0.0)
    return block * DRAW_BLOCK + min(int(np.searchsorted(within, at, side="right")), int(within.argmax()))
