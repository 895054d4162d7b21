"""`package.module:name` or `path/file.py:name` -> what the user's own code calls so."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .errors import AsyncPipeError
from .import_path import add_own_folder
from .wording import did_you_mean


def names_object(spec: str) -> bool:
    """Whether a text has the form `module:function` or `path.py:function`."""
    place, colon, name = spec.rpartition(":")
    return bool(colon and place and name.isidentifier())


def import_object(spec: str, option: str, error: type[AsyncPipeError]) -> Any:
    """Imports what `spec` names for the command-line `option`.

    Modules are also found in the folder of the command, and a file may import its neighbours, but
    what is installed comes first. Raises `error` when the file, the module or the name does not
    exist, or when the code fails.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        module = _import_own_file(Path(place), option, error)
    else:
        module = _import_module(place, option, error)
    if not hasattr(module, name):
        hint = did_you_mean(name, vars(module))
        raise error(f"{option} {spec}: {place} has no {name}. {hint}".rstrip())
    return getattr(module, name)


def import_file(path: Path, name: str, source: str | bytes | None = None) -> ModuleType:
    """Imports a file as the module `name`, from its source; raises what its code raises.

    No bytecode is read or written: what lies in a `__pycache__` beside a file need not be what the
    file says. `source` is what the file holds, if that was read before.
    """
    loader = _FromSource(name, str(path))
    loader.source = path.read_bytes() if source is None else source
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _FromSource(SourceFileLoader):
    """Compiles what it is given, whatever bytecode there is."""

    source: str | bytes

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.get_filename(fullname))
        return code


def hashed_name(prefix: str, path: Path) -> str:
    """A module name for a file that no other file has."""
    return f"{prefix}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


@contextmanager
def told_as(error: type[AsyncPipeError], what: str) -> Iterator[None]:
    """An exception in the user's code becomes one sentence with the line it came from."""
    try:
        yield
    except AsyncPipeError:
        raise
    except Exception as cause:
        place = own_line(cause) or last_line(cause)
        raise error(f"{what} failed at {place}: {type(cause).__name__}: {cause}") from cause


def own_line(error: BaseException) -> str:
    """`data.py:12`: the last line that an exception came through of code that is neither ours nor
    installed; "" where there is none."""
    files = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in files if is_own_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def last_line(error: BaseException) -> str:
    """Where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def is_own_file(file: str) -> bool:
    """Whether a file is neither ours nor installed."""
    if not os.path.isfile(file):
        return False  # <string>, <frozen importlib>
    return not any(Path(file).is_relative_to(folder) for folder in _NOT_OWN)


_PACKAGE = Path(__file__).parent.parent
_NOT_OWN = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    *(_PACKAGE / name for name in ("runtime", "partitioner", "commands", "cli.py")),
    Path(sys.prefix),
)
"""Where code is that is not the user's."""


def check_own_file(spec: str, option: str, error: type[AsyncPipeError]) -> None:
    """Raises `error` where a text names an object of a file that does not exist; runs nothing."""
    place = spec.rpartition(":")[0]
    if names_object(spec) and place.endswith(".py"):
        _check_is_file(Path(place), option, error)


def _check_is_file(path: Path, option: str, error: type[AsyncPipeError]) -> None:
    if not path.is_file():
        raise error(f"{option} {path}: no such file.", f"{option} path/to/file.py:function")


def _import_own_file(path: Path, option: str, error: type[AsyncPipeError]) -> ModuleType:
    """Under its own name, unless that is another module's, so that its classes are called what they
    are."""
    _check_is_file(path, option, error)
    for name in (path.stem, hashed_name(path.stem, path)):
        known = sys.modules.get(name)
        if known is not None:
            if Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
                return known
        elif name != path.stem or not is_installed(name):
            add_own_folder(path.parent)
            with told_as(error, f"{option} {path}"):
                return import_file(path, name)
    raise AssertionError(f"{path} has no name")


def is_installed(name: str) -> bool:
    """Whether there is a module of this name on the path as it is now."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ValueError, ImportError):  # a name with dots, of a package that is none
        return False


def _import_module(name: str, option: str, error: type[AsyncPipeError]) -> ModuleType:
    if not is_installed(name.partition(".")[0]):
        add_own_folder(Path.cwd())
    with told_as(error, f"{option} {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as cause:
            raise error(
                f"{option} {name}: there is no module {cause.name}.",
                "Run from the folder that holds it, or name the file: path/to/file.py:function",
            ) from cause
