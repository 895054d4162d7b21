"""metrics.jsonl and config.toml of a run's folder -> the records of the run.

A run may have been killed in the middle of a line, restarted, or written by another version: lines
that are not records are counted and skipped, and fields that should be numbers but are not become
NaN. Steps that were repeated after a restart replace the earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..schedule.schedule import Action
from ..schedule.simulate import Event as Did
from ..schedule.simulate import Timeline
from ..serialization import Origin, parse_toml, read_text
from .tail import Record, Tail

METRICS, CONFIG = "metrics.jsonl", "config.toml"
_RANKS, _LONG_MS = 4096, 1e12


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event of a run.

    step: the number of steps before it.
    elapsed_s: the seconds since the run first began.
    kind, text: its kind and its text.
    """

    step: int
    elapsed_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step as a timeline.

    costs: the origin of the simulation's costs.
    simulated, measured: the step as simulated and as measured.
    """

    costs: str
    simulated: Timeline
    measured: Timeline


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run.

    folder: its folder.
    config: its options.
    start, end: the records of its start and end; empty if missing.
    steps, evals: its steps and evaluations; their `elapsed_s` is training time, which continues
        from a
        checkpoint.
    events: its notes, warnings and failures; their `elapsed_s` is wall-clock time.
    drawn: the timelines of a step, if recorded.
    failure: the error that ended it; "" if there is none.
    damaged: the number of lines that are not records.
    losses: the losses of all recorded steps, also of those that were not logged.
    """

    folder: Path
    config: Record
    start: Record
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[RunEvent, ...]
    drawn: Drawn | None
    end: Record
    failure: str
    damaged: int
    losses: tuple[Record, ...] = ()

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return int(number(self.steps[-1], "step")) if self.steps else 0

    def series(self, name: str, by: str = "step") -> tuple[tuple[float, float], ...]:
        """A field of the steps as a function of another."""
        return points(self.steps, name, by)


def read_run(folder: Path) -> RunRecords:
    """The records of a run. Raises DataError for a folder without a run."""
    path = folder / METRICS
    if not path.is_file():
        raise not_a_run(folder)
    tail = Tail(path)
    tail.finish()
    return gathered(folder, tail)


def not_a_run(folder: Path) -> DataError:
    """The error for a folder without a run."""
    return DataError(
        f"{folder} does not contain a run: {METRICS} is missing.",
        "Give a folder that asyncpipe-train wrote, such as runs/gpt2_4p/1.",
    )


def number(record: Record, name: str) -> float:
    """A field that is a number; NaN if it is missing or of another type."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def numbers(record: Record, name: str) -> tuple[float, ...]:
    """A field that is a list of numbers; empty if it is missing or of another type."""
    value = record.get(name)
    if not isinstance(value, list):
        return ()
    values = tuple(number({name: item}, name) for item in value)
    return () if any(map(math.isnan, values)) else values


def part(record: Record, name: str) -> Record:
    """A field that is an object; empty if it is missing or of another type."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def points(records: Iterable[Record], name: str, by: str) -> tuple[tuple[float, float], ...]:
    """A field as a function of another, where both are numbers."""
    pairs = ((number(record, by), number(record, name)) for record in records)
    return tuple(pair for pair in pairs if not any(map(math.isnan, pair)))


def _config(path: Path) -> Record:
    origin = Origin(str(path), DataError)
    try:
        return parse_toml(read_text(path, origin), origin)
    except DataError:
        return {}


def gathered(folder: Path, tail: Tail) -> RunRecords:
    """The run of a folder from the records that were read of its metrics.jsonl."""
    config = _config(folder / CONFIG)
    start: Record = {}
    end: Record = {}
    steps: list[Record] = []
    losses: list[Record] = []
    evals: list[Record] = []
    events: list[RunEvent] = []
    drawn: Drawn | None = None
    failure, began_s = "", math.nan

    def happened(record: Record, kind: str, text: str) -> None:
        elapsed_s = number(record, "time_s") - began_s
        step = number(record, "step")
        if not math.isfinite(step):
            step = number(steps[-1], "step") if steps else 0
        events.append(RunEvent(int(step), elapsed_s, kind, text))

    for record in tail.records():
        match record["event"]:
            case "start":
                if start:
                    happened(record, "started again", "")
                else:
                    began_s = number(record, "time_s")
                start, end, failure = record, {}, ""
            case "step":
                _add(steps, record)
                _add(losses, record)
            case "loss":
                _add(losses, record)
            case "eval":
                _add(evals, _at_its_time(record, losses))
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
        tail.damaged,
        tuple(losses),
    )


def _add(known: list[Record], record: Record) -> None:
    """Appends a record, after dropping those of the same or later steps."""
    step = number(record, "step")
    if not math.isfinite(step):
        return
    while known and number(known[-1], "step") >= step:
        known.pop()
    known.append(record)


def _at_its_time(evaluation: Record, steps: Sequence[Record]) -> Record:
    """An evaluation with the time of the last recorded step before it."""
    step = number(evaluation, "step")
    before = [record for record in steps[-2:] if number(record, "step") <= step]
    return {**evaluation, "elapsed_s": number(before[-1], "elapsed_s") if before else math.nan}


def _drawn(record: Record) -> Drawn | None:
    simulated, measured = (_timeline(name, record.get(name)) for name in ("simulated", "measured"))
    if simulated is None or measured is None:
        return None
    return Drawn(str(record.get("costs", "")), simulated, measured)


def _timeline(name: str, plain: object) -> Timeline | None:
    """A timeline as `MetricsFile` writes it; None for other content."""
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
