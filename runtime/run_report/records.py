"""metrics.jsonl and config.toml of a run's folder -> one value, as far as they reach.

A run may have been killed in the middle of a line, started again, or written by another version: a
line that is no record is counted and left out, a field that is no number is not a number. Steps
that were made again after a restart stand for those made before.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..schedule import Action
from ..timeline import Event as Did
from ..timeline import Timeline

METRICS, CONFIG = "metrics.jsonl", "config.toml"
Record = Mapping[str, Any]
_RANKS, _LONG_MS = 4096, 1e12


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened after `step` steps, so many seconds after the run first began."""

    step: int
    elapsed_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step as it was simulated, at which costs, and as it was measured."""

    costs: str
    simulated: Timeline
    measured: Timeline


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run. `steps` and `evals` have `elapsed_s`, the time that it trained, which goes on where a
    checkpoint has it. Events have that of the clock.

    `start` and `end` are empty where there are none; `failure` is what the run ended for, "" if it
    did not fail or nobody could say so. `damaged` lines were no records.
    """

    folder: Path
    config: Record
    start: Record
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Event, ...]
    drawn: Drawn | None
    end: Record
    failure: str
    damaged: int

    @property
    def last_step(self) -> int:
        """The last step that was recorded, 0 before the first."""
        return int(number(self.steps[-1], "step")) if self.steps else 0

    def series(self, name: str, by: str = "step") -> tuple[tuple[float, float], ...]:
        """A field of the steps against another."""
        return points(self.steps, name, by)


def read_run(folder: Path) -> RunRecords:
    """Raises DataError for a folder that holds no run."""
    path = folder / METRICS
    if not path.is_file():
        raise DataError(
            f"{folder} holds no run: there is no {METRICS} in it.",
            "Name a folder that asyncpipe-train wrote, such as runs/gpt2_4p/1.",
        )
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [record for line in lines if (record := _record(line)) is not None]
    return _gathered(folder, _config(folder / CONFIG), found, len(lines) - len(found))


def number(record: Record, name: str) -> float:
    """A field that is a number; else, or where it is missing, not a number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def numbers(record: Record, name: str) -> tuple[float, ...]:
    """A field that is a list of numbers; else, or where it is missing, none."""
    value = record.get(name)
    if not isinstance(value, list):
        return ()
    found = tuple(number({name: each}, name) for each in value)
    return () if any(map(math.isnan, found)) else found


def part(record: Record, name: str) -> Record:
    """A field that has fields; else, or where it is missing, none."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def points(records: Iterable[Record], name: str, by: str) -> tuple[tuple[float, float], ...]:
    """A field against another, where both are numbers."""
    pairs = ((number(record, by), number(record, name)) for record in records)
    return tuple(pair for pair in pairs if not any(map(math.isnan, pair)))


def _record(line: str) -> Record | None:
    try:
        value = json.loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def _config(path: Path) -> Record:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _gathered(folder: Path, config: Record, records: Sequence[Record], damaged: int) -> RunRecords:
    start: Record = {}
    end: Record = {}
    steps: list[Record] = []
    evals: list[Record] = []
    events: list[Event] = []
    drawn: Drawn | None = None
    failure, began_s = "", math.nan

    def happened(record: Record, kind: str, text: str) -> None:
        elapsed_s = number(record, "time_s") - began_s
        found = number(record, "step")
        if not math.isfinite(found):
            found = number(steps[-1], "step") if steps else 0
        events.append(Event(int(found), elapsed_s, kind, text))

    for record in records:
        match record["event"]:
            case "start":
                if start:
                    happened(record, "started again", "")
                else:
                    began_s = number(record, "time_s")
                start, end, failure = record, {}, ""
            case "step":
                _add(steps, record)
            case "eval":
                _add(evals, _at_its_time(record, steps))
            case "end":
                end = record
            case "timelines":
                drawn = _drawn(record) or drawn
            case "failure":
                failure = str(record.get("text", ""))
                happened(record, "failure", failure)
            case "note":
                happened(record, str(record.get("about", "note")), str(record.get("text", "")))
            case "warning":
                happened(record, "warning", str(record.get("text", "")))
    return RunRecords(
        folder,
        config,
        start,
        tuple(steps),
        tuple(evals),
        tuple(events),
        drawn,
        end,
        failure,
        damaged,
    )


def _add(known: list[Record], record: Record) -> None:
    """The record behind those of earlier steps; what was made before of later ones is gone."""
    step = number(record, "step")
    if not math.isfinite(step):
        return
    while known and number(known[-1], "step") >= step:
        known.pop()
    known.append(record)


def _at_its_time(evaluation: Record, steps: Sequence[Record]) -> Record:
    """An evaluation with the time of the last step before it that was recorded."""
    step = number(evaluation, "step")
    before = [each for each in steps[-2:] if number(each, "step") <= step]
    return {**evaluation, "elapsed_s": number(before[-1], "elapsed_s") if before else math.nan}


def _drawn(record: Record) -> Drawn | None:
    simulated, measured = (_timeline(name, record.get(name)) for name in ("simulated", "measured"))
    if simulated is None or measured is None:
        return None
    return Drawn(str(record.get("costs", "")), simulated, measured)


def _timeline(name: str, plain: object) -> Timeline | None:
    """What `MetricsFile` wrote of a timeline; None if it is something else."""
    try:
        events = tuple(
            Did(int(rank), Action(int(stage), kind, int(index)), float(start_ms), float(end_ms))
            for rank, stage, kind, index, start_ms, end_ms in plain  # type: ignore[attr-defined]
            if kind in ("F", "B", "W", "S") and 0 <= int(rank) < _RANKS
        )
    except (TypeError, ValueError, OverflowError):
        return None
    if not events or any(abs(event.start_ms) + abs(event.end_ms) > _LONG_MS for event in events):
        return None
    return Timeline(name, 1 + max(event.rank for event in events), events)
