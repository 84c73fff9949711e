"""The machine: its SKU key, what it can run, and whether a bundle fits it.

A SKU key names hardware for which one plan is right: `cpu-x86_64-avx512_bf16-2c`, `nvidia-h200`. It is advisory. What
is fatal for compiled code is checked by name: step ABI, architecture, torch version, instruction set.

Invariant: nothing here loads a compiled file, so a bundle that does not fit is refused before it can crash.
"""

import hashlib
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from yggrt.artifacts import STEP_ABI_VERSION
from yggrt.errors import BundleFormatError, TargetMismatchError
from yggrt.plan import Manifest, Plan

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")

DIGEST_PIECE = 16 * 1024 * 1024  # bytes

# Flag names of /proc/cpuinfo → our names, weakest first. A compiler told -march=native may use any of them.
_X86_FLAGS = {
    name: name
    for name in (
        *("sse4_2", "avx", "f16c", "fma", "bmi1", "bmi2", "movbe", "abm", "avx2", "gfni", "vaes", "vpclmulqdq"),
        *("avx_vnni", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi"),
        *("avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16"),
    )
}
_AARCH64_FLAGS = {
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
}
_FLAGS = {"x86_64": _X86_FLAGS, "aarch64": _AARCH64_FLAGS}

# What decides how fast a language model runs, strongest first: the part of the SKU key that names the instruction set.
_STRONGEST = {
    "x86_64": ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2"),
    "aarch64": ("sve2", "sve", "bf16", "neon"),
}
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Target:
    """One device of this machine.

    kind:            "cpu" or "cuda"; device_index: which GPU, 0 for the CPU.
    architecture:    `x86_64`, `aarch64`; for a GPU its compute capability, such as `sm_90`.
    instruction_set: CPU features, in a fixed order; empty for a GPU.
    name:            as the vendor calls it.
    num_cores:       CPU cores this process may use.
    memory_bytes:    of the device.
    driver:          version of a GPU's driver, `580.65.06`; empty for the CPU.
    """

    kind: str
    device_index: int
    sku: str
    architecture: str
    instruction_set: tuple[str, ...]
    name: str
    num_cores: int
    memory_bytes: int
    driver: str = ""

    @property
    def device(self) -> str:
        """As torch names it."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.device_index}"


def detect_target(target: str = "cpu") -> Target:
    """Look at this machine. target: `cpu`, `cuda` or `cuda:1`.

    Raises ValueError for another word, TargetMismatchError where there is no such device.
    """
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", target)
    if match is None:
        raise ValueError(f"unknown target {target!r}; known: cpu, cuda, cuda:<index>")
    return _detect_cpu() if target == "cpu" else _detect_cuda(int(match[1] or 0))


def check_manifest(manifest: Manifest, target: Target, torch_version: str) -> tuple[str, ...]:
    """Whether a bundle's compiled code can run here; cheapest checks first, no file is opened.

    torch_version: `torch.__version__`; a local part such as "+cu130" does not count.
    Returns advisory notices, one line each. Raises TargetMismatchError, which names both sides.
    """
    if manifest.step_abi_version != STEP_ABI_VERSION:
        raise TargetMismatchError(
            f"bundle has step ABI version {manifest.step_abi_version}; this runtime speaks {STEP_ABI_VERSION}. "
            "Rebuild the bundle, or install the yggrt it was built with."
        )
    if (manifest.target, manifest.architecture) != (target.kind, target.architecture):
        raise TargetMismatchError(
            f"bundle was compiled for {manifest.target} {manifest.architecture}; this is {target.kind} "
            f"{target.architecture} ({target.name}). Rebuild it here."
        )
    if release(manifest.torch_version) != release(torch_version):
        raise TargetMismatchError(
            f"bundle was compiled with torch {manifest.torch_version}; installed is {torch_version}. "
            f"Rebuild the bundle, or install torch {release(manifest.torch_version)}."
        )
    missing = [flag for flag in manifest.instruction_set if flag not in target.instruction_set]
    if missing:
        raise TargetMismatchError(
            f"bundle was compiled for {manifest.sku} and uses {', '.join(missing)}, which this machine ({target.sku}, "
            f"{target.name}) does not have. Rebuild it here."
        )
    notices = _notices(manifest.sku, manifest.num_threads, target)
    if manifest.driver != target.driver:
        notices += (f"built with driver {manifest.driver or '(unknown)'}; here is {target.driver or '(unknown)'}",)
    return notices


def check_plan(plan: Plan, target: Target) -> tuple[str, ...]:
    """Whether a plan may steer a build here: its target must be this kind, all else is advisory.

    Returns notices and raises as check_manifest does.
    """
    if plan.target != target.kind:
        raise TargetMismatchError(f"plan was made for {plan.target} ({plan.sku}); this is {target.kind} ({target.sku})")
    return _notices(plan.sku, plan.num_threads, target)


def piecewise_sha256(path: Path) -> str:
    """The sha256, in hex, over the sha256 of each DIGEST_PIECE of a file in order; all cores share the work."""
    size = path.stat().st_size
    with open(path, "rb") as file, ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:

        def digest(start: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), DIGEST_PIECE, start)).digest()

        pieces = pool.map(digest, range(0, max(size, 1), DIGEST_PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def verify_file(path: Path, num_bytes: int, expected: str) -> None:
    """Check one file of a bundle against its manifest: kind, size, then content.

    Raises BundleFormatError where it is missing, unreadable, a link that leaves its folder, or not what was built.
    """
    folder = path.parent.resolve()
    if not path.is_file():
        raise BundleFormatError(f"bundle is incomplete: {path} is missing. Copy or build it again.")
    if path.resolve().parent != folder:
        raise BundleFormatError(f"{path} is a link to {path.resolve()}, outside its bundle. Copy the file itself.")
    found = path.stat().st_size
    if found != num_bytes:
        raise BundleFormatError(f"{path} has {found} bytes; its manifest says {num_bytes}. Copy or build it again.")
    try:
        digest = piecewise_sha256(path)
    except OSError as error:
        raise BundleFormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    if digest != expected:
        raise BundleFormatError(
            f"{path} is damaged: its digest is {digest} instead of {expected}. Copy or build it again."
        )


def release(version: str) -> str:
    """major.minor.patch of a version, without what builds append: `2.14.1+cu130` gives `2.14.1`."""
    match = re.match(r"[0-9]+\.[0-9]+(\.[0-9]+)?", version)
    return match.group() if match else version


def _notices(sku: str, num_threads: int, target: Target) -> tuple[str, ...]:
    notices = []
    if sku != target.sku and not _is_stronger_twin(sku, target):
        notices.append(f"built for {sku}, running on {target.sku}: the choices may not be the fastest here")
    if num_threads > target.num_cores:
        notices.append(f"built for {num_threads} threads; this process may use {target.num_cores} cores")
    return tuple(notices)


def _is_stronger_twin(sku: str, target: Target) -> bool:
    """Whether a CPU differs from a SKU key only by having more: more cores, a superset of the instructions."""
    match = re.fullmatch(r"cpu-(\w+?)-(\w+)-([0-9]+)c", sku)
    return (
        match is not None
        and match[1] == target.architecture
        and (match[2] == "base" or match[2] in target.instruction_set)
        and int(match[3]) <= target.num_cores
    )


def _detect_cpu() -> Target:
    machine = platform.machine().lower()
    architecture = _ARCHITECTURES.get(machine, machine)
    model, flags = _read_cpuinfo(_CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else "")
    names = _FLAGS.get(architecture, {})
    instruction_set = tuple(name for flag, name in names.items() if flag in flags)
    strongest = next((name for name in _STRONGEST.get(architecture, ()) if name in instruction_set), "base")
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Target(
        kind="cpu",
        device_index=0,
        sku=f"cpu-{architecture}-{strongest}-{num_cores}c",
        architecture=architecture,
        instruction_set=instruction_set,
        name=model or machine,
        num_cores=num_cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _read_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Model name and the flags that every core has."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()
    return (model[1].strip() if model else ""), flags


def _detect_cuda(index: int) -> Target:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
        raise TargetMismatchError(f"cuda:{index} was asked for; torch {torch.__version__} finds {found} here")
    properties = torch.cuda.get_device_properties(index)
    name = properties.name if "nvidia" in properties.name.lower() else f"NVIDIA {properties.name}"
    return Target(
        kind="cuda",
        device_index=index,
        sku=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        architecture=f"sm_{properties.major}{properties.minor}",
        instruction_set=(),
        name=name,
        num_cores=_detect_cpu().num_cores,
        memory_bytes=properties.total_memory,
        driver=_read_driver(_DRIVER.read_text(errors="replace") if _DRIVER.exists() else ""),
    )


def _read_driver(text: str) -> str:
    """The version in what NVIDIA's kernel module says of itself; empty where it says nothing."""
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)", text)
    return match[1] if match else ""
