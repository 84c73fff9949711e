"""A bundle for people to read."""

from __future__ import annotations

import math

from yggrt.bundle import Bundle
from yggrt.cuda import unverified
from yggrt.plan import DepthFigures, ModelIdentity, Plan, SampledPolicy
from yggrt.schedule import describe_schedule
from yggrt.tree import depths_to_fall_back_to


def describe(bundle: Bundle) -> str:
    """What was built, from what, for which machine, and what was decided, a line each."""
    plan, manifest = bundle.plan, bundle.manifest
    lines = [
        f"bundle      {bundle.path}  ({bundle.num_bytes / 1e6:.0f} MB)",
        f"verifier    {_model(plan.verifier)}",
        f"drafter     {_model(plan.drafter)}",
        f"made for    {plan.sku}, {plan.num_threads} threads, {plan.dtype}, torch {manifest.torch_version}",
        *(f"unverified  {line}" for line in unverified(plan.target, plan.sku)),
        f"context     {plan.max_context} tokens, prompt included",
        f"tree        {_tree(plan)}",
        f"depth       {describe_depth(plan)}",
        f"draft head  {_head(plan)}",
        f"copies      {_copies(plan)}",
        f"schedule    {describe_schedule(plan.schedule)}",
        *(f"  {line}" for line in describe_study(plan)),
        *(
            f"{f'at {way.temperature}':<12}{describe_policy(way)}{'' if way.chosen else ' (not chosen)'}"
            for way in plan.sampled
        ),
        f"plain       {plan.plain_width} rows a step",
        *(
            f"drafts      of depth {graph.depth}: {'fused' if graph.fused else 'pass by pass'} "
            f"(measured: fused {graph.fused_s * 1e3:.2f} ms, pass by pass {graph.passes_s * 1e3:.2f} ms)"
            for graph in plan.draft_graphs
        ),
        f"calibration {_calibration(plan)}",
        f"prediction  {describe_prediction(plan)}",
        f"made by     yggc {plan.provenance.yggc_version}, {plan.provenance.created}",
        "measured steps:" if plan.curves else "measured steps: none",
    ]
    lines += [
        f"  {point.role:<7} width {point.width:<4} depth {point.depth:<3} extent {point.extent:<6} "
        f"{point.seconds * 1e3:7.2f} ms ± {point.spread_s * 1e3:.2f}"
        for point in plan.curves
    ]
    lines.append("files:")
    lines += [f"  {file.file:<16} {file.num_bytes / 1e6:9.1f} MB  {file.digest[:16]}…" for file in bundle.entries]
    return "\n".join(lines)


def _tree(plan: Plan) -> str:
    policy, shape = plan.policy, plan.policy.default_shape
    if shape.draft_depth == 0:
        return "none: plain decoding"
    verified = f"{shape.verify_width} nodes"
    if plan.token_s is not None:
        menu = ", ".join(map(str, policy.verify_widths))
        verified = f"{menu} nodes by value (a token is worth {plan.token_s * 1e3:.2f} ms)"
    fallbacks = [d for d in depths_to_fall_back_to(shape.draft_depth)[:-1] if d in policy.draft_depths]
    return (
        f"width {shape.draft_width}, depth {shape.draft_depth}, {policy.children_per_node} children a node; "
        f"verified: {verified}; depths to fall back to: {', '.join(map(str, fallbacks)) or 'none'}"
    )


def describe_depth(plan: Plan) -> str:
    """How the draft depth is chosen, and what the ways to choose it gave, in one line."""
    network, figures = plan.depth_network, plan.depth_figures
    chosen = "fixed" if network is None else f"learned: {', '.join(map(str, network.depths))}"
    if figures is None:
        return chosen
    return f"{chosen}; {describe_depth_figures(figures)}"


def describe_depth_figures(figures: DepthFigures) -> str:
    """What the ways to choose the depth gave."""
    return (
        f"over plain decoding on held-out text: {figures.fixed:.3f}x with the best fixed depth "
        f"({figures.fixed_depth}), {figures.confident:.3f}x stopping when unsure, {figures.learned:.3f}x learned, "
        f"{figures.oracle:.3f}x with an oracle"
    )


def describe_policy(way: SampledPolicy) -> str:
    """A way to draft above temperature 0 and what it gives, in one line."""
    shape, made = way.shape, way.prediction
    if shape.draft_depth == 0:
        return "plain decoding"
    kind = "drawn children, traversed" if way.draws else "the drafter's favourites, walked through"
    menu = ", ".join(map(str, way.verify_widths))
    return (
        f"{kind}; width {shape.draft_width}, depth {shape.draft_depth}, {way.children_per_node} children a node, "
        f"verified: {menu}; {made.speedup:.2f}x predicted, {made.tokens_per_iteration:.2f} tokens per iteration"
    )


def describe_study(plan: Plan) -> list[str]:
    """The schedules that were run, a line each, the plan's own marked."""
    study = plan.schedule_study
    if study is None:
        return []
    lines = [
        f"the next root guessed rightly: {study.tail_hits:.0%} with a tail draft, {study.hits:.0%} without; "
        f"one lane to another: {study.handoff_s * 1e6:.0f} us"
    ]
    for tried in study.tried:
        mark = "*" if tried.schedule == plan.schedule else " "
        lines.append(
            f"{mark} predicted {tried.predicted_s * 1e3:6.2f} ms an iteration, measured {tried.measured_s * 1e3:6.2f} "
            f"± {tried.error_s * 1e3:.2f}, {tried.token_s * 1e3:6.2f} a token: {describe_schedule(tried.schedule)}"
        )
    return lines


def _calibration(plan: Plan) -> str:
    record = plan.calibration
    if record is None:
        return "none: raw drafter probabilities"
    return f"{record.name}: {record.num_prompts} prompts, {record.num_tokens} tokens (sha256 {record.sha256[:12]})"


def describe_prediction(plan: Plan) -> str:
    """The plan's prediction in one line."""
    made = plan.prediction
    if made is None:
        return "none"
    return (
        f"{made.tpot_s * 1e3:.2f} ms a token, plainly {made.plain_tpot_s * 1e3:.2f}: {made.speedup:.2f}x, "
        f"{made.tokens_per_iteration:.2f} tokens per iteration"
    )


def _head(plan: Plan) -> str:
    vocabulary = plan.policy.draft_vocabulary
    kept = "all" if vocabulary is None else f"{len(vocabulary)} of"
    return f"{kept} {plan.drafter.vocab_size} tokens"


def _copies(plan: Plan) -> str:
    if not plan.copied_log_a:
        return "nothing"
    rates = ", ".join(f"{math.exp(log_a):.0%}" for log_a in plan.copied_log_a)
    return f"what followed the text's last 1, 2, … tokens before comes again in {rates}"


def _model(model: ModelIdentity) -> str:
    return (
        f"{model.name} ({model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.vocab_size} tokens, fingerprint {model.fingerprint[:12]})"
    )
