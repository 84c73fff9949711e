"""How much memory and disk this process may still use, its control groups' limits included."""

import os
import resource
from pathlib import Path

import torch

DEVICE_PER_WEIGHT_BYTE = 1.1
"""On a GPU a model's weights are there once, and a group of them twice while they are laid below one another."""
DEVICE_MEMORY_OF_TOOLS = 1_500_000_000
"""Of a GPU: the context, what is computed in, a KV cache of some thousand tokens. An estimate."""


def readable(num_bytes: int) -> str:
    """Bytes in decimal units: "1.5 GB"."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def available_disk(folder: Path) -> int:
    """Bytes that this user may still write in a folder, which need not exist yet."""
    status = os.statvfs(existing_parent(folder))
    return status.f_bavail * status.f_frsize


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process can still use: the machine's, its control groups' and its own limit, whichever is least."""
    limits = [_machine_memory(root), *_group_memory(root), _process_memory(root)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def available_device_memory(device: str) -> int:
    """Bytes free on a GPU, as torch names it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _machine_memory(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_memory(root: Path) -> list[int]:
    """What each control group from this process's up to the root leaves; page cache counts as free."""
    free = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.strip("/").split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None:
                cached = [int(row.split()[1]) for row in _lines(group / "memory.stat") if row.split()[0] == names[2]]
                free.append(limit - used + sum(cached))
    return free


def _process_memory(root: Path) -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _lines(root / "proc/self/statm")
    return limit - (int(pages[0].split()[0]) * resource.getpagesize() if pages else 0)


def _number(path: Path) -> int | None:
    """The number in a control group's file; None for "max" or no file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
