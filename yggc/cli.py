"""The command `yggc`: a build, its stages one by one, and what there is to ask about a bundle. Errors are one line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yggrt.errors import reason_in_a_line

if TYPE_CHECKING:
    from yggc.build import Build


def make_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="yggc",
        description="Compile a drafter and a verifier into a bundle that says what the verifier would, only faster.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="compile a pair into a bundle")
    _add_build(build)
    build.add_argument("-o", "--output", type=Path, metavar="DIR", help="default ./<drafter>+<verifier>.bundle")
    build.add_argument("--plan", type=Path, metavar="FILE", help="compile for this plan; nothing is searched again")
    build.set_defaults(handler=_build)

    for name, help_text, handler in (
        ("profile", "how long the steps of a pair take here", _profile),
        ("calibrate", "how well a drafter knows what its verifier says", _calibrate),
        ("train-depth", "learn which draft depth pays where, and whether that beats a fixed one", _train_depth),
        ("search", "which trees are fastest for a pair: a build up to its plan", _search),
    ):
        stage = commands.add_parser(name, help=help_text)
        _add_build(stage)
        what = {"calibrate": "the trace", "train-depth": "the network (ONNX)", "search": "the plan"}.get(name)
        if what is not None:
            stage.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"write {what} there too")
        stage.set_defaults(handler=handler)

    report = commands.add_parser("report", help="a bundle's prediction beside what it does on held-out prompts")
    report.add_argument("bundle", type=Path)
    report.add_argument("--prompts", type=Path, metavar="FILE", help="what it was calibrated on; default: as shipped")
    report.set_defaults(handler=_report)

    simulate = commands.add_parser("simulate", help="what trees would give on some text, without verifying")
    _add_bundle_and_prompts(simulate)
    simulate.add_argument(
        "--shape", action="append", default=[], metavar="W,D,V",
        help="draft width, draft depth, verify width; repeatable; default: what the plan chooses",
    )  # fmt: skip
    simulate.add_argument("--run", action="store_true", help="let the engine run them too, for what that takes beside")
    simulate.add_argument("--json", action="store_true")
    simulate.set_defaults(handler=_simulate)

    compare = commands.add_parser("compare", help="a bundle against transformers with the same models")
    _add_bundle_and_prompts(compare)
    compare.add_argument(
        "--ablation", action="store_true", help="instead, what compilation, pruning, learned depth and schedule add"
    )
    compare.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="above 0: the plan's ways to draft there; default 0"
    )
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
    show.add_argument("--timeline", action="store_true", help="an iteration's stages in time, planned and measured")
    show.set_defaults(handler=_show)

    clean = commands.add_parser("clean", help="remove the kept stages of all builds")
    clean.set_defaults(handler=_clean)
    return parser


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser)
    parser.add_argument("--target", default="cpu", help="cpu (the default), cuda or cuda:N")
    parser.add_argument(
        "--dtype",
        default="",
        help="of activations and KV cache: float32 (the default on the CPU) or bfloat16 (on a GPU)",
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="default the verifier's, up to 8192")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; default all cores")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="to calibrate on, in place of the shipped ones")
    parser.add_argument(
        "--compile-options",
        default="measured",
        metavar="NAME",
        help="for a GPU: default, max-autotune or coordinate-descent; by default those that run each model fastest, "
        "for which one step of it is compiled with all",
    )


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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        reason = reason_in_a_line(error)
        if reason is None:
            raise
        print(f"yggc: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nyggc: interrupted; nothing partial is left, finished stages are kept", file=sys.stderr)
        return 130


def _made_build(options: argparse.Namespace, output: Path | None = None, plan: Path | None = None) -> Build:
    from yggc.build import Build
    from yggc.config import BuildOptions
    from yggc.progress import Progress
    from yggc.stage_cache import DURATIONS_FILE, cache_folder

    wanted = BuildOptions(
        drafter=options.drafter,
        verifier=options.verifier,
        output=output,
        target=options.target,
        dtype=options.dtype,
        max_context=options.max_context,
        num_threads=options.threads,
        prompts=options.prompts,
        plan=plan,
        compile_options=options.compile_options,
    )
    return Build(wanted, Progress(cache_folder() / DURATIONS_FILE))


def _build(options: argparse.Namespace) -> int:
    from yggc.report import format_depth, format_prediction, format_schedules, format_tried

    build = _made_build(options, options.output, options.plan)
    report = build.emit()
    trial = '"Why is the sky blue?"' if build.verifier.chat_template else '--raw "The sky is blue because"'
    lines = [
        format_tried(report.tried),
        "" if report.study is None else format_depth(report.study),
        f"{report.output}  {report.num_bytes / 1e6:.0f} MB, {report.plan.sku}, {report.plan.num_threads} threads",
        format_schedules(report.plan),
        format_prediction(report.plan),
        f"try: yggrt run {report.output} {trial}",
    ]
    print("\n".join(line for line in lines if line))
    return 0


def _profile(options: argparse.Namespace) -> int:
    from yggc.report import format_profile

    print(format_profile(_made_build(options).first_profile))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from yggc.report import format_trace
    from yggc.trace import write_trace

    _check_place(options.output)
    trace = _made_build(options).trace
    if options.output is not None:
        write_trace(options.output, trace)
    print(format_trace(trace))
    return 0


def _train_depth(options: argparse.Namespace) -> int:
    from yggc.depth_onnx import write_onnx
    from yggc.report import format_depth

    _check_place(options.output)
    build = _made_build(options)
    study = build.depth_study
    too_little = "the depth stays fixed: there is too little calibration text to learn it from"
    print((build.decision.reason or too_little) if study is None else format_depth(study))
    if options.output is not None:
        if study is None or study.network is None:
            print(f"yggc: {options.output} is not written: there is no depth network to keep", file=sys.stderr)
            return 1
        write_onnx(options.output, study.network)
    return 0


def _search(options: argparse.Namespace) -> int:
    from yggc.depth_onnx import ONNX_FILE, write_onnx
    from yggc.report import format_decision, format_depth, format_prediction, format_schedules
    from yggrt.plan import write_plan

    _check_place(options.output)
    build = _made_build(options)
    plan = build.plan()
    if options.output is not None:
        write_plan(options.output, plan)
        if plan.depth_network is not None:
            write_onnx(options.output.with_name(ONNX_FILE), plan.depth_network)
    depth = () if build.depth_study is None else (format_depth(build.depth_study),)
    schedules = (format_schedules(plan),) if plan.schedule_study is not None else ()
    print("\n".join((format_decision(build.decision), *depth, *schedules, format_prediction(plan))))
    return 0


def _check_place(path: Path | None) -> None:
    """Raises ValueError where a file cannot be written, before minutes are spent on what it is for."""
    if path is not None and not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: {path.resolve().parent} is no folder that can be written to")


def _report(options: argparse.Namespace) -> int:
    from yggc.report import report_bundle

    return report_bundle(options.bundle, options.prompts)


def _simulate(options: argparse.Namespace) -> int:
    from yggc.simulate_bundle import SimulateOptions, format_simulations, json_of, simulate_bundle
    from yggrt.bench import read_shape

    wanted = SimulateOptions(
        bundle=options.bundle,
        prompts=options.prompts,
        shapes=tuple(read_shape(text) for text in options.shape),
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        run=options.run,
    )
    found = simulate_bundle(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(json_of(found), indent=1) if options.json else format_simulations(found))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from yggc.ablation import ablate, format_ablation
    from yggc.compare import CompareOptions, compare, format_table

    wanted = CompareOptions(
        bundle=options.bundle,
        prompts=options.prompts,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        output=options.json,
        drafter=options.drafter,
        verifier=options.verifier,
        temperature=options.temperature,
    )
    run, show = (ablate, format_ablation) if options.ablation else (compare, format_table)
    report = run(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    print(show(report))
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
    if options.timeline:
        from yggc.report import format_timeline

        if options.json:
            raise ValueError("--timeline is a picture, --json data; one of them is accepted")
        print(format_timeline(options.bundle))
        return 0
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
