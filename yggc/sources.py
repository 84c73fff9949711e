"""Where the checkpoints of built pairs lie on this machine, by fingerprint: a plan does not say, since it travels."""

from __future__ import annotations

import json
import os
from pathlib import Path

from yggc.stage_cache import SOURCES_FILE
from yggrt.wire import write_atomically


def remember_source(root: Path, fingerprint: str, source: str) -> None:
    """Keep where a checkpoint was read from. root: the cache folder. A local path is kept whole."""
    known = _read(root)
    path = os.path.expanduser(source)
    place = os.path.abspath(path) if os.path.exists(path) else source
    if known.get(fingerprint) != place:
        known[fingerprint] = place
        write_atomically(root / SOURCES_FILE, json.dumps(known, indent=1).encode())


def find_source(root: Path, fingerprint: str) -> str | None:
    """Folder, file or hub id that a checkpoint of this fingerprint was read from; None where no build here read one."""
    return _read(root).get(fingerprint)


def _read(root: Path) -> dict[str, str]:
    """A damaged file is no file."""
    try:
        content = json.loads((root / SOURCES_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: source for name, source in content.items() if isinstance(source, str)}
