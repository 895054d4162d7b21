"""Runs a command of ours in this process: returns its output and its exit code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from asyncpipe.commands.running import DEFECT, run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def command(folder: Path, name: str, *arguments: str) -> Outcome:
    """`asyncpipe-NAME ARGUMENTS` in a folder. A defect fails the test."""
    out, err = io.StringIO(), io.StringIO()
    app = importlib.import_module(f"asyncpipe.commands.{name}").app
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _inside(folder):
        with mock.patch.object(sys, "argv", [f"asyncpipe-{name}", *arguments]):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Cyclopts application invoked")
                code = run(app)
    assert DEFECT not in err.getvalue(), err.getvalue()
    return Outcome(code, out.getvalue(), err.getvalue())


def error_of(folder: Path, name: str, *arguments: str, code: int = 1) -> str:
    """The message of a command that fails: one sentence, and below it the cure."""
    outcome = command(folder, name, *arguments)
    assert outcome.code == code, outcome
    assert outcome.err.startswith("error: "), outcome
    return outcome.err


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
