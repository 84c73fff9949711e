"""Fixtures shared by all tests: toy models, and one toy bundle that is compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import toy

torch.set_num_threads(1)  # toys are far too small to share between threads


@pytest.fixture(scope="session")
def verifier():
    """The toy verifier; treat it as read-only."""
    return toy.make_llama(0)


@dataclass(frozen=True, slots=True)
class ToyBundle:
    """A built bundle of two tiny checkpoints, and what it was built from."""

    path: Path
    drafter: Path
    verifier: Path
    cache: Path


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory, pytestconfig) -> ToyBundle:
    """`yggc build` of a tiny fp32 pair, the drafter a noised copy of the verifier; compiled once for all tests.

    Stages are kept in pytest's own cache, so that a rerun compiles only what changed.
    """
    from tests.yggc.checkpoint_makers import make_tokenizer, write_checkpoint
    from yggc.cli import main

    folder = tmp_path_factory.mktemp("toy")
    tokenizer = make_tokenizer()
    verifier = toy.make_llama(0, vocab_size=tokenizer.get_vocab_size() + 4)  # logits padded beyond the tokenizer
    write_checkpoint(folder / "verifier", verifier, tokenizer)
    write_checkpoint(folder / "drafter", toy.make_drafter("sometimes", verifier), tokenizer)
    cache = Path(pytestconfig.cache.mkdir("stages"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGG_CACHE", str(cache))
        arguments = ["build", "--drafter", str(folder / "drafter"), "--verifier", str(folder / "verifier")]
        code = main([*arguments, "-o", str(folder / "toy.bundle"), "--dtype", "float32", "--threads", "1"])
    assert code == 0
    return ToyBundle(folder / "toy.bundle", folder / "drafter", folder / "verifier", cache)
