"""`make test-matrix`: the suite with the oldest and the newest torch and transformers that yggc accepts.

Each gets an environment of its own, `.venv-oldest` and `.venv-newest`, some 6 GB each. One alone:
`python tests/matrix.py oldest`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKED = ("torch", "transformers")


def oldest() -> list[str]:
    """The lowest versions of `pyproject.toml`, as pip takes them: `torch==2.11.*`."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lowest = []
    for line in asked:
        match = re.match(r"([a-z]+)>=([0-9.]+)", line)
        if match and match[1] in CHECKED:
            lowest.append(f"{match[1]}=={match[2]}.*")
    return lowest


def run_suite(name: str, pins: list[str]) -> bool:
    """Install into `.venv-<name>` and run the tests there; prints what was installed."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    print(f"{name}: setting up {python.parent.parent.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade", "-e", f"{ROOT}[dev]"]
    subprocess.run([*install, *pins], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    versions = [line for line in listed.stdout.splitlines() if line.split("==")[0] in CHECKED]
    print(f"{name}: {', '.join(versions)}", flush=True)
    cache = f"cache_dir=.pytest_cache/{name}"
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-o", cache]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    suites = {"oldest": oldest(), "newest": []}
    wanted = sys.argv[1:] or list(suites)
    if unknown := [name for name in wanted if name not in suites]:
        print(f"matrix: {unknown[0]!r} is not known; oldest and newest are", file=sys.stderr)
        return 2
    passed = {name: run_suite(name, suites[name]) for name in wanted}
    for name, good in passed.items():
        print(f"{name}: {'passed' if good else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
