"""A Llama-2-7B-shaped verifier and a 68M-shaped drafter with random weights, made on the device.

Step and stage times, how much of the memory's speed they reach, and what trees would give with acceptance *replayed*
from the demo pair.

Run by check.sh. Writes the figures as JSON and a plan made of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from yggc import __version__
from yggc.export import (
    StepModule,
    compile_step,
    constants,
    draft_pass,
    export_step,
    fused_draft,
    hidden_size,
    verify_step,
)
from yggc.lowering import merge_products
from yggc.profile import time_in_turns
from yggc.steps import step_limits
from yggrt.artifacts import attention_windows
from yggrt.breakdown import read_bandwidth
from yggrt.engine import Engine
from yggrt.executor import SEQUENCE, Decoder, Iteration
from yggrt.latency import LatencyPoint
from yggrt.loader import StepLoader
from yggrt.plan import (
    DraftGraph,
    HostSeconds,
    ModelIdentity,
    Plan,
    Provenance,
    TreePolicy,
    identity_table,
    write_plan,
)
from yggrt.schedule import sequential_schedule
from yggrt.target import detect_target
from yggrt.tree import PLAIN, TreeShape

VOCAB_SIZE, CONTEXT, DTYPE = 32000, 2048, torch.bfloat16
VERIFIER = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
DRAFTER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS = (1, 8, 32, 64)
DRAFTS = ((8, 2), (8, 4), (4, 8))
EXTENTS = (256, 1024)
REPLAYED = Path(__file__).with_name("replayed.json")
REPEATS = 9
TOGETHER = 9  # compilations: a verifier's takes 14 GB of the card


def make_model(sizes: dict[str, int], device: torch.device) -> LlamaForCausalLM:
    """A Llama with random weights, made where it is to be."""
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=4096, **sizes)
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        torch.manual_seed(0)
        with device:
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(dtype_before)


def make_step(role: str, model: LlamaForCausalLM) -> StepModule:
    """The module of a role: verify, verify.wN, draft; draft.WxD drafts D passes of W nodes."""
    limits = step_limits("cuda", CONTEXT, CONTEXT, VOCAB_SIZE)
    if role.startswith("verify"):
        width = int(role.removeprefix("verify.w")) if "." in role else None
        return verify_step(model, VOCAB_SIZE, limits, width)
    one = draft_pass(model, VOCAB_SIZE, limits)
    if role == "draft":
        return one
    width, depth = (int(part) for part in role.removeprefix("draft.").split("x"))
    return fused_draft(one, width, depth)


def compile_apart(role: str, sizes: dict[str, int], path: Path, device: torch.device) -> float:
    """In a process of its own. Returns seconds.

    Raises RuntimeError with what went wrong: torch's own errors cannot be sent to another process.
    """
    started = perf_counter()
    torch.set_num_threads(2)
    torch._inductor.config.compile_threads = 2  # of each of these processes
    try:
        program = export_step(make_step(role, make_model(sizes, device)))
        compile_step(merge_products(program), path, 1, path.with_suffix(".scratch"), device)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None
    return perf_counter() - started


@dataclass(frozen=True)
class Loaded:
    """A model, its step of any width, and the constants its artifacts use, by name."""

    model: LlamaForCausalLM
    step: StepModule
    weights: dict[str, Tensor]


def load(role: str, sizes: dict[str, int], device: torch.device) -> Loaded:
    model = make_model(sizes, device)
    step = make_step(role, model)
    tensors, aliases = constants(merge_products(export_step(step)))
    return Loaded(model, step, tensors | {name: tensors[own] for name, own in aliases.items()})


def say(text: str) -> None:
    print(f"[{perf_counter() - STARTED:5.0f} s] {text}", flush=True)


STARTED = perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script itself")
    options = parser.parse_args()
    target = detect_target("cuda")
    device = torch.device(target.device)
    sizes = {"verify": SMALL if options.small else VERIFIER, "draft": SMALL if options.small else DRAFTER}
    roles = ["verify", *(f"verify.w{width}" for width in WIDTHS)]
    roles += ["draft", *(f"draft.{width}x{depth}" for width, depth in DRAFTS)]
    figures: dict[str, Any] = {
        "gpu": target.name, "sku": target.sku, "driver": target.driver, "torch": str(torch.__version__),
        "verifier": sizes["verify"], "drafter": sizes["draft"], "dtype": "bfloat16", "compile_s": {}, "failed": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="yggc-gpu-") as place:
        packages = {role: Path(place) / f"{role}.pt2" for role in roles}
        with ProcessPoolExecutor(TOGETHER, multiprocessing.get_context("spawn")) as pool:
            jobs = {
                pool.submit(compile_apart, role, sizes[role.split(".")[0]], packages[role], device): role
                for role in roles
            }
            loaded = {role: load(role, sizes[role], device) for role in ("verify", "draft")}
            say("models are made")
            for job in as_completed(jobs):
                if job.exception() is None:
                    figures["compile_s"][jobs[job]] = round(job.result(), 1)
                    say(f"compiled {jobs[job]} in {job.result():.0f} s")
                else:
                    figures["failed"][jobs[job]] = str(job.exception())
                    say(f"{jobs[job]} cannot be compiled:\n{job.exception()}")
        try:
            if not figures["failed"]:
                measure(figures, packages, loaded, target, options)
        finally:  # what was found until something failed is worth having
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    say(f"figures are in {options.json}")
    sys.exit(1 if figures["failed"] else 0)


def measure(figures: dict, packages: dict, loaded: dict[str, Loaded], target: Any, options: Any) -> None:
    """Load everything into one engine and time it."""
    device = torch.device(target.device)
    models = {role: each.model for role, each in loaded.items()}
    torch.cuda.synchronize()  # the engines' streams wait for nothing but their own
    limits, layouts = loaded["verify"].step.limits, {role: each.step.layouts for role, each in loaded.items()}
    windows, width = attention_windows(layouts["verify"]), hidden_size(models["verify"])

    def engine_of(uses_graphs: bool, draft_width: int) -> Engine:
        loader = StepLoader(target, None, DTYPE, uses_graphs)

        def step(role: str, package: str) -> Any:
            return loader.step(role, packages[package], loaded[role.split(".")[0]].weights, limits, windows, width)

        table = identity_table(limits.num_children, limits.num_knots)
        decoder = Decoder(
            step("verify", "verify"),
            step("draft", "draft"),
            {depth: step(f"draft.d{depth}", f"draft.{each}x{depth}") for each, depth in DRAFTS if each == draft_width},
            draft_width,
            loader.cache(layouts["verify"], limits),
            loader.cache(layouts["draft"], limits),
            torch.tensor(table.log_a).view(table.num_ranks, table.num_knots),
            CONTEXT,
            1,
            by_width={each: step(f"verify.w{each}", f"verify.w{each}") for each in WIDTHS},
        )
        return Engine(decoder, TreeShape(draft_width, 2, 8), None, frozenset(), VOCAB_SIZE, CONTEXT, 1)

    bandwidth = read_bandwidth(device)
    figures["bandwidth_gb_per_s"] = round(bandwidth / 1e9)
    engines = {8: engine_of(True, 8), 4: engine_of(True, 4)}
    ungraphed = engine_of(False, 8)
    runs: dict[str, Callable[[], object]] = {}
    for extent in EXTENTS:
        tokens = [1] * (extent - 70)
        for rows in WIDTHS:
            runs[f"verify W={rows} S={extent}"] = partial(verify_once, engines[8].decoder, tokens, rows)
        for each, depth in DRAFTS:
            runs[f"draft W={each} D={depth} S={extent}"] = partial(
                draft_once, engines[each].decoder, tokens, each, depth
            )
    tokens = [1] * (EXTENTS[0] - 70)
    runs["verify W=1 without graphs"] = partial(verify_once, ungraphed.decoder, tokens, 1)
    runs["draft W=8 D=4 without graphs"] = partial(draft_once, ungraphed.decoder, tokens, 8, 4)
    timed = time_in_turns(runs, REPEATS)
    say("steps are timed")
    num_bytes = {
        role: sum({each.data_ptr(): each.numel() * 2 for each in model.parameters()}.values())
        - VOCAB_SIZE * model.config.hidden_size * 2  # of the embedding a step reads a few rows
        for role, model in models.items()
    }
    figures["steps"] = {}
    for name, timing in timed.items():
        passes = int(name.split("D=")[1].split()[0]) if "D=" in name else 1
        least = num_bytes[name.split()[0]] * passes / bandwidth
        figures["steps"][name] = {
            "ms": round(timing.seconds * 1e3, 3), "spread_ms": round(timing.spread_s * 1e3, 3),
            "of_bandwidth": round(least / timing.seconds, 3),
        }  # fmt: skip
        say(f"{name:32s} {timing.seconds * 1e3:8.3f} ms ± {timing.spread_s * 1e3:.3f}, {least / timing.seconds:.0%}")
    iterations(figures, engines, tokens)
    write_plan_of(figures, timed, models, target, options)


def verify_once(decoder: Decoder, tokens: list[int], rows: int) -> None:
    decoder.verifier_cache.num_committed = len(tokens)
    before, decoder.plain_width = decoder.plain_width, rows
    decoder.decode(tokens, PLAIN)
    decoder.plain_width = before


def draft_once(decoder: Decoder, tokens: list[int], width: int, depth: int) -> None:
    decoder.drafter_cache.num_committed = len(tokens)
    decoder.draft_tree(tokens, TreeShape(width, depth, 1))


def iterations(figures: dict, engines: dict[int, Engine], tokens: list[int]) -> None:
    """Whole iterations: split (the verify width chosen from the tree) and fused (fixed), stage by stage; with what they
    would give where as many tokens were accepted as in the replayed trace."""
    replayed = json.loads(REPLAYED.read_text())["tokens_per_iteration"]
    plain_s = figures["steps"][f"verify W=1 S={EXTENTS[0]}"]["ms"] / 1e3
    figures["iterations"], figures["replayed"] = {}, json.loads(REPLAYED.read_text())["what"]
    for name, tokens_per_iteration in replayed.items():
        shape = TreeShape(*(int(part) for part in name.split(",")))
        decoder = engines[shape.draft_width].decoder
        found: dict[str, list[float]] = {"split": [], "fused": []}
        stages: dict[str, list[float]] = {stage: [] for stage in SEQUENCE}
        for turn in range(REPEATS + 3):
            for mode in found:
                decoder.drafter_cache.num_committed = decoder.verifier_cache.num_committed = len(tokens)
                choose = None if mode == "fused" else partial(whole_menu, shape.verify_width)
                iteration = Iteration(tokens, shape, choose)
                began = perf_counter()
                for stage in SEQUENCE:
                    started = perf_counter()
                    decoder.stages[stage](iteration)
                    if turn >= 3:
                        stages[stage].append(perf_counter() - started)
                if turn >= 3:
                    found[mode].append(perf_counter() - began)
        seconds = {mode: median(each) for mode, each in found.items()}
        figures["iterations"][name] = {
            **{f"{mode}_ms": round(each * 1e3, 3) for mode, each in seconds.items()},
            "stages_ms": {stage: round(median(each) * 1e3, 3) for stage, each in stages.items()},
            "replayed_tokens_per_iteration": tokens_per_iteration,
            "replayed_speedup": round(tokens_per_iteration * plain_s / seconds["fused"], 3),
        }
        say(f"tree {name}: {figures['iterations'][name]}")


def whole_menu(width: int, values: Any, _extent: int) -> int:
    """A choice by value that takes all there is, so that split and fused verify the same rows."""
    return min(len(values), width)


def write_plan_of(figures: dict, timed: dict, models: dict, target: Any, options: Any) -> None:
    """A plan with the tree that the replayed acceptance makes the fastest, under plans/<sku>/<pair>/."""
    best = max(figures["iterations"], key=lambda name: figures["iterations"][name]["replayed_speedup"])
    shape = TreeShape(*(int(part) for part in best.split(",")))
    points = []
    for name, timing in timed.items():
        if "without" not in name:
            role, *parts = name.split()
            values = {part.split("=")[0]: int(part.split("=")[1]) for part in parts}
            points.append(
                LatencyPoint(role, values["W"], values.get("D", 0), values["S"], timing.seconds, timing.spread_s)
            )
    stages = figures["iterations"][best]["stages_ms"]
    host_s = sum(stages[stage] for stage in ("prune", "accept", "move")) / 1e3
    limits = step_limits("cuda", CONTEXT, CONTEXT, VOCAB_SIZE)
    policy = TreePolicy(
        shape.draft_width, (0, shape.draft_depth), (1, shape.verify_width), limits.num_children, None, shape
    )
    plan = Plan(
        sku=target.sku, target="cuda", dtype="bfloat16", num_threads=1, max_context=CONTEXT,
        drafter=identity("random-68m-shaped", models["draft"]), verifier=identity("random-7b-shaped", models["verify"]),
        policy=policy, schedule=sequential_schedule(1), schedule_study=None,
        acceptance_table=identity_table(limits.num_children, limits.num_knots), copied_log_a=(), plain_width=1,
        draft_graphs=(DraftGraph(shape.draft_depth, True, *[draft_seconds(timed, shape)] * 2),),
        curves=tuple(points), host=HostSeconds(host_s, host_s), token_s=None, depth_network=None, depth_figures=None,
        sampled=(), calibration=None, prediction=None,
        provenance=Provenance(__version__, str(torch.__version__), datetime.now(UTC).isoformat(timespec="seconds")),
    )  # fmt: skip
    folder = options.plans / target.sku / f"{plan.drafter.name}+{plan.verifier.name}"
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / "plan.ygg", plan)
    say(f"the plan is in {folder}")


def draft_seconds(timed: dict, shape: TreeShape) -> float:
    return float(timed[f"draft W={shape.draft_width} D={shape.draft_depth} S={EXTENTS[0]}"].seconds)


def identity(name: str, model: LlamaForCausalLM) -> ModelIdentity:
    """Of a model that no checkpoint holds: the fingerprint is of its shape."""
    config = model.config
    return ModelIdentity(
        name=name, architecture="llama", fingerprint=hashlib.sha256(config.to_json_string().encode()).hexdigest(),
        dtype="bfloat16", vocab_size=VOCAB_SIZE, context=CONTEXT, num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
    )  # fmt: skip


if __name__ == "__main__":
    main()
