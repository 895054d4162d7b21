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
"""Points that are drawn as such, where the two looks that there are for them are enough."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; `number` chooses its colour and dashes. Its points are drawn where
    `has_dots`, and only tell their numbers otherwise; `band` is an area about it, or empty."""

    label: str
    number: int
    path: str
    band: str
    points: tuple[Point, ...]
    has_dots: bool


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
    """Points in the order of x; those that no axis could have are left out. A `band` of (x, lowest
    y, highest y) is drawn about them."""

    label: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()

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
    ceiling: float | None = None,
    x_floor: float | None = None,
    is_even: bool = False,
    height: int = HEIGHT,
) -> Chart | None:
    """A line for each series, over all that x goes; None where there is nothing to draw.

    `write` says what a number of y is called, `x_unit` what x counts; `floor` and `x_floor` are
    numbers that the axes reach down to. What is above the `ceiling` leaves the chart at its top; by
    default that is what a few points at the start have, as first losses do, that are far above all
    others. Where the numbers of x `is_even` they are written each, equally far apart.
    """
    drawn = [one for one in series if one.finite]
    if not drawn:
        return None
    xs = sorted({x for one in drawn for x, _ in one.finite})
    ys = sorted(y for one in drawn for _, *each in (*one.finite, *one.band) for y in each)
    low = ys[0] if floor is None else min(floor, ys[0])
    high = _usual_most(ys) if ceiling is None else max(low, ceiling)
    y_ticks = ticks_around(low, high)
    x_low, x_high = xs[0] if x_floor is None else min(x_floor, xs[0]), xs[-1]
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    bottom, right = height - BOTTOM, WIDTH - RIGHT

    def x_of(x: float) -> float:
        part = xs.index(x) / max(1, len(xs) - 1) if is_even else (x - x_low) / (x_high - x_low)
        return round(LEFT + (right - LEFT) * part, 2)

    def y_of(y: float) -> float:
        part = (min(y, y_ticks[-1]) - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(bottom - (bottom - TOP) * part, 2)

    def path_of(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x_of(x)} {y_of(y)}" for x, y in points)

    def line(number: int, one: Series) -> Line:
        path = _thinned(one.finite, _MOST)
        around = [(x, y) for x, _, y in one.band] + [(x, y) for x, y, _ in reversed(one.band)]
        return Line(
            one.label,
            number,
            path_of(path if len(path) > 1 else [*path, *path]),  # a point is a line too
            path_of(around) + "Z" if around else "",
            tuple(
                Point(x_of(x), y_of(y), f"{one.label}, {x_unit} {x:g}: {write(y)}")
                for x, y in _thinned(one.finite, _HOVERED)
            ),
            has_dots=len(one.finite) <= _FEW and len(series) <= 2,
        )

    return Chart(
        heading=heading,
        width=WIDTH,
        height=height,
        left=LEFT,
        right=right,
        bottom=bottom,
        lines=tuple(line(number, one) for number, one in enumerate(series) if one.finite),
        x_ticks=tuple(
            (x_of(x), f"{x:g}")
            for x in (xs if is_even else ticks_around(x_low, x_high))
            if x_low <= x <= x_high
        ),
        y_ticks=tuple((y_of(y), write(y)) for y in y_ticks),
    )


def _usual_most(ascending: Sequence[float]) -> float:
    """The highest, unless it is far above all but a fiftieth of the numbers."""
    most, usual = ascending[-1], ascending[math.ceil(0.98 * len(ascending)) - 1]
    spread = usual - ascending[0]
    return usual + spread / 4 if spread > 0 and most > usual + spread else most


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most so many of the points, evenly taken, the first and last among them."""
    if len(points) <= most:
        return points
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
