"""Runs of a sweep -> their record, the tables of their results, and which strategy to take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.batch_layout import StepBatch
from ..errors import DataError
from ..formatting import (
    Column,
    Table,
    write_accuracy,
    write_bytes,
    write_count,
    write_duration,
    write_loss,
    write_share,
)
from ..monitoring.run_files import RunRecords, read_run
from ..reports.measures import UNITS, most_memory, rate_field, rate_of
from ..reports.time_parts import parts_of
from ..serialization import Origin, parse_json, read_text, shaped
from ..training.setup import Job
from .strategies import STRATEGY
from .variants import in_words

FILE = "sweep.json"
WAITING, FINISHED, FAILED = "waiting", "finished", "failed"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Figures:
    """The size of a run's steps and what they took; 0 where unknown.

    samples: samples of a step, in all replicas.
    rate, unit: samples or tokens a second.
    memory_bytes: the memory of the stages on the fullest rank.
    parts: shares of the ranks' time, see `parts_of`.
    """

    samples: int = 0
    rate: float = 0.0
    unit: str = "samples"
    memory_bytes: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep."""

    name: str
    """The name of its folder."""
    values: Mapping[str, Any]
    """The values of the varied options."""
    key: str
    """A hash of everything that decides its losses."""
    state: str = WAITING
    loss: float | None = None
    """The loss of its last evaluation, or of its last step if it made none."""
    train_loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""
    """The message of a failed run, or the memory that one without enough needed."""
    figures: Figures = Figures()

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Record:
    runs: tuple[SweptRun, ...]


def read_record(folder: Path) -> dict[str, SweptRun]:
    """The runs of a sweep's folder by name; empty for a folder without a record.

    Raises DataError for a record that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    cure = "Remove it, or give another folder with --output."
    origin = Origin(f"{path} is not a record of a sweep: it", DataError, cure)
    record = shaped(_Record, parse_json(read_text(path, origin), origin, finite=False), origin)
    return {run.name: run for run in record.runs}


def write_record(folder: Path, runs: Mapping[str, SweptRun]) -> None:
    """Writes the record atomically."""
    lines = ",\n  ".join(run.to_json() for run in runs.values())
    aside = folder / f".{FILE}"
    aside.write_text(f'{{"runs": [\n  {lines}\n]}}\n', encoding="utf-8")
    aside.replace(folder / FILE)


def with_outcome(run: SweptRun, job: Job, code: int, log: Path) -> SweptRun:
    """The run with the result of its process: an exit code, metrics in its folder, and a log."""
    if code != 0:
        error = error_in(log) or f"ended with exit code {code}"
        return replace(
            run, state=OUT_OF_MEMORY if ran_out_of_memory(error) else FAILED, error=error
        )
    records = read_run(job.folder)
    end = records.end
    evaluated = end["eval_loss"]
    return replace(
        run,
        state=FINISHED,
        loss=end["last_loss"] if evaluated is None else evaluated,
        train_loss=end["last_loss"],
        accuracy=end["accuracy"],
        seconds=round(end["seconds"], 3),
        error="",
        figures=_figures(job, records),
    )


def _figures(job: Job, records: RunRecords) -> Figures:
    return Figures(
        step_samples(job),
        _known(rate_of(records)),
        UNITS.get(rate_field(records), "samples"),
        _known(most_memory(records)),
        parts_of(records),
    )


def _known(number: float) -> float:
    return number if math.isfinite(number) else 0.0


def step_samples(job: Job) -> int:
    """The samples of a step, in all replicas."""
    return StepBatch.of(job.config).samples


def error_in(log: Path) -> str:
    """The last error that a run printed; "" if it printed none."""
    errors = re.findall(r"^error: (.*)", log.read_text(encoding="utf-8", errors="replace"), re.M)
    return str(errors[-1]) if errors else ""


def ran_out_of_memory(error: str) -> bool:
    """True for the error of a rank that had not enough memory."""
    return " ran out of memory at " in error


_BATCH, _MEMORY, _RATE = "batch", "memory of a rank", "throughput"
_LEAVE_OUT = {"time": 4, "train loss": 3, _MEMORY: 2, _RATE: 1}
_LIKE = 1.1
"""Amounts of memory that differ by less are called equal."""


def tables_of(runs: Sequence[SweptRun]) -> list[Table]:
    """The table of the results, the best first, and for strategies that of their times."""
    return [sweep_table(runs), *([parts_table(runs)] if _is_strategies(runs) else [])]


def sweep_table(runs: Sequence[SweptRun]) -> Table:
    """The options that differ, the memory of the fullest rank and the throughput, then the results;
    the lowest loss first. Strategies also have the samples of a step."""
    accuracy = ("accuracy",) if any(run.accuracy is not None for run in runs) else ()
    measured = (*([_BATCH] if _is_strategies(runs) else []), _MEMORY, _RATE)
    names = (*runs[0].values, *measured, "loss", *accuracy, "train loss", "time")
    return Table(
        (*(_column(name) for name in names), Column("", "text")),
        tuple((*(_cell(run, name) for name in names), _state(run)) for run in ranked(runs)),
    )


def parts_table(runs: Sequence[SweptRun]) -> Table:
    """The shares of the ranks' time of each strategy, see `parts_of`."""
    ran = [run for run in ranked(runs) if run.figures.parts]
    parts = list(dict.fromkeys(part for run in ran for part in run.figures.parts))
    names = list(runs[0].values)
    return Table(
        tuple(map(_column, (*names, *parts))),
        tuple(
            (
                *(_cell(run, name) for name in names),
                *(write_share(run.figures.parts.get(part, 0.0)) for part in parts),
            )
            for run in ran
        ),
    )


def advice(runs: Sequence[SweptRun]) -> str:
    """A sentence that recommends a strategy and says why; "" for fewer than two.

    >>> def run(name, rate, samples, memory):
    ...     figures = Figures(samples, rate, "samples/s", memory)
    ...     return SweptRun(name, {STRATEGY: name}, "", FINISHED, figures=figures)
    >>> print(advice([run("ddp", 320, 64, 9e9), run("1f1b", 326, 64, 3e9)]))
    Take 1f1b: 326 samples/s are 1.02 times those of ddp, which takes 3 times its memory.
    >>> advice([run("ddp", 416, 60, 16e9), run("1f1b", 326, 320, 15e9)]).partition(",")[2]
    ' whose steps of 320 samples are 5.33 times as large.'
    """
    if not _is_strategies(runs):
        return ""
    ran = sorted(
        (run for run in runs if run.state == FINISHED and run.figures.rate),
        key=lambda run: -run.figures.rate,
    )
    others = [run for run in ran[1:] if run.values[STRATEGY] != ran[0].values[STRATEGY]]
    if not others:
        return ""
    best, other = ran[0].figures, others[0].figures
    sentence = (
        f"Take {ran[0].values[STRATEGY]}: {write_count(best.rate)} {best.unit} are "
        f"{best.rate / other.rate:.3g} times those of {others[0].values[STRATEGY]}"
    )
    if other.samples > best.samples:
        times = f"{other.samples / best.samples:.3g}"
        return f"{sentence}, whose steps of {other.samples} samples are {times} times as large."
    share = other.memory_bytes / best.memory_bytes if best.memory_bytes else 1.0
    if not 1 / _LIKE < share < _LIKE and share:
        taken = f"{share:.3g} times" if share > 1 else f"{write_share(share)} of"
        return f"{sentence}, which takes {taken} its memory."
    return f"{sentence}."


def _is_strategies(runs: Sequence[SweptRun]) -> bool:
    return STRATEGY in runs[0].values


def _column(name: str) -> Column:
    return Column(
        name,
        "text" if name == STRATEGY else "number",
        leave_out=_LEAVE_OUT.get(name, 0),
    )


def ranked(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """The lowest loss first, and runs without a loss last, in their order; strategies as they were
    given."""
    if runs and _is_strategies(runs):
        return list(runs)
    return sorted(runs, key=lambda run: (run.loss is None, run.loss or 0.0))


def _cell(run: SweptRun, column: str) -> str:
    match column:
        case "loss" | "train loss":
            number = run.loss if column == "loss" else run.train_loss
            return "" if number is None else write_loss(number)
        case "accuracy":
            return "" if run.accuracy is None else write_accuracy(run.accuracy)
        case "time":
            return "" if run.seconds is None else write_duration(run.seconds)
        case _ if column == _BATCH:
            return str(run.figures.samples or "")
        case _ if column == _MEMORY:
            size = run.figures.memory_bytes
            return write_bytes(int(size)) if size else ""
        case _ if column == _RATE:
            rate = run.figures.rate
            return f"{write_count(rate)} {run.figures.unit}" if rate else ""
    return in_words(_hashable(run.values.get(column, "")))


def _state(run: SweptRun) -> str:
    return "" if run.state == FINISHED else ": ".join(filter(None, (run.state, run.error)))


def _hashable(value: object) -> object:
    """JSON has lists where options have tuples."""
    return tuple(value) if isinstance(value, list) else value
