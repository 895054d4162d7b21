"""The range of an axis -> round numbers to write at it."""

from __future__ import annotations

import math

_FLAT = 1e-9
"""A range that is so much smaller than its numbers is a point."""
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
    apart = next(each for each in _steps(exponent) if high - low <= 5 * each)
    first, last = math.floor(low / apart), math.ceil(high / apart)
    return tuple(round(apart * number, max(0, 2 - exponent)) for number in range(first, last + 1))


def ticks_up_to(most: float, count: int = 10) -> tuple[float, ...]:
    """At most `count` + 1 round numbers from 0 on, none above `most`.

    >>> ticks_up_to(23.0)
    (0.0, 5.0, 10.0, 15.0, 20.0)
    """
    if most <= _NOTHING:
        return ()
    exponent = math.floor(math.log10(most / count))
    apart = next(each for each in _steps(exponent) if most <= count * each)
    numbers = range(int(most / apart) + 1)
    return tuple(round(apart * number, max(0, 2 - exponent)) for number in numbers)


def _steps(exponent: int) -> tuple[float, ...]:
    """The round numbers of that power of ten; the last is of the next."""
    return tuple(10.0**exponent * factor for factor in (1, 2, 5, 10, 20))
