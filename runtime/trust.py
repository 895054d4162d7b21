"""Whose code it is that would be run: made or named here, trusted by the user, or a stranger's.

Training imports a folder's `stage_*.py`, so a folder that came from elsewhere is data until its
user says otherwise. A folder is known by either of two marks, files of no content in the user's own
folder for state: one for where it is and which plan is there, so that stages which the user edits
there stay his own, and one for all that it runs, so that a copy of it is known wherever it lies.
The examples that come with this package are known by their content too.

Options of a run may name code as well (`training/named_code.py`). That is known by a mark for where
it is and what is called there, so that its author may go on editing it. So is what a folder runs
beside its own files: the criterion of its plan, and modules of the user's that its stages import.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

from .errors import AsyncPipeError
from .own_modules import named_criterion, own_modules
from .user_code import names_object

_SHIPPED = frozenset({"91a525a4de7e0fef69399f7fc3d8faf2a2f3294956d55e0044975a5916bc9ffd"})
"""What `generated_models` holds in the repository, as `content_hash` has it; a test keeps it so."""


class TrustError(AsyncPipeError):
    """Code that would be run and that nobody here has made or trusted."""


def remember(folder: str | Path) -> bool:
    """Trusts a folder, and what it runs beside its own files, from now on; whether that could be
    noted."""
    outside = (mark for marks in _outside(Path(folder)).values() for mark in marks)
    return _left((*_marks(Path(folder)), *outside))


def remember_code(spec: str) -> bool:
    """Trusts what `module:function` or `path.py:function` names from now on; whether that could be
    noted."""
    return _left(_marks_of_code(spec))


def is_known_code(spec: str) -> bool:
    """Whether what a spec names was trusted here before."""
    return any(mark.is_file() for mark in _marks_of_code(spec))


def is_trusted(folder: str | Path) -> bool:
    """Whether a folder was made here, was trusted, or is one of the package's examples, and all
    that it runs beside its own files is known too."""
    return _is_known(Path(folder)) and not _strange(Path(folder))


def untrusted(folder: str | Path) -> TrustError:
    """What to tell of a folder whose code is not to be run yet."""
    name = shlex.quote(str(folder))
    if _is_known(Path(folder)) and (strange := _strange(Path(folder))):
        return TrustError(
            f"to train {folder} is also to run {' and '.join(strange)}, which no command here has "
            "named.",
            f"Read it. Trust it from then on: asyncpipe-train {name} --trust",
        )
    return TrustError(
        f"{folder} was not made on this machine, and to train it is to run its stage_*.py.",
        f"Read them: asyncpipe-inspect {name} --stage 0. Trust them from then on: "
        f"asyncpipe-train {name} --trust",
    )


def code_hash(folder: str | Path) -> str:
    """The SHA-256 of a folder's Python files."""
    return _hash_of(sorted(Path(folder).glob("*.py")))


def content_hash(folder: str | Path) -> str:
    """The SHA-256 of all that a folder has run: its plan and its Python files."""
    return _hash_of([Path(folder) / "plan.json", *sorted(Path(folder).glob("*.py"))])


def state_folder() -> Path | None:
    """Where marks are kept: $ASYNCPIPE_STATE, or `asyncpipe` in the user's folder for state; None
    where the user has no home."""
    if own := os.environ.get("ASYNCPIPE_STATE"):
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
    """What a folder would run beside its own files and that is not known here."""
    outside = _outside(folder).items()
    return [code for code, marks in outside if not any(mark.is_file() for mark in marks)]


def _outside(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The marks of what a folder runs beside its own files."""
    found = {str(path): _marks_of_code(f"{path}:") for path in own_modules(folder).values()}
    if (criterion := named_criterion(folder)) and names_object(criterion):
        found[criterion] = _marks_of_code(criterion)
    return found


def _marks(folder: Path) -> tuple[Path, ...]:
    """The files that stand for this folder here, and for its content anywhere."""
    if (state := state_folder()) is None:
        return ()
    here = hashlib.sha256(os.fsencode(folder.resolve()))
    here.update(_hash_of([folder / "plan.json"]).encode())
    return state / "trusted" / here.hexdigest(), state / "trusted" / content_hash(folder)


def _left(marks: tuple[Path, ...]) -> bool:
    """Makes the marks; whether that could be done."""
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark.touch(mode=0o600)
    except OSError:
        return False
    return bool(marks)


def _marks_of_code(spec: str) -> tuple[Path, ...]:
    """The file that stands for a name in a file, or in a module as it is found from this folder."""
    if (state := state_folder()) is None:
        return ()
    place, _, name = spec.rpartition(":")
    is_path = place.endswith(".py") or os.path.isabs(place)
    path = Path(place).resolve() if is_path else Path.cwd() / "-m" / place
    told = hashlib.sha256(b"code\n" + os.fsencode(path) + f"\n{name}".encode())
    return (state / "trusted" / told.hexdigest(),)


def _hash_of(files: list[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            found.update(f"{path.name}\n{content}\n".encode())
    return found.hexdigest()
