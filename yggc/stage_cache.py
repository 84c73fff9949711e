"""Finished stages, kept on disk under a key made of everything that could change their result.

A stage writes into a folder of its own that is renamed into place when it is complete: an entry is whole or absent,
and a stage that was killed is simply run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from yggrt.errors import BuildError


def cache_folder() -> Path:
    """$YGG_CACHE, else the user's cache folder."""
    chosen = os.environ.get("YGG_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yggc"


class StageCache:
    """Entries `<root>/<stage>-<key>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(root)
        except OSError as error:
            raise BuildError(
                f"the cache folder {root} cannot be used ({error.strerror}); set YGG_CACHE to a folder you can write to"
            ) from None

    def entry(self, stage: str, key_parts: dict[str, object]) -> Path:
        """Where the result of a stage with these inputs is, or will be."""
        text = json.dumps(key_parts, sort_keys=True, default=str)
        return self.root / f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def has(self, entry: Path) -> bool:
        return entry.is_dir()

    def fill(self, entry: Path, run: Callable[[Path], None]) -> None:
        """Run a stage in a scratch folder and keep what it wrote there. Nothing is left behind when it fails."""
        scratch = self.root / f".{entry.name}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            run(scratch)
            place_folder(scratch, entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def place_folder(scratch: Path, final: Path) -> None:
    """Rename a finished folder into place; an older one there is replaced whole."""
    if final.exists():
        old = final.with_name(f".{final.name}.{os.getpid()}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        scratch.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        scratch.rename(final)


def _remove_abandoned(root: Path) -> None:
    """Scratch folders of processes that no longer run."""
    for scratch in root.glob(".*"):
        process = scratch.suffix.removeprefix(".")
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(scratch, ignore_errors=True)
