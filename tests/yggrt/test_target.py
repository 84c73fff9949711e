"""The machine's SKU key, and which bundles it may run."""

import dataclasses
import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.yggrt.test_plan import sample_manifest, sample_plan
from yggrt import target as targets
from yggrt.errors import BundleFormatError, TargetMismatchError
from yggrt.target import Target, check_manifest, check_plan, detect_target, piecewise_sha256, release, verify_file

X86 = "fpu sse4_2 avx f16c fma avx2 avx512f avx512cd avx512bw avx512dq avx512vl avx512_vnni"


def detect_with(monkeypatch, tmp_path: Path, text: str, machine: str = "x86_64", num_cores: int = 2) -> Target:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)), raising=False)
    return detect_target("cpu")


def cpuinfo(*flag_lines: str, key: str = "flags") -> str:
    return "".join(f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n{key}\t\t: {flags}\n\n" for flags in flag_lines)


@pytest.mark.parametrize(
    "flags, sku",
    [
        ("fpu sse4_2", "cpu-x86_64-base-2c"),
        ("avx2 fma", "cpu-x86_64-avx2-2c"),
        ("avx2 avx512f", "cpu-x86_64-avx512f-2c"),
        (X86, "cpu-x86_64-avx512_vnni-2c"),
        (X86 + " avx512_bf16", "cpu-x86_64-avx512_bf16-2c"),
        (X86 + " amx_tile amx_bf16 avx512_bf16", "cpu-x86_64-amx_bf16-2c"),
    ],
)
def test_the_sku_key_names_the_strongest_instruction_set(monkeypatch, tmp_path, flags, sku):
    target = detect_with(monkeypatch, tmp_path, cpuinfo(flags, flags))
    assert target.sku == sku
    assert target.name == "Some CPU @ 2 GHz"
    assert set(target.instruction_set) == set(flags.split()) - {"fpu"}


def test_a_feature_counts_only_when_every_core_has_it(monkeypatch, tmp_path):
    assert "avx512f" not in detect_with(monkeypatch, tmp_path, cpuinfo(X86, "avx2 fma")).instruction_set


def test_an_arm_machine_is_named_in_our_words(monkeypatch, tmp_path):
    text = cpuinfo("fp asimd asimdhp asimddp sve bf16 i8mm", key="Features")
    target = detect_with(monkeypatch, tmp_path, text, machine="arm64", num_cores=64)
    assert target.sku == "cpu-aarch64-sve-64c"
    assert target.instruction_set == ("neon", "fp16", "dotprod", "bf16", "i8mm", "sve")


def test_an_unknown_machine_still_gets_a_key(monkeypatch, tmp_path):
    assert detect_with(monkeypatch, tmp_path, "", machine="riscv64").sku == "cpu-riscv64-base-2c"


def test_this_machine_is_detected():
    target = detect_target()
    assert re.fullmatch(r"cpu-\w+-\w+-[1-9][0-9]*c", target.sku)
    assert target.kind == "cpu"
    assert target.num_cores >= 1
    assert target.memory_bytes > 2**28


@pytest.mark.parametrize("word", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0:1", "CUDA", "cuda:99999"])
def test_an_unknown_target_word_is_a_bad_argument(word):
    with pytest.raises(ValueError, match="known: cpu, cuda, cuda:<index>"):
        detect_target(word)


@pytest.mark.field(27)
def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TargetMismatchError, match="cuda:0 was asked for; torch .* finds no CUDA device here"):
        detect_target("cuda")
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    with pytest.raises(TargetMismatchError, match="cuda:1 was asked for; torch .* finds 1 CUDA device here"):
        detect_target("cuda:1")


def pretend_gpu(monkeypatch, name: str, major: int, minor: int) -> None:
    properties = SimpleNamespace(name=name, major=major, minor=minor, total_memory=2**37)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (2**36, 2**37))


@pytest.mark.parametrize(
    "name, sku",
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("Tesla T4", "nvidia-tesla-t4"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_gpu_is_named_in_lower_case_with_hyphens(monkeypatch, name, sku):
    pretend_gpu(monkeypatch, name, 9, 0)
    target = detect_target("cuda:0")
    assert (target.sku, target.architecture, target.kind, target.memory_bytes) == (sku, "sm_90", "cuda", 2**37)


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("", ""),
    ],
)
def test_the_driver_is_read_and_another_is_told_of(monkeypatch, tmp_path, text, version):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr("yggrt.target._DRIVER", tmp_path / "version")
    target = detect_target("cuda")
    assert target.driver == version and target.device == "cuda:0"
    manifest = dataclasses.replace(
        sample_manifest(), target="cuda", architecture="sm_90", instruction_set=(), sku="nvidia-h200", kernels=None,
        driver="535.104.05",
    )  # fmt: skip
    notices = check_manifest(manifest, target, "2.14.1")
    assert bool(notices) == (version != "535.104.05")


HOST = Target(
    kind="cpu",
    device_index=0,
    sku="cpu-x86_64-avx512_bf16-2c",
    architecture="x86_64",
    instruction_set=("avx2", "avx512f", "avx512_vnni", "avx512_bf16"),
    name="Some CPU",
    num_cores=2,
    memory_bytes=2**34,
)


def test_the_machine_it_was_built_on_loads_a_bundle_in_silence():
    assert check_manifest(sample_manifest(), HOST, "2.14.1") == ()


@pytest.mark.field(19)
def test_a_superset_host_loads_a_bundle_in_silence():
    host = dataclasses.replace(
        HOST,
        sku="cpu-x86_64-amx_bf16-64c",
        num_cores=64,
        instruction_set=(*HOST.instruction_set, "amx_tile", "amx_bf16"),
    )
    assert check_manifest(sample_manifest(), host, "2.14.1+cu130") == ()


@pytest.mark.field(19, 23)
@pytest.mark.parametrize(
    "changes, torch_version, message",
    [
        ({"step_abi_version": 4}, "2.14.1", "step ABI version 4; this runtime speaks 5"),
        ({"architecture": "aarch64"}, "2.14.1", "compiled for cpu aarch64; this is cpu x86_64 \\(Some CPU\\)"),
        (
            {"target": "cuda", "architecture": "sm_90", "kernels": None},
            "2.14.1",
            "compiled for cuda sm_90; this is cpu x86_64",
        ),
        ({}, "2.14.0", "compiled with torch 2.14.1; installed is 2.14.0. Rebuild the bundle, or install torch 2.14.1"),
        ({}, "2.15.1+cpu", "installed is 2.15.1\\+cpu"),
        (
            {"instruction_set": ("avx2", "amx_tile", "amx_bf16"), "sku": "cpu-x86_64-amx_bf16-8c"},
            "2.14.1",
            "compiled for cpu-x86_64-amx_bf16-8c and uses amx_tile, amx_bf16, which this machine "
            "\\(cpu-x86_64-avx512_bf16-2c, Some CPU\\) does not have",
        ),
    ],
)
def test_code_that_cannot_run_here_is_refused_naming_both_sides(changes, torch_version, message):
    with pytest.raises(TargetMismatchError, match=message) as caught:
        check_manifest(dataclasses.replace(sample_manifest(), **changes), HOST, torch_version)
    assert "\n" not in str(caught.value)


def test_another_gpu_generation_is_refused():
    manifest = dataclasses.replace(
        sample_manifest(), target="cuda", architecture="sm_90", instruction_set=(), kernels=None
    )
    host = dataclasses.replace(HOST, kind="cuda", architecture="sm_80", sku="nvidia-a100", name="NVIDIA A100")
    with pytest.raises(TargetMismatchError, match="cuda sm_90; this is cuda sm_80 \\(NVIDIA A100\\)"):
        check_manifest(manifest, host, "2.14.1")


def test_what_only_costs_speed_is_a_notice():
    manifest = dataclasses.replace(sample_manifest(), num_threads=4, sku="cpu-x86_64-avx512_bf16-4c")
    notices = check_manifest(manifest, HOST, "2.14.1")
    assert notices == (
        "built for cpu-x86_64-avx512_bf16-4c, running on cpu-x86_64-avx512_bf16-2c: "
        "the choices may not be the fastest here",
        "built for 4 threads; this process may use 2 cores",
    )


def test_a_plan_fits_every_machine_of_its_kind():
    assert check_plan(sample_plan(), HOST) == ()
    assert len(check_plan(dataclasses.replace(sample_plan(), sku="cpu-x86_64-amx_bf16-2c"), HOST)) == 1
    with pytest.raises(TargetMismatchError, match="plan was made for cuda"):
        check_plan(dataclasses.replace(sample_plan(), target="cuda"), HOST)


def test_a_local_version_part_does_not_count():
    assert release("2.14.1+cu130") == release("2.14.1") == "2.14.1"
    assert release("2.15.0a0+git123") == "2.15.0"
    assert release("2.15") == "2.15"
    assert release("unknown") == "unknown"
    assert release(torch.__version__) in torch.__version__


def test_a_file_is_checked_by_size_then_content(tmp_path: Path):
    path = tmp_path / "verify.pt2"
    with pytest.raises(BundleFormatError, match="incomplete: .*verify.pt2 is missing"):
        verify_file(path, 4, "")
    path.write_bytes(b"code")
    digest = hashlib.sha256(hashlib.sha256(b"code").digest()).hexdigest()
    verify_file(path, 4, digest)
    with pytest.raises(BundleFormatError, match="has 4 bytes; its manifest says 5"):
        verify_file(path, 5, digest)
    path.write_bytes(b"c0de")
    with pytest.raises(BundleFormatError, match="damaged"):
        verify_file(path, 4, digest)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 5, 4096])
def test_the_digest_covers_every_piece_in_order(tmp_path: Path, monkeypatch, num_bytes):
    monkeypatch.setattr("yggrt.target.DIGEST_PIECE", 4)
    data = bytes(index % 251 for index in range(num_bytes))
    (tmp_path / "file").write_bytes(data)
    pieces = [data[start : start + 4] for start in range(0, max(num_bytes, 1), 4)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert piecewise_sha256(tmp_path / "file") == expected


@pytest.mark.field(34)
def test_a_link_out_of_the_bundle_is_refused_but_one_inside_is_followed(tmp_path: Path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    digest = hashlib.sha256(hashlib.sha256(b"code").digest()).hexdigest()
    (tmp_path / "outside").write_bytes(b"code")
    (bundle / "real").write_bytes(b"code")
    (bundle / "inner").symlink_to("real")
    (bundle / "outer").symlink_to("../outside")
    verify_file(bundle / "inner", 4, digest)
    with pytest.raises(BundleFormatError, match="outside its bundle"):
        verify_file(bundle / "outer", 4, digest)
    (tmp_path / "alias").symlink_to(bundle)  # the bundle itself may be reached by a link
    verify_file(tmp_path / "alias" / "real", 4, digest)
