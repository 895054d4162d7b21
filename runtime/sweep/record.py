"""What is known of each run of a sweep, as `sweep.json` keeps it from one call to the next."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..reading import Origin, parse_json, read_text, shaped

FILE = "sweep.json"
WAITING, FINISHED, FAILED = "waiting", "finished", "failed"


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep; its folder is called `name`.

    `key` stands for all that decides its losses. `loss` is that of its last evaluation, or of its
    last step where nothing was evaluated; `error` is what a run that failed said.
    """

    name: str
    values: Mapping[str, Any]
    key: str
    state: str = WAITING
    loss: float | None = None
    train_loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Record:
    runs: tuple[SweptRun, ...]


def read_record(folder: Path) -> dict[str, SweptRun]:
    """The runs of a sweep's folder by name; none of a folder without a record.

    Raises DataError for a record that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    cure = "Remove it, or give another folder with --output."
    origin = Origin(f"{path} is no record of a sweep: it", DataError, cure)
    record = shaped(_Record, parse_json(read_text(path, origin), origin, finite=False), origin)
    return {run.name: run for run in record.runs}


def write_record(folder: Path, runs: Mapping[str, SweptRun]) -> None:
    """Writes the record in one move, so that no reader sees a part of it."""
    lines = ",\n  ".join(run.to_json() for run in runs.values())
    aside = folder / f".{FILE}"
    aside.write_text(f'{{"runs": [\n  {lines}\n]}}\n', encoding="utf-8")
    aside.replace(folder / FILE)


def with_outcome(run: SweptRun, folder: Path, code: int, log: Path) -> SweptRun:
    """The run with what its process left: an exit code, metrics in its folder, and a log."""
    if code != 0:
        return replace(run, state=FAILED, error=_last_error(log) or f"ended with exit code {code}")
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    end = next(event for event in map(json.loads, reversed(lines)) if event["event"] == "end")
    evaluated = end["eval_loss"]
    return replace(
        run,
        state=FINISHED,
        loss=end["last_loss"] if evaluated is None else evaluated,
        train_loss=end["last_loss"],
        accuracy=end["accuracy"],
        seconds=round(end["seconds"], 3),
        error="",
    )


def _last_error(log: Path) -> str:
    found = re.findall(r"^error: (.*)", log.read_text(encoding="utf-8", errors="replace"), re.M)
    return str(found[-1]) if found else ""
