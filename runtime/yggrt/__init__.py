"""yggrt: the slim runtime. Loads a bundle made by yggc and answers with it, exactly as its verifier alone would."""

from yggrt.bundle import check_bundle, load
from yggrt.engine import Engine, GenerationResult, GenerationStats, Stream
from yggrt.errors import YggError

__version__ = "0.1.0"

__all__ = ["Engine", "GenerationResult", "GenerationStats", "Stream", "YggError", "check_bundle", "load", "__version__"]
