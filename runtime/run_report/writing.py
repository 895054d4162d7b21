"""A run's folder -> the report in it, written when the run is over, however it ends."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError, why_ended
from ..links import write_here
from ..watching.metrics import append_line
from .comparison import Comparison
from .comparison_page import render_comparison
from .page import render_run
from .records import METRICS, RunRecords, read_run

REPORT, COMPARISON = "report.html", "comparison.html"
_TROUBLE = "report-error.txt"


def write_report(run: RunRecords, file: Path | None = None) -> Path:
    """Writes the page about a run, by default into its folder. Raises DataError when it cannot be
    written."""
    return _write(file or run.folder / REPORT, render_run(run))


def write_comparison(comparison: Comparison, file: Path | None = None) -> Path:
    """Writes the page about several runs, by default beside the first's folder. Raises DataError
    when it cannot be written."""
    beside = comparison.runs[0].folder.resolve().parent / COMPARISON
    return _write(file or beside, render_comparison(comparison))


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Leaves the report in a run's folder at the end, after an error too, which is then among the
    records. What goes wrong with the report itself costs no run: it is told in a file beside."""
    try:
        yield
    except BaseException as error:
        _leave(folder, why_ended(error))
        raise
    _leave(folder, "")


def _leave(folder: Path, failure: str) -> None:
    if not (folder / METRICS).is_file():
        return
    try:
        if failure and read_run(folder).failure != failure:
            _add_failure(folder / METRICS, failure)
        write_report(read_run(folder))
    except (OSError, DataError):
        return  # of a full disk, for one, the run says itself
    except Exception:
        write_here(folder / _TROUBLE, traceback.format_exc())


def _write(file: Path, page: str) -> Path:
    made = file.with_name(f".{file.name}.made")
    try:
        write_here(made, page)
        made.replace(file)
    except OSError as error:
        raise DataError(
            f"{file} cannot be written: {(error.strerror or str(error)).lower()}.",
            "Name another file with --output.",
        ) from error
    return file


def _add_failure(path: Path, text: str) -> None:
    """A last record, behind a line that a killed process may have left unfinished."""
    record = {"event": "failure", "text": text, "time_s": round(time.time(), 3)}
    unfinished = not path.read_bytes().endswith(b"\n")
    append_line(path, "\n" * unfinished + json.dumps(record))
