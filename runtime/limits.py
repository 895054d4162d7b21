"""The legal values of an option, for command line, TOML and Python alike.

A limit reads a value from text (`read`), decides which values are legal (`has`), and names the
legal values (`words`) and one of them (`example`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from reprlib import Repr
from typing import Any, Protocol

from .formatting import hiding_in
from .known_names import value_in_ours

_LONGEST = 2**16
_short = Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 2, 60, 60, 60


class Limit(Protocol):
    """The legal values of an option."""

    @property
    def words(self) -> str:
        """The legal values, as in `--steps 2.5 is not <words>`."""
        ...

    @property
    def example(self) -> Any:
        """A legal value."""
        ...

    def read(self, text: str) -> Any:
        """The value that a text stands for; the text itself if it stands for no value."""
        ...

    def has(self, value: Any) -> bool:
        """True if the value is legal."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers, both ends included."""

    least: int
    most: int
    example: int

    @property
    def words(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, text: str) -> int | str:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,60}", text) else text

    def has(self, value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Number:
    """Finite numbers from `least` to `most`, or to below `below`."""

    least: float
    most: float
    example: float
    below: float = inf

    @property
    def words(self) -> str:
        upto = f"{self.most:g}" if self.below == inf else f"below {self.below:g}"
        return f"a number from {self.least:g} to {upto}"

    def read(self, text: str) -> float | str:
        form = r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})(e[+-]?[0-9]{1,9})?"
        is_number = re.fullmatch(form, text, re.IGNORECASE) and isfinite(float(text))
        return float(text) if is_number else text

    def has(self, value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return self.least <= value <= self.most and value < self.below and isfinite(value)


@dataclass(frozen=True)
class Choice:
    """A few names, read in any case and in the words of other tools."""

    names: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.names)}"

    @property
    def example(self) -> str:
        return self.names[0]

    def read(self, text: str) -> str:
        return value_in_ours(text, self.names)

    def has(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.names


@dataclass(frozen=True)
class Text:
    """Texts without control or hidden characters that are not empty and that `accepts` takes."""

    words: str
    example: str
    accepts: Callable[[str], Any] = bool

    def read(self, text: str) -> str:
        return text

    def has(self, value: Any) -> bool:
        if not isinstance(value, str | os.PathLike):
            return False
        text = os.fspath(value)
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST or _hidden_in(text):
            return False
        return bool(self.accepts(text))


@dataclass(frozen=True)
class Flag:
    """True or false."""

    words = "true or false"
    example = True

    def read(self, text: str) -> bool | str:
        return {"true": True, "false": False}.get(text.lower(), text)

    def has(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class ListOf:
    """A list of legal values without duplicates, or of exactly `count` values."""

    item: Limit
    count: int | None = None

    @property
    def words(self) -> str:
        if self.count is not None:
            return f"{self.count} values, each {self.item.words}"
        return f"a list without duplicates of values, each {self.item.words}"

    @property
    def example(self) -> Any:
        return (self.item.example,) * (self.count or 1)

    def read(self, text: str) -> Any:
        """`0.9/0.999`, as in `--sweep` and in the methods of a comparison."""
        return tuple(self.item.read(part) for part in text.split("/"))

    def has(self, value: Any) -> bool:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            return False
        values = list(value)
        if not all(map(self.item.has, values)):
            return False
        if self.count is not None:
            return len(values) == self.count
        return all(element not in values[:index] for index, element in enumerate(values))


@dataclass(frozen=True)
class Either:
    """The values of two limits; a text is read by the first that accepts it."""

    first: Limit
    second: Limit

    @property
    def words(self) -> str:
        return f"{self.first.words}, or {self.second.words}"

    @property
    def example(self) -> Any:
        return self.first.example

    def read(self, text: str) -> Any:
        value = self.first.read(text)
        return value if self.first.has(value) else self.second.read(text)

    def has(self, value: Any) -> bool:
        return self.first.has(value) or self.second.has(value)


def form(pattern: str) -> Callable[[str], Any]:
    """The check of a `Text`: accepts texts that match a regular expression as a whole."""
    return re.compile(pattern, re.ASCII).fullmatch


def path(example: str) -> Text:
    """The limit of a path to a file or folder."""
    return Text("a path", example)


_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}


def bytes_of(size: int | str) -> int | None:
    """A number of bytes from "11GiB", "500 MB" or "1.5e9"; None if it is not a memory size.

    >>> bytes_of("11GiB"), bytes_of("500 MB"), bytes_of(7), bytes_of("many")
    (11811160064, 500000000, 7, None)
    """
    number = r"([0-9]{1,20}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)"
    parts = re.fullmatch(rf"\s*{number}\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = _UNITS.get(parts[2].lower(), 0) if parts else 0
    is_size = parts is not None and unit > 0 and 0 < float(parts[1]) < 1e18
    return int(float(parts[1]) * unit) if parts and is_size else None


def key_values(example: str) -> ListOf:
    """The limit of a list of `key=value`."""
    return ListOf(Text("KEY=VALUE", example, form(r"(?s)[^=\s]+=.*")))


def refusal(limit: Limit, name: str, value: Any, place: str = "") -> tuple[str, str] | None:
    """The error about the value of an option, and a cure; None if it is legal.

    The option is written as a flag, or as `name = value` where it stands in `place`.

    >>> refusal(Whole(1, 64, 8), "micro_batches", 0)
    ('--micro-batches 0 is not a whole number from 1 to 64.', 'Use for example --micro-batches 8.')
    >>> refusal(Choice(("sgd", "adam")), "optimizer", "adm", "run.toml")
    ('run.toml: optimizer = "adm" is not one of sgd, adam.', 'Did you mean optimizer = "adam"?')
    """
    if limit.has(value):
        return None
    wrong, wrong_value = limit, value
    if isinstance(limit, ListOf) and isinstance(value, list | tuple) and limit.count is None:
        for item in value:  # names the one that is wrong
            if not limit.item.has(item):
                wrong, wrong_value = limit.item, item
                break
            if list(value).count(item) > 1:
                return f"{_written(name, item, place)} is given twice.", "Leave one out."

    as_typed = _assigned if place else typed
    message = f"{_written(name, wrong_value, place)} is not {wrong.words}."
    chosen = wrong.first if isinstance(wrong, Either) else wrong
    names = chosen.names if isinstance(chosen, Choice) else ()
    meant = value_in_ours(str(wrong_value), names)
    if near := [meant] if meant in names else get_close_matches(str(wrong_value), names, n=1):
        return message, f"Did you mean {as_typed(name, near[0])}?"
    if isinstance(wrong, Text) and (hidden := _hidden_in(str(wrong_value))):
        written = _written(name, wrong_value, place)
        message = f"{written} has a control or hidden character ('{hidden}')."
    example = limit.example
    return message, f"Use for example {as_typed(name, example)}."


def _hidden_in(text: str) -> str:
    """The first character that no name may have, spelled out; "" if there is none."""
    return hiding_in(text) or next(
        (repr(character)[1:-1] for character in text if character in "\n\t"), ""
    )


def flag_of(option: str) -> str:
    """`micro_batches` -> `--micro-batches`."""
    return "--" + option.replace("_", "-")


def _written(name: str, value: Any, place: str) -> str:
    return f"{place}: {_assigned(name, value)}" if place else typed(name, value)


def typed(name: str, value: Any) -> str:
    """An option and its value as one types them: `--betas 0.9 0.99`."""
    written = name if name.isupper() else flag_of(name)  # FOLDER is no flag
    if value is True:
        return written
    values = value if isinstance(value, list | tuple) else (value,)
    return " ".join([written, *map(_word, values)])


def _word(value: Any) -> str:
    """A value as one types it; quoted where it has characters that would not show."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, float) and isfinite(text):
        return f"{text:g}"
    if not isinstance(text, str):
        return _short.repr(text)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return shown if text and text.isprintable() else _short.repr(text)


def _assigned(name: str, value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, str | bool) and len(str(value)) < 60:
        return f"{name} = {json.dumps(value)}"
    return f"{name} = {_short.repr(list(value) if isinstance(value, tuple) else value)}"
