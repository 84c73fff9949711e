"""The examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_generate_answers_in_all_three_ways(toy_bundle, tmp_path):
    command = [sys.executable, str(EXAMPLES / "generate.py"), str(toy_bundle.drafter), str(toy_bundle.verifier)]
    found = subprocess.run(
        [*command, str(toy_bundle.path), "the world tree"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "tokens per verifier call" in found.stdout
