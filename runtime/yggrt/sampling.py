"""What a request makes of the verifier's law, and drawing from it: temperature, top-k, top-p, min-p, penalty, seed.

The meaning and the order are those of transformers: penalty, temperature, top-k, top-p, min-p. A request draws one
number for each of its tokens, in their order, from a generator of its own. Invariant: what is drawn depends on the
logits, the options and the seed alone, so that plain and speculative decoding with one seed say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below it are temperature 0."""

SORTED_AT_FIRST = 1024
"""Tokens that top-p sorts before it sorts them all: nearly always enough."""


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

    def __init__(self, options: SamplingOptions, history: Sequence[int], vocab_size: int) -> None:
        self.options = options
        self._generator = np.random.default_rng(options.seed)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self._seen[torch.tensor(history, dtype=torch.int64)] = True

    def choose(self, logits: Tensor) -> int:
        """The next token. logits: [V], the verifier's after all tokens chosen so far. It counts as said from now on."""
        scores = penalized(logits.double(), self._seen, self.options.repetition_penalty)
        if self.options.is_greedy:
            token = int(scores.argmax())
        else:
            sums = law(scores, self.options).cumsum(0)
            at = self._generator.random() * float(sums[-1])
            token = min(int(torch.searchsorted(sums, at, right=True)), int(sums.argmax()))
        self._seen[token] = True
        return token


def penalized(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits with the repetition penalty. scores: float64[V]; seen: bool[V]."""
    if penalty == 1.0:
        return scores
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def law(scores: Tensor, options: SamplingOptions) -> Tensor:
    """The law to draw from, up to a factor: float64[V], not negative. scores: float64[V], penalized."""
    scores = scores / options.temperature
    if 0 < options.top_k < scores.numel():
        least = scores.topk(options.top_k).values[-1]
        scores = torch.where(scores < least, -torch.inf, scores)
    chances = scores.softmax(0)
    if options.top_p < 1.0:
        chances = _most_likely(chances, options.top_p)
    if options.min_p > 0.0:
        chances = torch.where(chances < options.min_p * chances.max(), 0.0, chances)
    return chances


def _most_likely(chances: Tensor, share: float) -> Tensor:
    """The fewest tokens, the most likely first, that hold `share` of the law; the others at 0."""
    values, tokens = chances.topk(min(SORTED_AT_FIRST, chances.numel()))
    if float(values.sum()) < share:
        values, tokens = chances.sort(descending=True)
    kept = values.cumsum(0) - values < share
    kept[0] = True
    return torch.zeros_like(chances).scatter(0, tokens[kept], values[kept])
