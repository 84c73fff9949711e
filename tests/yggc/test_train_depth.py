"""Training the depth: a planted rule is found, a useless row is not believed, what is kept wins on held-out text."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from tests import toy
from tests.yggrt.test_depth import random_network
from yggc import train_depth
from yggc.depth_onnx import write_onnx
from yggc.simulate import GrownText, Prices, grow_text
from yggc.trace import TracedText, trace_text
from yggc.train_depth import depth_menu, fit_network, gather, study_depth
from yggrt import wire
from yggrt.bench import BenchPrompt
from yggrt.bundle import table_tensor
from yggrt.errors import BuildError
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.plan import HostSeconds, TreePolicy, identity_table
from yggrt.tree import TreeShape

MENU = (0, 1, 2, 4)
ROOTS, HIDDEN = 60, 24
WIDTHS = (1, 2, 3, 5)


def made_prices(draft_s: float = 1.5) -> Prices:
    """A chain: a plain step of 10 s, a pass of draft_s, a row beyond the first of 0.2 s."""
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + 0.2 * (width - 1), 0.0) for width in WIDTHS]
    points += [LatencyPoint("draft", 1, depth, 64, draft_s * depth, 0.0) for depth in MENU[1:]]
    return Prices(StepTimes(points), HostSeconds(0.0, 0.1), 1, WIDTHS, 8.0)


def policy_of(depth: int = 2) -> TreePolicy:
    return TreePolicy(1, (0, 1, 2), WIDTHS[:3], 1, None, TreeShape(1, depth, 3))


def made_text(seed: int, told: bool) -> tuple[TracedText, GrownText]:
    """A text of easy and hard stretches; its hidden rows tell in which of them a root is, or nothing."""
    chance = np.random.default_rng(seed)
    easy = np.repeat(chance.permutation([True, False] * 6), 8)[: ROOTS + 8]
    runs = np.array([int(np.argmin(np.append(easy[root : root + 4], False))) for root in range(ROOTS)])
    depth = np.arange(5)
    on_path = depth[None, :] <= runs[:, None]
    values = np.tile(np.log(0.6) * depth, (ROOTS, 1)).astype(np.float32)  # the drafter is as sure in both
    hidden = chance.normal(size=(ROOTS + 1, HIDDEN)).astype(np.float32)
    if told:
        hidden[:ROOTS, 3] = runs
    count = ROOTS + 1
    text = TracedText(
        "made", False, count + 9, (1, 2, 3), tuple(range(count)), hidden, np.ones(count, np.float32),
        np.zeros((count, 1), np.int64), np.zeros((count, 1), np.float32),
    )  # fmt: skip
    return text, GrownText(1, 3, count + 9, values, on_path)


def study(told: bool, num_texts: int = 20):
    made = [made_text(seed, told) for seed in range(num_texts + 6)]
    fit, held_out = made[:num_texts], made[num_texts:]
    return study_depth(
        [text for text, _ in fit], [grown for _, grown in fit],
        [text for text, _ in held_out], [grown for _, grown in held_out],
        policy_of(), MENU, made_prices(),
    )  # fmt: skip


def test_a_planted_rule_is_recovered_and_kept():
    found = study(told=True)
    figures = found.figures
    assert found.network is not None and not found.reason
    assert figures.learned > 1.1 * figures.fixed
    assert figures.learned - figures.fixed > 0.9 * (figures.oracle - figures.fixed)
    assert figures.promised == pytest.approx(figures.emitted, rel=0.05)
    assert set(MENU) <= set(found.policy.draft_depths) and found.policy.default_shape == policy_of().default_shape
    row = np.zeros((2, HIDDEN), np.float32)
    row[1, 3] = 4
    hard, easy = found.network.expected_tokens(row)[:, : len(MENU)]
    assert hard == pytest.approx([1, 1, 1, 1], abs=0.3) and easy == pytest.approx([1, 2, 3, 5], abs=0.35)


def test_a_useless_row_leaves_the_depth_fixed():
    found = study(told=False)
    assert found.network is None or found.figures.learned <= 1.01 * found.figures.fixed
    made = [made_text(seed, False) for seed in range(20)]
    texts, grown = [text for text, _ in made], [trees for _, trees in made]
    network = fit_network(gather(texts, grown, MENU, made_prices()), MENU, (1, 2, 3, 5), 8.0)
    fresh = np.random.default_rng(99).normal(size=(500, HIDDEN)).astype(np.float32)
    costs = np.array([10.0, 11.8, 13.5, 16.9]) / 8.0
    chosen = np.argmax(network.expected_tokens(fresh)[:, : len(MENU)] - costs, axis=1)
    assert np.bincount(chosen).max() > 0.9 * chosen.size  # one depth for nearly all


def test_a_network_that_loses_is_not_kept_and_says_so(monkeypatch):
    """One that always drafts deep is slower than a good fixed depth, and the plan stays as it was."""

    def always_deep(samples, menu, widths, token_s):
        network = random_network(HIDDEN, 0, menu)
        second = np.zeros_like(network.layers[1])
        second[-1, : len(menu)] = (1, 2, 3, 9)
        return replace(network, second=second.tobytes())

    monkeypatch.setattr(train_depth, "fit_network", always_deep)
    found = study(told=True)
    assert found.network is None and found.policy == policy_of() and found.token_s == 8.0
    assert found.reason.startswith("the depth stays fixed: learned it gives")


def test_a_study_survives_its_file():
    form = wire.FileFormat("study", b"YGGSTDY\0", 1, 1, BuildError)
    found = study(told=True, num_texts=6)
    assert wire.decode(form, train_depth.DepthStudy, wire.encode(form, found)) == found


def test_training_twice_gives_the_same_network():
    assert study(True, 6).network == study(True, 6).network


def test_roots_whose_text_was_cut_off_are_left_out():
    text, grown = made_text(0, True)
    whole = gather([text], [grown], MENU, made_prices())
    cut_off = gather([replace(text, budget=len(text.answer_ids))], [grown], MENU, made_prices())
    assert len(whole.text) == ROOTS and len(cut_off.text) == ROOTS - MENU[-1]
    assert np.array_equal(cut_off.tokens, whole.tokens[: ROOTS - MENU[-1]])


def test_samples_say_what_each_depth_does_at_each_root():
    text, grown = made_text(4, True)
    samples = gather([text], [grown], MENU, made_prices())
    runs = text.hidden[:ROOTS, 3]
    for column, depth in enumerate(MENU):
        most = np.minimum(runs, depth) + 1
        assert (samples.tokens[:, column] <= most).all() and (samples.tokens[:, 0] == 1).all()
    assert (np.diff(samples.seconds, axis=1) > 0).all()


def test_too_little_text_teaches_nothing():
    assert study(told=True, num_texts=3) is None
    short = [(replace(text, budget=len(text.answer_ids)), trees) for text, trees in (made_text(1, True),)]
    texts, grown = [text for text, _ in short], [trees for _, trees in short]
    assert study_depth(texts, grown, texts, grown, policy_of(), MENU, made_prices()) is None


def test_the_menu_goes_deeper_than_the_best_fixed_depth_as_far_as_was_compiled():
    assert depth_menu(1, (1, 2, 3, 4, 6, 8)) == (0, 1, 2, 3)
    assert depth_menu(2, (1, 2, 3, 4, 6, 8)) == (0, 1, 2, 3, 4, 6)
    assert depth_menu(8, (1, 2, 3, 4, 6, 8)) == (0, 1, 2, 3, 4, 6, 8)
    assert depth_menu(4, (1, 2, 3)) == (0, 1, 2, 3)


@pytest.mark.parametrize("depths", [(0, 1), MENU, (0, 1, 2, 3, 4, 6, 8)])
def test_the_onnx_file_passes_the_checker_and_gives_the_same_numbers(tmp_path, depths):
    network = random_network(48, 7, depths)
    write_onnx(tmp_path / "depth.onnx", network)
    model = onnx.load(tmp_path / "depth.onnx")
    onnx.checker.check_model(model, full_check=True)
    rows = np.random.default_rng(1).normal(size=(9, 48)).astype(np.float32)
    (found,) = ReferenceEvaluator(model).run(None, {"hidden": rows})
    assert found.shape == (9, len(depths))
    assert np.allclose(found, network.expected_tokens(rows)[:, : len(depths)], atol=1e-5)


# ---- the pair whose best depth depends on the context ----


@pytest.fixture(scope="module")
def depth_pair():
    """examples/depth_pair.py as a module, with a shorter circle."""
    path = Path(__file__).parent.parent.parent / "examples" / "depth_pair.py"
    spec = importlib.util.spec_from_file_location("depth_pair", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["depth_pair"] = module
    spec.loader.exec_module(module)
    module.STRETCHES = (12, 16, 7, 13)
    module.NUM_WORDS = sum(module.STRETCHES)
    return module


def test_a_pair_made_for_it_gains_most_of_what_an_oracle_would(depth_pair):
    """The models of the example, small, with the prices of a verifier of ten draft passes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    verifier = depth_pair.make_model(sizes, depth_pair.successors(True), 0).float()
    drafter = depth_pair.make_model(sizes, depth_pair.successors(False), 1).float()
    menu = (0, 1, 2, 3, 4, 6)
    vocabulary = depth_pair.NUM_WORDS + 1
    engine = toy.make_engine(drafter, verifier, TreeShape(1, 6, 7), children=1, vocab_size=vocabulary)
    table = table_tensor(identity_table(1, toy.NUM_KNOTS), 1)
    chance = random.Random(0)
    texts, grown = [], []
    for _ in range(9):
        first = chance.randrange(depth_pair.NUM_WORDS)
        prompt = [(first + place) % depth_pair.NUM_WORDS for place in range(4)]
        engine.encode_prompt = lambda text, raw=False, prompt=prompt: prompt
        text = trace_text(engine, BenchPrompt("circle", ""), False, 40)
        assert list(text.answer_ids) == [(prompt[-1] + 1 + step) % depth_pair.NUM_WORDS for step in range(40)]
        texts.append(text)
        grown.append(grow_text(engine, text, TreeShape(1, 6, 1), table))
    points = [LatencyPoint("verify", width, 0, 64, 10.0 + 0.1 * (width - 1), 0.0) for width in range(1, 8)]
    points += [LatencyPoint("draft", 1, depth, 64, 1.0 * depth, 0.0) for depth in menu[1:]]
    prices = Prices(StepTimes(points), HostSeconds(0.0, 0.1), 1, tuple(range(1, 8)), 7.0)
    policy = TreePolicy(1, (0, 1, 2), (1, 2, 3), 1, None, TreeShape(1, 2, 3))
    figures = study_depth(texts[:7], grown[:7], texts[7:], grown[7:], policy, menu, prices).figures
    assert figures.learned > 1.1 * figures.fixed
    assert figures.learned - figures.fixed > 0.9 * (figures.oracle - figures.fixed)
    assert figures.oracle >= figures.learned
