"""Versions of torch and transformers that are not supported are refused in one line."""

from importlib import metadata

import pytest

from yggc import versions
from yggc.build import Build
from yggc.config import BuildOptions
from yggc.progress import Progress
from yggrt.errors import BuildError


def not_installed(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


def test_the_installed_versions_are_supported():
    versions.check_versions()


@pytest.mark.field(25)
@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("package, found", [("transformers", "4.57.1"), ("transformers", "6.0.0"), ("torch", "2.10.0")])
def test_another_version_is_refused_before_anything_is_built(package, found, is_installed, monkeypatch):
    if not is_installed:  # as tests/gpu/check.sh runs
        monkeypatch.setattr(versions.metadata, "requires", not_installed)
    installed = metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda name: found if name == package else installed(name))
    with pytest.raises(BuildError, match=f"{package} {found} is installed; .*pip install '{package}") as caught:
        Build(BuildOptions(drafter="a", verifier="b"), Progress(quiet=True))
    assert "\n" not in str(caught.value)
