"""Trust in code that a folder or an option would run: made here, trusted by the user, or unknown.

Training imports a folder's `stage_*.py`, so a folder from elsewhere is only data until its user
trusts it. Two marks identify a folder, empty files in the user's state folder: one for its path and
plan, so that stages which the user edits there stay trusted, and one for the content of everything
it runs, so that a copy is known anywhere. The examples of this package are known by their content.

Options of a run may name code as well (`user_code.py`). It is known by a mark for its path and
name, so that its author may continue to edit it. So is the code that a folder runs in addition to
its own files: the criterion of its plan, and the user's modules that its stages import (a leaf
module whose class is the user's is imported by its stage). A module that is not installed is
searched for in the current folder and next to the file that the plan names as the model.

The folder of a run, a sweep or a comparison may come from an archive of somebody else. A link in it
with the name of one of our files would let us write to any place: `verify_no_links` refuses links
that lead out of a folder, `write_here` replaces them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AsyncPipeError
from ..import_path import is_own_folder
from ..user_code import MOST_BYTES, file_hash, names_object

STATE_VARIABLE = "ASYNCPIPE_STATE"
"""The environment variable that names the folder of the marks."""

_OURS = {*sys.stdlib_module_names, "asyncpipe", "torch"}


def own_modules(folder: Path, files: str = "*.py") -> Mapping[str, Path]:
    """The modules that `files` of a generated folder import and that are not installed: the file,
    or the folder of a package, of each one that exists."""
    paths = [path for path in folder.glob(files) if path.is_file()]
    sources = (path.read_bytes() for path in paths if path.stat().st_size <= MOST_BYTES)
    names = {name for source in sources for name in imported_names(source)}
    files_of = {name: _file_of(name, folder) for name in sorted(names - _OURS)}
    return {name: path for name, path in files_of.items() if path is not None}


def imported_names(source: bytes) -> set[str]:
    """The top-level modules that a stage imports by name, anywhere in it."""
    try:
        nodes = list(ast.walk(ast.parse(source.decode("utf-8"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the import will report it
        return set()
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0
    ]
    return {module.partition(".")[0] for module in modules} - {""}


def named_criterion(folder: Path) -> str | None:
    """The criterion that a folder's plan names."""
    name = _plan_of(folder).get("criterion")
    return name if isinstance(name, str) else None


def _file_of(name: str, folder: Path) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ValueError, ImportError):
        spec = None
    if spec is not None:
        inside = spec.submodule_search_locations
        places = [*inside] if inside is not None else [spec.origin or ""]
        own = [Path(place) for place in places if is_own_folder(Path(place).parent)]
        return own[0] if own else None
    return next(_beside(name, folder), None)


def _beside(name: str, folder: Path) -> Iterator[Path]:
    model, _, _ = str(_plan_of(folder).get("model", "")).partition(":")
    places = [Path.cwd()]
    if model.endswith(".py") and not Path(model).is_absolute():
        places.append(Path(model).parent.absolute())
    for place in places:
        yield from (
            path for path in (place / name, place / f"{name}.py") if path.is_dir() or path.is_file()
        )


def _plan_of(folder: Path) -> Mapping[str, Any]:
    """The content of plan.json as far as it can be read; errors in it are reported elsewhere."""
    try:
        path = folder / "plan.json"
        raw = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


_SHIPPED = frozenset({"9cff20b71e4299a4b87df5ad0e0ec5fb652d8434efba91bb203620bd628a7602"})
"""The `content_hash` of each folder of `generated_models` in the repository; a test keeps it
current."""


class TrustError(AsyncPipeError):
    """Code that would run, but was neither made here nor trusted."""


def remember(folder: str | Path) -> bool:
    """Marks a folder, and other code that it runs, as trusted; returns False if it could not be
    recorded."""
    outside = (mark for marks in _outside(Path(folder)).values() for mark in marks)
    return _left((*_marks(Path(folder)), *outside))


def remember_code(spec: str) -> bool:
    """Marks the code named by `module:function` or `path.py:function` as trusted; returns False if
    it could not be recorded."""
    return _left(_marks_of_code(spec))


def is_known_code(spec: str) -> bool:
    """True if the code that a spec names was trusted here before."""
    return any(mark.is_file() for mark in _marks_of_code(spec))


def is_trusted(folder: str | Path) -> bool:
    """True if a folder was made here, was trusted, or is one of the package's examples, and all
    other code that it runs is known too."""
    return _is_known(Path(folder)) and not _strange(Path(folder))


def untrusted(folder: str | Path) -> TrustError:
    """The error for a folder whose code must not run yet."""
    name = shlex.quote(str(folder))
    if _is_known(Path(folder)) and (strange := _strange(Path(folder))):
        return TrustError(
            f"training {folder} would also run {' and '.join(strange)}, which no command here has "
            "named.",
            f"Read it. Trust it from then on: asyncpipe-train {name} --trust",
        )
    return TrustError(
        f"{folder} was not made on this machine, and training it would run its stage_*.py.",
        f"Read them: asyncpipe-inspect {name} --stage 0. Trust them from then on: "
        f"asyncpipe-train {name} --trust",
    )


def code_hashes(folder: str | Path) -> dict[str, str]:
    """The SHA-256 of each Python file of a folder, by its name."""
    return _hashes_of(sorted(Path(folder).glob("*.py")))


def content_hash(folder: str | Path) -> str:
    """The SHA-256 of everything that a folder runs: its plan and its Python files."""
    return _hash_of([Path(folder) / "plan.json", *sorted(Path(folder).glob("*.py"))])


def state_folder() -> Path | None:
    """The folder of the marks: $ASYNCPIPE_STATE, or `asyncpipe` in the user's state folder; None if
    the user has no home."""
    if own := os.environ.get(STATE_VARIABLE):
        return Path(own)
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "asyncpipe"
    try:
        return Path.home() / ".local" / "state" / "asyncpipe"
    except RuntimeError:
        return None


def _is_known(folder: Path) -> bool:
    return content_hash(folder) in _SHIPPED or any(mark.is_file() for mark in _marks(folder))


def _strange(folder: Path) -> list[str]:
    """The unknown code that a folder would run in addition to its own files."""
    outside = _outside(folder).items()
    return [code for code, marks in outside if not any(mark.is_file() for mark in marks)]


def _outside(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The marks of the code that a folder runs in addition to its own files."""
    marks = {str(path): _marks_of_code(f"{path}:") for path in own_modules(folder).values()}
    if (criterion := named_criterion(folder)) and names_object(criterion):
        marks[criterion] = _marks_of_code(criterion)
    return marks


def _marks(folder: Path) -> tuple[Path, ...]:
    """The files that stand for this folder here, and for its content anywhere."""
    if (state := state_folder()) is None:
        return ()
    digest = hashlib.sha256(os.fsencode(folder.resolve()))
    digest.update(_hash_of([folder / "plan.json"]).encode())
    return state / "trusted" / digest.hexdigest(), state / "trusted" / content_hash(folder)


def _left(marks: tuple[Path, ...]) -> bool:
    """Makes the marks; returns False if that failed."""
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark.touch(mode=0o600)
    except OSError:
        return False
    return bool(marks)


def _marks_of_code(spec: str) -> tuple[Path, ...]:
    """The mark of a name in a file, or in a module as found from the current folder."""
    if (state := state_folder()) is None:
        return ()
    place, _, name = spec.rpartition(":")
    is_path = place.endswith(".py") or os.path.isabs(place)
    path = Path(place).resolve() if is_path else Path.cwd() / "-m" / place
    mark = hashlib.sha256(b"code\n" + os.fsencode(path) + f"\n{name}".encode())
    return (state / "trusted" / mark.hexdigest(),)


def _hash_of(files: list[Path]) -> str:
    content = "".join(f"{name}\n{content}\n" for name, content in _hashes_of(files).items())
    return hashlib.sha256(content.encode()).hexdigest()


def _hashes_of(files: list[Path]) -> dict[str, str]:
    return {path.name: file_hash(path) for path in files if path.is_file()}


def verify_no_links(folder: Path, error: type[AsyncPipeError]) -> None:
    """Raises `error` if a folder contains, at any depth, a link that leads out of it, or an entry
    that is neither a file nor a folder. A missing folder has none."""
    home = os.path.realpath(folder)
    for entry in _entries(home):
        name = os.path.join(folder, os.path.relpath(entry.path, home))
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath((home, target)) != home:
                raise error(
                    f"{name} is a link to {os.readlink(entry.path)}, outside of the folder, and "
                    "nothing is written through such links.",
                    "Remove the link, or name another folder with --output.",
                )
        elif not (entry.is_file() or entry.is_dir()):
            raise error(
                f"{name} is neither a file nor a folder.",
                "Remove it, or name another folder with --output.",
            )


def open_here(path: Path, flags: int) -> int:
    """Opens a file for writing; raises OSError (ELOOP) for a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_here(path: Path, text: str) -> None:
    """Writes a whole file; replaces a link of its name instead of following it."""
    path.unlink(missing_ok=True)
    descriptor = open_here(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
