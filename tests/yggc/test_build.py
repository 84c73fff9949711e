"""`yggc build`: what is kept, what is refused, and that nothing half-written stays behind."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from yggc import build as build_module
from yggc import decide, head_cut, profile, simulate_bundle, steps
from yggc.cli import main
from yggc.config import BuildOptions
from yggc.progress import Progress
from yggc.simulate_bundle import SimulateOptions
from yggc.stage_cache import StageCache, place_folder, remove_abandoned
from yggrt.cli import main as run_main
from yggrt.depth import DEPTH_UNITS, DepthNetwork
from yggrt.errors import BuildError
from yggrt.latency import LatencyPoint
from yggrt.plan import DepthFigures, HostSeconds, Plan, TreePolicy, read_manifest, read_plan, write_plan
from yggrt.schedule import sequential_schedule
from yggrt.tree import TreeShape

ROOT = Path(__file__).parent.parent.parent


def build_again(toy_bundle, output: Path, *more: str) -> int:
    pair = ["--drafter", str(toy_bundle.drafter), "--verifier", str(toy_bundle.verifier)]
    return main(["build", *pair, "-o", str(output), "--dtype", "float32", "--threads", "1", *more])


@pytest.fixture
def kept(toy_bundle, monkeypatch):
    """The cache the toy bundle was built with."""
    monkeypatch.setenv("YGG_CACHE", str(toy_bundle.cache))
    return toy_bundle.cache


def test_a_build_with_nothing_changed_keeps_every_stage(toy_bundle, kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steps, "_compile_all", lambda *_: pytest.fail("compiled again"))
    assert build_again(toy_bundle, tmp_path / "again.bundle") == 0
    done = [line.split(" done in")[0].strip() for line in capsys.readouterr().err.splitlines() if " done in" in line]
    assert done == ["inspect", "emit"]
    first, second = read_manifest(toy_bundle.searched), read_manifest(tmp_path / "again.bundle")
    assert first.artifacts == second.artifacts and first.text == second.text
    assert (
        read_plan(tmp_path / "again.bundle" / "plan.ygg").policy == read_plan(toy_bundle.searched / "plan.ygg").policy
    )


def test_an_older_bundle_is_replaced_whole_and_anything_else_is_refused(toy_bundle, kept, tmp_path, capsys):
    place = tmp_path / "place"
    assert build_again(toy_bundle, place) == 0
    (place / "stray").write_text("of the old bundle")
    assert build_again(toy_bundle, place) == 0
    assert not (place / "stray").exists()
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("irreplaceable")
    assert build_again(toy_bundle, other) == 1
    assert "is not a bundle; it will not be replaced" in capsys.readouterr().err
    assert (other / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "precious"]


def test_the_default_name_is_the_pair(toy_bundle, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pair = ["--drafter", str(toy_bundle.drafter), "--verifier", str(toy_bundle.verifier)]
    assert main(["build", *pair, "--dtype", "float32", "--threads", "1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["drafter+verifier.bundle"]


@pytest.mark.field(43)
@pytest.mark.parametrize(
    "more, message",
    [
        (["--max-context", "9999"], "max-context 9999: the verifier's context of 512 is the most"),
        (["--max-context", "3"], "max-context 3: at least 64"),
        (["--dtype", "int8"], "dtype 'int8': float32 or bfloat16"),
        (["--threads", "999"], "threads 999"),
        (["--target", "tpu"], "target 'tpu'"),
        (["-o", "/nonexistent/place"], "does not exist"),
        (["--drafter", "/nonexistent/model"], "/nonexistent/model"),
        (["--prompts", "/nonexistent/prompts.jsonl"], "prompts.jsonl cannot be read"),
    ],
)
def test_bad_options_get_one_line(toy_bundle, kept, tmp_path, capsys, more, message):
    assert build_again(toy_bundle, tmp_path / "b", *more) == 1
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("yggc:")]
    assert len(lines) == 1 and message in lines[0]
    assert "compile" not in error.replace(lines[0], "")  # before anything takes long
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_is_said_in_one_line(toy_bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build_again(toy_bundle, tmp_path / "b") == 1
    assert "no C++ compiler found" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.field(41)
def test_ctrl_c_leaves_nothing_partial(toy_bundle, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    monkeypatch.setenv("YGG_CACHE", str(cache))

    def interrupted(_connections: list) -> None:
        while not list(cache.glob(".verify-*")):  # it compiles in another process
            sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.connection, "wait", interrupted)
    assert build_again(toy_bundle, tmp_path / "b") == 130
    assert "interrupted" in capsys.readouterr().err
    left = [path.name.partition("-")[0] for path in cache.iterdir() if path.is_dir()]
    assert sorted(left) == ["head", "kernels"]  # the stages that were finished before
    assert not (tmp_path / "b").exists()


STAGES = {
    "head": (head_cut, "choose_draft_vocabulary"),
    "profile": (profile, "measure_steps"),
    "trace": (build_module, "make_trace"),
    "search": (decide, "search"),
    "forecast": (decide, "forecast"),
    "schedule": (decide, "choose_schedule"),
    "bundle": (build_module, "emit_bundle"),
}


@pytest.mark.field(41)
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_any_stage_leaves_nothing_partial(toy_bundle, tmp_path, monkeypatch, capsys, stage):
    cache = tmp_path / "cache"
    shutil.copytree(toy_bundle.cache, cache, ignore=shutil.ignore_patterns(f"{stage}-*"), copy_function=os.link)
    monkeypatch.setenv("YGG_CACHE", str(cache))
    monkeypatch.setattr(build_module, "wait_until_idle", lambda _say: None)
    monkeypatch.setattr(profile, "UNSTEADY", float("inf"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*STAGES[stage], interrupted)
    assert build_again(toy_bundle, tmp_path / "b") == 130
    assert "interrupted" in capsys.readouterr().err
    assert not [path.name for path in cache.iterdir() if path.name.startswith((f"{stage}-", "."))]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.field(41)
def test_a_killed_stage_is_absent_and_its_scratch_is_cleaned_up_later(tmp_path):
    program = f"""
import time
from pathlib import Path
from yggc.stage_cache import StageCache
cache = StageCache(Path({str(tmp_path)!r}))
def run(folder):
    (folder / "half").write_text("half")
    print("running", flush=True)
    time.sleep(60)
cache.fill(cache.entry("export", {{"a": 1}}), run)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"running\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(list(tmp_path.iterdir())) == 1
    sleep(0.1)
    cache = StageCache(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not cache.has(cache.entry("export", {"a": 1}))


@pytest.mark.field(43)
def test_stages_of_other_inputs_have_other_entries(tmp_path):
    cache = StageCache(tmp_path)
    assert cache.entry("export", {"a": 1}) != cache.entry("export", {"a": 2})
    assert cache.entry("export", {"a": 1, "b": 2}) == cache.entry("export", {"b": 2, "a": 1})
    cache.fill(cache.entry("export", {"a": 1}), lambda folder: (folder / "x").touch())
    assert cache.has(cache.entry("export", {"a": 1}))


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="set YGG_CACHE"):
        StageCache(tmp_path / "file" / "cache")


def test_placing_a_folder_replaces_the_old_one(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    place_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]


def test_a_folder_that_cannot_be_placed_leaves_the_old_one(tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_what_a_killed_build_left_beside_the_bundle_is_removed_by_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f".a.bundle.{gone.pid}", f".a.bundle.{gone.pid}.old", f".a.bundle.{os.getpid()}", f".b.{gone.pid}"):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path, "a\\.bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f".a.bundle.{os.getpid()}", f".b.{gone.pid}"])


def test_clean_removes_what_builds_keep_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("YGG_CACHE", str(tmp_path))
    cache = StageCache(tmp_path)
    for stage in ("verify", "profile"):
        cache.fill(cache.entry(stage, {"a": 1}), lambda folder: (folder / "x").touch())
    (tmp_path / "durations.json").write_text("{}")
    for mine in ("photos", ".vim.99999999"):
        (tmp_path / mine).mkdir()
        (tmp_path / mine / "precious").touch()
    StageCache(tmp_path)
    assert main(["clean"]) == 0
    assert "holds other things" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [".vim.99999999", "photos"]
    assert (tmp_path / ".vim.99999999" / "precious").exists()
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "own"))
    StageCache(tmp_path / "own")
    assert main(["clean"]) == 0
    assert not (tmp_path / "own").exists()


def test_a_damaged_history_of_durations_is_no_history(tmp_path):
    (tmp_path / "durations.json").write_text("[1]")
    with Progress(tmp_path / "durations.json", quiet=True).stage("a", 1):
        pass
    assert "a" in (tmp_path / "durations.json").read_text()


@pytest.mark.field(43)
def test_a_plan_is_compiled_as_it_is(toy_bundle, kept, tmp_path, capsys):
    assert build_again(toy_bundle, tmp_path / "b", "--plan", str(toy_bundle.path / "plan.ygg")) == 0
    assert read_plan(tmp_path / "b" / "plan.ygg") == read_plan(toy_bundle.path / "plan.ygg")
    err = capsys.readouterr().err
    assert "calibrate" not in err and "search" not in err and "profile" not in err


def test_a_plan_of_another_machine_is_used_with_a_note(toy_bundle, kept, tmp_path, capsys):
    plan = replace(read_plan(toy_bundle.path / "plan.ygg"), sku="cpu-x86_64-base-64c")
    write_plan(tmp_path / "p.ygg", plan)
    assert build_again(toy_bundle, tmp_path / "b", "--plan", str(tmp_path / "p.ygg")) == 0
    assert "the plan was made for cpu-x86_64-base-64c; this machine is" in capsys.readouterr().err


def larger_tree(plan: Plan) -> Plan:
    policy = replace(plan.policy, draft_depths=(12,), verify_widths=(4,), default_shape=TreeShape(4, 12, 4))
    return replace(plan, policy=policy, draft_graphs=())


@pytest.mark.parametrize(
    "change, more, message",
    [
        (lambda plan: replace(plan, drafter=replace(plan.drafter, fingerprint="0" * 64)), [], "is for the drafter"),
        (lambda plan: plan, ["--max-context", "100"], "--max-context 100 was given, the plan says 512"),
        (lambda plan: plan, ["--prompts", "x"], "both a plan and prompts"),
        (larger_tree, [], "the plan asks for trees of width 4 and depth 12; up to 33 nodes"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(toy_bundle, kept, tmp_path, capsys, change, more, message):
    write_plan(tmp_path / "p.ygg", change(read_plan(toy_bundle.path / "plan.ygg")))
    assert build_again(toy_bundle, tmp_path / "b", "--plan", str(tmp_path / "p.ygg"), *more) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("yggc:")]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "b").exists()


@pytest.fixture
def idle(monkeypatch):
    """A machine that is taken to be idle and steady."""
    monkeypatch.setattr(simulate_bundle, "wait_until_idle", lambda _say: None)
    monkeypatch.setattr(profile, "UNSTEADY", float("inf"))
    monkeypatch.setattr(profile, "DRIFT", float("inf"))


PROMPTS = '{"prompt": "the world"}\n{"prompt": "a tree"}\n{"prompt": "water"}\n'


def test_a_searched_plan_predicts_and_simulates(toy_bundle, idle, tmp_path, capsys):
    plan = read_plan(toy_bundle.searched / "plan.ygg")
    assert plan.prediction is not None and plan.calibration is not None and plan.token_s is not None
    assert plan.prediction.speedup >= 0.95
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPTS)
    command = ["simulate", str(toy_bundle.path), "--prompts", str(prompts), "--max-new-tokens", "24"]
    assert main([*command, "--shape", "2,2,3", "--shape", "3,1,2", "--run"]) == 0  # the build timed no width of 3
    captured = capsys.readouterr()
    assert "2,2,3" in captured.out and "3,1,2" in captured.out and captured.out.count("TPOT off by") == 2
    simulated, measured, *others = (line.split() for line in captured.out.splitlines()[1:])
    assert measured[:2] == ["measured", simulated[1]] and others[1][:2] == ["measured", others[0][1]]
    assert "when the plan was made" in captured.err
    assert main([*command, "--shape", "8,40,16"]) == 1
    assert "were compiled" in capsys.readouterr().err


def test_simulated_tokens_per_iteration_are_those_of_the_bench(toy_bundle, idle, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPTS)
    for shape in ("1,1,2", "3,2,4", "8,4,16"):
        limits = ["--prompts", str(prompts), "--max-new-tokens", "40"]
        capsys.readouterr()
        assert main(["simulate", str(toy_bundle.path), *limits, "--shape", shape, "--json"]) == 0
        simulated = json.loads(capsys.readouterr().out)[0]["tokens_per_iteration"]
        assert run_main(["bench", str(toy_bundle.path), *limits, "--shape", shape, "--json", str(tmp_path / "o")]) == 0
        assert json.loads((tmp_path / "o").read_text())["acceptance_length"] == pytest.approx(simulated, rel=1e-6)


def with_choices(plan: Plan, hidden_size: int) -> Plan:
    """The plan, choosing in every iteration, by made-up times and a network that learned nothing."""
    policy = TreePolicy(
        4, (0, 1, 2, 4), (1, 2, 4, 9), plan.acceptance_table.num_ranks, plan.policy.draft_vocabulary, TreeShape(4, 2, 9)
    )
    curves = [LatencyPoint("verify", width, 0, 128, 1e-3 * (1 + 0.06 * width), 0.0) for width in policy.verify_widths]
    curves += [LatencyPoint("draft", 4, depth, 128, 1e-4 * depth, 0.0) for depth in policy.draft_depths[1:]]
    chance = np.random.default_rng(3)
    first = chance.normal(size=(hidden_size + 1, DEPTH_UNITS)).astype(np.float32)
    second = chance.normal(size=(DEPTH_UNITS + 1, 4)).astype(np.float32) / 8
    network = DepthNetwork.of_arrays(policy.draft_depths, (1, 2, 4, 9), first, second)
    return replace(
        plan, policy=policy, curves=tuple(curves), host=HostSeconds(1e-5, 2e-5), token_s=1e-3, depth_network=network,
        depth_figures=DepthFigures(2, 1.1, 1.1, 1.1, 1.2, 2.0, 2.0),
        schedule=sequential_schedule(plan.num_threads, depth=True), schedule_study=None,
    )  # fmt: skip


def test_a_plans_own_choices_are_simulated_as_the_bench_runs_them(
    toy_bundle, kept, idle, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("yggrt.bundle.follows_clock", lambda _plan: False)  # else choices follow what iterations take
    hidden_size = json.loads((toy_bundle.verifier / "config.json").read_text())["hidden_size"]
    write_plan(tmp_path / "p.ygg", with_choices(read_plan(toy_bundle.searched / "plan.ygg"), hidden_size))
    bundle = tmp_path / "b"
    assert build_again(toy_bundle, bundle, "--plan", str(tmp_path / "p.ygg")) == 0
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPTS)
    limits = ["--prompts", str(prompts), "--max-new-tokens", "60"]
    capsys.readouterr()
    assert main(["simulate", str(bundle), *limits, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)[0]["tokens_per_iteration"]
    assert run_main(["bench", str(bundle), *limits, "--json", str(tmp_path / "o")]) == 0
    benched = json.loads((tmp_path / "o").read_text())
    assert benched["acceptance_length"] == pytest.approx(simulated, rel=1e-6)
    assert sum(count > 0 for count in benched["depth_histogram"]) > 1


def test_a_simulation_goes_by_what_steps_take_now(toy_bundle, idle, tmp_path, monkeypatch):
    """On a machine of half the speed everything takes twice as long, and the plan chooses as it did."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPTS)
    plan = read_plan(toy_bundle.searched / "plan.ygg")

    def simulated(slower: float) -> simulate_bundle.Figures:
        points = tuple(replace(point, seconds=point.seconds * slower) for point in plan.curves)
        host = HostSeconds(plan.host.plain_s * slower, plan.host.speculative_s * slower)
        now = profile.LatencyProfile(points, host, ())
        monkeypatch.setattr(simulate_bundle, "measure_steps", lambda *_, **__: now)
        options = SimulateOptions(toy_bundle.searched, prompts, max_new_tokens=30)
        return simulate_bundle.simulate_bundle(options, lambda _line: None)[0].simulated

    usual, slow = simulated(1.0), simulated(2.0)
    assert slow.tokens_per_iteration == usual.tokens_per_iteration
    assert slow.tpot_s == pytest.approx(2 * usual.tpot_s)
    assert slow.plain_tpot_s == pytest.approx(2 * usual.plain_tpot_s)


def test_threads_default_to_all_cores():
    assert BuildOptions("d", "v").threads == len(os.sched_getaffinity(0))
