"""Rows of a comparison -> an SVG: loss against steps, and against simulated time.

Lines are means over seeds, the bands about them reach from the lowest to the highest. Colours tell
methods apart, dashes are synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..pages.ticks import ticks_around
from .table import Ends, Row, mean_curve

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 340, 56, 14, 34, 44
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#aa7700", "#aa3377", "#0088aa", "#777777", "#332288",
    "#882255", "#44aa99",
)  # fmt: skip
_LINE_HEIGHT = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its points, and the highest and lowest of the runs at each."""

    label: str
    colour: str
    dashed: bool
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def draw(rows: Sequence[Row], ends: Ends, *, title: str, loss: str = "evaluation loss") -> str:
    """The SVG of all rows whose runs went to the end."""
    drawn = [row for row in rows if math.isfinite(row.loss)]
    minutes = max((row.minutes for row in drawn), default=0.0)
    unit, per_ms = ("min", 1 / 60_000) if minutes >= 2 else ("s", 1 / 1000)
    by_step = [_series(row, number, None) for number, row in enumerate(drawn)]
    by_time = [
        _series(row, number, [end * per_ms for end in ends(row.runs[0])])
        for number, row in enumerate(drawn)
    ]
    height = _HEIGHT + _LINE_HEIGHT * (1 + -(-len(drawn) // 2))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{height}" '
        f'viewBox="0 0 {2 * _WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{2 * _WIDTH}" height="{height}" fill="white"/>',
        *_panel(by_step, 0, f"{title}: by optimizer steps", "steps", loss),
        *_panel(by_time, _WIDTH, "by simulated time, one device a stage", unit, loss),
        *_legend(by_step),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _series(row: Row, number: int, at: Sequence[float] | None) -> Series:
    y = mean_curve(row.runs)
    steps = row.runs[0].curve.steps[: len(y)]
    each = list(zip(*(run.curve.evaluated for run in row.runs), strict=False))
    return Series(
        f"{row.method}, {row.optimizer}, lr {row.lr:g}: {row.loss:.3f}",
        _COLOURS[number % len(_COLOURS)],
        row.method.startswith("sync"),
        tuple(float(step) if at is None else at[step - 1] for step in steps),
        y,
        tuple(map(min, each)),
        tuple(map(max, each)),
    )


def _panel(
    series: Sequence[Series], left: int, heading: str, x_label: str, y_label: str
) -> Iterable[str]:
    x_most = max((max(line.x) for line in series), default=1.0) or 1.0
    lowest = min((min(line.low) for line in series), default=0.0)
    # What is above the second evaluation of the best is the same for all.
    highest = max((sorted(line.high)[-2] for line in series if len(line.high) > 1), default=1.0)
    y_ticks = ticks_around(lowest, max(highest, lowest + 1e-6))
    floor, ceiling = y_ticks[0], y_ticks[-1]
    right, bottom = left + _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x_of(value: float) -> float:
        return round(left + _LEFT + (right - left - _LEFT) * value / x_most, 1)

    def y_of(value: float) -> float:
        part = (min(value, ceiling) - floor) / (ceiling - floor)
        return round(bottom - (bottom - _TOP) * part, 1)

    yield f'<text x="{left + _LEFT}" y="20" font-weight="bold">{escape(heading)}</text>'
    for tick in y_ticks:
        yield (
            f'<line x1="{left + _LEFT}" x2="{right}" y1="{y_of(tick)}" y2="{y_of(tick)}" '
            f'stroke="#dddddd"/><text x="{left + _LEFT - 6}" y="{y_of(tick) + 4}" '
            f'text-anchor="end">{tick:g}</text>'
        )
    for tick in ticks_around(0.0, x_most):
        if tick <= x_most:
            yield (f'<text x="{x_of(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    yield f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{x_label}</text>'
    yield f'<text x="{left + 4}" y="{_TOP - 4}" font-size="11">{y_label}</text>'
    for line in series:
        band = [
            *((x_of(x), y_of(y)) for x, y in zip(line.x, line.high, strict=True)),
            *reversed([(x_of(x), y_of(y)) for x, y in zip(line.x, line.low, strict=True)]),
        ]
        dashes = ' stroke-dasharray="6 3"' if line.dashed else ""
        points = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in zip(line.x, line.y, strict=True))
        yield (
            f'<polygon points="{" ".join(f"{x},{y}" for x, y in band)}" fill="{line.colour}" '
            'opacity="0.15"/>'
        )
        yield (
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.8"'
            f"{dashes}><title>{escape(line.label)}</title></polyline>"
        )


def _legend(series: Sequence[Series]) -> Iterable[str]:
    for number, line in enumerate(series):
        x = _LEFT + (number % 2) * _WIDTH
        y = _HEIGHT + _LINE_HEIGHT * (number // 2)
        dashes = ' stroke-dasharray="6 3"' if line.dashed else ""
        yield (
            f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{line.colour}" '
            f'stroke-width="2.5"{dashes}/><text x="{x + 32}" y="{y}">{escape(line.label)}</text>'
        )
