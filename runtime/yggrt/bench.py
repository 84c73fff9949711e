"""`yggrt bench`: plain against speculative decoding on a file of prompts, interleaved prompt by prompt.

It also checks that both say the same: a difference is allowed only where the verifier's two best logits nearly tie
(`NEAR_TIE`), is printed with its gap, and is a failure otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter

from yggrt.bundle import load
from yggrt.engine import Engine, GenerationResult
from yggrt.plan import Prediction
from yggrt.tree import TreeShape

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.0625}
"""Largest top-2 gap at which two shapes of one step may choose differently, by dtype. Logits of size 16 to 32 lie 0.125
apart in bfloat16, and each of the two may be off by two such steps."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt and the group it is reported under."""

    category: str
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where plain and speculative first differ: index of the token and the plain run's top-2 gap there."""

    prompt: int
    token: int
    gap: float
    allowed: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt answered both ways."""

    category: str
    plain: GenerationResult
    speculative: GenerationResult

    @property
    def speedup(self) -> float | None:
        """Plain over speculative seconds per token; None where a run is too short to measure."""
        if self.plain.stats.tpot_s is None or not self.speculative.stats.tpot_s:
            return None
        return self.plain.stats.tpot_s / self.speculative.stats.tpot_s


def run_bench(
    path: Path,
    prompts: Path,
    limit: int | None,
    max_new_tokens: int,
    output: Path | None,
    floor: float | None,
    shape: TreeShape | None = None,
    turns: int = 1,
    device: str | None = None,
) -> int:
    """Bench a bundle, print a table, write JSON.

    shape: a tree for every iteration, in place of what the plan chooses.
    turns: how often every prompt is answered both ways; each counts.
    device: as for `yggrt.load`.

    Returns 1 when the two ways differ beyond a near tie, or the median speedup is below `floor`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: at least 1 is accepted")
    if max_new_tokens < 2:
        raise ValueError(f"max-new-tokens {max_new_tokens}: at least 2 are needed to measure a time per token")
    if turns < 1:
        raise ValueError(f"turns {turns}: at least 1 is accepted")
    chosen = spread_over_categories(read_prompts(prompts), limit)
    if output is not None and not output.resolve().parent.is_dir():
        raise ValueError(f"{output.resolve().parent} does not exist; the figures cannot be written to {output}")
    engine = load(path, device)
    assert engine.bundle is not None
    if shape is not None:
        use_shape(engine, shape)
    for notice in engine.bundle.notices:
        print(f"note: {notice}", file=sys.stderr)
    pairs, differences = answer_both_ways(engine, chosen, max_new_tokens, turns)
    report = summarize(pairs, engine, differences)
    print(format_table(report))
    if shape is None and engine.bundle.plan.prediction is not None:
        print(beside_prediction(engine.bundle.plan.prediction, report))
    for notice in dict.fromkeys(notice for pair in pairs for notice in pair.speculative.stats.notices):
        print(f"note: {notice}")
    for line in difference_lines(differences):
        print(line)
    if output is not None:
        output.write_text(json.dumps(report, indent=1))
    if any(not entry.allowed for entry in differences):
        dtype = engine.bundle.manifest.dtype
        print(
            f"yggrt: speculative differs from plain beyond a near tie ({NEAR_TIE[dtype]} in {dtype})", file=sys.stderr
        )
        return 1
    speedup = report["speedup"]
    if floor is not None and (not isinstance(speedup, float) or speedup < floor):
        print(f"yggrt: median speedup {_cell(speedup, '.2f', 'x')} is below the floor of {floor}x", file=sys.stderr)
        return 1
    return 0


def answer_both_ways(
    engine: Engine, prompts: Sequence[BenchPrompt], max_new_tokens: int, turns: int = 1
) -> tuple[list[Pair], list[Difference]]:
    """Answer all prompts plainly and speculatively, `turns` times, in changing order; tells its progress.

    Raises ValueError for a prompt that does not fit, before the first is answered.
    """
    assert engine.bundle is not None
    for prompt in prompts:
        engine.encode_prompt(prompt.text, engine.takes_raw_text)
    near_tie = NEAR_TIE[engine.bundle.manifest.dtype]
    pairs: list[Pair] = []
    differences: list[Difference] = []
    for plain in (False, True):  # warms up
        engine.generate(prompts[0].text, max_new_tokens=8, plain=plain, raw=engine.takes_raw_text)
    started = perf_counter()
    for turn in range(turns):
        for index, prompt in enumerate(prompts):
            pair = _answer_both(engine, prompt, max_new_tokens, plain_first=(index + turn) % 2 == 0)
            pairs.append(pair)
            difference = first_difference(index, pair, near_tie)
            if difference is not None:
                differences.append(difference)
            _progress(len(pairs), turns * len(prompts), perf_counter() - started, pair)
    return pairs, differences


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    """A line for every answer that differs from the plain one."""
    return [
        f"prompt {entry.prompt}: differs from plain at token {entry.token}, top-2 gap {entry.gap:.3g}, "
        + ("near tie" if entry.allowed else "FAILURE")
        for entry in differences
    ]


def use_shape(engine: Engine, shape: TreeShape) -> None:
    """Grow this tree in every iteration. Raises ValueError when it is larger than the artifacts hold."""
    limits = engine.decoder.draft.limits
    if shape.capacity > limits.max_nodes or shape.draft_depth > limits.max_moves or shape.pool_size > limits.pool_size:
        raise ValueError(
            f"shape {shape.draft_width},{shape.draft_depth},{shape.verify_width}: trees of up to {limits.max_nodes} "
            f"nodes, {limits.max_moves} passes and {limits.pool_size} candidates between them were compiled"
        )
    engine.shape, engine.pace = shape, None
    engine.use_schedule(replace(engine.executor.schedule, verify_width=None))  # the shape's own, whatever the plan's is


def read_shape(text: str) -> TreeShape:
    """W_d,D_d,W_v. Raises ValueError."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"shape {text!r:.40}: draft width, draft depth and verify width are accepted, such as 4,2,4")
    return TreeShape(*(int(part) for part in parts))


MISS = 0.05
"""How far a prediction may be off before it is called a miss."""


def beside_prediction(prediction: Prediction, report: dict[str, object]) -> str:
    """What was predicted for text like the calibration's, and what this bench measured; misses are marked."""
    plain, speculative = report["plain"], report["speculative"]
    assert isinstance(plain, dict) and isinstance(speculative, dict)
    rows = [
        ("TPOT, ms", 1e3 * prediction.tpot_s, _milliseconds(speculative["tokens_per_s"])),
        ("plain TPOT, ms", 1e3 * prediction.plain_tpot_s, _milliseconds(plain["tokens_per_s"])),
        ("speedup", prediction.speedup, _ratio(plain["tokens_per_s"], speculative["tokens_per_s"])),
        ("tokens per iteration", prediction.tokens_per_iteration, report["acceptance_length"]),
    ]
    lines = [f"{'':<22}{'predicted':>10}{'measured':>10}"]
    for name, predicted, measured in rows:
        off = measured / predicted - 1 if isinstance(measured, float) else 0.0
        missed = f"   off by {off:+.0%}" if abs(off) > MISS else ""
        lines.append(f"{name:<22}{predicted:>10.2f}{_cell(measured, '.2f'):>10}{missed}")
    lines.append("predicted for text like the calibration's held-out part, on an idle machine")
    return "\n".join(lines)


def _milliseconds(tokens_per_s: object) -> float | None:
    return 1e3 / tokens_per_s if isinstance(tokens_per_s, float) else None


def _ratio(plain: object, speculative: object) -> float | None:
    return speculative / plain if isinstance(plain, float) and isinstance(speculative, float) else None


def read_prompts(path: Path) -> list[BenchPrompt]:
    """JSON lines with "prompt", or Spec-Bench's "turns" of which the first is used. Raises ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry["prompt"]
            prompts.append(BenchPrompt(str(entry.get("category", "all")), str(text)))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ValueError(f'{path}, line {number}: a JSON object with "prompt" or "turns" is accepted') from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def spread_over_categories(prompts: Sequence[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """The first `limit` prompts taken in turn from every group; Spec-Bench's eight kinds of chat count as one group."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(group_of(prompt.category), []).append(prompt)
    for name, members in groups.items():
        kinds = list(dict.fromkeys(member.category for member in members))
        if len(kinds) > 1:  # take the kinds of chat in turn
            by_kind = [[member for member in members if member.category == kind] for kind in kinds]
            longest = max(len(kind) for kind in by_kind)
            groups[name] = [kind[index] for index in range(longest) for kind in by_kind if index < len(kind)]
    taken = [
        members[index]
        for index in range(max(len(members) for members in groups.values()))
        for members in groups.values()
        if index < len(members)
    ]
    return taken[:limit]


def group_of(category: str) -> str:
    """Spec-Bench's group of a category: MT-bench's eight kinds are its multi-turn conversation."""
    chat = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    return "conversation" if category in chat else category


def _answer_both(engine: Engine, prompt: BenchPrompt, max_new_tokens: int, plain_first: bool) -> Pair:
    results: dict[bool, GenerationResult] = {}
    for plain in (True, False) if plain_first else (False, True):
        results[plain] = engine.generate(
            prompt.text, max_new_tokens=max_new_tokens, plain=plain, raw=engine.takes_raw_text
        )
    return Pair(group_of(prompt.category), results[True], results[False])


def first_difference(index: int, pair: Pair, near_tie: float) -> Difference | None:
    """Where the two answers part, if they do."""
    plain, speculative = pair.plain, pair.speculative
    if plain.token_ids == speculative.token_ids:
        return None
    both = zip(plain.token_ids, speculative.token_ids, strict=False)
    shorter = min(len(plain.token_ids), len(speculative.token_ids))
    token = next((place for place, (one, other) in enumerate(both) if one != other), shorter)
    gap = max(run.gaps[token] for run in (plain, speculative) if token < len(run.gaps))
    return Difference(index, token, gap, gap <= near_tie)


def summarize(pairs: Sequence[Pair], engine: Engine, differences: Sequence[Difference]) -> dict[str, object]:
    """All figures of a bench as plain JSON data, overall and by category."""
    categories = dict.fromkeys(pair.category for pair in pairs)
    prediction = engine.bundle.plan.prediction if engine.bundle else None
    return {
        **_figures(pairs),
        "predicted_tpot_s": prediction.tpot_s if prediction else None,
        "predicted_speedup": prediction.speedup if prediction else None,
        "load_s": engine.load_s,
        "bundle_bytes": engine.bundle.num_bytes if engine.bundle else None,
        "differences": [
            {"prompt": d.prompt, "token": d.token, "gap": d.gap, "allowed": d.allowed} for d in differences
        ],
        "by_category": {name: _figures([pair for pair in pairs if pair.category == name]) for name in categories},
    }


def _figures(pairs: Sequence[Pair]) -> dict[str, object]:
    speedups = sorted(pair.speedup for pair in pairs if pair.speedup is not None)
    iterations = sum(pair.speculative.stats.iterations for pair in pairs)
    depths = _depth_counts(pairs)
    emitted = sum(pair.speculative.stats.acceptance_length * pair.speculative.stats.iterations for pair in pairs)
    return {
        "prompts": len(pairs),
        "plain": _side([pair.plain for pair in pairs]),
        "speculative": _side([pair.speculative for pair in pairs]),
        "speedup": median(speedups) if speedups else None,
        "speedup_quartiles": [speedups[len(speedups) // 4], speedups[3 * len(speedups) // 4]] if speedups else None,
        "acceptance_length": emitted / iterations if iterations else None,
        "depth": sum(depth * count for depth, count in enumerate(depths)) / iterations if iterations else None,
        "depth_histogram": depths,
        "host_share": _median([pair.speculative.stats.host_share for pair in pairs]),
        "ttft_s": _median([pair.speculative.stats.ttft_s for pair in pairs]),
        "tpot_s": _median([pair.speculative.stats.tpot_s for pair in pairs]),
    }


def _depth_counts(pairs: Sequence[Pair]) -> list[int]:
    """Iterations by the depth that was drafted, from 0 on."""
    histograms = [pair.speculative.stats.depth_histogram for pair in pairs]
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def _side(results: Sequence[GenerationResult]) -> dict[str, object]:
    timed = [(result.stats.new_tokens - 1, result.stats.tpot_s) for result in results if result.stats.tpot_s]
    seconds = sum(count * tpot for count, tpot in timed)
    return {
        "tokens_per_s": sum(count for count, _ in timed) / seconds if seconds else None,
        "tpot_s": _median([result.stats.tpot_s for result in results]),
        "ttft_s": _median([result.stats.ttft_s for result in results]),
        "new_tokens": sum(result.stats.new_tokens for result in results),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def format_table(report: dict[str, object]) -> str:
    """The figures of a bench for people."""
    by_category = report["by_category"]
    assert isinstance(by_category, dict)
    rows = [*by_category.items(), ("all", report)]
    head = f"{'group':<16}{'prompts':>8}{'plain':>12}{'speculative':>13}{'speedup':>9}{'quartiles':>12}"
    lines = [head + f"{'accepted':>10}{'depth':>7}{'host':>7}{'ttft':>9}"]
    for name, figures in rows:
        lines.append(
            f"{name:<16}{figures['prompts']:>8}{_cell(figures['plain']['tokens_per_s'], '.1f', ' t/s'):>12}"
            f"{_cell(figures['speculative']['tokens_per_s'], '.1f', ' t/s'):>13}"
            f"{_cell(figures['speedup'], '.2f', 'x'):>9}{_range(figures['speedup_quartiles']):>12}"
            f"{_cell(figures['acceptance_length'], '.2f'):>10}{_cell(figures['depth'], '.1f'):>7}"
            f"{_cell(_percent(figures['host_share']), '.1f', '%'):>7}"
            f"{_cell(figures['ttft_s'], '.2f', ' s'):>9}"
        )
    lines.append(
        "accepted: tokens per verifier call, bonus token included; depth: draft passes of an iteration, on average; "
        "speedup: median of per-prompt ratios"
    )
    return "\n".join(lines)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _cell(value: object, pattern: str, unit: str = "") -> str:
    return "-" if value is None else format(value, pattern) + unit


def _range(quartiles: Sequence[float] | None) -> str:
    return "-" if quartiles is None else f"{quartiles[0]:.2f}-{quartiles[1]:.2f}"


def _progress(done: int, total: int, elapsed_s: float, pair: Pair) -> None:
    speedup = f"{pair.speedup:.2f}x" if pair.speedup else "-"
    left = elapsed_s / done * (total - done)
    line = f"  {done}/{total} {pair.category}: {speedup}, {elapsed_s:.0f} s elapsed, about {left:.0f} s left"
    print(line, file=sys.stderr, flush=True)
