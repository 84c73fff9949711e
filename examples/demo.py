"""The main job on the demo pair: build the bundle, answer one prompt plainly and speculatively, compare."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

from demo_pair import drafter_path, verifier_path

import yggrt
from yggc.build import build
from yggc.config import BuildOptions
from yggc.progress import Progress
from yggc.stage_cache import cache_folder
from yggrt.bench import NEAR_TIE, Pair, first_difference
from yggrt.errors import YggError

PROMPT = "Tom has 3 boxes with 12 apples each. He gives away 9 apples. How many are left? Explain step by step."
BUNDLE = Path("demo.bundle")


def answer(engine: yggrt.Engine, plain: bool) -> yggrt.GenerationResult:
    """Stream one answer to the terminal."""
    print(f"\n--- {'the verifier alone' if plain else 'speculative'}", flush=True)
    stream = engine.stream(PROMPT, max_new_tokens=160, plain=plain)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    assert stream.result is not None
    return stream.result


def table(engine: yggrt.Engine, plain: yggrt.GenerationResult, speculative: yggrt.GenerationResult) -> str:
    """Both runs side by side."""
    assert engine.bundle is not None and engine.load_s is not None

    def row(name: str, pattern: str, scale: float = 1.0) -> str:
        values = [getattr(run.stats, name) for run in (plain, speculative)]
        cells = ["-" if value is None else format(value * scale, pattern) for value in values]
        return f"{cells[0]:>14}{cells[1]:>14}"

    lines = [
        f"{'':<24}{'plain':>14}{'speculative':>14}",
        f"{'tokens/s':<24}{row('tokens_per_s', '.1f')}",
        f"{'TPOT, ms':<24}{row('tpot_s', '.2f', 1e3)}",
        f"{'TTFT, ms':<24}{row('ttft_s', '.1f', 1e3)}",
        f"{'new tokens':<24}{row('new_tokens', 'd', 1)}",
        f"{'iterations':<24}{row('iterations', 'd', 1)}",
        f"{'acceptance length':<24}{row('acceptance_length', '.2f')}",
        f"{'host share, %':<24}{row('host_share', '.2f', 100)}",
        f"{'bundle size, MB':<24}{engine.bundle.num_bytes / 1e6:>14.0f}",
        f"{'load time, s':<24}{engine.load_s:>14.2f}",
    ]
    return "\n".join(lines)


def prediction(engine: yggrt.Engine, plain: yggrt.GenerationResult, speculative: yggrt.GenerationResult) -> str:
    """What the plan expects on text like the calibration's, beside this one answer."""
    assert engine.bundle is not None
    made = engine.bundle.plan.prediction
    if made is None or not plain.stats.tpot_s or not speculative.stats.tpot_s:
        return "nothing was predicted"
    return (
        f"predicted for text like the calibration's: {made.tpot_s * 1e3:.2f} ms a token, {made.speedup:.2f}x plain\n"
        f"measured on this answer:                   {speculative.stats.tpot_s * 1e3:.2f} ms a token, "
        f"{plain.stats.tpot_s / speculative.stats.tpot_s:.2f}x plain"
    )


def report_agreement(engine: yggrt.Engine, plain: yggrt.GenerationResult, speculative: yggrt.GenerationResult) -> int:
    """Say whether both runs agree; 1 when they part where the verifier's two best logits do not nearly tie."""
    assert engine.bundle is not None
    difference = first_difference(0, Pair("demo", plain, speculative), NEAR_TIE[engine.bundle.manifest.dtype])
    if difference is None:
        print("both said exactly the same")
        return 0
    verdict = "a near tie" if difference.allowed else "FAILURE: no near tie"
    print(f"they part at token {difference.token}, where the two best logits lie {difference.gap:.3g} apart: {verdict}")
    return 0 if difference.allowed else 1


def main() -> int:
    """Build, answer twice, print the table."""
    started = perf_counter()
    try:
        options = BuildOptions(str(drafter_path()), str(verifier_path()), BUNDLE)
        report = build(options, Progress(cache_folder() / "durations.json"))
        print(f"built {report.output} in {perf_counter() - started:.0f} s; `yggrt run {report.output}` answers with it")
        engine = yggrt.load(BUNDLE)
    except YggError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    for plain in (True, False):  # first calls are slow: keep them out of the figures
        engine.generate(PROMPT, max_new_tokens=6, plain=plain)
    answer_plainly = answer(engine, plain=True)
    answer_speculatively = answer(engine, plain=False)
    print()
    print(table(engine, answer_plainly, answer_speculatively))
    print(prediction(engine, answer_plainly, answer_speculatively))
    return report_agreement(engine, answer_plainly, answer_speculatively)


if __name__ == "__main__":
    sys.exit(main())
