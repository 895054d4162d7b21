"""The import path of our processes: installed packages, then folders that the user named.

Python puts the folder of the script, or the current folder, first on `sys.path`. A `random.py` or a
`json/` in a folder that somebody else packed would then run in place of the module that torch
imports. So commands and ranks remove that entry, and a folder of the user's own comes last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ISOLATED = ("-P",)
"""Interpreter options of every process that we start."""

_own: set[str] = set()
_PATH, _SAFE_PATH = "PYTHONPATH", "PYTHONSAFEPATH"


def isolate() -> None:
    """Takes the folder of the script and the current folder off `sys.path`, unless PYTHONPATH names
    them, here and in every interpreter that this process starts.

    Call it before the first import of anything that is not part of Python.
    """
    if not sys.flags.safe_path and sys.path:
        del sys.path[0]
    entries = os.environ.get(_PATH, "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    if os.environ.get(_PATH) and "" in entries:  # an empty entry is the current folder
        os.environ[_PATH] = os.pathsep.join(named)
        current = os.getcwd()
        if current not in map(os.path.abspath, named):
            sys.path[:] = [entry for entry in sys.path if entry not in ("", current)]
    os.environ[_SAFE_PATH] = "1"


def add_own_folder(folder: Path) -> None:
    """Makes the modules of a folder importable, where nothing installed is called the same."""
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.append(entry)
        _own.add(entry)


def is_own_folder(folder: Path) -> bool:
    """True if modules of a folder can be imported because the user named something there."""
    return str(folder.resolve()) in _own
