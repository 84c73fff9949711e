"""Above temperature 0: transformers' meaning of every option, the verifier's law, and one text for one seed."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests import toy
from tests.yggrt.test_pace import make_pace
from yggrt.bundle import load
from yggrt.cli import main
from yggrt.engine import SampledMode
from yggrt.pace import Pace
from yggrt.sampling import GenerationSettings, SamplingOptions, TokenChooser, _largest, draw, law, penalized
from yggrt.tree import PLAIN, TreeShape

PROMPT = [5, 9, 17, 30, 5]
SHAPES = [TreeShape(1, 3, 4), TreeShape(4, 3, 9)]
TREE = TreeShape(4, 2, 7)
OPTIONS = [
    {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 1.5, "top_k": 5}, {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1}, {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
]  # fmt: skip


def transformers_law(logits: torch.Tensor, history: list[int], options: SamplingOptions) -> torch.Tensor:
    """The law that transformers' generate would draw from, with its own processors."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors(torch.tensor([history]), logits[None].double())[0].softmax(0)


def our_law(logits: torch.Tensor, history: list[int], options: SamplingOptions) -> torch.Tensor:
    scores = penalized(logits, torch.tensor(history), options.repetition_penalty)
    found = law(scores.numpy(), options).astype(np.float64)
    return torch.from_numpy(found / found.sum())


@pytest.mark.field(12)
@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: "-".join(given))
@pytest.mark.parametrize("size", [64, 5000])
def test_the_law_is_that_of_transformers(given, size):
    options = SamplingOptions(**given)
    for seed in range(4):
        torch.manual_seed(seed)
        logits = torch.randn(size) * (4 if seed % 2 else 0.5)
        history = torch.randint(size, (30,)).tolist()
        torch.testing.assert_close(
            our_law(logits, history, options), transformers_law(logits, history, options), rtol=1e-5, atol=1e-9
        )


def test_an_extreme_option_leaves_the_most_likely_token():
    logits = torch.tensor([1.0, 5.0, 2.0])
    for given in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        found = law(logits.numpy(), SamplingOptions(temperature=1.0, **given))
        assert found.argmax() == 1 and (found > 0).sum() == 1


@pytest.mark.parametrize(
    "given, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1: a number from 0 is accepted"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"temperature": True}, "temperature=True"),
        ({"top_k": -1}, "top_k=-1: an integer from 0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0: a number above 0, at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 1.1}, "min_p=1.1: a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: a number above 0"),
        ({"seed": -3}, "seed=-3"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_nonsense_is_refused_by_name(verifier, given, message):
    engine = toy.make_engine(verifier, verifier, TreeShape(1, 1, 2))
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPT, max_new_tokens=4, **given)


@pytest.mark.parametrize("kind", toy.DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: "-".join(given))
def test_with_one_seed_speculative_and_plain_say_the_same(verifier, kind, shape, given):
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape)
    texts = set()
    for seed in range(3):
        speculative = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True, seed=seed, **given)
        plain = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True, seed=seed, plain=True, **given)
        assert speculative.token_ids == plain.token_ids
        texts.add(speculative.token_ids)
    assert len(texts) > 1


def drawing_engine(verifier, kind="sometimes", shape=TREE, **given):
    """Trees are drawn above temperature 0, and only those at 0 may copy."""
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, shape, copied_log_a=toy.COPIED_LOG_A, **given)
    engine.modes = (SampledMode(1.0, True, shape, toy.slot_table(engine.decoder.draft.limits), None),)
    return engine


def exact_law(verifier, options: SamplingOptions, length: int) -> dict[tuple[int, ...], float]:
    """Of the first tokens after the prompt."""
    found = {(): 1.0}
    for _ in range(length):
        texts = list(found)
        with torch.no_grad():
            rows = verifier(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        found = {
            (*text, token): found[text] * chance
            for text, row in zip(texts, rows, strict=True)
            for token, chance in enumerate(our_law(row, [*PROMPT, *text], options).tolist())
            if found[text] * chance > 1e-9
        }
    return found


def assert_law(found: Counter, exact: dict[tuple[int, ...], float]) -> None:
    """Chi-square at one in a hundred thousand."""
    count = found.total()
    assert set(found) <= set(exact)
    common = [text for text, chance in exact.items() if count * chance >= 5]
    rest = count * (1 - sum(exact[text] for text in common))
    cells = [(found[text], count * exact[text]) for text in common]
    if rest >= 1:
        cells.append((count - sum(found[text] for text in common), rest))
    square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = max(1, len(cells) - 1)
    assert square < freedom + 4.5 * np.sqrt(2 * freedom) + 4


LAWS = [{}, {"top_k": 6, "top_p": 0.9}, {"repetition_penalty": 1.4, "min_p": 0.05}]


@pytest.mark.field(6, 7)
@pytest.mark.parametrize("given", LAWS, ids=["open", "top-k and top-p", "penalty and min-p"])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("shape", [TreeShape(4, 2, 7), TreeShape(1, 3, 4)], ids=["tree", "chain"])
def test_trees_that_are_drawn_have_the_law_of_plain_sampling(verifier, shape, temperature, given):
    """The tokens after the first come out of trees."""
    options = SamplingOptions(temperature=temperature, **given)
    engine = drawing_engine(verifier, shape=shape)
    asked = {"max_new_tokens": 3, "ignore_eos": True, "temperature": temperature} | given
    results = [engine.generate(PROMPT, seed=seed, **asked) for seed in range(300)]
    assert sum(result.stats.drafted for result in results) >= 300
    assert_law(Counter(result.token_ids for result in results), exact_law(verifier, options, 3))


@pytest.mark.field(6)
@pytest.mark.parametrize("copied", [(), toy.COPIED_LOG_A], ids=["drafted", "copied"])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_trees_of_favourites_have_it_too(verifier, temperature, copied):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 2, 7), copied_log_a=copied)
    asked = {"max_new_tokens": 3, "ignore_eos": True, "temperature": temperature}
    found = Counter(engine.generate(PROMPT, seed=seed, **asked).token_ids for seed in range(300))
    assert_law(found, exact_law(verifier, SamplingOptions(temperature=temperature), 3))


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_drawn_trees_serve_every_temperature_and_drafter(verifier, kind, temperature):
    """Also where most of the drafter's tokens have no chance left, or all have the same."""
    engine = drawing_engine(verifier, kind, TreeShape(4, 3, 9))
    for given in ({}, {"top_k": 1}, {"top_p": 0.5}):
        result = engine.generate(PROMPT, max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=1, **given)
        assert len(result.token_ids) == 60
        if given == {"top_k": 1} or temperature == 1e-3:
            assert result.token_ids == tuple(toy.hf_greedy(verifier, PROMPT, 60))
        if kind == "always" and temperature == 1.0 and not given:
            assert result.stats.acceptance_length > 2  # p is q, but for the least likely tokens


@pytest.mark.parametrize("eos", [None, 3])
def test_drawn_trees_end_where_they_should(verifier, eos):
    engine = drawing_engine(verifier, eos_ids=() if eos is None else tuple(range(2, 64, eos)))
    for length in (0, 1, 2, 3, 4, 9):
        result = engine.generate(PROMPT, max_new_tokens=length, temperature=1.0, seed=length)
        ended = [place for place, token in enumerate(result.token_ids) if token in engine.eos_ids]
        assert ended in ([], [len(result.token_ids) - 1])
        assert len(result.token_ids) == length or ended


def test_a_schedule_that_fixes_the_width_fixes_it_for_greedy_requests_alone(verifier, monkeypatch):
    engine = drawing_engine(verifier)
    engine.use_schedule(replace(engine.executor.schedule, verify_width=2))
    rows = []
    verify = engine.decoder._verify

    def watched(iteration):
        rows.append(len(iteration.verify_inputs[0][0]))
        verify(iteration)

    engine.decoder.stages = {**engine.decoder.stages, "verify": watched}
    engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert max(rows) == 2
    rows.clear()
    engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=0)
    assert max(rows) == TREE.verify_width


@pytest.mark.field(42)
def test_plain_decoding_at_a_temperature_says_so(verifier):
    engine = drawing_engine(verifier)
    engine.modes = (replace(engine.modes[0], shape=PLAIN, draws=False), replace(engine.modes[0], temperature=3.0))
    asked = {"max_new_tokens": 9, "ignore_eos": True}
    told = [engine.generate(PROMPT, temperature=each, **asked).stats for each in (0.0, 1.0, 2.9)]
    assert [stats.drafted > 0 for stats in told] == [True, False, True]
    assert [any("decoded plainly" in notice for notice in stats.notices) for stats in told] == [False, True, False]
    assert engine.generate(PROMPT, temperature=1.0, plain=True, **asked).stats.notices == ()


@pytest.mark.field(10)
def test_what_a_seed_draws_depends_on_nothing_but_the_plan(verifier, monkeypatch):
    """Neither on the clock, nor W_v on what was drawn, which would change the law."""
    observed, texts = [], []

    class Watched(Pace):
        def verify_width(self, values, extent):
            raise AssertionError("W_v was chosen by values")

        def observe(self, depth, verify_width, extent, emitted, compiled_s=None):
            observed.append((depth, verify_width, compiled_s))
            super().observe(depth, verify_width, extent, emitted, compiled_s)

    for others in (0, 3):
        engine = drawing_engine(verifier)
        pace = make_pace(depths=(0, 1, 2), draft_width=4, follows_clock=True)
        pace.__class__ = Watched
        engine.modes = (replace(engine.modes[0], pace=pace),)
        for seed in range(others):  # what was asked before does not matter either
            engine.generate(PROMPT[:3], max_new_tokens=20, temperature=0.7, seed=seed)
        texts.append(engine.generate(PROMPT, max_new_tokens=60, temperature=1.0, seed=5).token_ids)
    assert texts[0] == texts[1]
    assert {clock for _, _, clock in observed} == {None}
    assert {width for depth, width, _ in observed if depth == 2} <= {9}


@pytest.mark.field(10)
@pytest.mark.parametrize("draws", [False, True], ids=["favourites", "drawn"])
def test_seeds_are_honoured_and_requests_do_not_share_a_stream(verifier, draws):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 2, 7))
    if draws:
        engine = drawing_engine(verifier)

    def ask(seed=None):
        return engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=seed).token_ids

    once = ask(7)
    np.random.seed(0)
    torch.manual_seed(0)
    random.seed(0)
    assert ask() != ask()
    assert ask(7) == once
    assert len({ask(seed) for seed in range(20)}) > 15


def test_a_temperature_of_nothing_is_greedy(verifier):
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 2, 7))
    greedy = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids
    found = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True, temperature=9e-6, top_k=3, seed=1).token_ids
    assert found == greedy == tuple(toy.hf_greedy(verifier, PROMPT, 30))


@pytest.mark.field(12)
@pytest.mark.parametrize("kind", toy.DRAFTERS)
@pytest.mark.parametrize("penalty", [0.8, 1.2, 3.0])
def test_greedy_with_a_penalty_is_transformers_greedy_with_it(verifier, kind, penalty):
    """On a tree each node has a history of its own."""
    engine = toy.make_engine(toy.make_drafter(kind, verifier), verifier, TreeShape(4, 3, 13))
    found = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True, repetition_penalty=penalty).token_ids
    assert found == engine.generate(
        PROMPT, max_new_tokens=40, ignore_eos=True, repetition_penalty=penalty, plain=True
    ).token_ids  # fmt: skip
    with torch.no_grad():
        ids = verifier.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), do_sample=False,
            max_new_tokens=40, repetition_penalty=penalty, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert list(found) == ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("size", [1, 127, 128, 129, 3000])
def test_a_draw_gives_every_token_its_share_of_the_numbers(size):
    chance = np.random.default_rng(size)
    chances = chance.random(size).astype(np.float32) * (chance.random(size) < 0.3)
    chances[chance.integers(size)] = 1.0
    count = 20_000
    drawn = Counter(draw(chances, (each + 0.5) / count) for each in range(count))
    shares = count * chances / chances.sum(dtype=np.float64)
    assert max(abs(drawn[token] - share) for token, share in enumerate(shares.tolist())) < 1.5
    for number in (0.0, 1 - 2**-53):
        assert chances[draw(chances, number)] > 0
    assert all(chances[token] > 0 for token in drawn)


@pytest.mark.parametrize("count", [1, 7, 50, 600])
def test_the_largest_are_found_with_their_equals(count):
    scores = np.random.default_rng(count).integers(0, 400, 1500).astype(np.float32)
    least = np.sort(scores)[-count]
    assert set(_largest(scores, count).tolist()) == set(np.flatnonzero(scores >= least).tolist())


def test_a_chooser_draws_one_number_a_token_and_never_what_has_no_chance():
    options = SamplingOptions(temperature=1.0, top_k=2, seed=0)
    chooser, drawn = TokenChooser(options, [0]), np.random.default_rng(0)
    logits = torch.tensor([0.0, 2.0, -5.0, 1.0, -9.0, 0.5])
    first = float(torch.softmax(torch.tensor([2.0, 1.0]), 0)[0])
    for _ in range(50):
        assert chooser.choose(logits) == (1 if drawn.random() < first else 3)


def test_a_compiled_pair_draws_the_same_with_and_without_its_drafter(toy_bundle, capsys):
    engine = load(toy_bundle.path)
    for seed in range(4):
        both = [
            engine.generate("the world tree", max_new_tokens=24, temperature=0.8, top_p=0.95, seed=seed, plain=plain)
            for plain in (True, False)
        ]
        assert both[0].token_ids == both[1].token_ids and both[0].text == both[1].text
    arguments = ["run", str(toy_bundle.path), "the world tree", "--max-new-tokens", "8", "--json"]
    asked = ["--temperature", "0.9", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1"]
    outputs = []
    for seed in ("3", "3"):
        assert main([*arguments, *asked, "--seed", seed]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1]
    assert main([*arguments, "--temperature", "-1"]) == 1
    assert capsys.readouterr().err == "yggrt: temperature=-1.0: a number from 0 is accepted\n"


def configured(verifier, settings: GenerationSettings):
    engine = toy.make_engine(verifier, verifier, TreeShape(1, 1, 2))
    engine.bundle = SimpleNamespace(manifest=SimpleNamespace(generation=settings))
    return engine


@pytest.mark.field(12)
def test_the_checkpoints_own_settings_hold_on_request_alone(verifier):
    engine = configured(verifier, GenerationSettings(0.8, 7, 0.9, 0.01, 1.2, ()))
    asked = {"max_new_tokens": 30, "ignore_eos": True}
    own = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    assert engine.generate(PROMPT, **asked).token_ids == tuple(toy.hf_greedy(verifier, PROMPT, 30))
    wanted = engine.generate(PROMPT, **asked, **own, seed=3).token_ids
    assert engine.generate(PROMPT, **asked, generation_config=True, seed=3).token_ids == wanted
    given = engine.generate(PROMPT, **asked, **(own | {"top_k": 0, "temperature": 1.5}), seed=3).token_ids
    assert given != wanted
    mixed = {"temperature": 1.5, "top_k": 0, "generation_config": True}
    assert engine.generate(PROMPT, **asked, **mixed, seed=3).token_ids == given


@pytest.mark.field(12)
def test_settings_that_are_not_honoured_are_refused_by_name(verifier):
    engine = configured(verifier, GenerationSettings(0.0, 0, 1.0, 0.0, 1.0, ("no_repeat_ngram_size=3",)))
    engine.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match="asks for no_repeat_ngram_size=3, which is not honoured"):
        engine.generate(PROMPT, max_new_tokens=3, generation_config=True)
    engine.bundle = None
    with pytest.raises(ValueError, match="made by hand"):
        engine.generate(PROMPT, max_new_tokens=3, generation_config=True)
