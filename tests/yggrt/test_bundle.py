"""A bundle whose parts do not belong together is refused before anything of it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from yggrt import target
from yggrt.artifacts import load_weights
from yggrt.bundle import check_bundle, load
from yggrt.errors import BundleFormatError
from yggrt.plan import PLAN_FILE, DraftGraph, Plan, read_manifest, read_plan, write_manifest, write_plan
from yggrt.target import piecewise_sha256
from yggrt.tree import TreeShape


def with_plan(bundle: Path, copy: Path, change: Callable[[Plan], Plan]) -> Path:
    """A copy of a bundle with another plan, whose size and digest its manifest lists."""
    shutil.copytree(bundle, copy)
    path = copy / PLAN_FILE
    write_plan(path, change(read_plan(path)))
    manifest = read_manifest(copy)
    listed = tuple(
        replace(entry, num_bytes=path.stat().st_size, digest=piecewise_sha256(path))
        if entry.file == PLAN_FILE
        else entry
        for entry in manifest.files
    )
    write_manifest(copy, replace(manifest, files=listed))
    return copy


def larger_tree(plan: Plan) -> Plan:
    shape = TreeShape(plan.policy.draft_width, 12, 40)
    policy = replace(plan.policy, draft_depths=(12,), verify_widths=(40,), default_shape=shape)
    return replace(plan, policy=policy, draft_graphs=())


def fused_but_absent(plan: Plan) -> Plan:
    policy = replace(plan.policy, draft_depths=(*plan.policy.draft_depths, 7))
    return replace(plan, policy=policy, draft_graphs=(DraftGraph(7, True, 0.002, 0.001),))


@pytest.mark.field(31)
@pytest.mark.parametrize(
    "change, message",
    [
        (larger_tree, "nodes of a tree 49 in the plan, 33 in bundle.ygg"),
        (fused_but_absent, "0 artifacts for draft.d7"),
        (lambda plan: replace(plan, plain_width=9999), "plain width 9999 in the plan"),
        (lambda plan: replace(plan, max_context=100), "max_context 100 in the plan, 512 in bundle.ygg"),
        (lambda plan: replace(plan, drafter=replace(plan.drafter, fingerprint="0" * 64)), "drafter 0000"),
        (lambda plan: replace(plan, dtype="float16"), "dtype float16 in the plan, float32 in bundle.ygg"),
    ],
)
def test_a_plan_that_does_not_fit_the_artifacts_is_refused(toy_bundle, tmp_path, change, message):
    copy = with_plan(toy_bundle.path, tmp_path / "copy", change)
    for refuse in (check_bundle, load):
        with pytest.raises(BundleFormatError, match=message):
            refuse(copy)


def test_a_bundle_without_a_draft_pass_is_refused_by_check_as_by_load(toy_bundle, tmp_path):
    shutil.copytree(toy_bundle.path, tmp_path / "copy")
    manifest = read_manifest(tmp_path / "copy")
    write_manifest(tmp_path / "copy", replace(manifest, artifacts=manifest.artifacts[:1]))
    with pytest.raises(BundleFormatError, match="0 artifacts for draft"):
        check_bundle(tmp_path / "copy")


def test_a_file_that_may_not_be_read_is_named(toy_bundle, monkeypatch):
    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(target, "piecewise_sha256", refused)
    with pytest.raises(BundleFormatError, match="verify.pt2 cannot be read: Permission denied"):
        check_bundle(toy_bundle.path)


def test_a_name_that_no_file_can_have_is_no_bundle():
    with pytest.raises(BundleFormatError, match="is not a bundle"):
        load("x" * 5000)


@pytest.mark.field(28)
def test_weights_of_more_than_4_gib_are_read_to_their_end(tmp_path):
    """The file has a hole where most of its zeros are."""
    size = 2**32 + 4096
    header = json.dumps(
        {
            "first": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
            "last": {"dtype": "F32", "shape": [3], "data_offsets": [size, size + 12]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "weights.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(size, 1)
        file.write(struct.pack("<3f", 1.5, 2.5, 3.5))
    assert load_weights(path)["last"].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.field(22)
def test_weights_take_their_own_size_in_memory_once(tmp_path):
    num_bytes = 200_000_000
    save_file({"weights": torch.ones(num_bytes, dtype=torch.uint8)}, tmp_path / "weights.safetensors")
    program = (
        "import sys, torch, pathlib\n"
        "from yggrt.artifacts import load_weights\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "weights = load_weights(pathlib.Path(sys.argv[1]))['weights']\n"
        "assert weights.min().item() == 1\n"
        "print(1024 * (peak() - before))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "weights.safetensors")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    slack = 30_000_000
    assert num_bytes <= int(result.stdout) + slack and int(result.stdout) <= num_bytes + slack
