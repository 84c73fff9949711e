"""The demo pair's steps against transformers' own, interleaved in one run, beside the floors this project holds to.

The floors are for bfloat16, so the pair is built in it first (floors.bundle). Run it on an idle machine:
`.venv/bin/python examples/floors.py`, or with another bundle of the demo pair, such as demo.bundle, as its argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import yggrt  # before torch, so that it can say how OpenMP waits

# isort: split
import torch
from demo_pair import drafter_path, verifier_path
from transformers import DynamicCache

from yggc.build import build
from yggc.checkpoints import load_model, open_checkpoint
from yggc.config import BuildOptions
from yggc.progress import Progress
from yggc.stage_cache import cache_folder
from yggrt.breakdown import EXTENT, REFERENCE_SHAPE
from yggrt.errors import YggError
from yggrt.tree import PLAIN, TreeShape

BUNDLE = Path("floors.bundle")
REPEATS = 15
WARM_UPS = 2


def hugging_face_step(dtype: torch.dtype) -> Callable[[], object]:
    """One token through transformers' model, eagerly, after EXTENT - 1 others in its cache."""
    model = load_model(open_checkpoint(str(verifier_path())), dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(1000, 1000 + EXTENT - 1)[None], past_key_values=cache)

    def step() -> None:
        with torch.no_grad():
            model(torch.tensor([[1000]]), past_key_values=cache)
        cache.crop(-1)

    return step


def main() -> int:
    """Time everything, print the table; 1 when a floor is missed."""
    try:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE
        if len(sys.argv) == 1 and not BUNDLE.exists():
            options = BuildOptions(str(drafter_path()), str(verifier_path()), BUNDLE, dtype="bfloat16")
            build(options, Progress(cache_folder() / "durations.json"))
        engine = yggrt.load(path)
    except YggError as error:
        print(f"floors: {error}", file=sys.stderr)
        return 1
    assert engine.bundle is not None and engine.load_s is not None
    torch.set_num_threads(engine.num_threads)
    decoder, shape = engine.decoder, REFERENCE_SHAPE
    tokens = list(range(1000, 1000 + EXTENT - shape.capacity - 8))
    decoder.prefill(tokens)
    decoder.prefill_drafter(tokens)

    def verify(width: int) -> Callable[[], object]:
        def step() -> None:
            decoder.plain_width = width
            decoder.decode(tokens, PLAIN)

        return step

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    runs = {
        **{f"transformers, {name}, W=1": hugging_face_step(dtype) for name, dtype in dtypes.items()},
        "plain": verify(decoder.plain_width),
        f"verify W={shape.verify_width}": verify(shape.verify_width),
        "draft pass": lambda: decoder.draft_tree(tokens, TreeShape(shape.draft_width, 1, 1)),
        "draft": lambda: decoder.draft_tree(tokens, shape),
        "iteration": lambda: decoder.decode(tokens, shape),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    compiled = 0.0
    for repeat in range(REPEATS + WARM_UPS):
        for name, run in runs.items():
            before = decoder.compiled_s
            started = perf_counter()
            run()
            if repeat >= WARM_UPS:
                seconds[name].append(perf_counter() - started)
                if name == "iteration":
                    compiled += decoder.compiled_s - before
    took = {name: median(samples) for name, samples in seconds.items()}
    for name, samples in seconds.items():
        low, _, high = quantiles(samples, n=4)
        print(f"{name:<28}{took[name] * 1e3:>9.2f} ms ± {(high - low) / 2e-3:.2f}")
    dtype = engine.bundle.manifest.dtype
    verify_s, own_dtype = took[f"verify W={shape.verify_width}"], took[f"transformers, {dtype}, W=1"]
    weights = sum(entry.num_bytes for entry in engine.bundle.manifest.files if entry.file.endswith(".weights"))
    floors = [
        (f"verify W={shape.verify_width} / transformers {dtype} W=1", verify_s / own_dtype, 0.40),
        ("draft pass / verify", took["draft pass"] / verify_s, 0.07),
        ("iteration / plain", took["iteration"] / took["plain"], 1.5),
        ("host share of an iteration", 1 - compiled / sum(seconds["iteration"]), 0.05),
        ("load, seconds", engine.load_s, 2.0),
        ("bundle / weights", engine.bundle.num_bytes / weights, 1.6),
    ]
    print(f"\n{'':<44}{'measured':>9}{'floor':>7}")
    for name, value, floor in floors:
        print(f"{name:<44}{value:>9.3f}{floor:>7.2f}{'' if value <= floor else '   missed'}")
    return int(any(value > floor for _, value, floor in floors))


if __name__ == "__main__":
    sys.exit(main())
