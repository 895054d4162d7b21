"""`3h50m` -> seconds."""

from __future__ import annotations

import re

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_FORM = re.compile("".join(rf"(?:(\d+){unit})?" for unit in _UNITS))


def seconds_of(text: str) -> int | None:
    """The seconds of a time of days, hours, minutes and seconds; None of what is none, or is 0.

    >>> [seconds_of(text) for text in ("3h50m", "90s", "2d", "90", "0s", "")]
    [13800, 90, 172800, None, None, None]
    """
    found = _FORM.fullmatch(text)
    numbers = found.groups(default="0") if found else ()
    return sum(int(n) * s for n, s in zip(numbers, _UNITS.values(), strict=False)) or None
