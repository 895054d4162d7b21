"""Files between a job's folder and its URLs: data and plans fetched, plans and results uploaded.

A list of the fetched files and their versions is kept: complete files are not fetched again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import DataError
from ..formatting import counted, write_bytes
from ..locations import LocationError, RemoteFolder
from ..serialization import Origin, parse_json, read_text, shaped

_LIST = ".fetched.json"
_PLAN_FILE = "plan.json"
MADE_FROM = "made-from.json"
"""The file that says what a job's plan was made from (`steps.made_from`)."""


def fetch(url: str, target: Path) -> str:
    """Copies all files of a location into a folder; returns what was done in words.

    Raises LocationError when they cannot be read, and for a name that leads out of the folder.
    """
    location = RemoteFolder(url)
    files = location.list()
    for file in files:
        if _leads_out(file.name):
            raise LocationError(f"{url} has a file with the name {file.name!r}.", "Rename it.")
    known = _read_list(target / _LIST)
    waiting = [
        file
        for file in files
        if known.get(file.name) != file.version or not (target / file.name).is_file()
    ]
    target.mkdir(parents=True, exist_ok=True)
    for file in waiting:
        location.fetch(file, target / file.name)
        known[file.name] = file.version
        _write(target / _LIST, known)
    for name in known.keys() - {file.name for file in files}:
        (target / name).unlink(missing_ok=True)
    size = write_bytes(sum(file.bytes for file in waiting))
    kept = len(files) - len(waiting)
    return f"{counted(len(waiting), 'file')}, {size}" + (f"; {kept} were here" if kept else "")


def upload(files: Iterable[Path], base: Path, url: str) -> str:
    """Copies files, under their paths in `base`, to a location; returns what was done in words."""
    location = RemoteFolder(url)
    count = size = 0
    for file in files:
        location.put_file(file, file.relative_to(base).as_posix())
        count, size = count + 1, size + file.stat().st_size
    return f"{counted(count, 'file')}, {write_bytes(size)}"


def upload_plan(plan: Path, made_from: Path, url: str) -> str:
    """Copies a generated folder and what it was made from in place of another one; its plan.json
    last, without which it is not complete."""
    RemoteFolder(url).clear(_PLAN_FILE)
    upload([made_from], made_from.parent, url)
    last = plan / _PLAN_FILE
    inside = {path for path in plan.rglob("*") if path.is_file()}
    return upload([*sorted(inside - {last}), last], plan, url)


def fetch_plan(url: str, aside: Path, made_from: Path) -> bool:
    """Copies a complete generated folder to `aside`, and what it was made from to `made_from`;
    False if there is none."""
    try:
        names = {file.name for file in RemoteFolder(url).list()}
    except LocationError as missing:
        if isinstance(missing.__cause__, Exception):
            raise
        return False
    if not {_PLAN_FILE, MADE_FROM} <= names:
        return False
    fetch(url, aside)
    (aside / _LIST).unlink()
    (aside / MADE_FROM).replace(made_from)
    return True


def read_made_from(path: Path) -> object:
    """The origin of a plan; None if it is not known."""
    origin = Origin(str(path), DataError, "Remove it.")
    return parse_json(read_text(path, origin), origin) if path.is_file() else None


def write_made_from(path: Path, value: object) -> None:
    """Notes what a plan was made from."""
    _write(path, value)


def _read_list(path: Path) -> dict[str, str]:
    """The versions of the fetched files by name; of names that stay in the folder."""
    origin = Origin(str(path), DataError, "Remove it.")
    if not path.is_file():
        return {}
    versions = shaped(dict[str, str], parse_json(read_text(path, origin), origin), origin)
    return {name: version for name, version in versions.items() if not _leads_out(name)}


def _leads_out(name: str) -> bool:
    """True for a name that is not a path inside of a folder."""
    return not name or ".." in Path(name).parts or Path(name).is_absolute()


def _write(path: Path, value: object) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
