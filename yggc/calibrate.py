"""The acceptance table: how often a child is the verifier's choice, by its rank and the drafter's probability of it;
and how often that is what a text said the last time, by how much of it came before then too.

Estimated at nodes on the verifier's path alone, for all K children, grown or not.
Source: design, section 5, "EGT at temperature 0".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from yggc.trace import TracedText
from yggrt.artifacts import LOG_Q_MIN
from yggrt.copying import LONGEST_MATCH, find_match
from yggrt.plan import AcceptanceTable

SMALLEST, LARGEST = 1e-4, 0.999
PRIOR_COUNT = 12.0
"""Positions that an estimate's prior weighs as much as: the drafter's own probability for the table of all ranks, that
table for each rank's own."""
SMOOTHING_KNOTS = 0.8
"""Standard deviation of the smoothing along log q, in knots."""


def fit_table(texts: Sequence[TracedText], num_ranks: int, num_knots: int) -> AcceptanceTable:
    """a(rank, q) of these texts. Raises ValueError when there is no text."""
    if not texts:
        raise ValueError("an acceptance table needs at least one text")
    hits = [text.children == np.array(text.answer_ids)[:, None] for text in texts]  # [T, K]
    log_q = np.concatenate([text.child_log_q for text in texts])
    return table_of(log_q, np.concatenate(hits).astype(np.float64), num_ranks, num_knots)


def table_of(log_q: NDArray[np.float32], hits: NDArray[np.float64], num_ranks: int, num_knots: int) -> AcceptanceTable:
    """a(rank, q), non-decreasing in q. log_q: [n, at least K], best first; hits: as many chances to be chosen."""
    log_q, hits = log_q[:, :num_ranks], hits[:, :num_ranks]
    found = log_q.shape[1]
    q_at_knots = np.exp(np.linspace(LOG_Q_MIN, 0.0, num_knots))
    pooled = _estimate(log_q.ravel(), hits.ravel(), q_at_knots)
    rows = [_estimate(log_q[:, rank], hits[:, rank], pooled) for rank in range(found)]
    rows += rows[-1:] * (num_ranks - found)
    values = np.log(np.clip(np.stack(rows), SMALLEST, LARGEST))
    return AcceptanceTable(num_ranks, num_knots, LOG_Q_MIN, tuple(float(value) for value in values.ravel()))


def fit_copied(texts: Sequence[TracedText]) -> tuple[float, ...]:
    """Of these texts' answers, by the length of the match: log of how often what followed it the last time comes again.

    Non-decreasing; lengths that never came have the rate of the others.
    """
    counts, hits = np.zeros(LONGEST_MATCH), np.zeros(LONGEST_MATCH)
    for text in texts:
        tokens = np.array([*text.prompt_ids, *text.answer_ids])
        for place in range(len(text.prompt_ids), tokens.size):
            after, length = find_match(tokens[:place])
            if length:
                counts[length - 1] += 1
                hits[length - 1] += tokens[after] == tokens[place]
    if not counts.any():
        return ()
    prior = PRIOR_COUNT * hits.sum() / counts.sum()
    rates = non_decreasing((hits + prior) / (counts + PRIOR_COUNT), counts + PRIOR_COUNT)
    return tuple(float(value) for value in np.log(np.clip(rates, SMALLEST, LARGEST)))


def by_knots(places: NDArray[np.float64], chances: NDArray[np.float64], num_knots: int) -> NDArray[np.float64]:
    """Chances as they go with something from LOG_Q_MIN to 0: float64[K, num_knots]. places: [n]; chances: [n, K]."""
    rows = [
        np.divide(*_weighed(places, each, np.full(num_knots, each.mean())))  # type: ignore[call-overload]
        for each in chances.T
    ]
    return np.stack(rows)


def _estimate(log_q: NDArray[np.float32], hits: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chance of a hit at every knot: float64[num_knots]. log_q, hits: [n]; prior: [num_knots]."""
    hit_counts, counts = _weighed(log_q.astype(np.float64), hits, prior)
    return non_decreasing(hit_counts / counts, counts)


def _weighed(
    places: NDArray[np.float64], hits: NDArray[np.float64], prior: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hits and positions about every knot, smoothed, with those of the prior."""
    last = prior.size - 1
    place = np.clip(1.0 - places / LOG_Q_MIN, 0.0, 1.0) * last
    below = np.minimum(np.floor(place).astype(np.int64), last - 1)
    upper = place - below
    counts, hit_counts = np.zeros(prior.size), np.zeros(prior.size)
    for knot, weight in ((below, 1.0 - upper), (below + 1, upper)):
        np.add.at(counts, knot, weight)
        np.add.at(hit_counts, knot, weight * hits)
    offsets = np.arange(prior.size)
    kernel = np.exp(-0.5 * ((offsets[:, None] - offsets[None, :]) / SMOOTHING_KNOTS) ** 2)
    counts, hit_counts = kernel @ counts, kernel @ hit_counts
    return hit_counts + PRIOR_COUNT * prior, counts + PRIOR_COUNT


def non_decreasing(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, other_mass, other_count = blocks.pop()
            mean = (mean * mass + other * other_mass) / (mass + other_mass)
            mass, count = mass + other_mass, count + other_count
        blocks.append((mean, mass, count))
    return np.array([mean for mean, _, count in blocks for _ in range(count)])


def log_loss(texts: Sequence[TracedText], table: AcceptanceTable) -> float:
    """Mean -log of what the table gave each child that was, or was not, chosen; nats. Lower is better."""
    total, count = 0.0, 0
    for text in texts:
        for answer, children, log_q in zip(text.answer_ids, text.children, text.child_log_q, strict=True):
            for rank, (child, q) in enumerate(zip(children.tolist(), log_q.tolist(), strict=True)):
                chance = min(math.exp(table.log_acceptance(rank, q)), LARGEST)
                total -= math.log(chance if child == answer else 1.0 - chance)
                count += 1
    return total / count
