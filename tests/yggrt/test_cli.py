"""The commands of yggrt on the toy bundle: what they print, and that bad input is one line."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from yggrt import cli
from yggrt.cli import main


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.field(40)
def test_run_prints_the_answer_and_what_it_took(toy_bundle, capsys):
    code, out, err = run(capsys, "run", toy_bundle.path, "the world tree", "--max-new-tokens", 12)
    assert code == 0 and out.endswith("\n")
    assert "[speculative:" in err and "tokens/s" in err and "ended by" in err
    assert run(capsys, "run", toy_bundle.path, "the world tree", "--max-new-tokens", 12, "--plain")[1] == out


def test_run_json_holds_text_ids_and_stats(toy_bundle, capsys):
    code, out, _ = run(
        capsys, "run", toy_bundle.path, "the tree", "--raw", "--ignore-eos", "--json", "--max-new-tokens", 9
    )
    result = json.loads(out)
    assert code == 0 and len(result["token_ids"]) == 9 and result["finish_reason"] == "length"
    assert result["stats"]["iterations"] >= 1 and result["stats"]["mode"] == "speculative"


def test_run_takes_standard_input_and_messages(toy_bundle, capsys, monkeypatch, tmp_path):
    expected = run(capsys, "run", toy_bundle.path, "the well", "--max-new-tokens", 6)[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the well")))
    assert run(capsys, "run", toy_bundle.path, "--max-new-tokens", 6)[1] == expected
    assert run(capsys, "run", toy_bundle.path, "--max-new-tokens", 6, "the well")[1] == expected
    assert run(capsys, "run", "--max-new-tokens", 6, toy_bundle.path, "the well")[1] == expected
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "the well"}]))
    assert run(capsys, "run", toy_bundle.path, "--messages", messages, "--max-new-tokens", 6)[1] == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "BUNDLE", "", "--raw"], "the prompt is empty"),
        (["run", "BUNDLE", "x", "--max-new-tokens", "-1"], "max_new_tokens=-1"),
        (["run", "BUNDLE", "x", "--stop", ""], "stop strings"),
        (["run", "BUNDLE", "--messages", "/nonexistent.json"], "/nonexistent.json cannot be read"),
        (["run", "BUNDLE", "word " * 2000], "at most 511 fit"),
        (["run", "/nonexistent", "x"], "is not a bundle"),
        (["run", "x" * 5000, "x"], "is not a bundle"),
        (["show", "/tmp"], "is not a bundle"),
        (["bench", "BUNDLE", "--prompts", "/nonexistent"], "/nonexistent cannot be read"),
    ],
)
def test_bad_input_is_one_line(toy_bundle, capsys, arguments, message):
    code, out, err = run(capsys, *[str(toy_bundle.path) if part == "BUNDLE" else part for part in arguments])
    assert code == 1 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("yggrt: ") and message in err


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1, 2, 3]", "is not a JSON list of"),
        ('["hi"]', "is not a JSON list of"),
        ('{"role": "user"}', "is not a JSON list of"),
        ("[" * 100_000, "is not JSON"),
        ('[{"role": "user", "content": null}]', "'content' must be a string"),
    ],
)
def test_bad_messages_are_one_line(toy_bundle, tmp_path, capsys, content, message):
    messages = tmp_path / "messages.json"
    messages.write_text(content)
    code, out, err = run(capsys, "run", toy_bundle.path, "--messages", messages)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and message in err


def test_messages_and_raw_exclude_each_other(toy_bundle, tmp_path, capsys):
    messages = tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "x"}]')
    code, _, err = run(capsys, "run", toy_bundle.path, "--messages", messages, "--raw")
    assert code == 1 and "--raw" in err


def test_closed_and_full_standard_streams_are_one_line(toy_bundle, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "run", toy_bundle.path)
    assert code == 1 and len(err.splitlines()) == 1 and "standard input is closed" in err
    program = f"import sys; from yggrt.cli import main; sys.exit(main(['show', {str(toy_bundle.path)!r}]))"
    with open("/dev/full", "wb") as full:
        found = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (found.returncode, found.stderr) == (1, b"yggrt: No space left on device\n")


def test_a_terminated_run_leaves_nothing_unpacked(toy_bundle, tmp_path):
    program = "import sys; from yggrt.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["run", str(toy_bundle.path), "the", "--raw", "--ignore-eos", "--max-new-tokens", "500"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (143, b"")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_torch_is_imported_is_one_line(capsys, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_torch_without_processes", interrupted)
    assert run(capsys, "show", "x")[::2] == (130, "\nyggrt: interrupted\n")


def test_check_and_show(toy_bundle, capsys):
    code, out, _ = run(capsys, "check", toy_bundle.path)
    assert code == 0 and "loads here" in out
    code, out, _ = run(capsys, "show", toy_bundle.path)
    assert code == 0 and "verify.pt2" in out and "width 4, depth 2" in out and "of depth 2" in out and "copies" in out
    code, out, _ = run(capsys, "show", toy_bundle.path, "--json")
    shown = json.loads(out)
    assert shown["plan"]["policy"]["draft_width"] == 4 and shown["manifest"]["step_abi_version"] == 5


def test_a_run_can_be_traced(toy_bundle, tmp_path, capsys):
    place = tmp_path / "trace.json"
    code, out, _ = run(capsys, "run", toy_bundle.path, "the world tree", "--max-new-tokens", "8", "--trace", place)
    events = json.loads(place.read_text())["traceEvents"]
    assert code == 0 and out
    assert {"prefill", "head", "verify", "emit"} <= {event["name"] for event in events}
    code, out, err = run(capsys, "run", toy_bundle.path, "x", "--trace", "/nonexistent/trace.json")
    assert (code, out) == (
        1,
        "",
    ) and err == "yggrt: /nonexistent/trace.json cannot be written: No such file or directory\n"


def test_a_damaged_bundle_is_refused_before_it_is_loaded(toy_bundle, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(toy_bundle.path, damaged)
    content = bytearray((damaged / "verify.pt2").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "verify.pt2").write_bytes(content)
    for command in (["check", damaged], ["run", damaged, "x"]):
        code, _, err = run(capsys, *command)
        assert code == 1 and "is damaged" in err
    (damaged / "verify.pt2").unlink()
    code, _, err = run(capsys, "check", damaged)
    assert code == 1 and "is incomplete" in err


def test_bench_writes_the_agreed_keys_overall_and_by_category(toy_bundle, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    entries = [
        {"category": "writing", "turns": ["the world tree", "again"]},
        {"category": "coding", "turns": ["def add"]},
        {"category": "qa", "turns": ["who drafts"]},
        {"prompt": "the well of the wise"},
    ]
    prompts.write_text("\n".join(json.dumps(entry) for entry in entries))
    output = tmp_path / "bench.json"
    arguments = ["bench", toy_bundle.path, "--prompts", prompts, "--max-new-tokens", 12, "--json", output]
    code, out, err = run(capsys, *arguments)
    assert code == 0 and "speedup" in out and "4/4" in err
    report = json.loads(output.read_text())
    assert set(report["by_category"]) == {"conversation", "qa", "all"}
    for figures in (report, *report["by_category"].values()):
        assert figures["plain"]["tokens_per_s"] > 0 and figures["speculative"]["tokens_per_s"] > 0
        for key in ("speedup", "acceptance_length", "host_share", "ttft_s", "tpot_s"):
            assert figures[key] > 0
    assert report["predicted_tpot_s"] is None and report["differences"] == []
    code, out, err = run(capsys, *arguments[:4], "--limit", 2, "--turns", 2, "--max-new-tokens", 12, "--floor", 0)
    assert code == 0 and "4/4" in err and "all                    4" in out
    code, _, err = run(capsys, *arguments[:4], "--limit", 2, "--max-new-tokens", 12, "--floor", 1000)
    assert code == 1 and "is below the floor of 1000" in err


def test_the_breakdown_adds_up(toy_bundle, capsys):
    code, out, _ = run(capsys, "bench", toy_bundle.path, "--breakdown")
    assert code == 0 and "GB/s" in out and "host:" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("verify", "draft"))]
    assert {row[0] for row in rows} == {"verify", "draft"}
    for row in rows:
        shares = [int(cell.rstrip("%")) for cell in row[-4:]]
        assert 98 <= sum(shares) <= 102 and all(share >= 0 for share in shares) and shares[0] > 0


@pytest.mark.field(41)
def test_on_a_terminal_loading_and_reading_a_long_prompt_are_shown_and_erased(toy_bundle, capsys, monkeypatch):
    arguments = ["run", toy_bundle.path, "ab " * 140, "--raw", "--max-new-tokens", 2]
    quiet = run(capsys, *arguments)
    assert "reading" not in quiet[2] and "loading" not in quiet[2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = run(capsys, *arguments)
    assert code == 0 and out == quiet[1]
    assert "loading" in err and "reading the prompt: 256 of" in err and err.count("\r\033[K") >= 3
