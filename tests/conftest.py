"""Fixtures shared by all tests: toy models, and one toy bundle that is compiled once."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests import toy
from yggrt.plan import DraftGraph, Plan, TreePolicy, read_plan, write_plan
from yggrt.schedule import sequential_schedule
from yggrt.tree import TreeShape

FIXED_SHAPE = TreeShape(draft_width=4, draft_depth=2, verify_width=4)

torch.set_num_threads(1)  # toys are far too small to share between threads


@pytest.fixture(scope="session")
def verifier():
    """The toy verifier; treat it as read-only."""
    return toy.make_llama(0)


@dataclass(frozen=True, slots=True)
class ToyBundle:
    """A built bundle of two tiny checkpoints, and what it was built from. searched: the bundle before its plan."""

    path: Path
    searched: Path
    drafter: Path
    verifier: Path
    cache: Path


@pytest.fixture(scope="session")
def kept_stages(pytestconfig) -> Path:
    """Where finished stages are kept between runs of the tests, so that a rerun compiles only what changed.

    Its name has a space, as folders have.
    """
    return Path(pytestconfig.cache.mkdir("kept stages"))


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Tests that run side by side wait here for each other: the second finds kept what the first compiled."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory, kept_stages) -> ToyBundle:
    """`yggc build` of a tiny fp32 pair, the drafter a noised copy of the verifier; compiled once for all tests.

    What the search chooses depends on the machine, so a first build searches, and the bundle that tests use is built
    from its plan with the trees of `FIXED_SHAPE`.
    """
    from tests.yggc.checkpoint_makers import make_tokenizer, write_checkpoint
    from yggc import build, profile
    from yggc.cli import main

    folder = tmp_path_factory.mktemp("toy")
    tokenizer = make_tokenizer()
    verifier = toy.make_llama(0, vocab_size=tokenizer.get_vocab_size() + 4)  # logits padded beyond the tokenizer
    write_checkpoint(folder / "verifier", verifier, tokenizer)
    write_checkpoint(folder / "drafter", toy.make_drafter("sometimes", verifier), tokenizer)
    with pytest.MonkeyPatch.context() as patch, one_at_a_time(kept_stages):
        patch.setenv("YGG_CACHE", str(kept_stages))
        patch.setattr(build, "wait_until_idle", lambda _say: None)
        patch.setattr(profile, "UNSTEADY", float("inf"))
        arguments = ["build", "--drafter", str(folder / "drafter"), "--verifier", str(folder / "verifier")]
        assert main([*arguments, "-o", str(folder / "searched.bundle"), "--dtype", "float32", "--threads", "1"]) == 0
        write_plan(folder / "fixed.ygg", with_fixed_shape(read_plan(folder / "searched.bundle" / "plan.ygg")))
        assert main([*arguments, "-o", str(folder / "toy.bundle"), "--plan", str(folder / "fixed.ygg")]) == 0
    return ToyBundle(
        folder / "toy.bundle", folder / "searched.bundle", folder / "drafter", folder / "verifier", kept_stages
    )


def with_fixed_shape(plan: Plan) -> Plan:
    """The plan, with FIXED_SHAPE in every iteration, drafted by a fused graph."""
    children = plan.acceptance_table.num_ranks
    policy = TreePolicy(
        FIXED_SHAPE.draft_width, (0, FIXED_SHAPE.draft_depth), (1, FIXED_SHAPE.verify_width), children,
        plan.policy.draft_vocabulary, FIXED_SHAPE,
    )  # fmt: skip
    graphs = (DraftGraph(FIXED_SHAPE.draft_depth, True, 0.002, 0.001),)
    return replace(
        plan, policy=policy, draft_graphs=graphs, token_s=None, depth_network=None, depth_figures=None, sampled=(),
        prediction=None, schedule=sequential_schedule(plan.num_threads), schedule_study=None,
    )  # fmt: skip
