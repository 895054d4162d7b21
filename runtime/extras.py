"""The optional packages of asyncpipe, and the command that installs those that are missing."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import requires
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "pyproject.toml"


def install(extra: str) -> str:
    """The command that installs the packages of an extra of asyncpipe.

    It names the packages themselves: on the public package index, `asyncpipe` is another project.
    Raises KeyError for an extra that asyncpipe does not declare.

    >>> install("s3")
    "pip install 's3fs>=2025.2'"
    """
    return shlex.join(["pip", "install", *packages()[extra]])


def packages() -> dict[str, list[str]]:
    """The requirements of each extra: those of the source tree, or else of the installed one."""
    if _SOURCE.is_file():
        declared = tomllib.loads(_SOURCE.read_text(encoding="utf-8"))
        extras: dict[str, list[str]] = declared["project"]["optional-dependencies"]
        return extras
    return by_extra(requires("asyncpipe") or [])


def by_extra(requirements: list[str]) -> dict[str, list[str]]:
    """Requirements as the metadata of a package lists them, by extra.

    >>> by_extra(["torch>=2.11", 'mpich>=5; extra == "mpi"', 'mpi4py>=4.1; extra == "mpi"'])
    {'mpi': ['mpich>=5', 'mpi4py>=4.1']}
    """
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        package, _, condition = requirement.partition(";")
        if match := re.search(r"extra == [\"']([\w-]+)[\"']", condition):
            extras.setdefault(match[1], []).append(package.strip())
    return extras
