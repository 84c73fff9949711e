"""Which versions of torch and transformers a bundle can be built with: those that yggc's own metadata asks for."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from yggrt.errors import BuildError

CHECKED = ("torch", "transformers")


def check_versions() -> None:
    """Raises BuildError where another version is installed: exporting depends on the insides of both."""
    for line in _requirements():
        wanted = Requirement(line)
        if wanted.name in CHECKED:
            found = metadata.version(wanted.name)
            if not wanted.specifier.contains(found, prereleases=True):
                raise BuildError(
                    f"{wanted.name} {found} is installed; {wanted.specifier} is accepted: "
                    f"pip install '{wanted.name}{wanted.specifier}'"
                )


def _requirements() -> list[str]:
    """Of this package; where it runs from its source tree, uninstalled, what that says."""
    try:
        return metadata.requires("yggc") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        return list(project["dependencies"])
