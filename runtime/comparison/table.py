"""Runs -> one row for each method and optimizer: its best learning rate, its loss and its time.

A row's loss is the mean over seeds at the learning rate where that mean is lowest. Its gap is to
the synchronous runs with the same optimizer at their own best learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..hidden_text import in_markdown
from .runs import Run

Ends = Callable[[Run], Sequence[float]]
"""When each step of a run is over, in simulated milliseconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A method with an optimizer. `spread` is the difference of the highest and lowest loss over
    seeds. `gap` is to the loss of the synchronous runs, `share` the same as a share of it; None
    where there are none. `speed_up` is the time of the synchronous run over this one's, for all
    steps; `sooner` the same for the times until both were within `TOLERANCE` of the synchronous
    run's last loss: None where this one never was."""

    method: str
    optimizer: str
    lr: float
    tried: tuple[float, ...]
    seeds: int
    loss: float
    spread: float
    gap: float | None
    share: float | None
    minutes: float
    speed_up: float | None
    sooner: float | None
    runs: tuple[Run, ...]


TOLERANCE = 0.01


def rows(runs: Iterable[Run], ends: Ends) -> list[Row]:
    """The table, the methods of one optimizer together, the synchronous first."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.optimizer, run.name), []).append(run)
    found = [_row(name, optimizer, own, ends) for (optimizer, name), own in grouped.items()]
    baselines = {row.optimizer: row for row in found if row.method.split(",")[0] == "sync"}
    compared = [_compared(row, baselines.get(row.optimizer), ends) for row in found]
    return sorted(compared, key=lambda row: (row.optimizer, row.gap != 0.0, row.loss))


COLUMNS = (
    "method", "optimizer", "lr", "seeds", "loss", "spread", "gap", "gap %", "time", "speed-up",
    "sooner",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row as it is shown, one text for each of COLUMNS."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form) if math.isfinite(value) else "-"

    time = f"{row.minutes:.1f} min" if row.minutes >= 2 else f"{60 * row.minutes:.3g} s"
    return (
        row.method,
        row.optimizer,
        f"{row.lr:g}",
        str(row.seeds),
        number(row.loss, ".4f"),
        number(row.spread, ".4f"),
        number(row.gap, "+.4f"),
        number(row.share, "+.1%"),
        time,
        number(row.speed_up, ".2f"),
        "never" if row.gap is not None and row.sooner is None else number(row.sooner, ".2f"),
    )


def markdown(found: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * 2 + ("---:",) * (len(COLUMNS) - 2), *map(cells, found)]
    return "".join(f"| {' | '.join(map(in_markdown, line))} |\n" for line in lines)


def _row(name: str, optimizer: str, runs: Sequence[Run], ends: Ends) -> Row:
    by_lr: dict[float, list[Run]] = {}
    for run in runs:
        by_lr.setdefault(run.lr, []).append(run)
    lr, best = min(by_lr.items(), key=lambda item: _mean(item[1]))
    losses = [run.curve.last for run in best]
    spread = max(losses) - min(losses) if math.isfinite(max(losses)) else math.inf
    return Row(
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


def _compared(row: Row, baseline: Row | None, ends: Ends) -> Row:
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


def time_to(runs: Sequence[Run], loss: float, ends: Ends) -> float | None:
    """Simulated milliseconds until the mean curve of the runs is at `loss` or below, between two
    evaluations in a straight line; None where it never is."""
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


def mean_curve(runs: Sequence[Run]) -> tuple[float, ...]:
    """The mean of the evaluated losses over runs, as far as all of them went."""
    each = zip(*(run.curve.evaluated for run in runs), strict=False)
    return tuple(sum(losses) / len(losses) for losses in each)


def _mean(runs: Sequence[Run]) -> float:
    return sum(run.curve.last for run in runs) / len(runs)
