"""The times of splits -> their summaries, a sentence on the slow ones, and a drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, quantiles
from typing import Any

from ..formatting import Column, Table, write_bytes, write_share
from ..reports.charts import ticks_up_to
from ..reports.rendering import render
from .options import LocalityOptions


@dataclass(frozen=True)
class SplitTimes:
    """The times of one split, in seconds, and what is predicted for it.

    ranks: their number.
    hosts: the names of its hosts.
    lone_ranks: the ranks whose neighbors on both sides are on other hosts.
    uses_per_step: how often the busiest rank uses the network in a step of the ring; None for the
        steps of a model.
    seconds: the time of the slowest rank in each repeat.
    predicted_s: the predicted time; None where the rate of the links is not known.
    """

    split: str
    ranks: int
    hosts: tuple[str, ...]
    lone_ranks: tuple[int, ...]
    uses_per_step: int | None
    seconds: tuple[float, ...]
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The mean of a split in the study: seconds, and its share of the best split."""

    seconds: float
    share: float


STUDY = "https://github.com/dlguswo333/distributed-learning-anomaly"
PUBLISHED = {
    "4-2-2": Published(6.3155, 1.0),
    "4-3-1": Published(7.1491, 1.1319),
    "3-3": Published(4.190, 1.0),
    "5-1": Published(5.032, 1.201),
}
"""The study's measurements of a ring all-reduce over MPI; about 20 repeats for 4-2-2 and 4-3-1."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds. Outliers are further from the middle half than 1.5 times its width."""

    n: int
    mean_s: float
    median_s: float
    min_s: float
    max_s: float
    outliers: int


def summary(seconds: Sequence[float]) -> Summary:
    """
    >>> summary([1.0, 1.1, 1.0, 1.2, 1.1, 9.0]).outliers
    1
    """
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, _, high = quantiles(several, method="inclusive")
    far = 1.5 * (high - low)
    return Summary(
        n=len(seconds),
        mean_s=mean(seconds),
        median_s=median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
        outliers=sum(not low - far <= value <= high + far for value in seconds),
    )


TOLERATED = 1.15
"""The share of the best split's time up to which a split is as fast as the best."""


def verdict(rows: Sequence[Mapping[str, Any]], *, is_serial_ring: bool) -> str:
    """One sentence on the slow splits, with their cause and the cure; `rows` are those of a
    result."""
    slow = [row for row in rows if row["share"] is not None and row["share"] > TOLERATED]
    if not slow:
        return f"No anomaly: every split takes at most {TOLERATED:.0%} of the best one's time."
    if surprising := [row for row in slow if (row["predicted_share"] or 0.0) <= TOLERATED]:
        return (
            f"{'; '.join(map(_slow_split, surprising))}, which the prediction does not explain: "
            "measure the links with asyncpipe-comm measure."
        )
    words = "; ".join(map(_slow_split, slow))
    if is_serial_ring:
        return (
            f"{words}: a rank that is alone on its host sends and receives over the network, and a "
            "serial endpoint does one after the other. Place two or more ranks on every host, or "
            "send and receive at the same time."
        )
    return f"{words}: as predicted, more of its messages cross hosts."


def _slow_split(row: Mapping[str, Any]) -> str:
    lone = row["lone_ranks"]
    who = f" (rank{'s' if len(lone) > 1 else ''} {', '.join(map(str, lone))})" if lone else ""
    return f"{row['split']}{who} takes {row['share']:.0%} of the best split's time"


def result_of(options: LocalityOptions, times: Sequence[SplitTimes]) -> dict[str, Any]:
    """The result of the command, as JSON values."""
    is_ring = options.model is None
    rows = [
        {
            **asdict(each),
            **asdict(summary(each.seconds)),
            "share": share,
            "predicted_share": predicted,
            "published": asdict(PUBLISHED[each.split])
            if is_ring and each.split in PUBLISHED
            else None,
        }
        for each, share, predicted in zip(
            times,
            _shares(times, lambda of: median(of.seconds)),
            _shares(times, lambda of: of.uses_per_step if is_ring else of.predicted_s),
            strict=True,
        )
    ]
    return {
        "work": "ring all-reduce" if is_ring else "training step",
        "endpoint": options.endpoint if is_ring else None,
        "size_bytes": options.size_bytes if is_ring else None,
        "mbit_s": options.mbit_s,
        "rows": rows,
        "verdict": verdict(rows, is_serial_ring=is_ring and options.is_serial),
    }


def _shares(
    times: Sequence[SplitTimes], amount: Callable[[SplitTimes], float | None]
) -> list[float | None]:
    """The amount of each split over the least of those with as many ranks; None where a split has
    no amount, or the least is 0."""
    shares: list[float | None] = []
    for each in times:
        own = amount(each)
        alike = [amount(other) for other in times if other.ranks == each.ranks]
        least = min((value for value in alike if value is not None), default=0)
        shares.append(own / least if own is not None and least else None)
    return shares


def result_table(result: Mapping[str, Any]) -> Table:
    """A row for each split."""
    columns = (
        Column("split", "text"),
        Column("n", leave_out=3),
        Column("mean (s)"),
        Column("median (s)", leave_out=1),
        Column("min (s)", leave_out=2),
        Column("max (s)", leave_out=2),
        Column("outliers", leave_out=3),
        Column("of the best"),
        Column("predicted"),
        Column("predicted (s)", leave_out=4),
        Column("published"),
    )
    rows = tuple(map(_cells, result["rows"]))
    if not any(row["published"] for row in result["rows"]):
        return Table(columns[:-1], tuple(row[:-1] for row in rows))
    return Table(columns, rows)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    published = row["published"]
    return (
        row["split"],
        str(row["n"]),
        *(f"{row[name]:.3f}" for name in ("mean_s", "median_s", "min_s", "max_s")),
        str(row["outliers"]),
        _share(row["share"]),
        _share(row["predicted_share"]),
        "-" if row["predicted_s"] is None else f"{row['predicted_s']:.3f}",
        "-" if published is None else f"{published['seconds']:g} s, {published['share']:.2%}",
    )


def _share(share: float | None) -> str:
    return "-" if share is None else write_share(share)


WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 720, 80, 170, 34, 48, 42
_SHIFTS = (0, -7, 7, -3, 4)
"""Pixels by which the points of a row are moved apart."""


@dataclass(frozen=True, slots=True)
class PlotRow:
    """One split.

    label: the split.
    note: its mean and share of the best.
    y, mean_x: the middle of its row, and its mean.
    points: x, y and title of each time.
    """

    label: str
    note: str
    y: float
    mean_x: float
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True, slots=True)
class StripPlot:
    """Rows of points over an axis of seconds from 0."""

    title: str
    rows: tuple[PlotRow, ...]
    ticks: tuple[tuple[float, str], ...]
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


def strip_plot(result: Mapping[str, Any]) -> str:
    """The SVG of a result of `compare_splits`; it follows the light or dark mode of its page."""
    most = max(row["max_s"] for row in result["rows"])
    right = WIDTH - RIGHT
    scale = (right - LEFT) / (1.02 * most or 1.0)
    rows = tuple(
        PlotRow(
            row["split"],
            f"{row['mean_s']:.3f} s · {'-' if row['share'] is None else write_share(row['share'])}",
            (y := TOP + ROW * (number + 0.5)),
            round(LEFT + scale * row["mean_s"], 1),
            tuple(
                (
                    round(LEFT + scale * seconds, 1),
                    y + _SHIFTS[repeat % len(_SHIFTS)],
                    f"{row['split']}, repeat {repeat + 1}: {seconds:.3f} s",
                )
                for repeat, seconds in enumerate(row["seconds"])
            ),
        )
        for number, row in enumerate(result["rows"])
    )
    bottom = TOP + ROW * len(rows)
    ticks = tuple((round(LEFT + scale * at, 1), f"{at:g}") for at in ticks_up_to(most, 8))
    plot = StripPlot(
        title_of(result), rows, ticks, WIDTH, bottom + BOTTOM, LEFT, right, TOP, bottom
    )
    return render("strip_plot.svg.j2", plot=plot)


def title_of(result: Mapping[str, Any]) -> str:
    rate = "" if result["mbit_s"] is None else f", links of {result['mbit_s']:g} Mbit/s"
    if result["endpoint"] is None:
        return f"{result['work']}{rate}"
    size = write_bytes(result["size_bytes"])
    return f"{result['work']} of {size}, {result['endpoint']} endpoints{rate}"
