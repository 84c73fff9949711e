"""The plans that ship in `plans/`: readable, in the right folder, and for the models they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from yggc.checkpoints import open_checkpoint
from yggrt.plan import read_plan

ROOT = Path(__file__).parent.parent
PLANS = sorted((ROOT / "plans").glob("*/*/plan.ygg"))
DEMO_DRAFTER = ROOT / "yggc" / "data" / "demo_drafter"


def test_there_are_plans_and_nothing_else_in_their_folder():
    assert PLANS
    assert sorted(path for path in (ROOT / "plans").rglob("*") if path.is_file()) == PLANS


@pytest.mark.parametrize("path", PLANS, ids=lambda path: f"{path.parent.parent.name}/{path.parent.name}")
def test_a_plan_is_where_its_machine_and_pair_say(path):
    plan = read_plan(path)
    assert path.parent.parent.name == plan.sku
    assert path.parent.name == f"{plan.drafter.name}+{plan.verifier.name}"
    assert plan.prediction is not None and plan.calibration is not None


def test_the_demo_pairs_plan_is_for_the_drafter_that_ships():
    fingerprint = open_checkpoint(str(DEMO_DRAFTER)).fingerprint
    assert any(read_plan(path).drafter.fingerprint == fingerprint for path in PLANS)
