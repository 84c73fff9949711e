"""What a request makes of the verifier's law, and drawing from it: temperature, top-k, top-p, min-p, penalty, seed.

The meaning and the order are those of transformers: penalty, temperature, top-k, top-p, min-p. A request draws from a
generator of its own. Invariant: what is emitted has the verifier's law; with a seed it depends on nothing else but the
plan. Chances are float32, sums of many of them float64.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yggrt.accept import DraftLaw, traverse

GREEDY_BELOW = 1e-5
"""Temperatures below it are temperature 0."""

BLOCK = 128
"""Tokens that are looked at together before one of them is looked for."""

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


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a checkpoint's generation config asks for, as the options of a request.

    temperature: 0 where it does not sample. unsupported: `name=value` of settings that are not honoured.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    unsupported: tuple[str, ...]

    def __post_init__(self) -> None:
        SamplingOptions(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def require_supported(self) -> None:
        """Raises ValueError naming what is not honoured."""
        if self.unsupported:
            raise ValueError(
                f"the checkpoint's generation config asks for {', '.join(self.unsupported)}, which is not honoured; "
                "leave the config out and give the options themselves"
            )


class Laws(Protocol):
    """What a chooser reckons with: `REFERENCE`, or the kernels that say the same faster."""

    def law(self, scores: Scores, options: SamplingOptions, out: Scores) -> Scores:
        """See `law`."""

    def draw(self, weights: Scores, number: float) -> int:
        """See `draw`."""


class _Reference:
    def law(self, scores: Scores, options: SamplingOptions, out: Scores) -> Scores:
        return law(scores, options, out)

    def draw(self, weights: Scores, number: float) -> int:
        return draw(weights, number)


REFERENCE: Laws = _Reference()
"""In numpy."""


class LawKernels:
    """In a bundle's library of kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._law, self._draw = library.ygg_law, library.ygg_draw
        number, real, place = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
        self._law.argtypes, self._law.restype = (place, number, real, number, real, real, place), None
        self._draw.argtypes, self._draw.restype = (place, number, real), number

    def law(self, scores: Scores, options: SamplingOptions, out: Scores) -> Scores:
        """See `Laws`."""
        scores = np.ascontiguousarray(scores)
        self._law(
            _address(scores), scores.size, options.temperature, options.top_k, options.top_p, options.min_p,
            _address(out),
        )  # fmt: skip
        return out

    def draw(self, weights: Scores, number: float) -> int:
        """See `Laws`."""
        token: int = self._draw(_address(weights), weights.size, number)
        return token


def _address(array: Scores) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _require_number(name: str, value: object, low: float, high: float, accepted: str, above: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: {accepted} is accepted")


def _require_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: an integer from 0 is accepted")


class TokenChooser:
    """Chooses the tokens of one request, one after another or an iteration's at a time.

    history: tokens of the prompt. laws: what it reckons with.
    """

    def __init__(self, options: SamplingOptions, history: Sequence[int], laws: Laws = REFERENCE) -> None:
        self.options, self._reckon = options, laws
        self._generator = np.random.default_rng(options.seed)
        self._seen = dict.fromkeys(history)
        self._laws: list[Scores] = []  # room for those of an iteration

    def choose(self, logits: Tensor) -> int:
        """The next token. logits: [V], the verifier's after all tokens chosen so far. It counts as said from now on."""
        scores = self._scores(logits, ())
        if self.options.is_greedy:
            token = int(scores.argmax())
        else:
            token = self.draw(self._reckon.law(scores, self.options, self._room(0, scores)))
        self._seen[token] = None
        return token

    def traverse(
        self,
        tokens: NDArray[np.int64],
        parents: NDArray[np.int64],
        logits: Tensor,
        drafted: Callable[[int], DraftLaw],
    ) -> tuple[list[int], int]:
        """The rows accepted of a tree that was drawn, and the token after them; see `yggrt.accept.traverse`.

        logits: [W, V], the verifier's after each row. What is emitted counts as said from now on.
        """

        def law_of(row: int) -> Scores:
            path: list[int] = []
            at = row
            while at and self.options.repetition_penalty != 1.0:
                path.append(int(tokens[at]))
                at = int(parents[at])
            scores = self._scores(logits[row], path)
            return self._reckon.law(scores, self.options, self._room(row, scores))

        path, bonus = traverse(tokens, parents, law_of, drafted, self)
        self._seen |= dict.fromkeys([*tokens[path[1:]].tolist(), bonus])
        return path, bonus

    def noise(self, rows: int, columns: int) -> Tensor:
        """Standard Gumbel numbers for the drafter's draws: float32[rows, columns]."""
        return torch.from_numpy(self._generator.gumbel(size=(rows, columns)).astype(np.float32))

    def coin(self, probability: float) -> bool:
        """See `yggrt.accept.Chance`."""
        return bool(self._generator.random() < probability)

    def draw(self, weights: Scores) -> int:
        """See `yggrt.accept.Chance`."""
        return self._reckon.draw(weights, self._generator.random())

    def _room(self, place: int, like: Scores) -> Scores:
        while len(self._laws) <= place:
            self._laws.append(np.empty_like(like))
        return self._laws[place]

    def _scores(self, logits: Tensor, path: Sequence[int]) -> Scores:
        """Logits [V] after some further tokens, penalized."""
        scores: Scores = logits.float().numpy()
        if self.options.repetition_penalty == 1.0:
            return scores
        return penalized(scores, list(self._seen | dict.fromkeys(path)), self.options.repetition_penalty)


def penalized(scores: Scores, seen: Sequence[int], penalty: float) -> Scores:
    """Logits with the repetition penalty. scores: float32[V]; seen: tokens of the prompt and the text."""
    scores = scores.copy()
    said = scores[seen]
    scores[seen] = np.where(said < 0, said * penalty, said / penalty)
    return scores


def law(scores: Scores, options: SamplingOptions, out: Scores | None = None) -> Scores:
    """The law to draw from, float32[V], sums to 1. scores: float32[V], penalized.

    out: where to put it; default an array of its own.
    """
    chances = np.empty_like(scores) if out is None else out
    if 0 < options.top_k < scores.size:
        kept = _largest(scores, options.top_k)
        few = _truncated(_softmax(scores[kept], options.temperature, np.empty(kept.size, np.float32)), options)
        chances.fill(0)
        chances[kept] = few
        return chances
    return _truncated(_softmax(scores, options.temperature, chances), options)


def _softmax(scores: Scores, temperature: float, out: Scores) -> Scores:
    if temperature != 1.0:
        scores = np.divide(scores, np.float32(temperature), out=out)
    torch.softmax(torch.from_numpy(scores), 0, out=torch.from_numpy(out))
    return out


def _largest(scores: Scores, count: int) -> NDArray[np.int64]:
    """Places of the `count` largest, and of all that equal the least of them."""
    likely = np.arange(scores.size)
    if count <= scores.size // BLOCK:
        best = np.maximum.reduceat(scores, np.arange(0, scores.size, BLOCK))
        likely = np.flatnonzero(scores >= np.partition(best, -count)[-count])  # as many blocks reach that much
    few = scores[likely]
    found: NDArray[np.int64] = likely[few >= np.partition(few, -count)[-count]]
    return found


def _truncated(chances: Scores, options: SamplingOptions) -> Scores:
    """By top-p and min-p, in place, and made to sum to 1 again."""
    if options.top_p < 1.0:
        kept = _most_likely(chances, options.top_p)
        few = chances[kept]
        few /= float(few.sum(dtype=np.float64))
        chances.fill(0)
        chances[kept] = few
    if options.min_p > 0.0:
        chances[chances < options.min_p * chances.max()] = 0
        chances /= float(chances.sum(dtype=np.float64))
    return chances


def _most_likely(chances: Scores, share: float) -> NDArray[np.int64]:
    """The fewest tokens, the most likely first, that hold `share` of a law."""
    least = np.float32(1e-2)
    while True:
        likely = np.flatnonzero(chances >= least)
        few = chances[likely]
        if few.sum(dtype=np.float64) >= share or least < 1e-30:
            break
        least *= np.float32(0.1)
    order = np.argsort(-few, kind="stable")
    sums = few[order].cumsum(dtype=np.float64)
    kept: NDArray[np.int64] = likely[order[: max(1, int(np.searchsorted(sums, share)) + 1)]]
    return kept


def draw(weights: Scores, number: float) -> int:
    """The token at which the running sum of a law passes this share of it. number: from 0 below 1.

    weights: float32[V], a law up to a factor. Sums of BLOCK tokens first, then within them.
    """
    sums = np.add.reduceat(weights, np.arange(0, weights.size, BLOCK)).cumsum(dtype=np.float64)
    at = number * float(sums[-1])
    block = _passed(sums, at)
    first = block * BLOCK
    within = weights[first : first + BLOCK].cumsum(dtype=np.float64)
    return first + _passed(within, at - float(sums[block - 1]) if block else at)


def _passed(sums: NDArray[np.float64], at: float) -> int:
    """The first place where a running sum is above `at`; where rounding leaves none, the first of the largest."""
    place = int(np.searchsorted(sums, at, side="right"))
    return place if place < sums.size else int(sums.argmax())
