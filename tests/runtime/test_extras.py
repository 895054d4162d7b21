"""The hints that name missing packages."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from asyncpipe.runtime import extras

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def without_versions(packages: dict[str, list[str]]) -> dict[str, set[str]]:
    return {
        extra: {re.split("[<>=]", package)[0] for package in named}
        for extra, named in packages.items()
    }


@pytest.mark.parametrize("extra", DECLARED)
def test_a_hint_names_every_package_of_its_extra_and_never_asyncpipe(extra: str) -> None:
    hint = extras.install(extra)
    assert hint.startswith("pip install ")
    assert "asyncpipe" not in hint
    assert all(package in hint for package in DECLARED[extra])


def test_an_installed_package_has_the_hints_of_its_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras, "_SOURCE", tmp_path / "pyproject.toml")
    if not any("extra ==" in line for line in requires("asyncpipe") or []):
        pytest.fail("the environment of the tests has no metadata of asyncpipe")
    installed = without_versions(extras.packages())
    assert {extra: installed[extra] for extra in DECLARED} == without_versions(DECLARED)


def test_pages_install_the_packages_that_the_hints_name() -> None:
    hints = {extras.install(extra) for extra in DECLARED}
    shown = {
        command
        for page in PAGES
        for command in re.findall(r"pip install '[^`\n]*'", page.read_text())
    }
    assert shown
    assert shown <= hints


def test_no_file_advises_to_install_asyncpipe_from_the_package_index() -> None:
    folders = ("partitioner", "runtime", "commands", "templates", "examples", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    advised = re.compile(r"pip install (?!-e )[^\n`]*asyncpipe|asyncpipe\[")
    assert [path for path in (*files, *PAGES) if advised.search(path.read_text())] == []
