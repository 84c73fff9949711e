"""Every error a user can meet, one class per way to fail.

A message says what was found, what is accepted and what to do. Command lines print it as one line and exit 1.
"""


class YggError(Exception):
    """Base of all errors raised on purpose by yggc and yggrt; bad arguments are ValueError."""


class PairError(YggError):
    """Drafter and verifier do not fit together."""


class CheckpointError(YggError):
    """A checkpoint cannot be read, is incomplete, or is of a kind that is not supported."""


class PlanFormatError(YggError):
    """A plan file is malformed, or of a format version this runtime does not read."""


class BundleFormatError(YggError):
    """A bundle folder or its manifest is malformed or incomplete."""


class TargetMismatchError(YggError):
    """A bundle or plan was made for another machine, torch version or thread count."""


class ArtifactError(YggError):
    """A compiled artifact cannot be loaded, or was called with wrong inputs."""


class BuildError(YggError):
    """A build stage failed or cannot start: no compiler, no disk, no memory, no permission."""


class TextError(YggError):
    """A tokenizer or chat template cannot be read or applied."""


class TraceFormatError(YggError):
    """A calibration trace is malformed, or of a version this yggc does not read."""


def reason_in_a_line(error: Exception) -> str | None:
    """What the command line says of an error; None for one that no input and no machine explains, a fault of ours."""
    if isinstance(error, YggError | ValueError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{place}"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded ({' '.join(str(error).split())}); install again, or free memory"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
        return "out of memory; free some, use smaller models, a smaller context or a larger machine"
    return None
