"""Finished runs -> the table of a comparison.

A row is a method with an optimizer. Its loss is the mean over seeds at the learning rate with the
lowest mean; its gap is to the synchronous runs with the same optimizer at their own best learning
rate, and with the best of their options if several were tried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from ..formatting import Column, Table, write_duration
from .trial import Curve


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A finished run; `key` is a hash of everything that decides its losses."""

    key: str
    method: str
    optimizer: str
    lr: float
    seed: int
    stages: int
    micro_batches: int
    steps: int
    curve: Curve

    @property
    def name(self) -> str:
        """The method without its optimizer; `sync` for synchronous runs."""
        return self.method.partition(",")[0].partition(":")[0] + _rest(self.method)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _rest(method: str) -> str:
    _, comma, options = method.partition(",")
    return comma + options


Ends = Callable[[ComparedRun], Sequence[float]]
"""The end of each step of a run, in simulated milliseconds."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A row of the table: a method with an optimizer."""

    method: str
    optimizer: str
    lr: float
    """The best learning rate."""
    tried: tuple[float, ...]
    """All learning rates."""
    seeds: int
    loss: float
    """The mean loss over seeds."""
    spread: float
    """The highest minus the lowest loss over seeds."""
    gap: float | None
    """The loss minus that of the synchronous runs; None without synchronous runs."""
    share: float | None
    """The gap as a share of the synchronous loss."""
    minutes: float
    """The simulated time of all steps."""
    speed_up: float | None
    """The time of the synchronous run divided by this one's, for all steps."""
    sooner: float | None
    """The same for the times until both are within `TOLERANCE` of the synchronous run's last loss;
    None if this one never is."""
    runs: tuple[ComparedRun, ...]


TOLERANCE = 0.01


def rows(runs: Iterable[ComparedRun], ends: Ends) -> list[MethodRow]:
    """The table, grouped by optimizer, with synchronous runs first."""
    grouped: dict[tuple[str, str], list[ComparedRun]] = {}
    for run in runs:
        grouped.setdefault((run.optimizer, run.name), []).append(run)
    table = [_row(name, optimizer, own, ends) for (optimizer, name), own in grouped.items()]
    synchronous = [row for row in table if row.method.split(",")[0] == "sync"]
    baselines = {row.optimizer: row for row in sorted(synchronous, key=lambda row: -row.loss)}
    compared = [_compared(row, baselines.get(row.optimizer), ends) for row in table]
    return sorted(compared, key=lambda row: (row.optimizer, row.gap != 0.0, row.loss))


COLUMNS = (
    Column("method", "text"), Column("optimizer", "text"), Column("lr"),
    Column("seeds", leave_out=2), Column("loss"), Column("spread", leave_out=3), Column("gap"),
    Column("gap %", leave_out=1), Column("time"), Column("speed-up"), Column("sooner", leave_out=4),
)  # fmt: skip


def cells(row: MethodRow) -> tuple[str, ...]:
    """The texts of a row, one for each of COLUMNS."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form) if math.isfinite(value) else "-"

    return (
        row.method,
        row.optimizer,
        f"{row.lr:g}",
        str(row.seeds),
        number(row.loss, ".4f"),
        number(row.spread, ".4f"),
        number(row.gap, "+.4f"),
        number(row.share, "+.1%"),
        write_duration(60 * row.minutes),
        number(row.speed_up, ".2f"),
        "never" if row.gap is not None and row.sooner is None else number(row.sooner, ".2f"),
    )


def method_table(table_rows: Sequence[MethodRow]) -> Table:
    """The table of a comparison."""
    return Table(COLUMNS, tuple(map(cells, table_rows)))


def _row(name: str, optimizer: str, runs: Sequence[ComparedRun], ends: Ends) -> MethodRow:
    by_lr: dict[float, list[ComparedRun]] = {}
    for run in runs:
        by_lr.setdefault(run.lr, []).append(run)
    lr, best = min(by_lr.items(), key=lambda item: _mean(item[1]))
    losses = [run.curve.last for run in best]
    spread = max(losses) - min(losses) if math.isfinite(max(losses)) else math.inf
    return MethodRow(
        name,
        optimizer,
        lr,
        tuple(sorted(by_lr)),
        len(best),
        _mean(best),
        spread,
        None,
        None,
        ends(best[0])[-1] / 60_000,
        None,
        None,
        tuple(best),
    )


def _compared(row: MethodRow, baseline: MethodRow | None, ends: Ends) -> MethodRow:
    if baseline is None:
        return row
    target = baseline.loss * (1 + TOLERANCE)
    sync_ms, own_ms = (time_to(of.runs, target, ends) for of in (baseline, row))
    return replace(
        row,
        gap=row.loss - baseline.loss,
        share=row.loss / baseline.loss - 1 if baseline.loss else None,
        speed_up=baseline.minutes / row.minutes if row.minutes else None,
        sooner=sync_ms / own_ms if sync_ms and own_ms else None,
    )


def time_to(runs: Sequence[ComparedRun], loss: float, ends: Ends) -> float | None:
    """Simulated milliseconds until the mean curve of the runs, with linear interpolation between
    evaluations, reaches `loss`; None if it never does."""
    at = [ends(runs[0])[step - 1] for step in runs[0].curve.steps]
    losses = mean_curve(runs)
    for index, value in enumerate(losses):
        if value <= loss:
            if index == 0:
                return at[0]
            before = losses[index - 1]
            part = (before - loss) / (before - value)
            return at[index - 1] + part * (at[index] - at[index - 1])
    return None


def mean_curve(runs: Sequence[ComparedRun]) -> tuple[float, ...]:
    """The mean of the evaluated losses over runs, up to the end of the shortest."""
    losses_by_step = zip(*(run.curve.evaluated for run in runs), strict=False)
    return tuple(sum(losses) / len(losses) for losses in losses_by_step)


def _mean(runs: Sequence[ComparedRun]) -> float:
    return sum(run.curve.last for run in runs) / len(runs)
