"""The decisions of a build: the acceptance table, the trees, how their depth is chosen, and what they will give.

`search` looks at the calibration's text to choose, `forecast` at the held-out part alone to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from yggc import calibrate, profile, schedule, search_tree, temperatures, train_depth
from yggc.config import DRAFT_WIDTHS, draft_depths
from yggc.profile import LatencyProfile, plain_width
from yggc.search_tree import Candidate, policy_of, reason_for_plain, score
from yggc.simulate import GrownText, Prices, add_up, grow_text, replay
from yggc.trace import CalibrationTrace, TracedText, redrafted
from yggrt.bundle import table_tensor
from yggrt.depth import DepthNetwork
from yggrt.engine import Engine
from yggrt.kvcache import EXTENT_BUCKET
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.pace import Pace
from yggrt.plan import AcceptanceTable, DraftGraph, Prediction, SampledPolicy, ScheduleStudy, TreePolicy
from yggrt.schedule import StageSchedule, sequential_schedule
from yggrt.tree import TreeShape

SCREENED_TEXTS = 10
"""Texts, spread over the categories, that every candidate tree is tried on."""

GROWTH_S = 20.0
"""What growing the trees that the depth network learns from should take; with more it learns from fewer texts, of which
SCREENED_TEXTS are the least. Those of the held-out texts come on top."""

HEAD_TEXTS = 24
"""Texts that the drafter's whole output layer is tried on beside the cut one, with the best tree."""


@dataclass(frozen=True, slots=True)
class TriedTree:
    """One line of the search: a tree, and what it does on the calibration's text.

    whole_head: whether the drafter's output layer was whole where the build could cut it.
    num_texts:  how many texts it was simulated on; others are not comparable to the last percent.
    """

    whole_head: bool
    num_texts: int
    draft_width: int
    children_per_node: int
    depth: int
    tpot_s: float
    speedup: float
    tokens_per_iteration: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What the search found.

    copied_log_a: as in the plan. reason: why there is no speculation, empty where there is. tried: the best first.
    """

    policy: TreePolicy
    table: AcceptanceTable
    copied_log_a: tuple[float, ...]
    token_s: float
    reason: str
    tried: tuple[TriedTree, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction on held-out text, by the curves with the fused drafts in them."""

    draft_graphs: tuple[DraftGraph, ...]
    points: tuple[LatencyPoint, ...]
    prediction: Prediction


def search(
    engine: Engine,
    measured: LatencyProfile,
    traced: CalibrationTrace,
    vocabulary: tuple[int, ...] | None,
    whole_head: Engine | None = None,
) -> Decision:
    """Fit the acceptance table, then choose the trees, then the drafter's output layer.

    vocabulary: what the engine's output layer is cut to; whole_head: the same pair with a drafter that is not cut.
    """
    limits = engine.decoder.draft.limits
    table = calibrate.fit_table(traced.fit, limits.num_children, limits.num_knots)
    copied = calibrate.fit_copied(traced.fit)
    prices = _open_prices(measured, measured.points)
    sample = spread(traced.fit, SCREENED_TEXTS)

    def grow(candidate: Candidate, depth: int, everything: bool) -> Sequence[GrownText]:
        return _grown(engine, traced.fit if everything else sample, candidate, depth, table, copied)

    found = search_tree.search_tree(candidates(engine), grow, prices)
    decision = Decision(
        policy_of(found.chosen.candidate, found.chosen.depth, found.verify_widths, vocabulary),
        table,
        copied,
        found.chosen.token_s,
        reason_for_plain(found) if found.chosen.depth == 0 else "",
        tuple(_tried(entry) for entry in found.ranking if entry.depth),
    )
    drafting = [entry for entry in found.ranking if entry.depth]
    if whole_head is None or not drafting:
        return decision
    return _price_whole_head(engine, whole_head, measured, traced, decision, drafting[0])


def _price_whole_head(
    engine: Engine,
    whole_head: Engine,
    measured: LatencyProfile,
    traced: CalibrationTrace,
    decision: Decision,
    best: search_tree.Scored,
) -> Decision:
    """The decision, or the same tree drafted with the whole output layer where that is faster on the same texts."""
    limits = engine.decoder.draft.limits
    candidate, depth = best.candidate, best.depth
    texts = spread(traced.fit, HEAD_TEXTS)
    cut = score(
        candidate,
        depth,
        _grown(engine, texts, candidate, depth, decision.table, decision.copied_log_a),
        _open_prices(measured, measured.points),
    )
    prices = _open_prices(measured, measured.points_of_whole_head)
    redrawn = [redrafted(whole_head, text) for text in texts]
    table = calibrate.fit_table(redrawn, limits.num_children, limits.num_knots)
    grown = _grown(whole_head, redrawn, candidate, depth, table, decision.copied_log_a)
    whole = score(candidate, depth, grown, prices)
    ranking = (*decision.tried, _tried(whole, whole_head=True))
    if whole.simulated.tpot_s >= cut.simulated.tpot_s or whole.speedup < search_tree.SMALLEST_GAIN:
        return replace(decision, tried=ranking)
    widths = search_tree.used_widths(whole.depth, grown, replace(prices, token_s=whole.token_s))
    policy = policy_of(candidate, depth, widths, None)
    return Decision(policy, table, decision.copied_log_a, whole.token_s, "", ranking[-1:] + ranking[:-1])


def _open_prices(measured: LatencyProfile, points: Sequence[LatencyPoint]) -> Prices:
    """Prices with every measured verify width on the menu, and no lambda yet."""
    times = StepTimes(points)
    return Prices(times, measured.host, plain_width(points), tuple(times.verify_widths), None)


def _grown(
    engine: Engine,
    texts: Sequence[TracedText],
    candidate: Candidate,
    depth: int,
    table: AcceptanceTable,
    copied_log_a: tuple[float, ...],
) -> list[GrownText]:
    tensor = table_tensor(table, candidate.children_per_node)
    return [grow_text(engine, text, TreeShape(candidate.draft_width, depth, 1), tensor, copied_log_a) for text in texts]


def candidates(engine: Engine) -> dict[Candidate, tuple[int, ...]]:
    """Depths to try by candidate: all widths with the children that were compiled, and the plain chain.

    At depth 1 the chain is the tree of width 1; other numbers of children would only bound the siblings.
    """
    limits = engine.decoder.draft.limits
    most = limits.num_children
    chain = tuple(depth for depth in draft_depths(1, limits.max_nodes) if depth > 1)
    found = {Candidate(1, 1): chain} if chain else {}
    for width in DRAFT_WIDTHS:
        depths = draft_depths(width, limits.max_nodes)
        if width <= most and depths:
            found[Candidate(width, most)] = depths
    return found


def spread(texts: Sequence[TracedText], count: int) -> Sequence[TracedText]:
    """`count` texts, evenly spaced."""
    if len(texts) <= count:
        return texts
    return [texts[index * len(texts) // count] for index in range(count)]


def _tried(entry: search_tree.Scored, whole_head: bool = False) -> TriedTree:
    return TriedTree(
        whole_head,
        entry.num_texts,
        entry.candidate.draft_width,
        entry.candidate.children_per_node,
        entry.depth,
        entry.simulated.tpot_s,
        entry.speedup,
        entry.simulated.tokens_per_iteration,
    )


def learn_depth(
    engine: Engine, decision: Decision, measured: LatencyProfile, traced: CalibrationTrace
) -> train_depth.DepthStudy | None:
    """Train the depth network for the trees of a decision that speculates; None where there is too little text for it.

    engine: with the drafter that was chosen.
    """
    policy = decision.policy
    prices = replace(_open_prices(measured, _points(measured, policy)), token_s=decision.token_s)
    limits = engine.decoder.draft.limits
    depths = draft_depths(policy.draft_width, limits.max_nodes)
    menu = train_depth.depth_menu(policy.default_shape.draft_depth, depths)
    candidate = Candidate(policy.draft_width, policy.children_per_node)
    longest = max(len(text.answer_ids) for text in traced.fit)
    text_s = longest * prices.times.draft_s(policy.draft_width, menu[-1], EXTENT_BUCKET)
    texts = spread(traced.fit, max(SCREENED_TEXTS, int(GROWTH_S / text_s)))
    grown = _grown(engine, texts, candidate, menu[-1], decision.table, decision.copied_log_a)
    held_out_grown = _grown(engine, traced.held_out, candidate, menu[-1], decision.table, decision.copied_log_a)
    return train_depth.study_depth(texts, grown, traced.held_out, held_out_grown, policy, menu, prices)


def _points(measured: LatencyProfile, policy: TreePolicy) -> tuple[LatencyPoint, ...]:
    """The curves with the drafter's output layer as the policy has it."""
    uncut = bool(measured.whole_head) and policy.draft_vocabulary is None
    return measured.points_of_whole_head if uncut else measured.points


def forecast(
    engine: Engine,
    decision: Decision,
    network: DepthNetwork | None,
    measured: LatencyProfile,
    traced: CalibrationTrace,
) -> Forecast:
    """Time the fused drafts, and predict on held-out text what the runtime will do with its own choices."""
    policy, shape = decision.policy, decision.policy.default_shape
    graphs = profile.time_drafts(engine)
    points = profile.with_fused(_points(measured, policy), graphs, policy.draft_width)
    rows = plain_width(points)
    prices = Prices(StepTimes(points), measured.host, rows, policy.verify_widths, decision.token_s)
    chooser = Pace(policy, prices.times, measured.host, rows, decision.token_s, network)
    table = table_tensor(decision.table, policy.children_per_node)
    deepest = TreeShape(policy.draft_width, policy.draft_depths[-1], 1)
    parts = []
    for text in traced.held_out:
        expected = None if network is None else network.expected_tokens(text.hidden)
        grown = grow_text(engine, text, deepest, table, decision.copied_log_a)
        parts.append(replay(grown, shape.draft_depth, prices, chooser, expected))
    simulated = add_up(parts)
    prediction = Prediction(simulated.tpot_s, simulated.plain_tpot_s, simulated.tokens_per_iteration)
    return Forecast(graphs, points, prediction)


@dataclass(frozen=True, slots=True)
class SampledPolicies:
    """How to draft above temperature 0; see `yggrt.plan.Plan.sampled`."""

    policies: tuple[SampledPolicy, ...]


def draft_at_temperatures(
    engine: Engine,
    decision: Decision,
    made: Forecast,
    measured: LatencyProfile,
    traced: CalibrationTrace,
    say: Callable[[str], object],
) -> SampledPolicies:
    """Study temperatures above 0 with the drafter that was chosen. engine: of the plan's steps."""
    prices = replace(_open_prices(measured, made.points), token_s=None)
    num_fit, num_held_out = temperatures.num_texts(temperatures.mean_answer_s(traced.fit, prices))
    fit, held_out = spread(traced.fit, num_fit), spread(traced.held_out, num_held_out)
    children = decision.policy.children_per_node
    return SampledPolicies(temperatures.study_temperatures(engine, fit, held_out, prices, children, say))


@dataclass(frozen=True, slots=True)
class ChosenSchedule:
    """How the stages of an iteration run. study: what it was chosen by; None where there is nothing to draft."""

    schedule: StageSchedule
    study: ScheduleStudy | None


def choose_schedule(
    engine: Engine,
    decision: Decision,
    network: DepthNetwork | None,
    made: Forecast,
    measured: LatencyProfile,
    traced: CalibrationTrace,
    say: Callable[[str], object],
) -> ChosenSchedule:
    """Search the stage schedules of a decision, run the best few, keep the fastest. engine: of the plan's steps."""
    policy, shape = decision.policy, decision.policy.default_shape
    if shape.draft_depth == 0:
        return ChosenSchedule(sequential_schedule(engine.num_threads), None)
    rows = plain_width(made.points)
    prices = Prices(StepTimes(made.points), measured.host, rows, policy.verify_widths, decision.token_s)
    pace = schedule.SteadyPace(policy, prices.times, measured.host, rows, decision.token_s, network)
    texts = spread(traced.fit, SCREENED_TEXTS)
    candidate = Candidate(policy.draft_width, policy.children_per_node)
    deeper = 1 + policy.draft_width * (shape.draft_depth + 1) <= engine.decoder.draft.limits.max_nodes
    grown = _grown(engine, texts, candidate, shape.draft_depth + deeper, decision.table, decision.copied_log_a)
    chosen, study = schedule.study_schedule(engine, pace, grown, texts, prices, network is not None, say)
    return ChosenSchedule(chosen, study)
