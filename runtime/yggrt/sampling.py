"""What a request makes of the verifier's law, and drawing from it: temperature, top-k, top-p, min-p, penalty, seed.

The meaning and the order are those of transformers: penalty, temperature, top-k, top-p, min-p. A request draws from a
generator of its own. Invariant: what is emitted has the verifier's law; with a seed it depends on nothing else but the
plan. Chances are float32, sums of many of them float64.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
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

NUMBERS = 256
"""Uniform numbers that are drawn together."""

NO_TOKENS = torch.zeros(0, dtype=torch.int64)

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


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """The rows of a drawn tree that the verifier ran.

    tokens, parents: int64[W]; row 0 is the root, parents come first, siblings in the order drawn.
    nodes:           int64[W], where a row's node lies in `ids` and `log_q`.
    ids, log_q:      int64[N, M] and float32[N, M], what the children of a node were drawn from.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    nodes: NDArray[np.int64]
    ids: Tensor
    log_q: Tensor

    def draft_law(self, row: int) -> DraftLaw:
        """That the children of a row were drawn from."""
        node = int(self.nodes[row])
        chances = self.log_q[node].double().exp()
        return DraftLaw(self.ids[node].numpy(), (chances / chances.sum()).numpy())

    def path(self, row: int) -> list[int]:
        """Tokens from the row up to the root's child."""
        tokens: list[int] = []
        while row:
            tokens.append(int(self.tokens[row]))
            row = int(self.parents[row])
        return tokens


class Laws(Protocol):
    """What a chooser reckons with: `REFERENCE`, or the kernels that say the same faster.

    numbers: float64, from 0 below 1, used in their order.
    """

    def choose(self, scores: Tensor, options: SamplingOptions, numbers: Tensor) -> int:
        """A token drawn from a request's law. scores: float32[V], penalized; numbers: [1]."""

    def traverse(
        self, tree: DrawnTree, scores: Tensor, options: SamplingOptions, seen: Tensor, numbers: Tensor
    ) -> tuple[list[int], int]:
        """The rows accepted and the token after them; see `yggrt.accept.traverse`.

        scores: float32[W, V], not penalized. seen: int64[S], what the penalty holds for besides a row's own path.
        numbers: [W], for the coins as they are tossed, and then for the last draw.
        """


class _Reference:
    def choose(self, scores: Tensor, options: SamplingOptions, numbers: Tensor) -> int:
        return draw(law(scores.numpy(), options), float(numbers))

    def traverse(
        self, tree: DrawnTree, scores: Tensor, options: SamplingOptions, seen: Tensor, numbers: Tensor
    ) -> tuple[list[int], int]:
        def law_of(row: int) -> Scores:
            said = torch.cat((seen, torch.tensor(tree.path(row), dtype=torch.int64)))
            return law(penalized(scores[row], said, options.repetition_penalty).numpy(), options)

        return traverse(tree.tokens, tree.parents, law_of, tree.draft_law, _Drawn(numbers))


class _Drawn:
    """The `yggrt.accept.Chance` of numbers that were drawn beforehand."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = iter(numbers.tolist())

    def coin(self, probability: float) -> bool:
        return bool(next(self._numbers) < probability)

    def draw(self, weights: Scores) -> int:
        return draw(weights, next(self._numbers))


REFERENCE: Laws = _Reference()
"""In numpy."""


class LawKernels:
    """In a bundle's library of kernels.

    A step of the model leaves nothing of Python's in the caches, where a call of numpy takes 10 us: there are few here.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose, self._traverse = library.ygg_choose, library.ygg_traverse
        number, real, place = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
        options = (real, number, real, real)
        self._choose.argtypes = (place, number, *options, place)
        self._traverse.argtypes = (
            place, number, place, number, place, place, number, *options, real, place, number, place, place,
        )  # fmt: skip
        self._choose.restype = self._traverse.restype = number
        self._make_room(0)

    def choose(self, scores: Tensor, options: SamplingOptions, numbers: Tensor) -> int:
        """See `Laws`."""
        scores = scores.contiguous()
        token: int = self._choose(
            scores.data_ptr(), scores.numel(), options.temperature, options.top_k, options.top_p, options.min_p,
            numbers.data_ptr(),
        )  # fmt: skip
        return token

    def traverse(
        self, tree: DrawnTree, scores: Tensor, options: SamplingOptions, seen: Tensor, numbers: Tensor
    ) -> tuple[list[int], int]:
        """See `Laws`."""
        width = tree.tokens.size
        if self._room.numel() < 4 * width + 1:
            self._make_room(width)
        np.concatenate((tree.tokens, tree.parents, tree.nodes), out=self._places[: 3 * width])
        scores, ids, log_q = scores.contiguous(), tree.ids.contiguous(), tree.log_q.contiguous()
        rows = self._room.data_ptr()
        accepted = self._traverse(
            scores.data_ptr(), scores.shape[1], rows, width, ids.data_ptr(), log_q.data_ptr(), ids.shape[1],
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
            seen.data_ptr(), seen.numel(), numbers.data_ptr(), rows + 3 * width * self._room.itemsize,
        )  # fmt: skip
        *path, token = self._places[3 * width : 3 * width + accepted + 1].tolist()
        return path, token

    def _make_room(self, width: int) -> None:
        """For what goes in and out of a walk over as many rows."""
        self._room = torch.zeros(4 * width + 1, dtype=torch.int64)
        self._places = self._room.numpy()


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
        self.options, self._laws = options, laws
        self._generator = np.random.default_rng(options.seed)
        self._seen = dict.fromkeys(history)
        self._numbers = torch.zeros(0)
        self._taken = 0

    def choose(self, logits: Tensor) -> int:
        """The next token. logits: [V], the verifier's after all tokens chosen so far. It counts as said from now on."""
        scores = penalized(logits.float(), self._said(), self.options.repetition_penalty)
        if self.options.is_greedy:
            token = int(scores.argmax())
        else:
            token = self._laws.choose(scores, self.options, self._take(1))
        self._seen[token] = None
        return token

    def traverse(self, tree: DrawnTree, logits: Tensor) -> tuple[list[int], int]:
        """The rows accepted of a tree that was drawn, and the token after them; see `yggrt.accept.traverse`.

        logits: [W, V], the verifier's after each row. What is emitted counts as said from now on.
        """
        numbers = self._take(tree.tokens.size)
        path, bonus = self._laws.traverse(tree, logits.float(), self.options, self._said(), numbers)
        self._seen |= dict.fromkeys([*tree.tokens[path[1:]].tolist(), bonus])
        return path, bonus

    def noise(self, rows: int, columns: int) -> Tensor:
        """Standard Gumbel numbers for the drafter's draws: float32[rows, columns]."""
        return torch.from_numpy(self._generator.gumbel(size=(rows, columns)).astype(np.float32))

    def _take(self, count: int) -> Tensor:
        """The next uniform numbers: float64[count]."""
        if self._taken + count > self._numbers.numel():
            self._numbers = torch.from_numpy(self._generator.random(max(count, NUMBERS)))
            self._taken = 0
        self._taken += count
        return self._numbers[self._taken - count : self._taken]

    def _said(self) -> Tensor:
        """What the penalty holds for: int64[S]."""
        return NO_TOKENS if self.options.repetition_penalty == 1.0 else torch.tensor(list(self._seen))


def penalized(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits with the repetition penalty. scores: float32[V]; seen: int64[S], tokens of the prompt and the text."""
    if penalty == 1.0:
        return scores
    said = scores[seen]
    return scores.index_put((seen,), torch.where(said < 0, said * penalty, said / penalty))


def law(scores: Scores, options: SamplingOptions) -> Scores:
    """The law to draw from, float32[V], sums to 1. scores: float32[V], penalized."""
    if 0 < options.top_k < scores.size:
        kept = _largest(scores, options.top_k)
        chances = np.zeros_like(scores)
        chances[kept] = _truncated(_softmax(scores[kept], options.temperature), options)
        return chances
    return _truncated(_softmax(scores, options.temperature), options)


def _softmax(scores: Scores, temperature: float) -> Scores:
    chances: Scores = torch.softmax(torch.from_numpy(scores / np.float32(temperature)), 0).numpy()
    return chances


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
