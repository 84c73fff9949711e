"""`yggc compare`: a bundle against its own checkpoints in transformers. It stays the one way to compare.

Four ways answer every prompt. At temperature 0: the engine plainly and speculatively, transformers' greedy `generate`,
and its assisted generation with the same drafter at its default schedule. Above it: the engine plainly and in the ways
to draft that the plan holds. Invariant: all four get the same token ids, budget, end tokens, dtype and threads, and
none of the generation settings of a checkpoint that would change its greedy text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import is_sklearn_available

from yggc.checkpoints import Checkpoint, load_model, open_checkpoint, silence_libraries
from yggc.sources import find_source
from yggc.stage_cache import cache_folder
from yggc.weight_files import one_line
from yggrt import bench
from yggrt.bundle import Bundle, follows_clock, load, make_mode
from yggrt.engine import Engine, GenerationResult, SampledMode
from yggrt.errors import CheckpointError, YggError
from yggrt.latency import StepTimes
from yggrt.sampling import GREEDY_BELOW, SamplingOptions
from yggrt.wire import write_atomically


@dataclass(frozen=True, slots=True)
class Lineup:
    """What is compared.

    ways:     four of them. ratios: speed of the first over speed of the second.
    drafting: those of which acceptance is told. same: those that should say the same as the plain way.
    """

    ways: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    drafting: tuple[str, ...]
    same: tuple[str, ...]


GREEDY = Lineup(
    ("plain", "speculative", "hf", "hf assisted"),
    (("speculative", "plain"), ("speculative", "hf"), ("speculative", "hf assisted"), ("plain", "hf")),
    ("speculative", "hf assisted"),
    ("speculative", "hf", "hf assisted"),
)
SAMPLED = Lineup(
    ("plain", "drawn", "favourites", "chain"),
    (("drawn", "plain"), ("favourites", "plain"), ("chain", "plain"), ("drawn", "favourites")),
    ("drawn", "favourites", "chain"),
    (),
)

WARM_UP_TOKENS = 8
NUM_RESAMPLES = 2000
ASSISTANT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What `yggc compare` was asked for.

    prompts: file as `yggrt bench` reads it.      limit: how many of them; None for all.
    output:  JSON file for all figures.           temperature: above 0 the ways are those of SAMPLED.
    drafter, verifier: folder, hub id or GGUF file; where None, what a build on this machine read.
    """

    bundle: Path
    prompts: Path
    limit: int | None = None
    max_new_tokens: int = 128
    output: Path | None = None
    drafter: str | None = None
    verifier: str | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: at least 1 is accepted")
        SamplingOptions(temperature=self.temperature)
        if self.max_new_tokens < 2:
            raise ValueError(f"max-new-tokens {self.max_new_tokens}: at least 2 are needed to measure a time per token")
        if self.output is not None and not self.output.resolve().parent.is_dir():
            raise ValueError(f"{self.output.resolve().parent} does not exist; {self.output} cannot be written")
        if self.output is not None and self.output.is_dir():
            raise ValueError(f"{self.output} is a folder; a file to write is needed")


@dataclass(frozen=True, slots=True)
class Answer:
    """One way's answer to one prompt.

    token_ids:      the end token included where there is one.
    gaps:           top-2 gaps of the verifier's logits at each of them; empty for transformers, which does not tell.
    ttft_s, tpot_s: seconds to the first token; seconds per token after it, None where none came later than the first.
    verifier_calls: after the prefill. emitted: tokens that came from them.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    ttft_s: float
    tpot_s: float | None
    verifier_calls: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt and its answers, by way. prompt: its index."""

    prompt: int
    category: str
    prompt_tokens: int
    answers: Mapping[str, Answer]

    def answer(self, way: str) -> Answer:
        return self.answers[way]

    def ratio(self, way: str, base: str) -> float | None:
        """Speed of a way over that of another; None where one of the answers is too short to measure."""
        seconds, base_seconds = self.answer(way).tpot_s, self.answer(base).tpot_s
        return base_seconds / seconds if seconds and base_seconds else None

    def difference(self, way: str, near_tie: float) -> bench.Difference | None:
        """Where a way's answer parts from the plain one, if it does."""
        # only ids and gaps are read of the two
        plain, other = (cast(GenerationResult, self.answer(name)) for name in ("plain", way))
        return bench.first_difference(self.prompt, bench.Pair(self.category, plain, other), near_tie)


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Streamer that notes when tokens come: the prompt first, then what each call of the verifier gave."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.chunks: list[list[int]] = []
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(perf_counter() - self.started)
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing is held back."""

    def answer(self) -> Answer:
        """What came, and when.

        Assisted generation drafts before its prefill, so that several tokens come at the time of the first. They count
        in tpot_s, as tokens that took no time, which favours it by a few percent; they do not count in `emitted`.
        """
        seconds, chunks = self.seconds[1:], self.chunks[1:]
        emitted = sum(len(chunk) for chunk in chunks[1:])
        num_tokens = len(chunks[0]) + emitted
        tpot = (seconds[-1] - seconds[0]) / (num_tokens - 1) if emitted else None
        token_ids = tuple(token for chunk in chunks for token in chunk)
        return Answer(token_ids, (), seconds[0], tpot, len(chunks) - 1, emitted)


class Ways:
    """The four ways over one pair: the bundle's engine, and its checkpoints as transformers models."""

    def __init__(self, engine: Engine, drafter: PreTrainedModel, verifier: PreTrainedModel) -> None:
        self.engine = engine
        for model in (drafter, verifier):
            nn.Module.to(model, engine.decoder.device)
        self.drafter = drafter
        self.verifier = verifier
        settings = {name: getattr(drafter.generation_config, name, None) for name in ASSISTANT_SETTINGS}
        drafter.generation_config = GenerationConfig(**settings)
        verifier.generation_config = GenerationConfig()  # a repetition penalty holds in greedy search too
        if drafter.config.vocab_size != verifier.config.vocab_size:  # padded differently; assistance wants them equal
            drafter.resize_token_embeddings(verifier.config.vocab_size, mean_resizing=False)

    def answer(self, way: str, prompt_ids: list[int], max_new_tokens: int) -> Answer:
        """A prompt's answer in one of GREEDY's ways; transformers keeps to the engine's context too."""
        if way in ("plain", "speculative"):
            return _answer_of(self.engine.generate(prompt_ids, max_new_tokens=max_new_tokens, plain=way == "plain"))
        inputs = torch.tensor([prompt_ids], device=self.engine.decoder.device)
        clock = TokenClock()
        generate: Any = self.verifier.generate  # its type is lost
        try:
            generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                assistant_model=self.drafter if way == "hf assisted" else None,
                do_sample=False,
                max_new_tokens=min(max_new_tokens, self.engine.max_context - len(prompt_ids)),
                eos_token_id=sorted(self.engine.eos_ids) or None,
                pad_token_id=0,
                streamer=clock,
            )
        except (IndexError, RuntimeError) as error:  # such as a text longer than the drafter's table of positions
            raise YggError(
                f"transformers ({way}) cannot answer a prompt of {len(prompt_ids)} tokens: {one_line(error)}"
            ) from error
        return clock.answer()

    def answer_all(self, index: int, prompt: bench.BenchPrompt, max_new_tokens: int) -> Record:
        """One prompt in all ways; which comes first rotates with the index."""
        return _in_turn(self.engine, GREEDY, index, prompt, lambda way, ids: self.answer(way, ids, max_new_tokens))


class SampledWays:
    """The four ways above temperature 0 over one bundle, by the policies of its plan for the nearest temperature."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        bundle = engine.bundle
        assert bundle is not None
        plan = bundle.plan
        if not plan.sampled:
            raise YggError(f"{bundle.path}: its plan holds no ways to draft above temperature 0; build it again")
        near = min(plan.sampled, key=lambda way: abs(math.log(way.temperature / temperature))).temperature
        self.engine, self.temperature = engine, temperature
        self.modes: dict[str, SampledMode] = {}
        for policy in (way for way in plan.sampled if way.temperature == near and way.shape.draft_depth):
            name = "favourites" if not policy.draws else "chain" if policy.children_per_node == 1 else "drawn"
            self.modes[name] = make_mode(
                policy, StepTimes(plan.curves), plan.plain_width, plan.policy.draft_vocabulary, follows_clock(plan)
            )

    def answer(self, way: str, prompt_ids: list[int], seed: int, max_new_tokens: int) -> Answer:
        """A prompt's answer in one of SAMPLED's ways."""
        before = self.engine.modes
        try:
            if way != "plain":
                self.engine.modes = (self.modes[way],)
            found = self.engine.generate(
                prompt_ids, max_new_tokens=max_new_tokens, plain=way == "plain", temperature=self.temperature, seed=seed
            )
        finally:
            self.engine.modes = before
        return _answer_of(found)

    def answer_all(self, index: int, prompt: bench.BenchPrompt, max_new_tokens: int) -> Record:
        """One prompt in all ways; which comes first rotates with the index."""
        return _in_turn(
            self.engine, SAMPLED, index, prompt, lambda way, ids: self.answer(way, ids, index, max_new_tokens)
        )


def _answer_of(found: GenerationResult) -> Answer:
    ids, stats = found.token_ids, found.stats
    return Answer(ids, found.gaps, stats.ttft_s or 0.0, stats.tpot_s, stats.iterations, len(ids) - 1)


def _in_turn(
    engine: Engine,
    lineup: Lineup,
    index: int,
    prompt: bench.BenchPrompt,
    answer: Callable[[str, list[int]], Answer],
) -> Record:
    prompt_ids = engine.encode_prompt(prompt.text, engine.takes_raw_text)
    first = index % len(lineup.ways)
    answers = {way: answer(way, prompt_ids) for way in (*lineup.ways[first:], *lineup.ways[:first])}
    return Record(index, bench.group_of(prompt.category), len(prompt_ids), {way: answers[way] for way in lineup.ways})


def compare(options: CompareOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Answers the prompts in all ways and returns the figures as JSON data; writes them where there is an output.

    say: gets notices and a line per prompt.
    Raises CheckpointError where the checkpoints are unknown or not those the bundle was built from, ValueError for a
    prompt that does not fit. `failures` of the report lists where speculative differs from plain beyond a near tie.
    """
    chosen = bench.spread_over_categories(bench.read_prompts(options.prompts), options.limit)
    engine = load(options.bundle)
    bundle = engine.bundle
    assert bundle is not None
    for notice in bundle.notices:
        say(f"note: {notice}")
    for prompt in chosen:  # a prompt that does not fit is said before a model is loaded
        engine.encode_prompt(prompt.text, engine.takes_raw_text)
    is_sampled = options.temperature >= GREEDY_BELOW
    lineup = SAMPLED if is_sampled else GREEDY
    ways: Ways | SampledWays
    if is_sampled:
        ways, settings = SampledWays(engine, options.temperature), None
    else:
        drafter, verifier = find_checkpoints(bundle, options)
        say(f"loading {drafter.name} and {verifier.name} into transformers")
        dtype = getattr(torch, bundle.manifest.dtype)
        ways = Ways(engine, load_model(drafter, dtype), load_model(verifier, dtype))
        settings = {  # null: transformers' own default
            **{name: getattr(ways.drafter.generation_config, name) for name in ASSISTANT_SETTINGS},
            "threshold_adapts": is_sklearn_available(),
        }
    with engine.its_threads(), silence_libraries():
        records = _measure(ways, lineup, chosen, options.max_new_tokens, say)
    prediction = None if is_sampled else bundle.plan.prediction
    report = {
        "bundle": str(options.bundle),
        "prompts_file": str(options.prompts),
        "max_new_tokens": options.max_new_tokens,
        "dtype": bundle.manifest.dtype,
        "num_threads": engine.num_threads,
        "sku": bundle.manifest.sku,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "temperature": options.temperature,
        "hf_assistant": settings,
        "predicted": {**asdict(prediction), "speedup": prediction.speedup} if prediction else None,
        **summarize(records, bench.NEAR_TIE[bundle.manifest.dtype], lineup),
    }
    if options.output is not None:
        write_atomically(options.output, json.dumps(report, indent=1).encode())
    return report


def find_checkpoints(bundle: Bundle, options: CompareOptions) -> tuple[Checkpoint, Checkpoint]:
    """The drafter and the verifier that a bundle was built from. Raises CheckpointError where they are not found."""
    given = {"drafter": options.drafter, "verifier": options.verifier}
    layouts = {"drafter": bundle.manifest.drafter, "verifier": bundle.manifest.verifier}
    names = {"drafter": bundle.plan.drafter.name, "verifier": bundle.plan.verifier.name}
    sources = {
        role: find_source(cache_folder(), layouts[role].fingerprint) if source is None else source
        for role, source in given.items()
    }
    if missing := [f"{role} {names[role]}" for role, source in sources.items() if source is None]:
        raise CheckpointError(
            f"it is not known here where the bundle's {' and '.join(missing)} came from; give the checkpoints that it "
            "was built from with --drafter and --verifier"
        )
    found = {role: open_checkpoint(str(source)) for role, source in sources.items()}
    for role, checkpoint in found.items():
        wanted = layouts[role].fingerprint
        if checkpoint.fingerprint != wanted:
            raise CheckpointError(
                f"{checkpoint.source} has fingerprint {checkpoint.fingerprint[:12]}, the bundle's {role} {names[role]} "
                f"has {wanted[:12]}; give the checkpoint that it was built from with --{role}"
            )
    return found["drafter"], found["verifier"]


def _measure(
    ways: Ways | SampledWays,
    lineup: Lineup,
    prompts: Sequence[bench.BenchPrompt],
    max_new_tokens: int,
    say: Callable[[str], None],
) -> list[Record]:
    """All prompts in all ways; every way is warmed up before."""
    ways.answer_all(0, prompts[0], min(WARM_UP_TOKENS, max_new_tokens))
    records = []
    started = perf_counter()
    for index, prompt in enumerate(prompts):
        record = ways.answer_all(index, prompt, max_new_tokens)
        records.append(record)
        done, elapsed = index + 1, perf_counter() - started
        speeds = ", ".join(f"{cell(record.ratio(*pair), 'x')} {'/'.join(pair)}" for pair in lineup.ratios[:3])
        left = elapsed / done * (len(prompts) - done)
        say(f"  {done}/{len(prompts)} {record.category}: {speeds}, {elapsed:.0f} s elapsed, about {left:.0f} s left")
    return records


def summarize(records: Sequence[Record], near_tie: float, lineup: Lineup = GREEDY) -> dict[str, Any]:
    """All figures as plain JSON data, overall, by category and by prompt. near_tie: gap up to which ways may differ."""
    found = {way: [record.difference(way, near_tie) for record in records] for way in lineup.same}
    differences = {way: [asdict(each) for each in places if each is not None] for way, places in found.items()}
    categories = dict.fromkeys(record.category for record in records)
    return {
        **_figures(records, lineup),
        "identical_to_plain": {way: places.count(None) for way, places in found.items()},
        "differences": differences,
        "failures": [each for each in differences.get("speculative", []) if not each["allowed"]],
        "by_category": {
            name: _figures([each for each in records if each.category == name], lineup) for name in categories
        },
        "records": [asdict(record) for record in records],
    }


def _figures(records: Sequence[Record], lineup: Lineup) -> dict[str, Any]:
    return {
        "prompts": len(records),
        **{way: _way_figures([record.answer(way) for record in records]) for way in lineup.ways},
        "ratios": {
            "/".join(pair): median_with_interval([each.ratio(*pair) for each in records]) for pair in lineup.ratios
        },
    }


def _way_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    timed = [(len(answer.token_ids) - 1, answer.tpot_s) for answer in answers if answer.tpot_s]
    seconds = sum(count * tpot for count, tpot in timed)
    calls = sum(answer.verifier_calls for answer in answers)
    return {
        "tokens_per_s": sum(count for count, _ in timed) / seconds if seconds else None,
        "tpot_s": median(tpot for _, tpot in timed) if timed else None,
        "ttft_s": median(answer.ttft_s for answer in answers),
        "acceptance_length": sum(answer.emitted for answer in answers) / calls if calls else None,
    }


def median_with_interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median of what is known and its 95 % interval by the percentile bootstrap, the same every time."""
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    drawn = np.random.default_rng(0).integers(known.size, size=(NUM_RESAMPLES, known.size))
    low, high = np.percentile(np.median(known[drawn], axis=1), (2.5, 97.5))
    return {"median": float(np.median(known)), "low": float(low), "high": float(high), "prompts": known.size}


def format_table(report: dict[str, Any]) -> str:
    """The figures of a comparison for people."""
    lineup = SAMPLED if report.get("temperature", 0.0) >= GREEDY_BELOW else GREEDY
    rows = [*report["by_category"].items(), ("all", report)]
    names = "".join(f"{way:>14}" for way in lineup.ways)
    accepted = "".join(f"{f'by {way}':>15}" for way in lineup.drafting)
    lines = [f"{'tokens/s':<16}{'prompts':>8}{names}   accepted{accepted}"]
    for name, figures in rows:
        speeds = "".join(f"{cell(figures[way]['tokens_per_s'], '', 1):>14}" for way in lineup.ways)
        lengths = "".join(f"{cell(figures[way]['acceptance_length']):>15}" for way in lineup.drafting)
        lines.append(f"{name:<16}{figures['prompts']:>8}{speeds}{'':>11}{lengths}")
    lines.append(f"\n{'speed of':<16}" + "".join(f"{'/'.join(pair):>25}" for pair in lineup.ratios))
    for name, figures in rows:
        lines.append(f"{name:<16}" + "".join(f"{interval(ratio):>25}" for ratio in figures["ratios"].values()))
    told = (
        "drawn: children drawn and traversed; favourites: the drafter's, the verifier's draws walk through them; "
        "chain: one drawn child a node"
        if lineup is SAMPLED
        else "hf: transformers with the same checkpoints"
    )
    lines.append(
        f"\n{told}\naccepted: tokens per verifier call, bonus token included\n"
        "speed of A/B: median of per-prompt ratios [its 95 % interval], above 1 where A is faster"
    )
    if lineup is SAMPLED:
        return "\n".join(lines)
    same = (f"{way} {_identical(report, way)}" for way in report["identical_to_plain"])
    lines.append(f"the same tokens as plain: {', '.join(same)}")
    for place in report["differences"]["speculative"]:
        at = f"prompt {place['prompt']}: speculative differs from plain at token {place['token']}"
        lines.append(f"{at}, top-2 gap {place['gap']:.3g}, {'near tie' if place['allowed'] else 'FAILURE'}")
    if predicted := report.get("predicted"):
        lines.append(f"predicted: {predicted['tpot_s'] * 1e3:.2f} ms per token, {predicted['speedup']:.2f}x plain")
    return "\n".join(lines)


def _identical(report: dict[str, Any], way: str) -> str:
    beyond = sum(not place["allowed"] for place in report["differences"][way])
    count = f"{report['identical_to_plain'][way]} of {report['prompts']}"
    return f"{count} ({beyond} beyond a near tie)" if beyond else count


def interval(ratio: dict[str, Any] | None) -> str:
    """A ratio of `median_with_interval` for people."""
    return "-" if ratio is None else f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def cell(value: float | None, unit: str = "", digits: int = 2) -> str:
    """A figure of a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
