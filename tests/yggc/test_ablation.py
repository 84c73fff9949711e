"""The ablation: figures from made-up answers, and every step over the toy bundle."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.yggrt.test_depth import random_network
from yggc import ablation
from yggc.ablation import (
    COMPILED,
    EAGER,
    LEARNED,
    PLAIN,
    PRUNED,
    SCHEDULED,
    Answered,
    ablate,
    format_ablation,
    summarize,
)
from yggc.cli import main
from yggc.compare import CompareOptions
from yggrt.bundle import load, make_pace
from yggrt.errors import YggError
from yggrt.latency import LatencyPoint
from yggrt.plan import DepthFigures, TreePolicy
from yggrt.schedule import sequential_schedule
from yggrt.tree import TreeShape


def answered(step: str, prompt: int, tpot_s: float | None, category: str = "qa") -> Answered:
    return Answered(step, prompt, category, tpot_s, 11, 5, 2.0)


def test_ratios_are_medians_over_prompts_and_build_on_each_other():
    made = [
        *(answered(PLAIN, prompt, 3.0) for prompt in range(3)),
        *(answered(EAGER, prompt, seconds) for prompt, seconds in enumerate((8.0, 8.0, 16.0))),
        *(answered(COMPILED, prompt, seconds) for prompt, seconds in enumerate((4.0, 2.0, 2.0))),
        *(answered(PRUNED, prompt, seconds) for prompt, seconds in enumerate((2.0, 2.0, 1.0))),
    ]
    figures = summarize(made)["all"]
    assert [figures[step]["over_eager"]["median"] for step in (EAGER, COMPILED, PRUNED)] == [1.0, 4.0, 4.0]
    assert [figures[step]["over_step_before"]["median"] for step in (COMPILED, PRUNED)] == [4.0, 2.0]
    assert figures[PLAIN]["over_step_before"] is None and figures[EAGER]["over_step_before"] is None
    assert figures[COMPILED]["tokens_per_s"] == pytest.approx(30 / 80)
    assert figures[PRUNED]["acceptance_length"] == 2.0


def test_an_answer_too_short_to_time_is_left_out():
    made = [answered(step, prompt, None if prompt else 2.0) for step in (PLAIN, EAGER, COMPILED) for prompt in (0, 1)]
    assert summarize(made)["all"][COMPILED]["over_eager"]["prompts"] == 1


@pytest.fixture
def ablated(toy_bundle, tmp_path, monkeypatch):
    """(report, options) of the toy bundle with a plan that chooses depth and width in every iteration."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [("qa", "the world tree"), ("rag", "a small model drafts"), ("qa", "def add(a, b):")]
    prompts.write_text("\n".join(json.dumps({"category": category, "prompt": text}) for category, text in lines))
    options = CompareOptions(
        toy_bundle.path, prompts, None, 10, tmp_path / "figures.json", str(toy_bundle.drafter), str(toy_bundle.verifier)
    )

    def run(network: bool, verify_width: int | None = None):
        """verify_width: of the plan's schedule."""

        def load_with_choices(path):
            engine = load(path)
            plan = engine.bundle.plan
            points = [LatencyPoint("verify", width, 0, 64, 1.0 + 0.01 * width, 0.0) for width in (1, 2, 4, 9)]
            points += [LatencyPoint("draft", 4, depth, 64, 0.05 * depth, 0.0) for depth in (1, 2)]
            policy = TreePolicy(
                4, (0, 1, 2), (1, 2, 4, 9), plan.policy.children_per_node, plan.policy.draft_vocabulary,
                TreeShape(4, 2, 9),
            )  # fmt: skip
            learned = random_network(plan.verifier.hidden_size, 3, (0, 1, 2)) if network else None
            figures = DepthFigures(2, 1.2, 1.1, 1.15, 1.4, 2.0, 2.0)
            alone = sequential_schedule(plan.num_threads, network)
            plan = replace(
                plan, policy=policy, curves=tuple(points), token_s=0.6, depth_network=learned, depth_figures=figures,
                schedule=replace(alone, verify_width=verify_width), schedule_study=None,
            )  # fmt: skip
            engine.bundle, engine.pace = replace(engine.bundle, plan=plan), make_pace(plan)
            if learned is not None:
                engine.decoder.depth_layers = learned.tensors()
            return engine

        monkeypatch.setattr(ablation, "load", load_with_choices)
        return ablate(options, lambda line: None)

    return run, options


def test_every_step_says_the_same_and_is_reported(ablated):
    run, options = ablated
    report = run(network=True)
    assert report["steps"] == [PLAIN, EAGER, COMPILED, PRUNED, LEARNED]
    assert report["failures"] == [] and report["depth"] == ""
    assert len(report["answers"]) == 15 and set(report["by_category"]) == {"qa", "rag"}
    assert report["all"][PLAIN]["acceptance_length"] == 1.0
    assert report["all"][COMPILED]["acceptance_length"] > 1.0
    assert json.loads(options.output.read_text()) == report
    table = format_ablation(report)
    assert all(step in table for step in report["steps"]) and "FAILURE" not in table


@pytest.mark.parametrize("network", [False, True])
def test_a_schedule_other_than_the_plain_one_is_a_step_of_its_own(ablated, network):
    """So that a fixed verify width does not pass for pruning by value."""
    run, _ = ablated
    report = run(network, verify_width=2)
    assert report["steps"][-1] == SCHEDULED and report["failures"] == []
    assert report["all"][SCHEDULED]["acceptance_length"] <= 2.0


def test_a_plan_with_a_fixed_depth_says_why_there_is_no_such_step(ablated):
    run, _ = ablated
    report = run(network=False)
    assert LEARNED not in report["steps"]
    assert "keeps a fixed depth: on held-out text learned 1.150 times plain, fixed 1.200" in format_ablation(report)


def test_a_plan_that_chooses_nothing_is_one_line(toy_bundle, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the world tree"}')
    pair = ["--drafter", str(toy_bundle.drafter), "--verifier", str(toy_bundle.verifier)]
    assert main(["compare", str(toy_bundle.path), "--prompts", str(prompts), "--ablation", *pair]) == 1
    assert "nothing to take apart" in capsys.readouterr().err
    with pytest.raises(YggError, match="nothing to take apart"):
        ablate(CompareOptions(toy_bundle.path, prompts, drafter=pair[1], verifier=pair[3]), print)
