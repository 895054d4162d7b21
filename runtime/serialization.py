"""Text from outside -> values of known types, or an error that names the file and the place.

JSON becomes a frozen dataclass by the types of its fields: nothing in a file decides which code
runs, how deep a reader recurses or how much it allocates. Semantic checks are the caller's job
(`plan/validate.py`).
"""

from __future__ import annotations

import difflib
import json
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import AsyncPipeError
from .formatting import hiding_in, visible

_MOST_BYTES = 256 << 20
_DEEPEST = 40
_LARGEST = 2**63
_repr = Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 2, 60, 60
_short = _repr.repr

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that was read, the class of its errors, and the cure."""

    where: str
    error: type[AsyncPipeError]
    cure: str = ""

    def refused(self, problem: str) -> AsyncPipeError:
        """The error about this place."""
        return self.error(f"{self.where}{problem}", self.cure)


def read_text(path: Path, origin: Origin) -> str:
    """The text of a file. Raises the origin's error when it cannot be read, is too large to be what
    it should be, or is not UTF-8 without control characters, which could hide what is in it."""
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise origin.refused(" is neither a file nor a folder.")  # such as a pipe
        if status.st_size > _MOST_BYTES:
            size = status.st_size >> 20
            raise origin.refused(f" has {size} MiB, more than such a file can have.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise origin.refused(f" cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise origin.refused(
            f" is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    if character := hiding_in(text):
        raise origin.refused(f" has a control or hidden character ('{character}').")
    return text


def parse_json(text: str, origin: Origin, *, finite: bool = True) -> Any:
    """The value of a JSON text. Raises the origin's error for text that is not JSON, is too deep,
    names a key twice, has control characters or, with `finite`, a number that is NaN or inf."""

    def number(text: str) -> float:
        if finite and not isfinite(float(text)):
            raise ValueError(f"{text} is not a finite number")
        return float(text)

    def parse(text: str) -> Any:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=number, parse_constant=number
        )

    return _parsed(parse, text, "JSON", origin)


def parse_toml(text: str, origin: Origin) -> dict[str, Any]:
    """The value of a TOML text. Raises the origin's error as `parse_json` does."""
    table: dict[str, Any] = _parsed(tomllib.loads, text, "TOML", origin)
    return table


def read_json_lines(
    path: Path, error: type[AsyncPipeError], cure: str = "", *, finite: bool = True
) -> Iterator[tuple[dict[str, Any], Origin]]:
    """The objects of a file that has one a line, each with where it is. Raises `error` for a line
    that is none."""
    text = read_text(path, Origin(str(path), error, cure))
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            origin = Origin(f"{path}: line {number}", error, cure)
            raw = parse_json(line, origin, finite=finite)
            if not isinstance(raw, dict):
                raise origin.refused(f" is {_short(raw)}, not an object.")
            yield raw, origin


def shaped(kind: type[T], raw: Any, origin: Origin) -> T:
    """`raw`, as parsed from JSON, as a value of a type: a dataclass of such, tuples, unions,
    numbers.

    >>> @dataclass
    ... class Point:
    ...     at: tuple[float, ...]
    ...     name: str = ""
    >>> shaped(Point, {"at": [1, 2.5]}, Origin("here", AsyncPipeError))
    Point(at=(1.0, 2.5), name='')
    >>> shaped(Point, {"at": [1, "x"]}, Origin("here", AsyncPipeError))
    Traceback (most recent call last):
    asyncpipe.runtime.errors.AsyncPipeError: here: at[1] is 'x', not a number.

    Raises the origin's error with the place, the value and the expected type.
    """
    try:
        value: T = _shaped(kind, raw, "")
    except _Misfit as misfit:
        place = f": {misfit.place.lstrip('.')}" if misfit.place else ""
        raise origin.refused(f"{place} {misfit.what}.") from None
    return value


def known_fields(kind: Any, raw: Any) -> Any:
    """An object without what a dataclass has no field for; anything else as it is."""
    names = {field.name for field in fields(kind)}
    if not isinstance(raw, dict):
        return raw
    return {name: item for name, item in raw.items() if name in names}


class _Misfit(Exception):
    """An error at a place within a value."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(place, what)
        self.place = place
        self.what = what


def _parsed(parse: Callable[[str], Any], text: str, form: str, origin: Origin) -> Any:
    try:
        raw = parse(text)
    except RecursionError:
        raise origin.refused(" is nested too deeply.") from None
    except ValueError as error:
        problem = str(error)
        if "set_int_max_str_digits" in problem:  # Python's words for what a program may do
            problem = "it has a number of more than 4300 digits"
        raise origin.refused(f" is not {form}: {visible(problem)}.") from error
    level, depth = [raw], 0
    while level:
        for item in level:
            if isinstance(item, str) and hiding_in(item):
                raise origin.refused(f" has control or hidden characters in {_short(item)}.")
        level = [inner for item in level for inner in _inner(item)]
        depth += 1
        if depth > _DEEPEST:
            raise origin.refused(" is nested too deeply.")
    return raw


def _inner(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item
        yield from item.values()
    elif isinstance(item, list):
        yield from item


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{_short(twice)} is there twice")
    return table


def _shaped(kind: Any, raw: Any, place: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return raw
    if origin in (Union, UnionType):
        return _one_of(arguments, raw, place)
    if is_dataclass(kind):
        return _record(kind, raw, place)
    if origin is tuple:
        return _tuple(arguments, raw, place)
    if origin in (dict, Mapping):
        if not isinstance(raw, dict):
            raise _Misfit(place, f"is {_short(raw)}, not an object")
        return {key: _shaped(arguments[1], item, f"{place}.{key}") for key, item in raw.items()}
    return _scalar(kind, raw, place)


def _scalar(kind: Any, raw: Any, place: str) -> Any:
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if kind is float and is_number and (isinstance(raw, float) or abs(raw) < _LARGEST):
        return float(raw)
    if kind is int and is_number and abs(raw) < _LARGEST and raw == int(raw):
        return int(raw)
    if kind in (bool, str) and type(raw) is kind:
        return raw
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    raise _Misfit(place, f"is {_short(raw)}, not {words[kind]}")


def _one_of(kinds: tuple[Any, ...], raw: Any, place: str) -> Any:
    """A value of the first of several types that it fits."""
    if raw is None and NoneType in kinds:
        return None
    misfits = []
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _shaped(kind, raw, place)
            except _Misfit as misfit:
                misfits.append(misfit)
    raise misfits[-1]


def _tuple(kinds: tuple[Any, ...], raw: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _Misfit(place, f"is {_short(raw)}, not a list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(raw)
    if len(kinds) != len(raw):
        raise _Misfit(place, f"is {_short(raw)}, not a list of {len(kinds)}")
    return tuple(
        _shaped(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, raw, strict=True))
    )


def _record(kind: Any, raw: Any, place: str) -> Any:
    if not isinstance(raw, dict):
        raise _Misfit(place, f"is {_short(raw)}, not an object")
    hints, needed = _types_of(kind)
    for name in (name for name in raw if name not in hints):
        near = difflib.get_close_matches(name[:80], hints, n=1)
        meant = f", which is not known; did you mean {near[0]}" if near else ", which is not known"
        raise _Misfit(place, f"has {_short(name)}{meant}")
    for name in hints:
        if name in needed and name not in raw:
            raise _Misfit(place, f"has no {name}")
    return kind(
        **{name: _shaped(hints[name], item, f"{place}.{name}") for name, item in raw.items()}
    )


@cache
def _types_of(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and the fields that have no default."""
    hints = get_type_hints(kind)
    needed = {
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }
    return {field.name: hints[field.name] for field in fields(kind)}, frozenset(needed)
