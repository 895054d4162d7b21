"""Modules of the user's own that the stages of a folder import, and the files that these are.

A leaf whose class is the user's is imported by its stage. Where nothing installed has its module,
it is looked for where the command runs and beside the file that the plan names as the model.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .import_path import is_own_folder

_OURS = {*sys.stdlib_module_names, "asyncpipe", "torch"}


def own_modules(folder: Path, files: str = "*.py") -> Mapping[str, Path]:
    """The modules that `files` of a generated folder import and that are not installed: the file,
    or the folder of a package, of each that is found."""
    paths = [path for path in folder.glob(files) if path.is_file()]
    names = {name for path in paths for name in imported_names(path.read_bytes())}
    found = {name: _file_of(name, folder) for name in sorted(names - _OURS)}
    return {name: path for name, path in found.items() if path is not None}


def imported_names(source: bytes) -> set[str]:
    """The top-level modules that a stage imports by name, wherever in it."""
    try:
        nodes = list(ast.walk(ast.parse(source.decode("utf-8"))))
    except (SyntaxError, ValueError, RecursionError):  # whoever imports it is told so
        return set()
    modules = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
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
    """What plan.json says, as far as it can be read: what is wrong with it is told elsewhere."""
    try:
        path = folder / "plan.json"
        raw = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
