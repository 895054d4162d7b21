"""Nested arguments and results <-> JSON that has names where the tensors are.

A string is the name of a tensor, a list a tuple, an object a dict; None, numbers and truth values
stand for themselves. What JSON has no word for is an object of one key: `{"$list": [...]}`,
`{"$text": "mean"}`, `{"$size": "2*batch"}`, `{"$other": "torch.float32"}` (an object that is
told by its repr), `{"$items": [[1, ...]]}` (a dict whose keys are no strings) and
`{"$named": ["Point", {"x": ...}]}` (a named tuple).
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from .errors import DataError
from .sizes import evaluate_size

NameOf = Callable[[Any], str | dict[str, str] | None]
"""The name (or the size) that stands for a leaf, None for one that is a constant."""


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def described(value: Any, name_of: NameOf) -> Any:
    """A value's structure.

    >>> described({"x": 1.5, "mode": "mean", "pair": (b"a", None)},
    ...           lambda leaf: "first" if leaf == b"a" else None)
    {'x': 1.5, 'mode': {'$text': 'mean'}, 'pair': ['first', None]}
    """
    name = name_of(value)
    if name is not None:
        return name
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return {"$text": value}
    if is_named_tuple(value):
        fields = {key: described(item, name_of) for key, item in value._asdict().items()}
        return {"$named": [type(value).__name__, fields]}
    if isinstance(value, Mapping):
        items = [(key, described(item, name_of)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [list(item) for item in items]}
    if isinstance(value, (tuple, list)):
        parts = [described(item, name_of) for item in value]
        return parts if isinstance(value, tuple) else {"$list": parts}
    if is_record(value):
        return {key: described(item, name_of) for key, item in fields_of(value).items()}
    return {"$other": repr(value)}


def is_structure(value: Any) -> bool:
    """Whether a value that was read is a structure: one that all below can take."""
    if isinstance(value, (list, tuple)):
        return all(map(is_structure, value))
    if not isinstance(value, Mapping):
        return value is None or isinstance(value, (str, int, float))
    match _tag(value):
        case "", inner:
            return all(map(is_structure, inner.values()))
        case "$text" | "$other" | "$size", str():
            return True
        case "$list", list() as items:
            return all(map(is_structure, items))
        case "$items", list() as items:
            pairs = [item for item in items if isinstance(item, list) and len(item) == 2]
            has_keys = all(not isinstance(key, (list, Mapping)) for key, _ in pairs)
            return len(pairs) == len(items) and has_keys and is_structure([v for _, v in pairs])
        case "$named", [str() as name, Mapping() as fields]:
            are_names = all(word.isidentifier() and not iskeyword(word) for word in (name, *fields))
            plain = not any(word.startswith("_") for word in fields)
            return are_names and plain and is_structure(list(fields.values()))
    return False


def names_in(structure: Any) -> Iterator[str]:
    """The names of the tensors in order; one that is there twice comes twice."""
    if isinstance(structure, str):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from names_in(item)
    elif isinstance(structure, Mapping):
        kind, inner = _tag(structure)
        if kind in ("", "$list"):
            yield from names_in(list(inner.values()) if kind == "" else inner)
        elif kind == "$named":
            yield from names_in(list(inner[1].values()))
        elif kind == "$items":
            yield from names_in([item for _, item in inner])


def rebuilt(structure: Any, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The value that a structure tells of, from named tensors and the numbers of the sizes."""

    def build(inner: Any) -> Any:
        return rebuilt(inner, values, sizes)

    if isinstance(structure, str):
        return values[structure]
    if isinstance(structure, (list, tuple)):
        return tuple(map(build, structure))
    if not isinstance(structure, Mapping):
        return structure
    kind, inner = _tag(structure)
    match kind:
        case "":
            return {key: build(item) for key, item in inner.items()}
        case "$list":
            return list(map(build, inner))
        case "$items":
            return {key: build(item) for key, item in inner}
        case "$named":
            name, fields = inner
            return namedtuple(name, fields)(*map(build, fields.values()))
        case "$size":
            return evaluate_size(inner, sizes)
    return inner


def tensors_by_name(structure: Any, given: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The tensors of `given`, a value like the one that was described, by name.

    `where` is what messages call it. Raises DataError for another structure and for a constant
    that is another than in the capture.
    """
    if isinstance(structure, str):
        yield structure, given
        return
    if isinstance(structure, Mapping):
        kind, inner = _tag(structure)
    else:
        kind, inner = ("$tuple" if isinstance(structure, (list, tuple)) else "$value"), structure
    if kind == "":
        for key, item in inner.items():
            if isinstance(given, Mapping) and key not in given and not any(names_in(item)):
                continue  # a constant that was not said again
            yield from tensors_by_name(item, _get(given, key, where), f"{where}.{key}")
    elif kind == "$items":
        for key, item in inner:
            yield from tensors_by_name(item, _get(given, key, where), f"{where}[{key!r}]")
    elif kind == "$named":
        for (key, item), value in zip(
            inner[1].items(), _parts(given, len(inner[1]), where), strict=True
        ):
            yield from tensors_by_name(item, value, f"{where}.{key}")
    elif kind in ("$list", "$tuple"):
        parts = _parts(given, len(inner), where)
        for position, (item, value) in enumerate(zip(inner, parts, strict=True)):
            yield from tensors_by_name(item, value, f"{where}[{position}]")
    else:
        _verify_constant(kind, inner, given, where)


def constants_in(structure: Any, where: str) -> Iterator[tuple[str, str]]:
    """What is fixed in a structure of arguments: where it is and its text. None is left out."""
    if isinstance(structure, Mapping):
        kind, inner = _tag(structure)
        if kind in ("$text", "$other"):
            yield where, repr(inner) if kind == "$text" else inner
        elif kind == "$named":
            yield from constants_in(inner[1], where)
        elif kind == "$list":
            yield from constants_in(inner, where)
        else:
            for key, item in inner if kind == "$items" else inner.items():
                yield from constants_in(item, f"{where}.{key}" if where else str(key))
    elif isinstance(structure, (list, tuple)):
        for position, item in enumerate(structure):
            yield from constants_in(item, f"{where}[{position}]")
    elif structure is not None and not isinstance(structure, str):
        yield where, repr(structure)


def _tag(structure: Mapping[str, Any]) -> tuple[str, Any]:
    """What an object of one key stands for and its content; for a plain dict, itself."""
    if len(structure) == 1:
        ((key, inner),) = structure.items()
        if key.startswith("$"):
            return key, inner
    return "", structure


def _get(given: Any, key: Any, where: str) -> Any:
    if isinstance(given, Mapping):
        if key in given:
            return given[key]
    elif isinstance(key, str) and hasattr(given, key):
        return getattr(given, key)
    raise DataError(f"{where} has no {key!r}, which it had when it was captured.")


def _parts(given: Any, count: int, where: str) -> Sequence[Any]:
    if isinstance(given, (tuple, list)) and len(given) == count:
        return given
    now = f"{len(given)} items" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
    raise DataError(f"{where} was captured with {count} items and is {now} now.")


def _verify_constant(kind: str, captured: Any, given: Any, where: str) -> None:
    now = repr(given) if kind == "$other" else given
    if type(now) is type(captured) and now == captured:
        return
    if type(now) in (int, float) and type(captured) in (int, float) and now == captured:
        return
    was = captured if kind == "$other" else repr(captured)
    shape = getattr(given, "shape", None)
    told = repr(given) if shape is None else f"a tensor of shape {tuple(shape)}"
    raise DataError(
        f"{where} was captured with {was} and is {told} now.",
        "What is no tensor is fixed in the stages: partition again with the other value.",
    )
