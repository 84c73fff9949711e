"""Both distributions hold what they should: the root wheel both packages, the runtime's only its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build_wheel(project: Path, output: Path) -> set[str]:
    """Names in the wheel of a copy of the project."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(output)]
    found = subprocess.run([*command, str(project)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    (wheel,) = output.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """What git would give a stranger, so that no build folder is left in the working tree."""
    copy = tmp_path_factory.mktemp("sources")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def test_the_root_wheel_carries_compiler_runtime_and_demo_drafter(sources, tmp_path):
    names = build_wheel(sources, tmp_path)
    wanted = {f"yggc/{path.name}" for path in (ROOT / "yggc").glob("*.py")}
    wanted |= {f"yggrt/{path.name}" for path in (ROOT / "runtime/yggrt").glob("*.py")}
    assert wanted <= names
    assert {"yggrt/py.typed", "yggc/data/probe_corpus.txt", "yggc/data/demo_drafter/model.safetensors"} <= names


def test_the_runtime_wheel_carries_yggrt_alone(sources, tmp_path):
    names = build_wheel(sources / "runtime", tmp_path)
    assert {f"yggrt/{path.name}" for path in (ROOT / "runtime/yggrt").glob("*.py")} <= names
    assert not any(name.startswith("yggc/") for name in names)
