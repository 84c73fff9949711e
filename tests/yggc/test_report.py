"""A build's stages as commands of their own, and a bundle's report."""

from __future__ import annotations

import pytest

from yggc import profile
from yggc.build import PROFILE_FORMAT
from yggc.cli import main
from yggc.profile import LatencyProfile
from yggc.trace import read_trace
from yggrt import wire
from yggrt.plan import read_plan


@pytest.fixture
def pair(toy_bundle, monkeypatch) -> list[str]:
    """Arguments that name the toy pair, with the cache it was built with."""
    monkeypatch.setenv("YGG_CACHE", str(toy_bundle.cache))
    return ["--drafter", str(toy_bundle.drafter), "--verifier", str(toy_bundle.verifier), "--threads", "1"]


def test_profile_prints_what_the_build_measured_first(toy_bundle, pair, capsys, monkeypatch):
    """The plan holds what all looks at the steps agree on; the command shows the first, and times nothing again."""
    monkeypatch.setattr(profile, "measure_steps", None)
    assert main(["profile", *pair]) == 0
    out = capsys.readouterr().out.splitlines()
    extents = sorted({point.extent for point in read_plan(toy_bundle.searched / "plan.ygg").curves})
    assert out[0].split()[-len(extents) :] == [str(extent) for extent in extents]
    kept = (wire.read_file(PROFILE_FORMAT, LatencyProfile, path) for path in toy_bundle.cache.glob("profile-*/*.ygg"))
    one_row = [next(at for at in look.points if (at.role, at.width) == ("verify", 1)) for look in kept]
    row = next(line for line in out if line.startswith("verify, 1 rows"))
    assert row.removeprefix("verify, 1 rows").split()[0] in {f"{point.seconds * 1e3:.2f}" for point in one_row}
    assert out[-1].startswith("host: ")


def test_calibrate_prints_agreement_by_kind_and_writes_the_trace(pair, tmp_path, capsys):
    assert main(["calibrate", *pair, "-o", str(tmp_path / "trace.safetensors")]) == 0
    trace = read_trace(tmp_path / "trace.safetensors")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*dict.fromkeys(text.category for text in trace.texts), "all"]
    right = sum(
        row[0] == said for text in trace.texts for row, said in zip(text.children, text.answer_ids, strict=True)
    )
    assert f"{right / trace.num_tokens:.0%}" in lines[-1].split()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.safetensors"]


def test_search_prints_its_choice_and_writes_a_plan_that_builds(pair, toy_bundle, tmp_path, capsys):
    place = tmp_path / "plan.ygg"
    assert main(["search", *pair, "-o", str(place)]) == 0
    out = capsys.readouterr().out
    plan = read_plan(place)
    assert plan.policy == read_plan(toy_bundle.searched / "plan.ygg").policy
    assert ("no speculation" in out) == (plan.policy.default_shape.draft_depth == 0)
    assert "predicted: " in out
    assert main(["build", *pair[:4], "--plan", str(place), "-o", str(tmp_path / "b.bundle")]) == 0


def test_the_timeline_is_drawn_as_planned_and_as_measured(toy_bundle, capsys):
    plan = read_plan(toy_bundle.searched / "plan.ygg")
    assert main(["show", str(toy_bundle.searched), "--timeline"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("schedule: ") and "measured: " in out and "verify" in out
    assert ("planned: " in out) == (plan.schedule_study is not None)
    assert main(["show", str(toy_bundle.path), "--timeline"]) == 0
    assert "planned: " not in capsys.readouterr().out  # its plan was given, and nothing measured for it
    assert main(["show", str(toy_bundle.path), "--timeline", "--json"]) == 1
    assert "one of them is accepted" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_line(pair, capsys):
    for command in ("calibrate", "search"):
        assert main([command, *pair, "-o", "/nonexistent/file"]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("yggc:")]
        assert len(lines) == 1 and "/nonexistent/" in lines[0]


def test_a_report_shows_what_was_predicted_beside_what_was_measured(toy_bundle, capsys):
    assert main(["report", str(toy_bundle.searched)]) == 0
    out = capsys.readouterr().out
    made = read_plan(toy_bundle.searched / "plan.ygg").prediction
    assert made is not None
    row = next(line for line in out.splitlines() if line.startswith("tokens per iteration"))
    assert f"{made.tokens_per_iteration:.2f}" in row.split()[3]


def test_a_report_on_other_prompts_says_so(toy_bundle, tmp_path, capsys):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "cab"}\n')
    assert main(["report", str(toy_bundle.searched), "--prompts", str(prompts)]) == 0
    assert "these are other prompts" in capsys.readouterr().err


def test_a_plan_without_a_prediction_has_nothing_to_report(toy_bundle, capsys):
    assert main(["report", str(toy_bundle.path)]) == 1
    assert "without a prediction" in capsys.readouterr().err
