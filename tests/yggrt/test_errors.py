"""What the command line says of errors."""

import pytest

from yggrt.errors import ArtifactError, reason_in_a_line


@pytest.mark.parametrize(
    "error, reason",
    [
        (ArtifactError("one\n  two"), "one two"),
        (ValueError("no such width"), "no such width"),
        (FileNotFoundError(2, "No such file or directory", "a.ygg"), "No such file or directory: a.ygg"),
        (ImportError("libtorch.so: failed to map"), "a library cannot be loaded (libtorch.so: failed to map)"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory"),
    ],
)
def test_what_a_user_can_meet_is_one_line(error, reason):
    found = reason_in_a_line(error)
    assert found is not None and found.startswith(reason) and "\n" not in found


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("x"), AssertionError()])
def test_a_fault_of_ours_is_not_hidden(error):
    assert reason_in_a_line(error) is None
