"""Several runs -> what each reached at equal steps and in equal time, and in what they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..wording import known, write_bytes, write_count, write_duration, write_ms, write_share
from .measures import idle_shares, rank_memory, rate_field, rate_of, step_times
from .records import Record, RunRecords, number, part, read_run
from .summary import UNITS, last, status_of, summary_of, title_of, versions_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs under names that tell them apart, as far as all of them went: `step` steps, and so many
    `seconds`. Rows have a cell for each run; `differences` are options and versions."""

    runs: tuple[RunRecords, ...]
    names: tuple[str, ...]
    step: float
    seconds: float
    rows: tuple[tuple[str, ...], ...]
    differences: tuple[tuple[str, ...], ...]


def compare(folders: Sequence[Path]) -> Comparison:
    """Raises DataError for a folder that holds no run."""
    runs = tuple(read_run(folder) for folder in folders)
    step = min(float(run.last_step) for run in runs)
    seconds = min(last(run, "elapsed_s") for run in runs)
    return Comparison(
        runs,
        _names(runs),
        step,
        seconds,
        tuple((label, *cells) for label, cells in _rows(runs, step, seconds) if any(cells)),
        tuple((name, *cells) for name, cells in _differences(runs)),
    )


def as_json(comparison: Comparison) -> str:
    """Every run's numbers, and those at equal steps and times, as text."""
    runs = [
        summary_of(run)
        | {
            "name": name,
            "loss_at_equal_steps": _at(run.steps, "step", comparison.step),
            "eval_loss_at_equal_steps": _at(run.evals, "step", comparison.step),
            "loss_at_equal_time": _at(run.steps, "elapsed_s", comparison.seconds),
            "steps_at_equal_time": _at(run.steps, "elapsed_s", comparison.seconds, "step"),
        }
        for run, name in zip(comparison.runs, comparison.names, strict=True)
    ]
    plain = {
        "equal_steps": comparison.step,
        "equal_seconds": comparison.seconds,
        "runs": [
            {
                name: value
                for name, value in run.items()
                if not isinstance(value, float) or math.isfinite(value)
            }
            for run in runs
        ],
        "differences": {name: cells for name, *cells in comparison.differences},
    }
    return json.dumps(plain, indent=1, default=str)


def _rows(runs: Sequence[RunRecords], step: float, seconds: float) -> list[tuple[str, list[str]]]:
    four = "{:.4f}".format
    after, within = f"after {step:g} steps", f"after {known(seconds, write_duration)}"
    rates = {UNITS.get(rate_field(run), rate_field(run)) for run in runs}
    return [
        ("ended", [status_of(run) for run in runs]),
        (f"loss {after}", [known(_at(run.steps, "step", step), four) for run in runs]),
        (f"evaluation loss {after}", [known(_at(run.evals, "step", step), four) for run in runs]),
        (f"loss {within}", [known(_at(run.steps, "elapsed_s", seconds), four) for run in runs]),
        (
            f"steps {within}",
            [known(_at(run.steps, "elapsed_s", seconds, "step"), "{:g}".format) for run in runs],
        ),
        (
            " or ".join(sorted(rates)),
            [known(rate_of(run), write_count) for run in runs],
        ),
        ("a step", [known(step_times(run).measured, write_ms) for run in runs]),
        ("a step, simulated", [known(step_times(run).predicted, write_ms) for run in runs]),
        ("ranks idle", [known(idle_shares(run).measured, write_share) for run in runs]),
        ("ranks idle, simulated", [known(idle_shares(run).predicted, write_share) for run in runs]),
        ("fullest rank", [known(_fullest(run), write_bytes) for run in runs]),
        ("time of all steps", [known(last(run, "elapsed_s"), write_duration) for run in runs]),
    ]


def _fullest(run: RunRecords) -> float:
    return max((rank.process_bytes for rank in rank_memory(run)), default=last(run, "mem_bytes"))


def _at(records: Sequence[Record], by: str, limit: float, name: str = "loss") -> float:
    """A field of the last record up to a step or a time."""
    found = [number(record, name) for record in records if number(record, by) <= limit]
    return found[-1] if found else math.nan


def _differences(runs: Sequence[RunRecords]) -> list[tuple[str, list[str]]]:
    """Options, versions and machines that are not the same for all."""
    of_runs = [
        {name: json.dumps(value, default=str) for name, value in run.config.items()}
        | versions_of(run)
        | {
            name: str(part(run.start, "environment").get(name, ""))
            for name in ("host", "cpu", "cpus", "gpus")
        }
        for run in runs
    ]
    names = dict.fromkeys(name for told in of_runs for name in told)
    found = [(name, [told.get(name, "") for told in of_runs]) for name in names]
    return [(name, cells) for name, cells in found if len(set(cells)) > 1]


def _names(runs: Sequence[RunRecords]) -> tuple[str, ...]:
    """The shortest ends of the folders' names that tell them apart, and are more than numbers."""
    parts = [run.folder.resolve().parts for run in runs]
    least = 2 if any(own[-1].isdigit() for own in parts) else 1
    for count in range(least, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{title_of(run)} ({place})" for place, run in enumerate(runs, 1))
