"""Finished stages, kept on disk under a key made of everything that could change their result.

A stage writes into a folder of its own that is renamed into place when it is complete: an entry is whole or absent,
and a stage that was killed is simply run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from yggrt.errors import BuildError

DURATIONS_FILE = "durations.json"
SOURCES_FILE = "sources.json"
OTHER_NAMES = (re.escape(DURATIONS_FILE), re.escape(SOURCES_FILE), "demo_verifier")
"""What lies in the cache folder beside the entries, as regular expressions."""

_ENTRY = r"[a-z0-9_.]+-[0-9a-f]{24}"


def cache_folder() -> Path:
    """$YGG_CACHE, else the user's cache folder."""
    chosen = os.environ.get("YGG_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen))  # unlike Path's, leaves an unknown ~user alone
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yggc"


class StageCache:
    """Entries `<root>/<stage>-<key>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.remove_abandoned()
        except OSError as error:
            raise BuildError(
                f"the cache folder {root} cannot be used ({error.strerror}); set YGG_CACHE to a folder you can write to"
            ) from None

    def remove_abandoned(self) -> None:
        """Remove what processes that no longer run were writing."""
        remove_abandoned(self.root, _ENTRY)

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
    if not final.exists():
        scratch.rename(final)
        return
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        final.rename(old)
        scratch.rename(final)
    finally:
        if not final.exists():  # interrupted, or refused, half way
            old.rename(final)
        shutil.rmtree(old, ignore_errors=True)


def remove_abandoned(folder: Path, names: str) -> None:
    """Scratch folders of processes that no longer run. names: regular expression of the finished folders' names."""
    for scratch in folder.glob(".*"):
        match = re.fullmatch(rf"\.(?:{names})\.([0-9]+)(?:\.old)?", scratch.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(scratch, ignore_errors=True)


def clear(root: Path) -> int:
    """Remove what builds keep in the cache folder and nothing else: it may be a folder with other things in it.

    Returns how many bytes there were. Raises OSError where something cannot be removed.
    """
    num_bytes = 0
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_symlink() or not re.fullmatch(
            rf"(?:{_ENTRY}|\.(?:{_ENTRY})\..*|{'|'.join(OTHER_NAMES)})", path.name
        ):
            continue
        num_bytes += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    return num_bytes
