"""The table of a comparison -> its plot, an SVG, and its page.

Both have the loss against steps and against predicted time. Lines are means over seeds, bands reach
from the lowest to the highest; colors distinguish methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..formatting import write_loss
from ..reports.charts import WIDTH, Chart, Series, chart
from ..reports.rendering import render
from .method_rows import Ends, MethodRow, mean_curve, method_table

_HEIGHT = 300
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#aa7700", "#aa3377", "#0088aa", "#777777", "#332288",
    "#882255", "#44aa99",
)  # fmt: skip
_DASHES = ("none", "12 3", "8 4", "5 5", "3 6")


@dataclass(frozen=True, slots=True)
class Look:
    """The style of the lines of a row; a line that covers another one has gaps."""

    label: str
    colour: str
    dashes: str


def draw(
    rows: Sequence[MethodRow], ends: Ends, *, title: str, loss: str = "evaluation loss"
) -> str:
    """The SVG of all rows with complete runs."""
    drawn = [row for row in rows if math.isfinite(row.loss)]
    looks = [
        Look(_label(row), _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)])
        for number, row in enumerate(drawn)
    ]
    return render(
        "curves.svg.j2",
        title=title,
        charts=_charts(drawn, ends, loss),
        looks=looks,
        width=WIDTH,
        height=_HEIGHT,
    )


_MOST = 8
"""The number of lines for which a page has colors."""


def comparison_page(rows: Sequence[MethodRow], ends: Ends, *, title: str) -> str:
    """The page of all rows; draws the first eight with complete runs."""
    drawn = [row for row in rows if math.isfinite(row.loss)][:_MOST]
    return render(
        "compared_methods.html.j2",
        title=f"{title}: methods compared",
        status=f"{len(rows)} rows",
        is_good=False,
        command="",
        why="",
        facts=[],
        cards=[],
        table=method_table(rows),
        drawn=[_label(row) for row in drawn],
        charts=_charts(drawn, ends, "Evaluation loss"),
    )


def _charts(drawn: Sequence[MethodRow], ends: Ends, loss: str) -> list[Chart]:
    """The loss over steps and over time."""
    minutes = max((row.minutes for row in drawn), default=0.0)
    is_long = minutes >= 2
    unit, name, per_ms = ("min", "minutes", 1 / 60_000) if is_long else ("s", "seconds", 1 / 1000)
    by_step = [_series(row, None) for row in drawn]
    by_time = [_series(row, [end * per_ms for end in ends(row.runs[0])]) for row in drawn]
    charts = (
        _chart(f"{loss} over optimizer steps", by_step, "step", "step"),
        _chart(f"{loss} over predicted time", by_time, unit, f"{name}, one device per stage"),
    )
    return [chart for chart in charts if chart is not None]


def _label(row: MethodRow) -> str:
    return f"{row.method}, {row.optimizer}, lr {row.lr:g}: {write_loss(row.loss)}"


def _series(row: MethodRow, at: Sequence[float] | None) -> Series:
    y = mean_curve(row.runs)
    x = [float(step) if at is None else at[step - 1] for step in row.runs[0].curve.steps]
    losses_by_step = list(zip(*(run.curve.evaluated for run in row.runs), strict=False))
    return Series(
        _label(row),
        tuple(zip(x, y, strict=False)),
        tuple((place, min(ys), max(ys)) for place, ys in zip(x, losses_by_step, strict=False)),
    )


def _chart(heading: str, series: Sequence[Series], unit: str, axis: str) -> Chart | None:
    # Losses above the second evaluation of the worst are similar in all rows.
    seconds = [sorted(high for _, _, high in line.band)[-2:][0] for line in series]
    return chart(
        heading,
        series,
        x_unit=unit,
        x_title=axis,
        write="{:.4g}".format,
        ceiling=max(seconds, default=None),
        x_floor=0.0,
        height=_HEIGHT,
    )
