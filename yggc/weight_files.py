"""The weight files of a checkpoint folder: which they are, what their headers say, and a fingerprint of their content.

Invariant: a file is only opened when its real place is inside the folder (or the blob store of the hub cache that the
folder belongs to), and nothing but safetensors is opened at all.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from yggrt.errors import CheckpointError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 100_000_000
WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed whole; of longer ones blocks are."""
BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 2048

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file.

    dtypes:       (safetensors' dtype, bytes of it) pairs.
    num_elements: of all its tensors.
    starts:       offset in the file of each tensor's first byte.
    """

    path: Path
    num_bytes: int
    num_elements: int
    dtypes: tuple[tuple[str, int], ...]
    tensor_names: frozenset[str]
    starts: tuple[int, ...]


def find_weight_files(folder: Path) -> tuple[WeightFile, ...]:
    """The folder's safetensors files, each with its header checked.

    Raises CheckpointError: pickles only, none, a shard missing or truncated, or a name that leads out of the folder.
    """
    if (folder / SINGLE_FILE).exists() or (folder / SINGLE_FILE).is_symlink():
        return (read_weight_file(member(folder, SINGLE_FILE)),)
    if (folder / INDEX_FILE).exists():
        return _sharded(folder)
    present = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as pickles ({pickles[0]}), which may run code when opened; safetensors is "
            "accepted. Convert them where you trust them: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER), and copy the tokenizer files."
        )
    raise CheckpointError(
        f"{folder} has a config.json but no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there. "
        "Download the checkpoint again, whole."
    )


def _sharded(folder: Path) -> tuple[WeightFile, ...]:
    weight_map = read_json(member(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map from tensors to files; it is damaged.")
    files = []
    for name in sorted(set(weight_map.values())):
        file = read_weight_file(member(folder, name))
        lost = sorted(key for key, value in weight_map.items() if value == name and key not in file.tensor_names)
        if lost:
            raise CheckpointError(
                f"{folder / name} lacks tensor {lost[0]}, which {INDEX_FILE} says it holds (and {len(lost) - 1} more). "
                "Download that file again."
            )
        files.append(file)
    return tuple(files)


def member(folder: Path, name: str) -> Path:
    """The file of that name in the folder, after a check that it stays there.

    A hub cache's snapshot holds links into its own `blobs` folder; these are followed, other ways out are refused.
    """
    relative = PurePosixPath(name)
    path = folder / name
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{folder} names the file {name!r}, which leaves the folder; only files inside it are opened."
        )
    real, allowed = path.resolve(), [folder.resolve()]
    if folder.parent.name == "snapshots":
        allowed.append((folder.parent.parent / "blobs").resolve())
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the folder; only files inside it are opened. Copy the file there."
        )
    if not real.is_file():
        raise CheckpointError(
            f"{path} is missing: the checkpoint is incomplete. Download it again, or copy the file there."
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {one_line(error)}. Download it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds JSON but no object; it is damaged. Download it again.")
    return value


def read_weight_file(path: Path) -> WeightFile:
    """Reads and checks a safetensors header, so that a truncated file is found before anything is loaded."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes). Download it again.")
        header = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        spans = {name: (int(e["data_offsets"][0]), int(e["data_offsets"][1])) for name, e in entries.items()}
        dtypes: Counter[str] = Counter()
        for name, (first, last) in spans.items():
            dtypes[str(entries[name]["dtype"])] += last - first
        num_elements = sum(math.prod(entry["shape"]) for entry in entries.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise CheckpointError(f"{path} has a damaged safetensors header. Download it again.") from None
    end = 8 + length + max((last for _, last in spans.values()), default=0)
    if size != end:
        fault = "truncated" if size < end else "damaged"
        raise CheckpointError(f"{path} is {fault}: {size} bytes, its header describes {end}. Download it again.")
    starts = tuple(8 + length + first for first, _ in spans.values())
    return WeightFile(path, size, num_elements, tuple(sorted(dtypes.items())), frozenset(entries), starts)


def weight_dtype(files: tuple[WeightFile, ...]) -> str:
    """torch's name of the dtype that most bytes have; quantised weights are refused."""
    total: Counter[str] = Counter()
    for file in files:
        for dtype, num_bytes in file.dtypes:
            total[dtype] += num_bytes
    name = max(total, key=lambda dtype: total[dtype], default="")
    if name not in DTYPE_NAMES:
        raise CheckpointError(
            f"{files[0].path.parent} has weights of type {name or '(none)'}; accepted: {', '.join(DTYPE_NAMES)}. "
            "Use the checkpoint that was not quantised."
        )
    return DTYPE_NAMES[name]


class Fingerprint:
    """A sha256 over named contents; of a file over 64 MiB over its head, blocks at equal distances and the first bytes
    of every tensor, so that 14 GB take about a second."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, content: bytes) -> None:
        self._digest.update(f"{name}\0{len(content)}\0".encode())
        self._digest.update(content)

    def add_file(self, path: Path, starts: Iterable[int]) -> None:
        """starts: offset of each tensor; everything before the first is hashed whole."""
        size = path.stat().st_size
        self._digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE_FILE_BYTES:
                while block := file.read(1 << 20):
                    self._digest.update(block)
                return
            starts = sorted(starts)
            self._digest.update(file.read(starts[0] if starts else BLOCK_BYTES))
            for offset in sorted({*starts, *range(0, size, max(1, size // NUM_BLOCKS)), size - BLOCK_BYTES}):
                file.seek(offset)
                self._digest.update(file.read(BLOCK_BYTES))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def one_line(error: BaseException) -> str:
    """A library's message, short and in one line, as a part of one of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__
