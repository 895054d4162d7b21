"""Installed dependencies: bounds that are met, and licenses that are compatible with ours.

Known vulnerabilities are not checked here, because that takes a service: `make audit` asks one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIRECT = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
OPTIONAL = [
    Requirement(text)
    for extra in PROJECT["project"]["optional-dependencies"].values()
    for text in extra
]
CAPPED = {
    "cyclopts": "majors come fast, and change how commands are read",
    "highspy": "1.16 prints to standard output, whatever output_flag says",
}
"""Those with an upper bound, and why."""

PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|Zlib|0BSD|CC0|HPND|NCSA|BSL-1\.0|"
    r"Boost|MPL[- ]2\.0|Mozilla Public License 2\.0|CNRI|Public Domain",
    re.IGNORECASE,
)
STRICT = re.compile(r"\b[AL]?GPL|General Public License|SSPL|Commons Clause", re.IGNORECASE)
READ_BY_HAND = {"mpich": "BSD, in words of its own (COPYRIGHT)"}
"""Packages whose metadata names no licence, with the one that is in their files."""
OF_CUDA = ("nvidia-", "cuda-")
"""NVIDIA's own libraries, which come with a torch for CUDA and not with the default one."""


def installed() -> dict[str, Distribution]:
    """Our dependencies, those of the installed extras, and all their dependencies, by name."""
    found: dict[str, Distribution] = {}
    waiting = [*DIRECT, *OPTIONAL]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        for text in found[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed)
    return found


def licences(package: Distribution) -> Iterator[str]:
    """All that the metadata of a package says of its licence."""
    about = package.metadata
    yield from (about.get_all("License-Expression") or ())
    yield from (each for each in about.get_all("Classifier") or () if each.startswith("License ::"))
    yield from (text.strip().splitlines()[0] for text in about.get_all("License") or () if text)


@pytest.mark.parametrize("requirement", [*DIRECT, *OPTIONAL], ids=str)
def test_a_dependency_has_a_lower_bound_and_comes_from_the_index(requirement: Requirement) -> None:
    operators = {each.operator for each in requirement.specifier}
    assert requirement.url is None and ">=" in operators
    assert operators == {">="} or requirement.name in CAPPED


def test_everything_needed_is_here_in_a_version_that_was_asked_for() -> None:
    here = installed()
    for requirement in DIRECT:
        version = here[requirement.name].version
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_every_licence_is_permissive() -> None:
    unknown = {}
    for name, package in installed().items():
        said = [READ_BY_HAND[name]] if name in READ_BY_HAND else list(licences(package))
        allowed = name.startswith(OF_CUDA) or any(
            PERMISSIVE.search(each) and not STRICT.search(each) for each in said
        )
        if not allowed:
            unknown[name] = said
    assert not unknown


@pytest.mark.parametrize("said", ["GPL-3.0-or-later", "AGPL-3.0", "LGPLv3", "proprietary", ""])
def test_another_licence_is_not(said: str) -> None:
    assert not PERMISSIVE.search(said) or STRICT.search(said)


CLEAN = "No known vulnerabilities found"
FOUND = "Found 2 known vulnerabilities in 1 package"
NO_NETWORK = "ERROR: Failed to establish a new connection"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        (CLEAN, 0, "The service knew 3 of 3 packages."),
        (FOUND, 2, FOUND),
        (NO_NETWORK, 0, "NOT AUDITED: no service answered."),
    ],
)
def test_an_audit_fails_for_what_it_finds_and_not_for_want_of_a_network(
    tmp_path: Path, said: str, code: int, told: str
) -> None:
    (tmp_path / "bin").mkdir()
    tools = {
        "pip": 'if [ "$1" = list ]; then printf "a==1\\nb==1\\nc==1\\n"; fi',
        "pip-audit": f'echo "{said}"; [ "{said}" = "{CLEAN}" ]',
    }
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for mark in (".torch", ".demo", ".dev"):
        (tmp_path / mark).touch()
    ended = subprocess.run(
        ["make", "audit", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == code, ended
    assert told in ended.stdout
    assert ("NOT AUDITED" in ended.stdout) == (said == NO_NETWORK)
