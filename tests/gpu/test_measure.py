"""What of `measure.py` needs no GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from tests.gpu import measure
from tests.yggrt.test_target import pretend_gpu
from yggc.profile import Timing
from yggrt.plan import read_plan
from yggrt.target import detect_target
from yggrt.tree import TreeShape


def test_the_plan_it_writes_has_the_tree_that_is_fastest_by_replayed_acceptance(tmp_path, monkeypatch):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    names = list(json.loads(measure.REPLAYED.read_text())["tokens_per_iteration"])
    iterations = {
        name: {"replayed_speedup": 2.0 - place, "stages_ms": {"prune": 0.1, "accept": 0.2, "move": 0.3}}
        for place, name in enumerate(reversed(names))
    }
    timed = {f"verify W={width} S={extent}": Timing(3e-3, 1e-5) for width in measure.WIDTHS for extent in (256, 1024)}
    timed |= {f"draft W={width} D={depth} S=256": Timing(1e-3, 1e-5) for width, depth in measure.DRAFTS}
    timed["verify W=1 without graphs"] = Timing(4e-3, 1e-5)
    models = {role: measure.make_model(measure.SMALL, torch.device("cpu")) for role in ("verify", "draft")}
    target = detect_target("cuda")
    measure.write_plan_of({"iterations": iterations}, timed, models, target, SimpleNamespace(plans=tmp_path))
    (written,) = tmp_path.glob("nvidia-h200/*/plan.ygg")
    plan = read_plan(written)
    assert plan.policy.default_shape == TreeShape(*map(int, names[-1].split(",")))
    assert len(plan.curves) == len(timed) - 1 and abs(plan.host.speculative_s - 6e-4) < 1e-9
    assert plan.sku == "nvidia-h200" and plan.prediction is None
