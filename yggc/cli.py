"""The command `yggc`: build, inspect, distill, show and clean. Errors are one line and exit 1."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from yggrt.errors import YggError

TREES_SHOWN = 5
"""Of those the search tried, the fastest."""


def make_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="yggc",
        description="Compile a drafter and a verifier into a bundle that says what the verifier would, only faster.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="compile a pair into a bundle")
    _add_pair(build)
    build.add_argument("-o", "--output", type=Path, metavar="DIR", help="default ./<drafter>+<verifier>.bundle")
    build.add_argument("--target", default="cpu", help="cpu (the default)")
    build.add_argument(
        "--dtype", default="float32", help="of activations and KV cache: float32 (the default) or bfloat16"
    )
    build.add_argument("--max-context", type=int, metavar="N", help="default the verifier's, up to 8192")
    build.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; default all cores")
    build.add_argument("--prompts", type=Path, metavar="FILE", help="to calibrate on, in place of the shipped ones")
    build.add_argument("--plan", type=Path, metavar="FILE", help="compile for this plan; nothing is searched again")
    build.set_defaults(handler=_build)

    simulate = commands.add_parser("simulate", help="what trees would give on some text, without verifying")
    _add_bundle_and_prompts(simulate)
    simulate.add_argument(
        "--shape", action="append", default=[], metavar="W,D,V",
        help="draft width, draft depth, verify width; repeatable; default: what the plan chooses",
    )  # fmt: skip
    simulate.add_argument("--json", action="store_true")
    simulate.set_defaults(handler=_simulate)

    compare = commands.add_parser("compare", help="a bundle against transformers with the same models")
    _add_bundle_and_prompts(compare)
    compare.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    compare.add_argument("--drafter", metavar="D", help="default: what the bundle was built from on this machine")
    compare.add_argument("--verifier", metavar="V", help="likewise")
    compare.set_defaults(handler=_compare)

    inspect = commands.add_parser("inspect", help="do these two models fit together?")
    _add_pair(inspect)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(handler=_inspect)

    distill = commands.add_parser("distill", help="make a drafter for a verifier that has none")
    distill.add_argument("--verifier", required=True, metavar="V", help="folder, hub id or GGUF file")
    distill.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist"
    )
    amount = distill.add_mutually_exclusive_group(required=True)
    amount.add_argument("--hours", type=float, metavar="H", help="how long to work")
    amount.add_argument("--tokens", type=int, metavar="N", help="tokens the verifier writes to learn from")
    distill.add_argument("--layers", type=int, metavar="N", help="with --hidden; default chosen by measured cost")
    distill.add_argument("--hidden", type=int, metavar="N", help="with --layers")
    distill.add_argument("--start", type=Path, metavar="DIR", help="go on from this drafter")
    distill.add_argument("--prompts", type=Path, metavar="FILE", help="own prompts beside the shipped ones")
    distill.add_argument("--device", default="auto", help="auto (the default), cpu, cuda or cuda:N")
    distill.add_argument("--seed", type=int, default=0, metavar="N")
    distill.set_defaults(handler=_distill)

    show = commands.add_parser("show", help="what a bundle holds")
    show.add_argument("bundle", type=Path)
    show.add_argument("--json", action="store_true")
    show.set_defaults(handler=_show)

    clean = commands.add_parser("clean", help="remove the kept stages of all builds")
    clean.set_defaults(handler=_clean)
    return parser


def _add_bundle_and_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="as for yggrt bench")
    parser.add_argument("--limit", type=int, metavar="N", help="this many prompts, spread evenly over the categories")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")


def _add_pair(parser: argparse.ArgumentParser) -> None:
    accepted = "folder, hub id or GGUF file"
    parser.add_argument("--drafter", required=True, metavar="D", help=f"the small model: {accepted}")
    parser.add_argument("--verifier", required=True, metavar="V", help=f"the model whose words count: {accepted}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        code: int = options.handler(options)
        return code
    except (YggError, ValueError) as error:
        print(f"yggc: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print(f"yggc: {error.strerror or error}{place}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nyggc: interrupted; nothing partial is left, finished stages are kept", file=sys.stderr)
        return 130


def _build(options: argparse.Namespace) -> int:
    from yggc.build import build
    from yggc.config import BuildOptions
    from yggc.progress import Progress
    from yggc.stage_cache import DURATIONS_FILE, cache_folder

    wanted = BuildOptions(
        drafter=options.drafter,
        verifier=options.verifier,
        output=options.output,
        target=options.target,
        dtype=options.dtype,
        max_context=options.max_context,
        num_threads=options.threads,
        prompts=options.prompts,
        plan=options.plan,
    )
    report = build(wanted, Progress(cache_folder() / DURATIONS_FILE))
    for tried in report.tried[:TREES_SHOWN]:
        print(
            f"tried: width {tried.draft_width}, depth {tried.depth}, {tried.children_per_node} children a node: "
            f"{tried.speedup:.3f}x plain, {tried.tokens_per_iteration:.2f} tokens per iteration"
        )
    print(f"{report.output}  {report.num_bytes / 1e6:.0f} MB, {report.plan.sku}, {report.plan.num_threads} threads")
    if report.plan.prediction is not None:
        prediction = report.plan.prediction
        print(
            f"predicted: {prediction.tpot_s * 1e3:.2f} ms a token, {prediction.plain_tpot_s * 1e3:.2f} plainly "
            f"({prediction.speedup:.2f}x), {prediction.tokens_per_iteration:.2f} tokens per iteration"
        )
    print(f'try: yggrt run {report.output} "Why is the sky blue?"')
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from yggc.simulate import format_simulations, simulate_bundle
    from yggrt.bench import read_shape

    found = simulate_bundle(
        options.bundle,
        options.prompts,
        options.limit,
        options.max_new_tokens,
        [read_shape(text) for text in options.shape],
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(found, indent=1) if options.json else format_simulations(found))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from yggc.compare import CompareOptions, compare, format_table

    wanted = CompareOptions(
        bundle=options.bundle,
        prompts=options.prompts,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        output=options.json,
        drafter=options.drafter,
        verifier=options.verifier,
    )
    report = compare(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    print(format_table(report))
    return 1 if report["failures"] else 0


def _distill(options: argparse.Namespace) -> int:
    from yggc.distill import DistillOptions, distill

    wanted = DistillOptions(
        verifier=options.verifier,
        output=options.output,
        hours=options.hours,
        tokens=options.tokens,
        layers=options.layers,
        hidden=options.hidden,
        start=options.start,
        prompts=options.prompts,
        device=options.device,
        seed=options.seed,
    )
    report = distill(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    print(
        f"{report.folder}  {report.num_parameters / 1e6:.1f}M parameters, agreement with the verifier: top 1 "
        f"{report.agreement_top1:.2f}, top 8 {report.agreement_top8:.2f}"
    )
    print(f"try: yggc build --drafter {report.folder} --verifier {options.verifier}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from yggc.checkpoints import open_checkpoint
    from yggc.inspect import inspect_pair

    pair = inspect_pair(open_checkpoint(options.drafter), open_checkpoint(options.verifier))
    if options.json:
        print(json.dumps(asdict(pair), ensure_ascii=False, indent=1))
        return 0
    print(f"vocabularies, merges and probe texts agree: {pair.vocab_size} tokens, ending with {list(pair.eos_ids)}")
    for role, model in (("verifier", pair.verifier), ("drafter", pair.drafter)):
        print(
            f"  {role:<9} {model.source}: {model.model_type}, {model.num_parameters / 1e6:.1f}M parameters, "
            f"{model.num_layers} layers, hidden {model.hidden_size}, context {model.context}, {model.dtype}"
        )
    for notice in pair.notices:
        print(f"note: {notice}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from yggrt.cli import main as runtime_main

    return runtime_main(["show", str(options.bundle), *(["--json"] if options.json else [])])


def _clean(_options: argparse.Namespace) -> int:
    from yggc.stage_cache import cache_folder, clear

    root = cache_folder()
    num_bytes = clear(root)
    left = f"; {root} holds other things too and stays" if root.exists() else ""
    print(f"removed the kept stages in {root} ({num_bytes / 1e6:.0f} MB){left}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
