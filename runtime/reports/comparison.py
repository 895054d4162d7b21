"""Several runs -> a comparison at equal steps and at equal time, and its page.

It lists the options that differ. A run with the network and one without it show the cost of
communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..formatting import (
    Column,
    Table,
    known,
    write_bytes,
    write_count,
    write_duration,
    write_loss,
    write_ms,
    write_share,
)
from ..monitoring.run_files import RunRecords, number, part, points, read_run
from ..monitoring.tail import Record
from .charts import Chart, Series, chart
from .measures import (
    UNITS,
    after_first_step,
    epoch_per_s,
    idle_shares,
    is_without_network,
    last,
    options_of,
    rank_idle,
    rank_memory,
    rate_field,
    rate_of,
    sent_bytes,
    status_of,
    step_times,
    summary_of,
    title_of,
    versions_of,
)
from .rendering import in_script, render, write_page


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Several runs, compared up to the point that all have reached.

    runs, names: the runs, and distinct names for them.
    step, seconds: the number of steps, and the time after the first step, that all have reached.
    rows: labels with a cell for each run.
    differences: options and versions that differ, with a cell for each run.
    """

    runs: tuple[RunRecords, ...]
    names: tuple[str, ...]
    step: float
    seconds: float
    rows: tuple[tuple[str, ...], ...]
    differences: tuple[tuple[str, ...], ...]

    @property
    def tables(self) -> tuple[Table, Table]:
        """The results, and the differences."""
        columns = (Column("", "text"), *map(Column, self.names))
        return Table(columns, self.rows), Table(columns, self.differences)

    @property
    def costs(self) -> tuple[NetworkCost, ...]:
        """The costs of communication, if runs with and without a network are compared."""
        return network_costs(self.runs, self.names)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The costs in words."""
        return tuple(map(str, self.costs))


def compare(folders: Sequence[Path]) -> RunComparison:
    """Compares the runs of these folders. Raises DataError for a folder without a run."""
    return compare_runs([read_run(folder) for folder in folders])


def compare_runs(records: Sequence[RunRecords]) -> RunComparison:
    """Compares these runs."""
    runs = tuple(records)
    step = min(float(run.last_step) for run in runs)
    seconds = min(last(after_first_step(run), "elapsed_s") for run in runs)
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
            "loss_at_equal_steps": _at(run.losses, "step", comparison.step),
            "eval_loss_at_equal_steps": _at(run.evals, "step", comparison.step),
            "loss_at_equal_time": _at_time(run, comparison.seconds),
            "steps_at_equal_time": _at_time(run, comparison.seconds, "step"),
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
        "communication": [
            asdict(cost) | {"communication_ms": cost.communication_ms} for cost in comparison.costs
        ],
    }
    return json.dumps(plain, indent=1, default=str)


def _rows(runs: Sequence[RunRecords], step: float, seconds: float) -> list[tuple[str, list[str]]]:
    after = f"after {step:g} steps"
    within = f"{known(seconds, write_duration)} after step 1"
    return [
        ("status", [status_of(run) for run in runs]),
        (f"loss {after}", [known(_at(run.losses, "step", step), write_loss) for run in runs]),
        (
            f"evaluation loss {after}",
            [known(_at(run.evals, "step", step), write_loss) for run in runs],
        ),
        (
            f"loss {within}",
            [known(_at_time(run, seconds), write_loss) for run in runs],
        ),
        (
            f"steps {within}",
            [known(_at_time(run, seconds, "step"), "{:g}".format) for run in runs],
        ),
        (
            _rate_units(runs),
            [known(rate_of(run), write_count) for run in runs],
        ),
        ("step time", [known(step_times(run).measured, write_ms) for run in runs]),
        ("step time, predicted", [known(step_times(run).predicted, write_ms) for run in runs]),
        ("idle", [known(idle_shares(run).measured, write_share) for run in runs]),
        ("idle, predicted", [known(idle_shares(run).predicted, write_share) for run in runs]),
        ("sent per step", [known(_sent(run), write_bytes) for run in runs]),
        ("epochs in a second", [known(epoch_per_s(run), "{:.4g}".format) for run in runs]),
        ("largest peak memory", [known(_fullest(run), write_bytes) for run in runs]),
        ("training time", [known(last(run, "elapsed_s"), write_duration) for run in runs]),
    ]


def _rate_units(runs: Sequence[RunRecords]) -> str:
    return " or ".join(sorted({UNITS.get(rate_field(run), rate_field(run)) for run in runs}))


def _fullest(run: RunRecords) -> float:
    return max((rank.process_bytes for rank in rank_memory(run)), default=last(run, "mem_bytes"))


def _sent(run: RunRecords) -> float:
    return sum(sent_bytes(run).values()) or math.nan


def _at(records: Sequence[Record], by: str, limit: float, name: str = "loss") -> float:
    """A field of the last record up to a step or a time."""
    values = [number(record, name) for record in records if number(record, by) <= limit]
    return values[-1] if values else math.nan


def _at_time(run: RunRecords, seconds: float, name: str = "loss") -> float:
    """A field of the last step that ended within a time after the first step."""
    return _at(after_first_step(run).losses, "elapsed_s", seconds, name)


def _differences(runs: Sequence[RunRecords]) -> list[tuple[str, list[str]]]:
    """Options, versions and machines that differ between the runs."""
    of_runs = [
        options_of(run)
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


_MOST = 8
"""The number of lines for which a chart has colors."""


def render_comparison(comparison: RunComparison) -> str:
    """A self-contained page; draws at most the first eight runs."""
    return render(
        "run_comparison.html.j2",
        **comparison_values(comparison),
        comparison_json=in_script(as_json(comparison)),
    )


def comparison_values(comparison: RunComparison) -> dict[str, Any]:
    """The values of the parts of the page, for their templates."""
    results, differences = comparison.tables
    charts = [
        _chart(comparison, "Loss over steps", "loss", "step"),
        _chart(comparison, "Loss over time", "loss", "elapsed_s"),
        _chart(comparison, "Evaluation loss over steps", "loss", "step", evaluated=True),
        _chart(comparison, "Evaluation loss over time", "loss", "elapsed_s", evaluated=True),
        _chart(comparison, f"Throughput, {_rate_units(comparison.runs)}", "", "step"),
        _chart(comparison, "Idle share, mean of the ranks", "idle_share", "step"),
    ]
    return dict(
        title=" · ".join(comparison.names),
        status=f"{len(comparison.runs)} runs",
        is_good=False,
        command="",
        why="",
        facts=[
            (name, folder)
            for name, run in zip(comparison.names, comparison.runs, strict=True)
            if (folder := str(run.folder)) != name
        ],
        cards=[],
        drawn=comparison.names[:_MOST],
        charts=[drawn for drawn in charts if drawn is not None],
        results=results,
        sentences=comparison.sentences,
        differences=differences,
    )


def _chart(
    comparison: RunComparison, heading: str, name: str, by: str, *, evaluated: bool = False
) -> Chart | None:
    """A line for each run; an empty name stands for the throughput, whose field depends on
    the run."""
    pairs = list(zip(comparison.names, comparison.runs, strict=True))[:_MOST]
    series = []
    for label, run in pairs:
        timed = after_first_step(run) if by == "elapsed_s" else run
        records = timed.losses if name == "loss" else timed.steps
        field = name or rate_field(run)
        series.append(Series(label, points(timed.evals if evaluated else records, field, by)))
    write = {"": write_count, "idle_share": write_share}.get(name, "{:.4g}".format)
    is_timed = by == "elapsed_s"
    return chart(
        heading,
        series,
        x_unit="s" if is_timed else "step",
        x_title="seconds after step 1" if is_timed else "step",
        write=write,
        floor=None if name == "loss" else 0.0,
        x_floor=0.0 if is_timed else None,
    )


COMPARISON = "comparison.html"


def write_comparison(comparison: RunComparison, file: Path | None = None) -> Path:
    """Writes the page about several runs, by default next to the first one's folder. Raises
    DataError."""
    default = comparison.runs[0].folder.resolve().parent / COMPARISON
    return write_page(file or default, render_comparison(comparison))


_DECIDES = (
    *(
        "folder",
        "schedule",
        "ranks",
        "replicas",
        "tensor_parallel",
        "staleness",
        "micro_batches",
        "micro_batch_size",
    ),
    *("global_batch_size", "seq", "device", "dtype", "precision", "boundary_dtype", "threads"),
    *("recompute", "compile", "optimizer"),
)
"""The options on which the computation of a step depends: the two runs have the same."""


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """The cost of communication in a step, in milliseconds.

    with_name, without_name: the run with the network, and the one without it.
    with_ms, without_ms: their steps.
    schedule_ms: the part of the difference in which the busiest rank waits on any network, because
        of the schedule or of unequal stages.
    """

    with_name: str
    without_name: str
    with_ms: float
    without_ms: float
    schedule_ms: float

    @property
    def communication_ms(self) -> float:
        """The rest of the difference."""
        return max(0.0, self.with_ms - self.without_ms - self.schedule_ms)

    def __str__(self) -> str:
        if self.without_ms >= self.with_ms:
            return (
                f"A step takes {self._times}: no cost of communication can be seen. Repeat both "
                "runs when nothing else runs here."
            )
        share = write_share(self.communication_ms / self.with_ms)
        return (
            f"Communication costs {write_ms(self.communication_ms)} of a step ({share}): a step "
            f"takes {self._times}, and {write_ms(self.schedule_ms)} of the difference are waits "
            "that the schedule and unequal stages cause on any network."
        )

    @property
    def _times(self) -> str:
        return (
            f"{write_ms(self.with_ms)} with the network ({self.with_name}) and "
            f"{write_ms(self.without_ms)} without it ({self.without_name})"
        )


def network_costs(runs: Sequence[RunRecords], names: Sequence[str]) -> tuple[NetworkCost, ...]:
    """For each run without the network, its comparison with the first run that differs in nothing
    else on which a step depends."""
    named = list(zip(runs, names, strict=True))
    costs = []
    for alone, without_name in named:
        if not is_without_network(alone):
            continue
        for run, with_name in named:
            if not is_without_network(run) and _is_alike(run, alone):
                costs.append(_cost(run, with_name, alone, without_name))
                break
    return tuple(cost for cost in costs if cost is not None)


def _is_alike(run: RunRecords, other: RunRecords) -> bool:
    return all(run.config.get(name) == other.config.get(name) for name in _DECIDES)


def _cost(
    run: RunRecords, with_name: str, alone: RunRecords, without_name: str
) -> NetworkCost | None:
    with_ms, without_ms = step_times(run).measured, step_times(alone).measured
    ranks = [rank for rank in rank_idle(run) if run.end and alone.end]
    if not ranks or not with_ms > 0:
        return None
    # Without the network a step is as long as the work of the busiest rank, which waits for none.
    busiest = min(ranks, key=lambda rank: rank.total).parts
    waits_ms = with_ms * (busiest.get("bubble", 0.0) + busiest.get("imbalance", 0.0))
    schedule_ms = min(waits_ms, max(0.0, with_ms - without_ms))
    return NetworkCost(with_name, without_name, with_ms, without_ms, schedule_ms)
