"""What the stages of a build found, for people; and a bundle's prediction beside what it does on held-out prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from yggc.decide import Decision, TriedTree
from yggc.profile import LatencyProfile
from yggc.schedule import SteadyPace
from yggc.trace import ANSWER_TOKENS, CalibrationTrace, TracedText, read_prompt_set, shipped_prompts
from yggc.train_depth import DepthStudy
from yggrt.bench import BenchPrompt, answer_both_ways, beside_prediction, difference_lines, format_table, summarize
from yggrt.bundle import load
from yggrt.engine import Engine
from yggrt.latency import StepTimes
from yggrt.plan import Plan
from yggrt.schedule import describe_schedule
from yggrt.show import describe_depth, describe_depth_figures, describe_prediction, describe_study
from yggrt.timeline import draw_round, measured_round, planned_round

TIMELINE_PROMPTS = 3

TREES_SHOWN = 5
"""Of those the search tried, the fastest."""


def format_profile(measured: LatencyProfile) -> str:
    """Seconds by step, a column an extent."""
    extents = sorted({point.extent for point in measured.points})
    lines = [f"{'milliseconds at extent':<26}" + "".join(f"{extent:>16}" for extent in extents)]
    steps = dict.fromkeys((point.role, point.width, point.depth) for point in measured.points)
    for role, width, depth in steps:
        name = f"verify, {width} rows" if role == "verify" else f"draft, width {width}, depth {depth}"
        cells = []
        for extent in extents:
            found = [p for p in measured.points if (p.role, p.width, p.depth, p.extent) == (role, width, depth, extent)]
            cells.append(f"{found[0].seconds * 1e3:.2f} ± {found[0].spread_s * 1e3:.2f}" if found else "-")
        lines.append(f"{name:<26}" + "".join(f"{cell:>16}" for cell in cells))
    plain, speculative = measured.host.plain_s * 1e3, measured.host.speculative_s * 1e3
    lines.append(f"host: {plain:.2f} ms of a plain iteration, {speculative:.2f} ms of a speculative one")
    return "\n".join(lines)


def format_trace(trace: CalibrationTrace) -> str:
    """How often the drafter's proposals are what the verifier says, by kind of text."""
    count = trace.texts[0].children.shape[1]
    lines = [f"{'kind':<20}{'texts':>7}{'tokens':>8}{'favourite right':>17}{f'among {count}':>11}"]
    for name in [*dict.fromkeys(text.category for text in trace.texts), "all"]:
        texts = [text for text in trace.texts if name in (text.category, "all")]
        tokens, first, any_of = _agreement(texts)
        lines.append(f"{name:<20}{len(texts):>7}{tokens:>8}{first / tokens:>17.0%}{any_of / tokens:>11.0%}")
    return "\n".join(lines)


def _agreement(texts: Sequence[TracedText]) -> tuple[int, int, int]:
    """Tokens, those that are the drafter's favourite, and those among its children."""
    tokens = first = any_of = 0
    for text in texts:
        agrees = [
            [child == said for child in row] for row, said in zip(text.children.tolist(), text.answer_ids, strict=True)
        ]
        tokens += len(agrees)
        first += sum(row[0] for row in agrees)
        any_of += sum(any(row) for row in agrees)
    return tokens, first, any_of


def format_tried(tried: Sequence[TriedTree]) -> str:
    """The fastest trees of a search, and the one that was tried with the drafter's whole output layer."""
    lines = []
    for tree in [*tried[:TREES_SHOWN], *(tree for tree in tried[TREES_SHOWN:] if tree.whole_head)]:
        head = ", whole head" if tree.whole_head else ""
        lines.append(
            f"tried: width {tree.draft_width}, depth {tree.depth}, {tree.children_per_node} children a node{head}: "
            f"{tree.speedup:.3f}x plain, {tree.tokens_per_iteration:.2f} tokens per iteration, "
            f"on {tree.num_texts} texts"
        )
    return "\n".join(lines)


def format_decision(decision: Decision) -> str:
    """What a search tried and chose."""
    policy = decision.policy
    chosen = decision.reason or (
        f"chosen: width {policy.draft_width}, depth {policy.default_shape.draft_depth}, {policy.children_per_node} "
        f"children a node, verifying {', '.join(map(str, policy.verify_widths))} rows"
    )
    return "\n".join(part for part in (format_tried(decision.tried), chosen) if part)


def format_depth(study: DepthStudy) -> str:
    """The ways to choose the draft depth, and which of them the plan keeps."""
    figures = study.figures
    lines = [
        f"depth, {describe_depth_figures(figures)}",
        f"the depth network expects {figures.promised:.2f} tokens per iteration of its choices; "
        f"{figures.emitted:.2f} came",
    ]
    network = study.network
    lines.append(study.reason if network is None else f"kept: depths {', '.join(map(str, network.depths))}, learned")
    return "\n".join(lines)


def format_prediction(plan: Plan) -> str:
    """The plan's prediction in a line; empty where it has none."""
    return "" if plan.prediction is None else f"predicted: {describe_prediction(plan)}"


def format_schedules(plan: Plan) -> str:
    """The stage schedules that were run, and which of them the plan keeps; empty where none were."""
    if plan.schedule_study is None:
        return ""
    kept = "one stage after the other" if len(plan.schedule.lanes) == 1 else "stages beside each other"
    title = "schedules that were run (± two standard errors; * is kept):"
    return "\n".join([title, *describe_study(plan), f"kept: {kept}"])


def format_timeline(path: Path) -> str:
    """A bundle's iteration in time: by the plan's stage times, and as it runs here on one of the shipped prompts."""
    engine = load(path)
    assert engine.bundle is not None
    plan, executor = engine.bundle.plan, engine.executor
    parts = [f"schedule: {describe_schedule(plan.schedule)}"]
    if plan.schedule_study is not None:
        parts.append(draw_round("planned", plan.schedule, planned_round(plan.schedule, plan.schedule_study)))
        if plan.token_s is not None:
            engine.pace = SteadyPace(
                plan.policy, StepTimes(plan.curves), plan.host, plan.plain_width, plan.token_s, plan.depth_network
            )
    fitting = [each for each in shipped_prompts().prompts if _fits(engine, each)]
    for prompt in fitting[:TIMELINE_PROMPTS]:  # all but the last warm up
        executor.spans = []
        count = min(ANSWER_TOKENS, engine.max_context - 1)
        engine.generate(prompt.text, raw=engine.takes_raw_text, max_new_tokens=count, ignore_eos=True)
    parts.append(draw_round("measured", plan.schedule, measured_round(plan.schedule, executor.spans or ())))
    return "\n".join(parts)


def report_bundle(path: Path, prompts: Path | None) -> int:
    """Answer the held-out calibration prompts both ways and print what was predicted beside what was measured.

    prompts: the file that the bundle was calibrated on; None for the shipped ones.
    Returns 1 where the two ways differ beyond a near tie. Raises ValueError for a plan without a prediction.
    """
    engine = load(path)
    assert engine.bundle is not None
    plan = engine.bundle.plan
    if plan.prediction is None or plan.calibration is None:
        raise ValueError(f"{path} was built from a plan without a prediction; there is nothing to report")
    chosen = shipped_prompts() if prompts is None else read_prompt_set(prompts)
    if chosen.sha256 != plan.calibration.sha256:
        print(f"note: {path} was calibrated on {plan.calibration.name}; these are other prompts", file=sys.stderr)
    fitting = [
        (prompt, held) for prompt, held in zip(chosen.prompts, chosen.held_out, strict=True) if _fits(engine, prompt)
    ]
    prompts_held_out = [prompt for prompt, held in fitting if held] or [prompt for prompt, _ in fitting]
    if not prompts_held_out:
        raise ValueError(f"no prompt of {chosen.name} fits a context of {engine.max_context} tokens")
    pairs, differences = answer_both_ways(engine, prompts_held_out, ANSWER_TOKENS)
    figures = summarize(pairs, engine, differences)
    print(f"depth: {describe_depth(plan)}")
    print(format_table(figures))
    print(beside_prediction(plan.prediction, figures))
    for line in difference_lines(differences):
        print(line)
    return 1 if any(not entry.allowed for entry in differences) else 0


def _fits(engine: Engine, prompt: BenchPrompt) -> bool:
    """Whether the context leaves room for an answer, as calibrating asks."""
    try:
        return len(engine.encode_prompt(prompt.text, engine.takes_raw_text)) + 2 <= engine.max_context
    except ValueError:
        return False
