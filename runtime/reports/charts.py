"""Numbers -> charts and bars in SVG units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar in percent of the scale, with a letter if there is room."""

    kind: str
    percent: float
    letter: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of bars; numbers are in percent of the scale.

    segments: its parts.
    is_slowest: True for the row to highlight.
    over_from, over_percent, limit: the part that exceeds the limit, and the limit.
    """

    label: str
    segments: tuple[BarSegment, ...]
    value: str
    title: str
    is_slowest: bool = False
    over_from: float | None = None
    over_percent: float = 0.0
    limit: float | None = None


def segment(kind: str, letter: str, share: float, title: str) -> BarSegment:
    """A part with this share of the scale."""
    return BarSegment(kind, 100 * share, letter if share > 0.03 else "", title)


@dataclass(frozen=True, slots=True)
class Card:
    """A heading with a number and a detail, as at the top of a page."""

    heading: str
    number: str
    detail: str


_FLAT = 1e-9
"""A range that is smaller than its numbers by this factor is a single point."""
_NOTHING = 1e-90


def ticks_around(low: float, high: float) -> tuple[float, ...]:
    """Four to eight round numbers, from at most `low` to at least `high`.

    >>> ticks_around(0.0, 7.3), ticks_around(2.61, 3.4)
    ((0.0, 2.0, 4.0, 6.0, 8.0), (2.6, 2.8, 3.0, 3.2, 3.4))
    """
    most = max(abs(low), abs(high))
    if high - low <= max(_FLAT * most, _NOTHING):
        around = most / 2 if most > _NOTHING else 0.5
        return ticks_around(low - around, high + around)
    exponent = math.floor(math.log10((high - low) / 5))
    apart = next(step for step in _steps(exponent) if high - low <= 5 * step)
    first, last = math.floor(low / apart), math.ceil(high / apart)
    return tuple(round(apart * number, max(0, 2 - exponent)) for number in range(first, last + 1))


def ticks_up_to(most: float, count: int = 10) -> tuple[float, ...]:
    """At most `count` + 1 round numbers from 0 up to at most `most`.

    >>> ticks_up_to(23.0)
    (0.0, 5.0, 10.0, 15.0, 20.0)
    """
    if most <= _NOTHING:
        return ()
    exponent = math.floor(math.log10(most / count))
    apart = next(step for step in _steps(exponent) if most <= count * step)
    numbers = range(int(most / apart) + 1)
    return tuple(round(apart * number, max(0, 2 - exponent)) for number in numbers)


def _steps(exponent: int) -> tuple[float, ...]:
    """The round numbers of that power of ten, and of the next."""
    return tuple(10.0**exponent * factor for factor in (1, 2, 5, 10, 20))


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 230, 58, 14, 12, 40
_MOST = 400
"""The maximum number of points of a line; more would not be visible."""
_HOVERED = 40
"""The maximum number of points of a line that show their numbers."""
_HUGE = 1e90
_NEAR = 0.25
"""An axis whose first number is at most this part of its last one begins at 0."""
_FEW = 12
"""The maximum number of points drawn as dots, for which there are two styles."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One series of a chart.

    number: selects its color and dashes.
    path, band: SVG paths of the line and of an area around it, which may be empty.
    points: positions with their numbers.
    has_dots: True if the points are drawn.
    """

    label: str
    number: int
    path: str
    band: str
    points: tuple[Point, ...]
    has_dots: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; its heading names the numbers of y.

    lines: its series
    x_title: the name of x
    x_ticks, y_ticks: positions and numbers of the marks
    """

    heading: str
    x_title: str
    width: int
    height: int
    left: int
    right: int
    bottom: int
    lines: tuple[ChartLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """A series of numbers.

    label: its name.
    points: (x, y) in the order of x; those that are not finite are omitted.
    band: (x, lowest y, highest y) of an area around them.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()

    @property
    def finite(self) -> tuple[tuple[float, float], ...]:
        return tuple(
            point for point in self.points if all(abs(coordinate) < _HUGE for coordinate in point)
        )


def chart(
    heading: str,
    series: Sequence[Series],
    *,
    x_unit: str,
    x_title: str = "",
    write: Callable[[float], str] = "{:g}".format,
    floor: float | None = None,
    ceiling: float | None = None,
    x_floor: float | None = None,
    is_even: bool = False,
    height: int = HEIGHT,
) -> Chart | None:
    """A chart with a line for each series; None if there is nothing to draw.

    x_unit: the unit of x.
    x_title: the name of x, by default its unit.
    write: formats a number of y.
    floor, x_floor: numbers that the axes include. An axis of x includes 0 if that is near.
    ceiling: the upper limit of y; lines above it leave the chart at its top. By default a few
        points far above all others, such as the first losses, are cut off.
    is_even: draws the values of x at equal distances, each with its number.
    """
    if not (drawn := [(number, line) for number, line in enumerate(series) if line.finite]):
        return None
    xs = sorted({x for _, line in drawn for x, _ in line.finite})
    ys = sorted(y for _, line in drawn for _, *limits in (*line.finite, *line.band) for y in limits)
    low = ys[0] if floor is None else min(floor, ys[0])
    high = _usual_most(ys) if ceiling is None else max(low, ceiling)
    x_low, x_high = _x_range(xs[0], xs[-1], x_floor)
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    axes = _Axes(x_low, x_high, ticks_around(low, high), right, bottom, xs if is_even else ())
    has_few = len(series) <= 2
    return Chart(
        heading=heading,
        x_title=x_title or x_unit,
        width=WIDTH,
        height=height,
        left=LEFT,
        right=right,
        bottom=bottom,
        lines=tuple(
            _line(
                number,
                line,
                axes,
                lambda x, y: f"{x_unit} {x:g}: {write(y)}",
                has_dots=len(line.finite) <= _FEW and has_few,
            )
            for number, line in drawn
        ),
        x_ticks=tuple(
            (axes.x_of(x), f"{x:g}")
            for x in (xs if is_even else ticks_around(x_low, x_high))
            if x_low <= x <= x_high
        ),
        y_ticks=tuple((axes.y_of(y), _without_zeros(write(y))) for y in axes.y_ticks),
    )


def _x_range(first: float, last: float, floor: float | None) -> tuple[float, float]:
    """The ends of an axis of x.

    >>> _x_range(1, 40, None), _x_range(300, 400, None), _x_range(20, 20, None), _x_range(0, 0, 0)
    ((0.0, 40), (300, 400), (0.0, 20), (-1, 1))
    """
    low = first if floor is None else min(floor, first)
    if low > 0 and (low <= _NEAR * last or low == last):
        low = 0.0
    return (low - 1, last + 1) if low == last else (low, last)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Numbers -> positions in a chart; `even` are values of x to draw at equal distances."""

    x_low: float
    x_high: float
    y_ticks: tuple[float, ...]
    right: int
    bottom: int
    even: Sequence[float]

    def x_of(self, x: float) -> float:
        part = (x - self.x_low) / (self.x_high - self.x_low)
        if self.even:
            part = self.even.index(x) / max(1, len(self.even) - 1)
        return round(LEFT + (self.right - LEFT) * part, 2)

    def y_of(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        part = (min(y, high) - low) / (high - low)
        return round(self.bottom - (self.bottom - TOP) * part, 2)

    def path_of(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x_of(x)} {self.y_of(y)}" for x, y in points)


def _line(
    number: int, line: Series, axes: _Axes, title: Callable[[float, float], str], *, has_dots: bool
) -> ChartLine:
    path = _thinned(line.finite, _MOST)
    around = [(x, y) for x, _, y in line.band] + [(x, y) for x, y, _ in reversed(line.band)]
    return ChartLine(
        line.label,
        number,
        axes.path_of(path if len(path) > 1 else [*path, *path]),  # a point is a line too
        axes.path_of(around) + "Z" if around else "",
        tuple(
            Point(axes.x_of(x), axes.y_of(y), f"{line.label}, {title(x, y)}")
            for x, y in _thinned(line.finite, _HOVERED)
        ),
        has_dots=has_dots,
    )


def _without_zeros(text: str) -> str:
    """A number of an axis without zeros after its point.

    >>> [*map(_without_zeros, ("40.00 ms", "5.0%", "0.20 ms", "100%", "0.305"))]
    ['40 ms', '5%', '0.2 ms', '100%', '0.305']
    """
    return re.sub(
        r"\.(?:0+|(\d*?[1-9])0+)(?!\d)", lambda zeros: f".{zeros[1]}" * bool(zeros[1]), text
    )


def _usual_most(ascending: Sequence[float]) -> float:
    """The highest number, or less if it is far above 98% of the numbers."""
    most, usual = ascending[-1], ascending[math.ceil(0.98 * len(ascending)) - 1]
    spread = usual - ascending[0]
    return usual + spread / 4 if spread > 0 and most > usual + spread else most


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most `most` of the points, evenly spaced, including the first and last."""
    if len(points) <= most:
        return points
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
