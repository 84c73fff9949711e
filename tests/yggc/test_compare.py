"""The comparison: figures from made-up records, and all four ways over the toy bundle."""

from __future__ import annotations

import json
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from tests import toy
from yggc.checkpoints import load_model, open_checkpoint
from yggc.compare import (
    GREEDY,
    SAMPLED,
    Answer,
    CompareOptions,
    Record,
    SampledWays,
    TokenClock,
    Ways,
    compare,
    format_table,
    median_with_interval,
    summarize,
)
from yggrt.bench import BenchPrompt
from yggrt.bundle import load
from yggrt.errors import CheckpointError, YggError
from yggrt.latency import LatencyPoint
from yggrt.plan import HostSeconds, Prediction, SampledPolicy, identity_table
from yggrt.tree import TreeShape

PROMPTS = (
    ("qa", "the world tree"),
    ("translation", "12 kings and 345 knights"),
    ("qa", "a small model drafts"),
    ("rag", "def add(a, b):"),
    ("rag", "the roots of the tree"),
)
NEAR_TIE = 0.1


def answer(tpot_s: float | None, ids: tuple[int, ...] = (1, 2, 3), calls: int = 2) -> Answer:
    return Answer(ids, (0.5,) * len(ids), 0.25, tpot_s, calls, len(ids) - 1)


def record(index: int, *seconds: float | None, category: str = "qa") -> Record:
    return in_ways(index, *(answer(each) for each in seconds), category=category)


def in_ways(index: int, *answers: Answer, category: str = "qa") -> Record:
    return Record(index, category, 7, dict(zip(GREEDY.ways, answers, strict=True)))


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"category": category, "prompt": text}) for category, text in PROMPTS))
    return path


@pytest.fixture(scope="module")
def compared(toy_bundle, tmp_path_factory):
    """(report, what was said, what was written) of the toy bundle with its checkpoints given."""
    folder = tmp_path_factory.mktemp("compare")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"category": category, "prompt": text}) for category, text in PROMPTS))
    said: list[str] = []
    options = CompareOptions(
        bundle=toy_bundle.path,
        prompts=prompts,
        max_new_tokens=8,
        output=folder / "figures.json",
        drafter=str(toy_bundle.drafter),
        verifier=str(toy_bundle.verifier),
    )
    threads = torch.get_num_threads()
    report = compare(options, said.append)
    assert torch.get_num_threads() == threads
    return report, said, json.loads((folder / "figures.json").read_text())


def test_a_ratio_is_the_median_over_prompts_of_inverse_times_per_token():
    records = [record(0, 0.4, 0.2, 0.6, 0.3), record(1, 0.4, 0.1, 0.6, 0.3), record(2, 0.3, 0.1, 0.9, 0.4)]
    found = summarize(records, NEAR_TIE)["ratios"]
    assert found["speculative/plain"]["median"] == pytest.approx(3)  # of 2, 4 and 3
    assert found["speculative/hf"]["median"] == pytest.approx(6)  # of 3, 6 and 9
    assert found["speculative/hf assisted"]["median"] == pytest.approx(3)  # of 1.5, 3 and 4
    assert found["plain/hf"]["median"] == pytest.approx(1.5)  # of 1.5, 1.5 and 3
    assert list(found) == ["/".join(pair) for pair in GREEDY.ratios]


def test_a_short_answer_is_left_out_of_the_ratios_it_has_a_part_in():
    found = summarize([record(0, 0.4, 0.2, None, 0.3), record(1, 0.4, 0.1, 0.6, None)], NEAR_TIE)["ratios"]
    assert [found["/".join(pair)]["prompts"] for pair in GREEDY.ratios] == [2, 1, 1, 1]
    assert found["speculative/hf"]["median"] == pytest.approx(6)
    alone = summarize([record(0, None, None, None, None)], NEAR_TIE)
    assert set(alone["ratios"].values()) == {None}
    assert "-" in format_table(alone)


def test_tokens_per_second_and_acceptance_length_count_tokens_not_prompts():
    short = in_ways(0, *[answer(1.0)] * 4)  # 2 tokens after the first in 2 s and 2 calls
    longer = in_ways(1, *[answer(0.25, tuple(range(9)), calls=3)] * 4)  # 8 in 2 s and 3 calls
    found = summarize([short, longer], NEAR_TIE)
    for way in GREEDY.ways:
        assert found[way]["tokens_per_s"] == pytest.approx(10 / 4)
        assert found[way]["acceptance_length"] == pytest.approx(10 / 5)


def test_figures_are_kept_by_category_and_the_table_has_them_all():
    records = [record(0, 4.0, 2.0, 4.0, 4.0), record(1, 4.0, 1.0, 4.0, 4.0, category="math")]
    report = summarize(records, NEAR_TIE)
    assert report["by_category"]["qa"]["ratios"]["speculative/plain"]["median"] == 2
    assert report["by_category"]["math"]["ratios"]["speculative/plain"]["median"] == 4
    starts = [line.split()[0] for line in format_table(report).splitlines() if line.strip()]
    assert all(starts.count(name) == 2 for name in ("qa", "math", "all"))


def test_only_a_speculative_answer_beyond_a_near_tie_is_a_failure():
    plain = Answer((1, 2, 3), (0.5, 0.5, 0.01), 0.1, 0.1, 2, 2)
    near = Answer((1, 2, 4), (0.5, 0.5, 0.02), 0.1, 0.1, 2, 2)
    far = Answer((1, 3, 3), (0.5, 0.3, 0.5), 0.1, 0.1, 2, 2)
    silent = Answer((1, 3, 3), (), 0.1, 0.1, 2, 2)  # transformers tells no gaps: the plain ones count
    report = summarize([in_ways(0, plain, near, silent, plain), in_ways(1, *[plain] * 4)], NEAR_TIE)
    assert report["identical_to_plain"] == {"speculative": 1, "hf": 1, "hf assisted": 2}
    assert report["differences"]["speculative"] == [{"prompt": 0, "token": 2, "gap": 0.02, "allowed": True}]
    assert report["differences"]["hf"] == [{"prompt": 0, "token": 1, "gap": 0.5, "allowed": False}]
    assert report["failures"] == []
    assert "hf 1 of 2 (1 beyond a near tie)" in format_table(report)
    failed = summarize([in_ways(0, plain, far, plain, plain)], NEAR_TIE)
    assert failed["failures"] == [{"prompt": 0, "token": 1, "gap": 0.5, "allowed": False}]
    assert "FAILURE" in format_table(failed)


def test_the_interval_holds_the_median_and_is_the_same_every_time():
    values = [1 + (7 * index % 31) / 31 for index in range(40)]
    found = median_with_interval(values)
    assert found == median_with_interval([*values, None])
    assert found["median"] == median(values)
    assert 1 < found["low"] < found["median"] < found["high"] < 2
    assert median_with_interval([1.5]) == {"median": 1.5, "low": 1.5, "high": 1.5, "prompts": 1}
    assert median_with_interval([None]) is None


def test_a_clock_counts_what_follows_the_first_call():
    clock = TokenClock()
    for tokens in ([[5, 6, 7]], [[1, 2]], [[3]], [[4, 5, 6]]):  # the prompt, then three calls
        clock.put(torch.tensor(tokens))
    clock.seconds = [0.0, 1.0, 2.0, 3.5]
    assert clock.answer() == Answer((1, 2, 3, 4, 5, 6), (), 1.0, 0.5, 2, 4)
    del clock.chunks[2:], clock.seconds[2:]
    assert clock.answer() == Answer((1, 2), (), 1.0, None, 0, 0)


@pytest.mark.parametrize("change, message", [
    ({"limit": 0}, "at least 1"),
    ({"max_new_tokens": 1}, "at least 2"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"output": "nowhere/figures.json"}, "does not exist"),
    ({"output": ""}, "is a folder"),
])  # fmt: skip
def test_options_that_cannot_be_served_are_refused_before_anything_is_loaded(tmp_path, change, message):
    change = {name: tmp_path / value if name == "output" else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        CompareOptions(tmp_path / "no.bundle", tmp_path / "no.jsonl", **change)


def test_all_ways_are_reported_and_written(compared):
    report, said, written = compared
    assert written == json.loads(json.dumps(report))
    assert report["prompts"] == len(PROMPTS)
    counts = {name: figures["prompts"] for name, figures in report["by_category"].items()}
    assert counts == {"qa": 2, "translation": 1, "rag": 2}
    for way in GREEDY.ways:
        assert report[way]["tokens_per_s"] > 0
    for ratio in report["ratios"].values():
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert report["plain"]["acceptance_length"] == report["hf"]["acceptance_length"] == 1
    assert report["speculative"]["acceptance_length"] > 1
    for entry in report["records"]:
        assert list(entry["answers"]) == list(GREEDY.ways)
        assert len(entry["answers"]["plain"]["token_ids"]) <= 8
    progress = [line for line in said if line.startswith("  ")]
    assert len(progress) == len(PROMPTS) and "left" in progress[0]
    table = format_table(report)
    assert all(name in table for name in ("qa", "translation", "rag", "all", *GREEDY.ways))


def test_all_ways_say_the_same_in_float32(compared):
    report, _, _ = compared
    assert report["failures"] == []
    assert report["identical_to_plain"] == dict.fromkeys(GREEDY.same, len(PROMPTS))


def test_a_limit_takes_the_groups_in_turn(toy_bundle, prompts_file):
    options = CompareOptions(
        toy_bundle.path, prompts_file, 3, 4, drafter=str(toy_bundle.drafter), verifier=str(toy_bundle.verifier)
    )
    report = compare(options, lambda line: None)
    assert [entry["category"] for entry in report["records"]] == ["qa", "translation", "rag"]


def test_checkpoints_that_a_build_read_are_found(toy_bundle, prompts_file, monkeypatch, tmp_path):
    from yggc.sources import remember_source

    for folder in (toy_bundle.drafter, toy_bundle.verifier):
        remember_source(tmp_path, open_checkpoint(str(folder)).fingerprint, str(folder))
    monkeypatch.setenv("YGG_CACHE", str(tmp_path))
    report = compare(CompareOptions(toy_bundle.path, prompts_file, 1, 4), lambda line: None)
    assert report["prompts"] == 1


def test_unknown_checkpoints_are_asked_for(toy_bundle, prompts_file, monkeypatch, tmp_path):
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "empty"))
    options = CompareOptions(toy_bundle.path, prompts_file, verifier=str(toy_bundle.verifier))
    with pytest.raises(CheckpointError, match="bundle's drafter drafter came from.*--drafter and --verifier") as caught:
        compare(options, lambda line: None)
    assert "\n" not in str(caught.value)


def test_another_checkpoint_is_refused_by_name(toy_bundle, prompts_file):
    options = CompareOptions(
        toy_bundle.path, prompts_file, drafter=str(toy_bundle.drafter), verifier=str(toy_bundle.drafter)
    )
    with pytest.raises(CheckpointError, match="the bundle's verifier verifier has") as caught:
        compare(options, lambda line: None)
    assert str(toy_bundle.drafter) in str(caught.value) and "\n" not in str(caught.value)


def test_calls_are_those_of_the_verifier_itself(toy_bundle):
    """By a hook on its forward, prefill left out."""
    engine = load(toy_bundle.path)
    drafter, verifier = (load_model(open_checkpoint(str(path)), torch.float32) for path in (
        toy_bundle.drafter, toy_bundle.verifier,
    ))  # fmt: skip
    ways = Ways(engine, drafter, verifier)
    calls: list[int] = []
    verifier.register_forward_hook(lambda *_: calls.append(1))
    for way in ("hf", "hf assisted"):
        calls.clear()
        found = ways.answer(way, engine.encode_prompt("the world tree"), 12)
        assert found.verifier_calls == len(calls) - 1
        assert found.emitted <= len(found.token_ids) - 1


def test_generation_settings_of_a_checkpoint_do_not_change_the_text(verifier):
    """But a drafter's own draft length is kept, as its users would have it."""
    drafter, penalised = toy.make_drafter("sometimes", verifier), toy.make_drafter("always", verifier)
    drafter.generation_config = GenerationConfig(num_assistant_tokens=3, repetition_penalty=5.0)
    penalised.generation_config = GenerationConfig(repetition_penalty=5.0, max_length=11)
    engine = toy.make_engine(drafter, verifier, TreeShape(2, 2, 3))
    ways = Ways(engine, drafter, penalised)
    answers = [ways.answer(way, [5, 6, 7], 16) for way in GREEDY.ways]
    assert len({found.token_ids for found in answers}) == 1
    assert len(answers[0].token_ids) == 16
    assert drafter.generation_config.num_assistant_tokens == 3


def test_a_drafter_padded_differently_assists_too(verifier):
    for vocab_size in (toy.VOCAB_SIZE - 6, toy.VOCAB_SIZE + 6):
        engine = toy.make_engine(verifier, verifier, TreeShape(2, 2, 3))
        ways = Ways(engine, toy.make_llama(5, vocab_size=vocab_size), toy.make_drafter("always", verifier))
        assert ways.answer("hf assisted", [5, 6, 7], 8).token_ids == ways.answer("plain", [5, 6, 7], 8).token_ids


def test_a_text_beyond_the_drafters_positions_is_one_line(verifier):
    from transformers import GPT2Config, GPT2LMHeadModel

    drafter = GPT2LMHeadModel(GPT2Config(vocab_size=toy.VOCAB_SIZE, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    ways = Ways(toy.make_engine(verifier, verifier, TreeShape(2, 2, 3)), drafter, toy.make_drafter("always", verifier))
    with pytest.raises(YggError, match="hf assisted.*cannot answer a prompt of 6 tokens"):
        ways.answer("hf assisted", [5, 6, 7, 8, 9, 10], 16)


@pytest.fixture
def sampled_engine(verifier):
    """Over eager steps, with a plan that holds three ways to draft at one temperature."""
    engine = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(2, 2, 5))
    points = [LatencyPoint("verify", width, 0, 64, 1.0, 0.0) for width in (1, 5)]
    points += [LatencyPoint("draft", width, depth, 64, 0.1 * depth, 0.0) for width in (1, 2) for depth in (1, 2)]
    ways = tuple(
        SampledPolicy(
            0.9, draws and children == 8, draws, TreeShape(width, 2, 1 + 2 * width), (1 + 2 * width,), children,
            identity_table(8, toy.NUM_KNOTS), (), HostSeconds(0.1, 0.1), 1.0, Prediction(1.0, 1.0, 1.0),
        )
        for draws, width, children in ((False, 2, 8), (True, 1, 1), (True, 2, 8))
    )  # fmt: skip
    plan = SimpleNamespace(
        sampled=ways, curves=tuple(points), plain_width=1, policy=SimpleNamespace(draft_vocabulary=None), target="cpu"
    )
    engine.bundle = SimpleNamespace(plan=plan, path="toy.bundle")  # type: ignore[assignment]
    return engine


def test_above_temperature_0_the_plans_ways_are_compared(sampled_engine, monkeypatch):
    ways = SampledWays(sampled_engine, 1.0)
    assert set(ways.modes) == set(SAMPLED.drafting)
    monkeypatch.setattr(sampled_engine, "encode_prompt", lambda text, raw=False: [5, 6, 7 + len(text)])
    records = [ways.answer_all(index, BenchPrompt("qa", "x" * index), 24) for index in range(6)]
    for record in records:
        assert list(record.answers) == list(SAMPLED.ways)
        lengths = {way: answer.emitted / answer.verifier_calls for way, answer in record.answers.items()}
        assert lengths["plain"] == 1 and min(lengths.values()) == 1
    assert sampled_engine.modes == ()
    report = {**summarize(records, NEAR_TIE, SAMPLED), "temperature": 1.0}
    assert report["failures"] == [] and report["differences"] == {}
    assert report["drawn"]["acceptance_length"] > 1.2 and report["chain"]["acceptance_length"] > 1.1
    table = format_table(report)
    assert all(f"by {way}" in table for way in SAMPLED.drafting) and "drawn/plain" in table
    again = ways.answer("drawn", [5, 6, 7], 0, 24)
    assert again.token_ids == records[0].answer("drawn").token_ids  # a prompt's number is its seed


def test_a_plan_without_ways_above_temperature_0_is_refused(sampled_engine):
    sampled_engine.bundle.plan.sampled = ()
    with pytest.raises(YggError, match="holds no ways to draft above temperature 0"):
        SampledWays(sampled_engine, 0.7)
