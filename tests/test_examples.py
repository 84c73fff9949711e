"""The programs in `examples/` do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from yggc.checkpoints import open_checkpoint
from yggc.inspect import inspect_pair

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_generate_answers_in_all_three_ways(toy_bundle, tmp_path):
    bundle = toy_bundle.path
    output = run_example("generate.py", toy_bundle.drafter, toy_bundle.verifier, bundle, "the roots of the tree")
    lines = output.splitlines()
    assert "tokens per verifier call" in output and len(lines) >= 3


def test_a_pair_trained_from_nothing_fits_together(tmp_path):
    commands = run_example("train_pair.py", tmp_path, 1).splitlines()
    assert commands[0].startswith(f"yggc build --drafter {tmp_path}/drafter --verifier {tmp_path}/verifier")
    pair = inspect_pair(open_checkpoint(str(tmp_path / "drafter")), open_checkpoint(str(tmp_path / "verifier")))
    assert (pair.vocab_size, pair.drafter.model_type, pair.verifier.model_type) == (2048, "llama", "qwen3")
