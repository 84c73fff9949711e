"""`yggc compare --ablation`: what each part of the machinery adds, as in the paper's ablation.

One engine after another answers every prompt: the plan's tree of fixed depth with eager steps, the whole tree verified;
the same with the compiled steps; with the verify width chosen by value (and falling back where drafts do not pay); with
the learned depth, where the plan holds one; with the plan's schedule, where it is not one stage after the other.
Invariant: all of them run the same prompts in turns and say the same.
Source: paper, ablation study.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from yggc.checkpoints import Checkpoint, load_model, silence_libraries
from yggc.compare import CompareOptions, cell, find_checkpoints, interval, median_with_interval
from yggc.export import draft_pass, eager_run, verify_step
from yggc.simulate_bundle import name_of
from yggrt import bench
from yggrt.artifacts import Step
from yggrt.bundle import Bundle, load, table_tensor
from yggrt.engine import Engine, GenerationResult
from yggrt.errors import YggError
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache
from yggrt.latency import StepTimes
from yggrt.pace import Pace
from yggrt.schedule import StageSchedule, sequential_schedule
from yggrt.tree import TreeShape
from yggrt.wire import write_atomically

PLAIN, EAGER, COMPILED, PRUNED = "plain", "EGT, eager", "+ compilation", "+ pruning"
LEARNED, SCHEDULED = "+ learned depth", "+ schedule"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt as one step of the ablation answered it. tpot_s: None below two tokens."""

    step: str
    prompt: int
    category: str
    tpot_s: float | None
    new_tokens: int
    iterations: int
    acceptance_length: float


class Ablation:
    """The engines of all steps over one bundle; they share what can be shared.

    Raises YggError for a bundle that decodes plainly, or whose plan was never calibrated.
    """

    def __init__(self, bundle_engine: Engine, drafter: Checkpoint, verifier: Checkpoint) -> None:
        assert bundle_engine.bundle is not None
        plan = bundle_engine.bundle.plan
        shape = plan.policy.default_shape
        if shape.draft_depth == 0 or plan.token_s is None:
            raise YggError("this bundle's plan chooses nothing per iteration; there is nothing to take apart")
        self.engine = bundle_engine
        self.eager = eager_engine(bundle_engine, drafter, verifier)
        self.whole_tree = TreeShape(shape.draft_width, shape.draft_depth, shape.capacity)
        times = StepTimes(plan.curves)
        pruning = Pace(plan.policy, times, plan.host, plan.plain_width, plan.token_s)
        alone = sequential_schedule(plan.num_threads)
        self._ways: dict[str, tuple[Pace | None, StageSchedule]] = {
            PLAIN: (None, alone),
            EAGER: (None, alone),
            COMPILED: (None, alone),
            PRUNED: (pruning, alone),
        }
        pace, has_depth = pruning, plan.depth_network is not None
        if has_depth:
            assert bundle_engine.pace is not None
            pace = bundle_engine.pace
            self._ways[LEARNED] = (pace, sequential_schedule(plan.num_threads, depth=True))
        if plan.schedule != sequential_schedule(plan.num_threads, has_depth):
            self._ways[SCHEDULED] = (pace, plan.schedule)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps, plain decoding first."""
        return tuple(self._ways)

    def answer(self, step: str, prompt_ids: list[int], max_new_tokens: int) -> GenerationResult:
        """A prompt's answer by one step."""
        engine = self.eager if step == EAGER else self.engine
        engine.pace, schedule = self._ways[step]
        engine.shape = self.whole_tree
        if engine.executor.schedule != schedule:
            engine.use_schedule(schedule)
        return engine.generate(prompt_ids, max_new_tokens=max_new_tokens, plain=step == PLAIN)


def eager_engine(compiled: Engine, drafter: Checkpoint, verifier: Checkpoint) -> Engine:
    """An engine like a bundle's whose steps are transformers' modules, run one operator after another."""
    bundle, decoder = compiled.bundle, compiled.decoder
    assert bundle is not None
    if decoder.device.type != "cpu":
        raise YggError("the ablation's eager steps run on the CPU alone; give a bundle that was built for it")
    plan, dtype = bundle.plan, getattr(torch, bundle.manifest.dtype)
    limits = decoder.verify.limits, decoder.draft.limits
    verify = verify_step(load_model(verifier, dtype), compiled.vocab_size, limits[0])
    draft = draft_pass(load_model(drafter, dtype), compiled.vocab_size, limits[1], plan.policy.draft_vocabulary)
    return Engine(
        Decoder(
            Step("verify", eager_run(verify), verify.inputs, limits[0]),
            Step("draft", eager_run(draft), draft.inputs, limits[1]),
            {},
            plan.policy.draft_width,
            KvCache(verify.layouts, limits[0], dtype),
            KvCache(draft.layouts, limits[1], dtype),
            table_tensor(plan.acceptance_table, plan.policy.children_per_node),
            compiled.max_context,
            plan.plain_width,
            copied_log_a=plan.copied_log_a,
        ),
        compiled.shape,
        compiled.codec,
        compiled.eos_ids,
        compiled.vocab_size,
        compiled.drafter_context,
        compiled.num_threads,
    )


def ablate(options: CompareOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Answer the prompts by all steps and return the figures as JSON data; writes them where there is an output.

    say: gets notices and a line per prompt.
    Raises as `yggc.compare.compare` does. `failures` of the report lists where a step differs from plain decoding
    beyond a near tie.
    """
    chosen = bench.spread_over_categories(bench.read_prompts(options.prompts), options.limit)
    engine = load(options.bundle)
    bundle = engine.bundle
    assert bundle is not None
    raw = engine.takes_raw_text
    encoded = [engine.encode_prompt(prompt.text, raw) for prompt in chosen]
    drafter, verifier = find_checkpoints(bundle, options)
    with silence_libraries():
        ablation = Ablation(engine, drafter, verifier)
    near_tie = bench.NEAR_TIE[bundle.manifest.dtype]
    for step in ablation.steps:
        ablation.answer(step, encoded[0], WARM_UP_TOKENS)
    answered: list[Answered] = []
    failures: list[dict[str, Any]] = []
    started = perf_counter()
    for index, (prompt, prompt_ids) in enumerate(zip(chosen, encoded, strict=True)):
        first = index % len(ablation.steps)
        order = (*ablation.steps[first:], *ablation.steps[:first])
        results = {step: ablation.answer(step, prompt_ids, options.max_new_tokens) for step in order}
        group = bench.group_of(prompt.category)
        for step in ablation.steps:
            stats = results[step].stats
            answered.append(
                Answered(step, index, group, stats.tpot_s, stats.new_tokens, stats.iterations, stats.acceptance_length)
            )
            pair = bench.Pair(group, results[PLAIN], results[step])
            place = bench.first_difference(index, pair, near_tie)
            if place is not None and not place.allowed:
                failures.append({"step": step, **asdict(place)})
        elapsed, done = perf_counter() - started, index + 1
        left = elapsed / done * (len(chosen) - done)
        say(f"  {done}/{len(chosen)} {group}: {elapsed:.0f} s elapsed, about {left:.0f} s left")
    report = {
        "bundle": str(options.bundle),
        "prompts_file": str(options.prompts),
        "prompts": len(chosen),
        "max_new_tokens": options.max_new_tokens,
        "dtype": bundle.manifest.dtype,
        "sku": bundle.manifest.sku,
        "tree": name_of(ablation.whole_tree),
        "depth": _depth_line(bundle),
        "steps": list(ablation.steps),
        **summarize(answered),
        "failures": failures,
        "answers": [asdict(each) for each in answered],
    }
    if options.output is not None:
        write_atomically(options.output, json.dumps(report, indent=1).encode())
    return report


def _depth_line(bundle: Bundle) -> str:
    """Why there is no learned depth to add, or nothing."""
    figures = bundle.plan.depth_figures
    if bundle.plan.depth_network is not None:
        return ""
    if figures is None:
        return "the plan holds no depth network"
    return (
        f"the plan keeps a fixed depth: on held-out text learned {figures.learned:.3f} times plain, fixed "
        f"{figures.fixed:.3f}"
    )


def summarize(answered: Sequence[Answered]) -> dict[str, Any]:
    """Figures of all steps, overall and by category."""
    categories = dict.fromkeys(each.category for each in answered)
    return {
        "all": _figures(answered),
        "by_category": {name: _figures([each for each in answered if each.category == name]) for name in categories},
    }


def _figures(answered: Sequence[Answered]) -> dict[str, Any]:
    """Of each step: tokens per second, and its speed over eager EGT and over the step before, medians over prompts."""
    steps = list(dict.fromkeys(each.step for each in answered))
    tpot = {step: {each.prompt: each.tpot_s for each in answered if each.step == step} for step in steps}

    def over(step: str, base: str) -> dict[str, Any] | None:
        pairs = [(tpot[base][prompt], tpot[step][prompt]) for prompt in tpot[step]]
        return median_with_interval([slow / fast if slow and fast else None for slow, fast in pairs])

    figures: dict[str, Any] = {}
    for index, step in enumerate(steps):
        mine = [each for each in answered if each.step == step]
        seconds = sum((each.new_tokens - 1) * each.tpot_s for each in mine if each.tpot_s)
        tokens = sum(each.new_tokens - 1 for each in mine if each.tpot_s)
        iterations = sum(each.iterations for each in mine)
        figures[step] = {
            "tokens_per_s": tokens / seconds if seconds else None,
            "over_eager": over(step, EAGER),
            "over_step_before": over(step, steps[index - 1]) if index > 1 else None,
            "acceptance_length": sum(each.acceptance_length * each.iterations for each in mine) / iterations
            if iterations
            else None,
        }
    return figures


def format_ablation(report: dict[str, Any]) -> str:
    """The figures for people: all prompts by step, then the last step by category."""
    lines = [f"tree: {report['tree']}, fixed; {report['dtype']}, {report['prompts']} prompts"]
    lines.append(f"{'':<18}{'tokens/s':>10}{'accepted':>10}{'cumulative':>22}{'this step':>22}")
    for step, figures in report["all"].items():
        lines.append(
            f"{step:<18}{cell(figures['tokens_per_s'], '', 1):>10}{cell(figures['acceptance_length']):>10}"
            f"{interval(figures['over_eager']):>22}{interval(figures['over_step_before']):>22}"
        )
    lines.append("cumulative: speed over eager EGT, median over prompts [its 95 % interval]; this step: over the last")
    lines.append("pruning: verify width by value, and falling back where drafts do not pay")
    if report["depth"]:
        lines.append(report["depth"])
    steps = report["steps"][2:]
    lines.append(f"\n{'this step, by kind':<18}" + "".join(f"{step:>22}" for step in steps))
    for name, figures in report["by_category"].items():
        lines.append(f"{name:<18}" + "".join(f"{interval(figures[step]['over_step_before']):>22}" for step in steps))
    for place in report["failures"]:
        at = f"prompt {place['prompt']}: {place['step']} differs from plain at token {place['token']}"
        lines.append(f"{at}, top-2 gap {place['gap']:.3g}, FAILURE")
    return "\n".join(lines)
