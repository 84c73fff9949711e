"""Above temperature 0: what a drafted child is worth there, and which way of drafting pays.

For each of TEMPERATURES the verifier writes text by its own law, and the drafter proposes at every position of it. From
that come two tables: of the drafter's favourites by rank and probability, as at temperature 0, and of children that are
drawn by their place and the drafter's entropy. The best trees of either kind and the best chain of drawn children are
run against each other, and against plain decoding: the choice is made on all texts that were answered, which are few,
and what is predicted of each way is what it gave on the held-out ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from yggc import calibrate, search_tree
from yggc.config import DRAFT_WIDTHS, draft_depths
from yggc.search_tree import SHALLOW, Candidate, pace_of
from yggc.simulate import GrownText, Prices, grow_text
from yggc.trace import TracedText
from yggrt.artifacts import LOG_Q_MIN
from yggrt.bundle import make_mode, table_tensor
from yggrt.engine import Engine, GenerationResult, SampledMode
from yggrt.executor import Drafting, Iteration, Round
from yggrt.kvcache import EXTENT_BUCKET
from yggrt.plan import AcceptanceTable, HostSeconds, Prediction, SampledPolicy
from yggrt.sampling import SamplingOptions, TokenChooser, law
from yggrt.show import describe_policy
from yggrt.tree import PLAIN, TreeShape

TEMPERATURES = (0.6, 1.0)
FIT_TEXTS, HELD_OUT_TEXTS = 16, 12
FIT_RUNS, HELD_OUT_RUNS = 5, 4
"""How often each of them is answered at every temperature."""
STUDY_S = 60.0
"""About what all may take; where it would take longer, fewer texts are used, LEAST_TEXTS at least."""
TREES_SHARE = 0.15
"""Of that: growing trees of every kind along the texts that are fitted to."""
LEAST_TEXTS = 6
SCREENED_TEXTS = 5
"""Of the fit ones, that every tree of favourites is tried on."""
ORDERS = 4
"""Ways to draw the children of a position, which the table of places is estimated from."""
SURE_GAIN = 1.02
"""A tree must be this much faster than plain decoding: the two wrote different texts."""
ROOT_STRIDE = 4
"""Drawn trees are grown at every so many positions."""


@dataclass(frozen=True, slots=True)
class WarmText:
    """A text that the verifier wrote by its law at a temperature; `children` of the trace are the drafter's M.

    chances: float64[T, M], the verifier's of those children.
    """

    traced: TracedText
    chances: NDArray[np.float64]


def num_texts(answer_s: float) -> tuple[int, int]:
    """Fit and held-out texts to use. answer_s: seconds of a plain answer, see `mean_answer_s`."""
    answers = len(TEMPERATURES) * (FIT_RUNS * FIT_TEXTS + HELD_OUT_RUNS * HELD_OUT_TEXTS)
    share = min(1.0, (1.0 - TREES_SHARE) * STUDY_S / (answers * answer_s))
    fit, held_out = (max(LEAST_TEXTS, round(share * count)) for count in (FIT_TEXTS, HELD_OUT_TEXTS))
    return fit, held_out


def mean_answer_s(texts: Sequence[TracedText], prices: Prices) -> float:
    """Mean seconds of reading a text's prompt and answering as long as the text did, plainly, by the curves."""
    seconds = []
    for text in texts:
        count = len(text.answer_ids)
        extent = -(-(len(text.prompt_ids) + count) // EXTENT_BUCKET) * EXTENT_BUCKET
        reading_s = float(prices.times.verify_s([len(text.prompt_ids)], extent)[0])
        seconds.append(reading_s + count * prices.plain_s(extent))
    return float(np.mean(seconds))


def study_temperatures(
    engine: Engine,
    fit: Sequence[TracedText],
    held_out: Sequence[TracedText],
    prices: Prices,
    children_per_node: int,
    say: Callable[[str], object],
) -> tuple[SampledPolicy, ...]:
    """Ways to draft at each of TEMPERATURES, ascending, and which of them is chosen.

    engine: of the plan's steps. fit, held_out: texts of the calibration, whose prompts are answered again. prices: with
    every verify width that was measured. children_per_node: K.
    """
    found: list[SampledPolicy] = []
    for temperature in TEMPERATURES:
        found += _study(engine, fit, held_out, prices, children_per_node, temperature)
        say(f"temperature {temperature}: {describe_policy(found[-1])}")
    return tuple(found)


def _study(
    engine: Engine,
    fit: Sequence[TracedText],
    held_out: Sequence[TracedText],
    prices: Prices,
    children_per_node: int,
    temperature: float,
) -> list[SampledPolicy]:
    """The ways at one temperature, the chosen one last."""
    with engine.its_threads():
        texts = [warm_text(engine, text, temperature, seed) for seed, text in enumerate(fit)]
    limits = engine.decoder.draft.limits
    plain = _run_all(engine, fit, temperature, None, prices)
    excess = plain.host_s - prices.host.plain_s
    host = HostSeconds(plain.host_s, max(prices.host.speculative_s + excess, 0.0))
    priced = replace(prices, host=host, token_s=plain.token_s)
    by_place = place_table(texts, temperature, limits.num_children, limits.num_knots)
    by_rank = rank_table(texts, limits.num_children, limits.num_knots)
    ways = [
        _favourites(engine, texts, priced, children_per_node, temperature, by_rank),
        _drawn(engine, texts, priced, (1,), 1, temperature, by_place),
        _drawn(engine, texts, priced, DRAFT_WIDTHS, children_per_node, temperature, by_place),
    ]
    runs = [_run_all(engine, fit, temperature, way, priced) for way in ways]
    alone = _run_all(engine, held_out, temperature, None, priced)
    found, over_all = [], []
    for way, run in zip(ways, runs, strict=True):
        settled = replace(way, host=HostSeconds(host.plain_s, run.host_s), token_s=run.token_s)
        after = _run_all(engine, held_out, temperature, settled, priced)
        made = Prediction(after.token_s, alone.token_s, max(after.tokens_per_iteration, 1.0))
        found.append(replace(settled, prediction=made))
        over_all.append(_token_s(run, after))
    none = SampledPolicy(
        temperature, False, False, PLAIN, (1,), children_per_node, by_rank, (), host, plain.token_s,
        Prediction(alone.token_s, alone.token_s, 1.0),
    )  # fmt: skip
    fastest = found[int(np.argmin(over_all))]
    if min(over_all) * SURE_GAIN > _token_s(plain, alone):
        return [*found, replace(none, chosen=True)]
    return [*(way for way in found if way is not fastest), replace(fastest, chosen=True)]


# ---- text and tables ----


def warm_text(engine: Engine, text: TracedText, temperature: float, seed: int) -> WarmText:
    """Another answer to a text's prompt, of as many tokens at most, drawn at a temperature."""
    decoder, options = engine.decoder, SamplingOptions(temperature=temperature, seed=seed)
    chooser, tokens = TokenChooser(options, text.prompt_ids), list(text.prompt_ids)
    decoder.reset()
    rounds: list[Round] = [decoder.prefill(tokens, chooser)]
    scores = [rounds[0].outputs[3][-1].float().cpu().numpy().copy()]
    tokens += rounds[0].tokens
    while len(rounds) < text.budget and tokens[-1] not in engine.eos_ids:
        rounds.append(decoder.decode(tokens, PLAIN, chooser=chooser))
        scores.append(rounds[-1].outputs[3][0].float().cpu().numpy().copy())
        tokens += rounds[-1].tokens
    children, log_q, chances = [], [], []
    for place, row in enumerate(scores, start=len(text.prompt_ids)):
        iteration = Iteration(tokens[:place], TreeShape(1, 1, 1))
        for stage in ("head", "grow"):
            decoder.stages[stage](iteration)
        likely, q = (part.numpy()[0].copy() for part in iteration.laws[0])
        said = law(row, options)
        children.append(likely)
        log_q.append(q)
        chances.append(said[likely].astype(np.float64))
    answer = tuple(tokens[len(text.prompt_ids) :])
    floor = np.maximum(np.stack(log_q), np.float32(LOG_Q_MIN))
    traced = replace(text, answer_ids=answer, children=np.stack(children), child_log_q=floor)
    return WarmText(traced, np.stack(chances))


def rank_table(texts: Sequence[WarmText], num_ranks: int, num_knots: int) -> AcceptanceTable:
    """a(rank, q) of the drafter's favourites, by the verifier's chances of them."""
    log_q = np.concatenate([text.traced.child_log_q for text in texts])
    return calibrate.table_of(log_q, np.concatenate([text.chances for text in texts]), num_ranks, num_knots)


def place_table(texts: Sequence[WarmText], temperature: float, num_ranks: int, num_knots: int) -> AcceptanceTable:
    """Chance that a drawn child is accepted, the places before it having been rejected: by its place among its siblings
    and minus the entropy of the drafter's law, non-increasing in the place."""
    log_q = np.concatenate([text.traced.child_log_q for text in texts]).astype(np.float64) / temperature
    law_q = np.exp(log_q - log_q.max(axis=1, keepdims=True))
    law_q /= law_q.sum(axis=1, keepdims=True)
    sureness = (law_q * np.log(np.maximum(law_q, 1e-300))).sum(axis=1)
    chances = np.concatenate([text.chances for text in texts])
    values = chances_of_places(
        np.repeat(chances, ORDERS, axis=0), np.repeat(law_q, ORDERS, axis=0), num_ranks, np.random.default_rng(0)
    )
    rows = calibrate.by_knots(np.repeat(sureness, ORDERS), values, num_knots)
    rows = np.minimum.accumulate(np.clip(rows, calibrate.SMALLEST, calibrate.LARGEST), axis=0)
    return AcceptanceTable(num_ranks, num_knots, LOG_Q_MIN, tuple(float(value) for value in np.log(rows).ravel()))


def chances_of_places(
    chances: NDArray[np.float64], law_q: NDArray[np.float64], num_places: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """For one order of draws a row: chance that the child at each place is accepted and none before it, float64[n, K].

    chances, law_q: float64[n, M], the verifier's of the drafter's M tokens, and the law they are drawn from.
    Source: `yggrt.accept.traverse`, at a node that is accepted for sure.
    """
    count, size = chances.shape
    rows = np.arange(count)
    keys = np.log(np.maximum(law_q, 1e-300)) + random.gumbel(size=law_q.shape)
    order = np.argsort(-keys, axis=1)
    inside, drafted = chances.copy(), law_q.copy()
    outside = np.maximum(0.0, 1.0 - inside.sum(axis=1))
    alive, reached = np.ones(count), np.ones(count)
    found = np.zeros((count, num_places))
    for place in range(min(num_places, size)):
        at = order[:, place]
        drawn = drafted[rows, at]
        accepted = alive * np.minimum(1.0, inside[rows, at] / np.maximum(drawn, 1e-300)) * (drawn > 0)
        found[:, place] = reached * accepted
        reached = reached * (1.0 - accepted)
        left = np.maximum(inside - drafted, 0.0)
        mass = left.sum(axis=1) + outside
        alive = np.where(mass > 0, alive, 0.0)
        inside = left / np.maximum(mass, 1e-300)[:, None]
        outside = outside / np.maximum(mass, 1e-300)
        drafted[rows, at] = 0.0
        drafted = drafted / np.maximum(drafted.sum(axis=1), 1e-300)[:, None]
    return found


# ---- trees ----


def _drawn(
    engine: Engine,
    texts: Sequence[WarmText],
    prices: Prices,
    widths: Sequence[int],
    children_per_node: int,
    temperature: float,
    table: AcceptanceTable,
) -> SampledPolicy:
    """The best tree of drawn children by what its values promise; a chain where there is one width and one child.

    Of a wider tree three nodes or more are verified where the menu allows: with two it is a chain that costs more.
    """
    assert prices.token_s is not None
    limits, best, least = engine.decoder.draft.limits, TreeShape(1, 1, 2), math.inf
    fewest = 2 if children_per_node == 1 else min(3, max(prices.verify_widths))
    tensor = table_tensor(table, children_per_node)
    for width in widths:
        depths = [depth for depth in draft_depths(width, limits.max_nodes) if depth <= SHALLOW]
        if width > max(children_per_node, widths[0]) or not depths:
            continue
        deepest = TreeShape(width, depths[-1], 1)
        grown = [grow_drawn(engine, text.traced, deepest, tensor, temperature) for text in texts]
        values = np.exp(np.concatenate([each for each, _ in grown]))
        extents = np.concatenate([each for _, each in grown])
        for depth in depths:
            promised = np.cumsum(-np.sort(-values[:, : 1 + width * depth], axis=1), axis=1).mean(axis=0)
            for rows in (each for each in prices.verify_widths if fewest <= each <= promised.size):
                seconds = np.mean([_iteration_s(prices, width, depth, rows, extent) for extent in extents.tolist()])
                if seconds / promised[rows - 1] < least:
                    least = float(seconds / promised[rows - 1])
                    best = TreeShape(width, depth, rows)
    return SampledPolicy(
        temperature, False, True, best, (best.verify_width,), children_per_node, table, (), prices.host, least,
        Prediction(least, prices.token_s, 1.0),
    )  # fmt: skip


def grow_drawn(
    engine: Engine, text: TracedText, shape: TreeShape, table: torch.Tensor, temperature: float
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Log values of the trees drawn along a text, float32[roots, N], and the extents there, int64[roots]."""
    decoder, tokens = engine.decoder, [*text.prompt_ids, *text.answer_ids]
    chooser = TokenChooser(SamplingOptions(temperature=temperature, seed=0), text.prompt_ids)
    lengths = range(len(text.prompt_ids) + 1, len(tokens), ROOT_STRIDE)
    decoder.reset(Drafting(table, (), temperature, chooser))
    with engine.its_threads():
        values = [decoder.draft_tree(tokens[:length], shape).values.copy() for length in lengths]
    decoder.reset()
    extents = [-(-(length + 1) // EXTENT_BUCKET) * EXTENT_BUCKET for length in lengths]
    empty = np.zeros((0, shape.capacity), np.float32)
    return np.stack(values) if values else empty, np.array(extents, dtype=np.int64)


def _iteration_s(prices: Prices, width: int, depth: int, rows: int, extent: int) -> float:
    times = prices.times
    return float(times.verify_s([rows], extent)[0]) + times.draft_s(width, depth, extent) + prices.host.speculative_s


def _favourites(
    engine: Engine,
    texts: Sequence[WarmText],
    prices: Prices,
    children_per_node: int,
    temperature: float,
    table: AcceptanceTable,
) -> SampledPolicy:
    """The best tree of the drafter's favourites, searched as at temperature 0."""
    traced = [text.traced for text in texts]
    limits = engine.decoder.draft.limits
    tensor, copied = table_tensor(table, children_per_node), calibrate.fit_copied(traced)
    depths_of = {
        Candidate(width, children_per_node): tuple(
            depth for depth in draft_depths(width, limits.max_nodes) if depth <= SHALLOW
        )
        for width in DRAFT_WIDTHS
        if width <= children_per_node and draft_depths(width, limits.max_nodes)
    }

    def grow(candidate: Candidate, depth: int, everything: bool) -> Sequence[GrownText]:
        chosen = traced if everything else traced[:SCREENED_TEXTS]
        return [grow_text(engine, text, TreeShape(candidate.draft_width, depth, 1), tensor, copied) for text in chosen]

    assert prices.token_s is not None
    found = search_tree.search_tree(depths_of, grow, replace(prices, token_s=None))
    best, widths = found.chosen, found.verify_widths
    if best.depth == 0:  # the best of those that do not pay
        best = next(entry for entry in found.ranking if entry.depth)
        widths = search_tree.fitting(prices.verify_widths, best.candidate, best.depth)
    shape = TreeShape(best.candidate.draft_width, best.depth, widths[-1])
    return SampledPolicy(
        temperature, False, False, shape, widths, children_per_node, table, copied, prices.host, best.token_s,
        Prediction(best.token_s, prices.token_s, max(best.simulated.tokens_per_iteration, 1.0)),
    )  # fmt: skip


# ---- runs ----


@dataclass(frozen=True, slots=True)
class _Run:
    """Of some prompts: seconds a token by the curves and the host's measured share, and what an iteration gave.

    host_s: outside compiled steps, of one iteration, mean; of a speculative one where there were such.
    """

    tokens: int
    token_s: float
    tokens_per_iteration: float
    host_s: float


def _token_s(*runs: _Run) -> float:
    """Seconds a token over several runs."""
    tokens = sum(run.tokens for run in runs)
    return sum(run.tokens * run.token_s for run in runs) / tokens if tokens else runs[0].token_s


def _run_all(
    engine: Engine, texts: Sequence[TracedText], temperature: float, policy: SampledPolicy | None, prices: Prices
) -> _Run:
    """Answer the texts' prompts at a temperature, by a policy or, with None, plainly."""
    if policy is None:
        pace = pace_of(Candidate(1, 1), 0, replace(prices, token_s=1.0))
        mode = SampledMode(temperature, False, PLAIN, engine.decoder.table, pace)
    else:
        mode = make_mode(policy, prices.times, prices.plain_width, None, follows_clock=False)
        assert mode.pace is not None
        pace = mode.pace
    before, engine.modes = engine.modes, (mode,)
    try:
        results = [
            engine.generate(text.prompt_ids, max_new_tokens=text.budget, temperature=temperature, seed=seed)
            for seed, text in enumerate(texts)
        ]
    finally:
        engine.modes = before
    timed = [result for result in results if result.stats.tpot_s]
    iterations = sum(result.stats.iterations for result in timed)
    tokens = sum(result.stats.new_tokens - 1 for result in timed)
    if not iterations:
        return _Run(0, prices.plain_s(EXTENT_BUCKET), 1.0, prices.host.plain_s)
    host_s = sum(_host_s(result) for result in timed)
    return _Run(tokens, (pace.predicted_s + host_s) / tokens, tokens / iterations, host_s / iterations)


def _host_s(result: GenerationResult) -> float:
    stats = result.stats
    assert stats.tpot_s is not None and stats.host_share is not None
    return stats.tpot_s * (stats.new_tokens - 1) * stats.host_share
