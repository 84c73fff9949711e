"""The command `yggrt`: run, bench, show and check a bundle. Errors are one line and exit 1."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from yggrt import import_torch_without_processes
from yggrt.errors import reason_in_a_line

ERASE_LINE = "\r\033[K"


def make_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="yggrt",
        description="Answer with a bundle made by `yggc build`: faster than its verifier, and word for word the same.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="answer one prompt, streamed")
    run.add_argument("bundle", type=Path)
    run.add_argument("prompt", nargs="?", help="text; standard input where it is missing or -")
    run.add_argument("--messages", type=Path, metavar="FILE", help='JSON list of {"role", "content"}')
    run.add_argument("--raw", action="store_true", help="no chat template: go on where the prompt ends")
    run.add_argument("--plain", action="store_true", help="the verifier alone, without the drafter")
    run.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default 512")
    run.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    run.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    run.add_argument("--temperature", type=float, metavar="T", help="default 0, the most likely token")
    run.add_argument("--top-k", type=int, metavar="N", help="draw from the N most likely tokens")
    run.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest share P of the law")
    run.add_argument("--min-p", type=float, metavar="P", help="least chance, of the most likely token's")
    run.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: what was said becomes less likely")
    run.add_argument(
        "--generation-config", action="store_true", help="the checkpoint's own settings for options that are not given"
    )
    run.add_argument("--seed", type=int, metavar="N", help="the same text each time; default another")
    run.add_argument("--json", action="store_true", help="one JSON object instead of a stream")
    _add_device(run)
    run.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when, in Chrome's trace format")
    run.set_defaults(handler=_run)

    bench = commands.add_parser("bench", help="plain against speculative on a file of prompts, interleaved")
    bench.add_argument("bundle", type=Path)
    bench.add_argument("--prompts", type=Path, metavar="FILE",
                       help='JSON lines: {"prompt"} or Spec-Bench\'s {"category", "turns"}')  # fmt: skip
    bench.add_argument("--limit", type=int, metavar="N", help="this many prompts, spread evenly over the categories")
    bench.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    bench.add_argument("--turns", type=int, default=1, metavar="N", help="answer all prompts N times; default 1")
    bench.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    bench.add_argument("--floor", type=float, metavar="X", help="exit 1 when the median speedup is below X")
    bench.add_argument("--shape", metavar="W,D,V", help="this tree in every iteration, whatever the plan says")
    bench.add_argument("--breakdown", action="store_true", help="where the time of a step goes, instead of prompts")
    _add_device(bench)
    bench.set_defaults(handler=_bench)

    show = commands.add_parser("show", help="what a bundle holds")
    show.add_argument("bundle", type=Path)
    show.add_argument("--json", action="store_true")
    show.set_defaults(handler=_show)

    check = commands.add_parser("check", help="would it load here, and why not")
    check.add_argument("bundle", type=Path)
    _add_device(check)
    check.set_defaults(handler=_check)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="cuda:N for a bundle that was built for cuda; default cuda:0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parse(arguments)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler_before = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    try:
        import_torch_without_processes()  # after parsing: --help should not wait for it
        code: int = options.handler(options)
        print(end="", flush=True)  # here, where a full disk or a closed pipe is still an error of ours
        return code
    except BrokenPipeError:
        _drop_output()
        return 1
    except Exception as error:
        reason = reason_in_a_line(error)
        if reason is None:
            raise
        print(f"yggrt: {reason}", file=sys.stderr)
        try:
            print(end="", flush=True)
        except OSError:
            _drop_output()
        return 1
    except _Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print("\nyggrt: interrupted", file=sys.stderr)
        return 130
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler_before)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """As argparse does, which but for this takes no prompt after a flag that follows the bundle."""
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and getattr(options, "prompt", "") is None and (rest[0] == "-" or not rest[0].startswith("-")):
        options.prompt = rest[0]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


class _Terminated(BaseException):
    """SIGTERM came. Ending in order lets torch remove what it unpacked, which is as large as the bundle."""


def _terminate(_signal: int, _frame: object) -> None:
    raise _Terminated


def _drop_output() -> None:
    """What is still buffered cannot be written; the interpreter would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    from yggrt.bundle import load
    from yggrt.sampling import SamplingOptions
    from yggrt.timeline import chrome_trace

    prompt = _read_prompt(options)
    sampling = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        if getattr(options, name) is not None
    }
    SamplingOptions(**sampling)  # nonsense is said before anything is loaded
    if options.trace is not None:
        write_json(options.trace, {"traceEvents": []})  # said before anything is loaded, if it cannot be
    waiting = sys.stderr.isatty() and not options.json
    if waiting:
        print(f"loading {options.bundle}", end="", file=sys.stderr, flush=True)
    try:
        engine = load(options.bundle, options.device)
    finally:
        if waiting:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)
    assert engine.bundle is not None
    for notice in engine.bundle.notices:
        print(f"yggrt: note: {notice}", file=sys.stderr)
    if waiting:
        engine.decoder.on_prefill = _prompt_progress()
    if options.trace is not None:
        engine.executor.spans = []
    stream = engine.stream(
        prompt, max_new_tokens=options.max_new_tokens, stop=options.stop, ignore_eos=options.ignore_eos,
        plain=options.plain, raw=options.raw, generation_config=options.generation_config, **sampling,
    )  # fmt: skip
    for piece in stream:
        if not options.json:
            print(piece, end="", flush=True)
    result = stream.result
    assert result is not None
    if options.trace is not None:
        plan = engine.bundle.plan
        write_json(options.trace, chrome_trace(plan.schedule, plan.schedule_study, engine.executor.spans or ()))
    if options.json:
        print(json.dumps(asdict(result), ensure_ascii=False))
        return 0
    print()
    stats = result.stats
    speed = f"{stats.tokens_per_s:.1f} tokens/s" if stats.tokens_per_s else "no speed to measure"
    first = f"first token after {stats.ttft_s:.2f} s" if stats.ttft_s is not None else "no token"
    print(
        f"[{stats.mode}: {stats.new_tokens} tokens, {speed}, {first}, {stats.iterations} iterations, "
        f"{stats.acceptance_length:.2f} tokens each, ended by {result.finish_reason}]",
        file=sys.stderr,
    )
    for notice in stats.notices:
        print(f"yggrt: note: {notice}", file=sys.stderr)
    return 0


def _prompt_progress() -> Callable[[int, int], None]:
    """Redraws how much of a long prompt is read, and what is left, on the terminal's last line."""
    started = perf_counter()

    def show(done: int, total: int) -> None:
        if done == total:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)
            return
        elapsed = perf_counter() - started
        left = elapsed / done * (total - done)
        line = f"reading the prompt: {done} of {total} tokens, {elapsed:.0f} s elapsed, about {left:.0f} s left"
        print(f"{ERASE_LINE}{line}", end="", file=sys.stderr, flush=True)

    return show


def _read_prompt(options: argparse.Namespace) -> str | list[dict[str, str]]:
    if options.messages is not None:
        if options.prompt is not None:
            raise ValueError("both a prompt and --messages were given; one of them is accepted")
        if options.raw:
            raise ValueError("--messages go through the chat template, --raw does not; one of them is accepted")
        messages = read_json(options.messages)
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise ValueError(f'{options.messages} is not a JSON list of {{"role", "content"}} messages')
        return messages
    if options.prompt is None or options.prompt == "-":
        if sys.stdin is None:
            raise ValueError("no prompt: none was given, and standard input is closed")
        data = sys.stdin.buffer.read()
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text") from None
    prompt: str = options.prompt
    return prompt


def write_json(path: Path, content: object) -> None:
    """Raises ValueError in one line where it cannot be written."""
    try:
        path.write_text(json.dumps(content, ensure_ascii=False))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def read_json(path: Path) -> object:
    """A JSON file, with ValueError in one line for whatever is wrong with it."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _bench(options: argparse.Namespace) -> int:
    if options.breakdown:
        from yggrt.breakdown import describe, measure
        from yggrt.bundle import load

        print(describe(measure(load(options.bundle, options.device))))
        return 0
    from yggrt.bench import read_shape, run_bench

    if options.prompts is None:
        raise ValueError("--prompts FILE is needed (or --breakdown)")
    shape = None if options.shape is None else read_shape(options.shape)
    return run_bench(
        options.bundle, options.prompts, options.limit, options.max_new_tokens, options.json, options.floor, shape,
        options.turns, options.device,
    )  # fmt: skip


def _show(options: argparse.Namespace) -> int:
    from yggrt.bundle import read_bundle
    from yggrt.show import describe

    bundle = read_bundle(options.bundle)
    if options.json:
        content = {"plan": asdict(bundle.plan), "manifest": asdict(bundle.manifest)}
        print(json.dumps(content, ensure_ascii=False, indent=1))
    else:
        print(describe(bundle))
    return 0


def _check(options: argparse.Namespace) -> int:
    from yggrt.bundle import check_bundle

    bundle, _ = check_bundle(options.bundle, options.device)
    print(f"{options.bundle} loads here: {bundle.manifest.sku}, torch {bundle.manifest.torch_version}, all files whole")
    for notice in bundle.notices:
        print(f"note: {notice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
