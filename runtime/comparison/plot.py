"""Rows of a comparison -> an SVG: loss against steps, and against simulated time.

Lines are means over seeds, the bands about them reach from the lowest to the highest. Colours tell
methods apart, dashes are synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..pages.chart import WIDTH, Chart, Series, chart
from ..pages.templating import render
from .table import Ends, Row, mean_curve

_HEIGHT = 300
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#aa7700", "#aa3377", "#0088aa", "#777777", "#332288",
    "#882255", "#44aa99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """How the lines of a row are told from others."""

    label: str
    colour: str
    is_dashed: bool


def draw(rows: Sequence[Row], ends: Ends, *, title: str, loss: str = "evaluation loss") -> str:
    """The SVG of all rows whose runs went to the end."""
    drawn = [row for row in rows if math.isfinite(row.loss)]
    minutes = max((row.minutes for row in drawn), default=0.0)
    unit, per_ms = ("min", 1 / 60_000) if minutes >= 2 else ("s", 1 / 1000)
    looks = [
        Look(_label(row), _COLOURS[number % len(_COLOURS)], row.method.startswith("sync"))
        for number, row in enumerate(drawn)
    ]
    by_step = [_series(row, None) for row in drawn]
    by_time = [_series(row, [end * per_ms for end in ends(row.runs[0])]) for row in drawn]
    charts = (
        _chart(f"{loss}, by optimizer steps", by_step, "step"),
        _chart(f"{loss}, by simulated {unit}, one device a stage", by_time, unit),
    )
    return render(
        "curves.svg.j2",
        title=title,
        charts=[one for one in charts if one is not None],
        looks=looks,
        width=WIDTH,
        height=_HEIGHT,
    )


def _label(row: Row) -> str:
    return f"{row.method}, {row.optimizer}, lr {row.lr:g}: {row.loss:.3f}"


def _series(row: Row, at: Sequence[float] | None) -> Series:
    y = mean_curve(row.runs)
    x = [float(step) if at is None else at[step - 1] for step in row.runs[0].curve.steps]
    each = list(zip(*(run.curve.evaluated for run in row.runs), strict=False))
    return Series(
        _label(row),
        tuple(zip(x, y, strict=False)),
        tuple((place, min(ys), max(ys)) for place, ys in zip(x, each, strict=False)),
    )


def _chart(heading: str, series: Sequence[Series], unit: str) -> Chart | None:
    # What is above the second evaluation of the worst is the same for all.
    seconds = [sorted(high for _, _, high in one.band)[-2:][0] for one in series]
    return chart(
        heading,
        series,
        x_unit=unit,
        write="{:.4g}".format,
        ceiling=max(seconds, default=None),
        x_floor=0.0,
        height=_HEIGHT,
    )
