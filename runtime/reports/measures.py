"""Records of runs -> the numbers of their reports, and comparisons of several runs.

Comparisons are at equal steps and at equal time, and list the options that differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..formatting import (
    known,
    write_bytes,
    write_count,
    write_duration,
    write_loss,
    write_ms,
    write_share,
)
from ..monitoring.run_files import Record, RunRecords, number, numbers, part, read_run

IDLE_PARTS = ("bubble", "imbalance", "communication", "data", "overhead")
TIME_PARTS = ("waiting", "sending", "data", "overhead")
_FIXED = frozenset(
    {
        *("event", "step", "loss", "lr", "grad_norm", "step_ms", "elapsed_s", "mem_bytes"),
        *(
            "epoch",
            "idle",
            "idle_share",
            "mem_bytes_by_rank",
            "base_bytes_by_rank",
            "loss_scale",
            "skipped",
        ),
    }
)
"""Fields of a step that the report shows in fixed places; other numbers appear by name."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction and a measurement; NaN where unknown."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage in milliseconds.

    forward, backward: of a micro-batch; a split backward counts with both parts.
    optimizer_ms: of an optimizer step, which no plan predicts.
    """

    stage: int
    forward: Compared
    backward: Compared
    optimizer_ms: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak memory of a rank in bytes.

    stages: the planned memory of its stages, and the measured one without that from before they
        were
        loaded.
    process_bytes: the memory of the whole process.
    """

    rank: int
    stages: Compared
    process_bytes: float


@dataclass(frozen=True, slots=True)
class RankIdle:
    """The idle shares of a rank's time, by reason; it computes in the rest."""

    rank: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rate_field(run: RunRecords) -> str:
    """The field of a step with the throughput: `tok_per_s` or `samples_per_s`; "" if there
    is none."""
    names = (name for record in run.steps[:1] for name in record if name.endswith("_per_s"))
    return next(names, "")


def rate_of(run: RunRecords) -> float:
    """The throughput in the record of the end, or else that of a typical step without the first."""
    rate = number(run.end, "rate")
    return rate if rate > 0 else usual(run, rate_field(run))


def usual(run: RunRecords, name: str) -> float:
    """The median over the recorded steps, without the first of several, when memory and caches are
    cold."""
    values = [number(record, name) for record in run.steps[1:] or run.steps]
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def other_series(run: RunRecords) -> dict[str, list[tuple[tuple[float, float], ...]]]:
    """All other numbers of the steps, such as delays, by name: one series, or one per element of a
    list."""
    fixed = _FIXED | {rate_field(run)}
    names = dict.fromkeys(name for record in run.steps for name in record)
    found: dict[str, list[tuple[tuple[float, float], ...]]] = {}
    for name in names:
        if name in fixed or name.endswith("_shares"):
            continue
        if single := run.series(name):
            found[name] = [single]
            continue
        rows = [(number(record, "step"), numbers(record, name)) for record in run.steps]
        places = range(max((len(values) for _, values in rows), default=0))
        lists = [tuple((x, row[at]) for x, row in rows if len(row) > at) for at in places]
        if lists:
            found[name] = lists
    return found


def step_times(run: RunRecords) -> Compared:
    """The time of a step in milliseconds. The prediction is that of the end, with the measured
    optimizer, or else that of the start, without one."""
    predicted = number(run.end, "simulated_step_ms")
    if math.isnan(predicted):
        predicted = number(part(run.start, "predicted"), "step_ms")
    measured = number(run.end, "step_ms")
    return Compared(predicted, usual(run, "step_ms") if math.isnan(measured) else measured)


def idle_shares(run: RunRecords) -> Compared:
    """The idle share over all ranks."""
    predicted = number(run.end, "simulated_idle")
    if math.isnan(predicted):
        predicted = number(part(run.start, "predicted"), "idle_share")
    measured = number(run.end, "idle")
    return Compared(predicted, usual(run, "idle_share") if math.isnan(measured) else measured)


def stage_times(run: RunRecords) -> list[StageTimes]:
    """The times of every stage: medians over the recorded steps."""
    predicted = part(run.start, "predicted")
    forward, backward = numbers(predicted, "forward_ms"), numbers(predicted, "backward_ms")
    taken = {kind: _usual_of_stages(run, kind) for kind in "FBWS"}
    stages = max(len(forward), *(len(times) for times in taken.values()))

    def at(values: Sequence[float], stage: int) -> float:
        return values[stage] if stage < len(values) else math.nan

    return [
        StageTimes(
            stage,
            Compared(at(forward, stage), at(taken["F"], stage)),
            Compared(
                at(backward, stage),
                at(taken["B"], stage) + (at(taken["W"], stage) if taken["W"] else 0.0),
            ),
            at(taken["S"], stage),
        )
        for stage in range(stages)
    ]


def rank_memory(run: RunRecords) -> list[RankMemory]:
    """The memory of every rank after the last recorded step; replicas have the first one's
    prediction."""
    last: Record = run.steps[-1] if run.steps else {}
    planned = numbers(part(run.start, "predicted"), "peak_bytes")
    peaks, bases = numbers(last, "mem_bytes_by_rank"), numbers(last, "base_bytes_by_rank")
    return [
        RankMemory(
            rank,
            Compared(
                planned[rank % len(planned)] if planned else math.nan,
                peak - bases[rank] if rank < len(bases) else math.nan,
            ),
            peak,
        )
        for rank, peak in enumerate(peaks)
    ]


def rank_idle(run: RunRecords) -> list[RankIdle]:
    """The causes of each rank's idle time from the record of the end, or else the kinds of it from
    the recorded steps."""
    recorded = run.end.get("idle_parts_by_rank")
    rows = recorded if isinstance(recorded, list) else []
    causes = [
        RankIdle(rank, {name: number(row, name) for name in IDLE_PARTS})
        for rank, row in enumerate(rows)
        if isinstance(row, dict) and all(not math.isnan(number(row, name)) for name in IDLE_PARTS)
    ]
    if causes:
        return causes
    shares = {name: _usual_of_lists(run, f"{name}_shares") for name in TIME_PARTS}
    ranks = min(len(values) for values in shares.values())
    return [
        RankIdle(rank, {name: values[rank] for name, values in shares.items()})
        for rank in range(ranks)
    ]


def _usual_of_stages(run: RunRecords, kind: str) -> list[float]:
    rows = [numbers(part(record, "action_ms"), kind) for record in run.steps[1:] or run.steps]
    return _medians(rows)


def _usual_of_lists(run: RunRecords, name: str) -> list[float]:
    return _medians([numbers(record, name) for record in run.steps[1:] or run.steps])


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column, over the rows that have it."""
    places = range(max(map(len, rows), default=0))
    return [median(row[at] for row in rows if len(row) > at) for at in places]


UNITS = {"tok_per_s": "tokens/s", "samples_per_s": "samples/s"}


def title_of(run: RunRecords) -> str:
    """The names of the run's folder and its parent, such as `gpt2_4p/3`."""
    return "/".join(run.folder.resolve().parts[-2:])


def status_of(run: RunRecords) -> str:
    """How the run ended, as far as it is recorded."""
    if run.end:
        return f"✓ {run.last_step} steps"
    asked = number(run.config, "steps")
    of = f" of {asked:g}" if math.isfinite(asked) else ""
    how = "ended after" if run.failure else "not at its end:"
    return f"{how} step {run.last_step}{of}"


def last(run: RunRecords, name: str) -> float:
    """A field of the last recorded step."""
    return number(run.steps[-1], name) if run.steps else math.nan


def last_evaluation(run: RunRecords, name: str = "loss") -> float:
    """A field of the last evaluation."""
    return number(run.evals[-1], name) if run.evals else math.nan


def to_json(run: RunRecords) -> str:
    """The numbers of a run as text."""
    return json.dumps(summary_of(run), indent=1, default=str)


def summary_of(run: RunRecords) -> dict[str, object]:
    """The numbers of a run, for other programs; unknown ones are omitted."""
    step, idle = step_times(run), idle_shares(run)
    found = {
        "last_loss": last(run, "loss"),
        "eval_loss": last_evaluation(run),
        "seconds": last(run, "elapsed_s"),
        rate_field(run) or "rate": rate_of(run),
        "epoch": last(run, "epoch"),
        "step_ms": step.measured,
        "predicted_step_ms": step.predicted,
        "idle_share": idle.measured,
        "predicted_idle_share": idle.predicted,
        "mem_bytes": last(run, "mem_bytes"),
    }
    return {
        "run": str(run.folder),
        "status": status_of(run),
        "failure": run.failure,
        "last_step": run.last_step,
        **{name: value for name, value in found.items() if math.isfinite(value)},
        "versions": versions_of(run),
        "config": dict(run.config),
    }


def versions_of(run: RunRecords) -> dict[str, str]:
    """Packages and their versions, from the record of the start."""
    versions = part(part(run.start, "environment"), "versions")
    return {str(name): str(version) for name, version in versions.items()}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Several runs, compared up to the point that all have reached.

    runs, names: the runs, and distinct names for them.
    step, seconds: the number of steps and the time that all runs have reached.
    rows: labels with a cell for each run.
    differences: options and versions that differ, with a cell for each run.
    """

    runs: tuple[RunRecords, ...]
    names: tuple[str, ...]
    step: float
    seconds: float
    rows: tuple[tuple[str, ...], ...]
    differences: tuple[tuple[str, ...], ...]


def compare(folders: Sequence[Path]) -> RunComparison:
    """Compares the runs of these folders. Raises DataError for a folder without a run."""
    runs = tuple(read_run(folder) for folder in folders)
    step = min(float(run.last_step) for run in runs)
    seconds = min(last(run, "elapsed_s") for run in runs)
    return RunComparison(
        runs,
        _names(runs),
        step,
        seconds,
        tuple((label, *cells) for label, cells in _rows(runs, step, seconds) if any(cells)),
        tuple((name, *cells) for name, cells in _differences(runs)),
    )


def as_json(comparison: RunComparison) -> str:
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
    after, within = f"after {step:g} steps", f"after {known(seconds, write_duration)}"
    rates = {UNITS.get(rate_field(run), rate_field(run)) for run in runs}
    return [
        ("ended", [status_of(run) for run in runs]),
        (f"loss {after}", [known(_at(run.steps, "step", step), write_loss) for run in runs]),
        (
            f"evaluation loss {after}",
            [known(_at(run.evals, "step", step), write_loss) for run in runs],
        ),
        (
            f"loss {within}",
            [known(_at(run.steps, "elapsed_s", seconds), write_loss) for run in runs],
        ),
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
    """Options, versions and machines that differ between the runs."""
    of_runs = [
        {name: json.dumps(value, default=str) for name, value in run.config.items()}
        | versions_of(run)
        | {
            name: str(part(run.start, "environment").get(name, ""))
            for name in ("host", "cpu", "cpus", "gpus")
        }
        for run in runs
    ]
    names = dict.fromkeys(name for values in of_runs for name in values)
    rows = [(name, [values.get(name, "") for values in of_runs]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def _names(runs: Sequence[RunRecords]) -> tuple[str, ...]:
    """The shortest distinct ends of the folders' paths that are more than numbers."""
    parts = [run.folder.resolve().parts for run in runs]
    least = 2 if any(own[-1].isdigit() for own in parts) else 1
    for count in range(least, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{title_of(run)} ({place})" for place, run in enumerate(runs, 1))
