"""Series of numbers -> lines between ticks, in SVG units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .ticks import ticks_around

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 220, 58, 14, 12, 34
_MOST = 400
"""Points of a line that are drawn; more would not be seen."""
_HOVERED = 40
"""Points of a long line that tell their numbers."""
_HUGE = 1e90
_FEW = 12
"""Points that are drawn as such, in the two looks that there are for them."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; `number` chooses its colour and dashes. Its points are drawn where
    `has_dots`, and only tell their numbers otherwise."""

    label: str
    number: int
    path: str
    points: tuple[Point, ...]
    has_dots: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    heading: str
    width: int
    height: int
    left: int
    right: int
    bottom: int
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x; those that no axis could have are left out."""

    label: str
    points: tuple[tuple[float, float], ...]

    @property
    def finite(self) -> tuple[tuple[float, float], ...]:
        return tuple(point for point in self.points if all(abs(each) < _HUGE for each in point))


def chart(
    heading: str,
    series: Sequence[Series],
    *,
    x_unit: str,
    write: Callable[[float], str] = "{:g}".format,
    floor: float | None = None,
) -> Chart | None:
    """A line for each series, over all that x goes; None where there is nothing to draw.

    `write` says what a number of y is called, `x_unit` what x counts; `floor` is a number of y
    that the axis reaches down to. A few points at the start that are far above all others, as first
    losses are, leave the chart at its top.
    """
    drawn = [one for one in series if one.finite]
    if not drawn:
        return None
    xs = [x for one in drawn for x, _ in one.finite]
    ys = sorted(y for one in drawn for _, y in one.finite)
    low = ys[0] if floor is None else min(floor, ys[0])
    y_ticks = ticks_around(low, _usual_most(ys))
    x_low, x_high = (min(xs), max(xs)) if len(set(xs)) > 1 else (xs[0] - 1, xs[0] + 1)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x_of(x: float) -> float:
        return round(LEFT + (right - LEFT) * (x - x_low) / (x_high - x_low), 2)

    def y_of(y: float) -> float:
        part = (min(y, y_ticks[-1]) - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(bottom - (bottom - TOP) * part, 2)

    def line(number: int, one: Series) -> Line:
        told = _thinned(one.finite, _HOVERED)
        path = [f"{x_of(x)} {y_of(y)}" for x, y in _thinned(one.finite, _MOST)]
        return Line(
            one.label,
            number,
            "M" + "L".join(path if len(path) > 1 else 2 * path),  # a point is a line too
            tuple(
                Point(x_of(x), y_of(y), f"{one.label}, {x_unit} {x:g}: {write(y)}") for x, y in told
            ),
            has_dots=len(one.finite) <= _FEW and number < 2,
        )

    return Chart(
        heading=heading,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=right,
        bottom=bottom,
        lines=tuple(line(number, one) for number, one in enumerate(series) if one.finite),
        x_ticks=tuple((x_of(x), f"{x:g}") for x in ticks_around(x_low, x_high) if _in(x, xs)),
        y_ticks=tuple((y_of(y), write(y)) for y in y_ticks),
    )


def _usual_most(ascending: Sequence[float]) -> float:
    """The highest, unless it is far above all but a fiftieth of the numbers."""
    most, usual = ascending[-1], ascending[math.ceil(0.98 * len(ascending)) - 1]
    spread = usual - ascending[0]
    return usual + spread / 4 if spread > 0 and most > usual + spread else most


def _in(x: float, xs: Sequence[float]) -> bool:
    return min(xs) <= x <= max(xs)


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most so many of the points, evenly taken, the first and last among them."""
    if len(points) <= most:
        return points
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
