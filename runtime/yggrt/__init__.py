"""yggrt: the slim runtime. Loads a bundle made by yggc and answers with it, exactly as its verifier alone would.

What it offers is imported on first use, so that `yggrt --help` does not wait for torch.
"""

import ctypes.util
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yggrt.bundle import check_bundle, load
    from yggrt.engine import Engine, GenerationResult, Stream
    from yggrt.errors import YggError
    from yggrt.stats import GenerationStats

__version__ = "0.1.0"

__all__ = ["Engine", "GenerationResult", "GenerationStats", "Stream", "YggError", "__version__", "check_bundle", "load"]

WAIT_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "2000"
"""How often a thread looks for work before it sleeps, tens of microseconds: long enough to meet the next loop of a step
awake. By default it spins for milliseconds, and beside two other busy processes a step takes 80 times as long."""

if "torch" not in sys.modules and not any(name in os.environ for name in WAIT_SETTINGS):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT  # read once, when torch loads OpenMP

_HOMES = {
    "check_bundle": "yggrt.bundle",
    "load": "yggrt.bundle",
    "Engine": "yggrt.engine",
    "GenerationResult": "yggrt.engine",
    "GenerationStats": "yggrt.stats",
    "Stream": "yggrt.engine",
    "YggError": "yggrt.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'yggrt' has no attribute {name!r}")
    import_torch_without_processes()
    return getattr(importlib.import_module(_HOMES[name]), name)


def import_torch_without_processes() -> None:
    """Import torch, where nobody has yet, with `ctypes.util.find_library` finding nothing.

    The CUDA bindings that CUDA builds of torch import ask it for libdl, and it runs ldconfig, gcc and ld to find out;
    told nothing, they take libdl.so.2. A runtime that answers on a CPU starts no process.
    """
    if "torch" in sys.modules:
        return
    find_library = ctypes.util.find_library
    ctypes.util.find_library = lambda name: None
    try:
        import torch  # noqa: F401
    finally:
        ctypes.util.find_library = find_library
