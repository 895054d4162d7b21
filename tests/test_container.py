"""The example of a container installs what the Makefile installs, with what there is."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEGAL = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the file and what stands behind each, in one line."""
    text = (ROOT / "examples" / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_every_instruction_is_one() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM" and set(words) <= LEGAL
    for command in of("RUN"):
        result = subprocess.run(["sh", "-n"], input=command, text=True, capture_output=True)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_image_has_a_python_that_will_do() -> None:
    (image,) = of("FROM")
    version = re.fullmatch(r"docker\.io/library/python:(\d+)\.(\d+)-slim", image)
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, version.groups())) >= least


def test_it_installs_by_the_makefile_with_extras_that_there_are() -> None:
    (install,) = (command for command in of("RUN") if command.startswith("make "))
    given = dict(word.split("=", 1) for word in shlex.split(install) if "=" in word)
    assert set(given) == {"VENV", "TORCH_BACKEND", "EXTRAS"}
    (backend,) = of("ARG")
    assert given["TORCH_BACKEND"] == "$TORCH_BACKEND" and backend == "TORCH_BACKEND=cpu"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(given["EXTRAS"].split(",")) <= set(extras)
    (path,) = of("ENV")
    assert path == f"PATH={given['VENV']}/bin:$PATH"
    would = subprocess.run(
        ["make", "--dry-run", *shlex.split(install)[1:]], cwd=ROOT, text=True, capture_output=True
    )
    assert would.returncode == 0, would.stderr
    assert f'{given["VENV"]}/bin/pip install -q -e ".[{given["EXTRAS"]}]"' in would.stdout
    assert f"python3 -m venv {given['VENV']}" in would.stdout


def test_what_git_ignores_is_not_copied() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    of_git = (ROOT / ".gitignore").read_text().splitlines()
    patterns = {
        f"**/{line.rstrip('/')}" for line in of_git if not line.startswith(("!", "generated"))
    }
    assert patterns | {".git"} <= ignored
