"""Times of splits -> an SVG with a point for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formatting import write_bytes, write_share
from ..reports.charts import ticks_up_to
from ..reports.rendering import render

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
