"""Nested arguments and results <-> JSON with names in place of tensors.

A string is the name of a tensor, a list a tuple, an object a dict; None, numbers and truth values
stand for themselves. Values without a counterpart in JSON are objects of one key:

    {"$list": [...]}                         a list
    {"$text": "mean"}                        a string
    {"$size": "2*batch"}                     a size
    {"$other": "torch.float32"}              another object, by its repr
    {"$items": [[1, ...]]}                   a dict with keys that are not strings
    {"$named": ["Point", {"x": ...}]}        a named tuple

`evaluate_size` computes a size expression such as `"batch*sequence"` from the symbols' numbers.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from ..errors import DataError, PlanError
from ..formatting import kind_of

_LONGEST = 10_000
_LARGEST = 2**63
Number = int | float
_OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_EXTREMES: dict[str, Callable[..., Number]] = {"max": max, "min": min}
_FUNCTIONS: dict[str, Callable[[Any], Number]] = {
    "math.ceil": math.ceil, "math.floor": math.floor, "int": int, "float": float, "round": round,
    "abs": abs,
}  # fmt: skip


class SizeError(PlanError, ValueError):
    """A text that is not a valid size, or has no value for the given numbers."""


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression of numbers, symbols, `+ - * / // % **`, max, min, abs, int, float,
    round, math.ceil and math.floor.

    Raises SizeError for anything else, for a symbol that `sizes` does not have, for an intermediate
    number of 2**63 or more, and if the value is not a whole number.

    >>> evaluate_size("batch*(sequence + 1)//2", {"batch": 3, "sequence": 7})
    12
    >>> evaluate_size("math.ceil(batch/3)", {"batch": 4})
    2
    """
    if len(expression) > _LONGEST:
        raise SizeError(
            f"{expression[:40]!r}... is not a valid size: it has {len(expression)} characters."
        )
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, sizes)
    except (
        SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError,
    ) as error:  # fmt: skip
        if isinstance(error, SizeError):
            raise
        raise SizeError(f"{expression!r} is not a valid size: {error}.") from error
    if not isinstance(value, int):
        raise SizeError(f"{expression!r} is {value}, which is not a whole number.")
    return value


def _value(node: ast.AST, sizes: Mapping[str, int]) -> Number:
    match node:
        case ast.Constant(value=int(value) | float(value)):
            return _bounded(value)
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand, sizes))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left, sizes), _value(right, sizes)
            if isinstance(op, ast.Pow) and not 0 <= second < 64:
                raise SizeError(f"{second} is not a valid exponent of a size.")
            return _bounded(_OPERATORS[type(op)](first, second))
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if (
            name in _EXTREMES
        ):
            return _EXTREMES[name](*(_value(arg, sizes) for arg in args))
        case ast.Call(func=function, args=[arg], keywords=[]) if (
            ast.unparse(function) in _FUNCTIONS
        ):
            return _FUNCTIONS[ast.unparse(function)](_value(arg, sizes))
    names = ", ".join(sizes) or "numbers"
    raise SizeError(f"{ast.unparse(node)!r} is not a size in {names}.")


def _bounded(value: Number) -> Number:
    if abs(value) >= _LARGEST:
        raise SizeError("a size has more than 63 bits.")
    return value


NameOf = Callable[[Any], str | dict[str, str] | None]
"""The name (or the size) that stands for a leaf; None for a constant."""


def is_named_tuple(value: Any) -> bool:
    """True for an instance of a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def is_record(value: Any) -> bool:
    """True for an instance of a dataclass."""
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
    """True if a value that was read is a structure that the functions below accept."""
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
    """The names of the tensors in order, with repetitions."""
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
    """The value that a structure describes, from named tensors and the numbers of the sizes."""

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
    """The tensors of `given`, a value like the described one, by name.

    Messages call it `where`. Raises DataError for another structure, and for a constant that
    differs from the capture's.
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
                continue  # a constant that was left out
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
    """The constants of a structure of arguments: place and text. None is left out."""
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
    """The tag of an object of one key, and its content; for a plain dict "" and the dict itself."""
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
    raise DataError(f"{where} has no {key!r}, but it had one when it was captured.")


def _parts(given: Any, count: int, where: str) -> Sequence[Any]:
    if isinstance(given, (tuple, list)) and len(given) == count:
        return given
    now = f"{len(given)} items" if isinstance(given, (tuple, list)) else kind_of(given)
    raise DataError(f"{where} was captured with {count} items and is {now} now.")


def _verify_constant(kind: str, captured: Any, given: Any, where: str) -> None:
    now = repr(given) if kind == "$other" else given
    if type(now) is type(captured) and now == captured:
        return
    if type(now) in (int, float) and type(captured) in (int, float) and now == captured:
        return
    was = captured if kind == "$other" else repr(captured)
    shape = getattr(given, "shape", None)
    current = repr(given) if shape is None else f"a tensor of shape {tuple(shape)}"
    raise DataError(
        f"{where} was captured with {was} and is {current} now.",
        "Arguments that are not tensors are fixed in the stages: partition again with this value.",
    )
