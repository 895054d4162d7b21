"""A size expression such as `"batch*sequence"` and the symbols' numbers -> a number."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .errors import PlanError

_LONGEST = 500
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
    """A text that is no size, or that has none for the numbers given."""


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression of numbers, symbols, `+ - * / // % **`, max, min, abs, int, float,
    round, math.ceil and math.floor.

    Raises SizeError for anything else, for a symbol that `sizes` does not have, where a number on
    the way is 2**63 or more, and where the value is no whole number.

    >>> evaluate_size("batch*(sequence + 1)//2", {"batch": 3, "sequence": 7})
    12
    >>> evaluate_size("math.ceil(batch/3)", {"batch": 4})
    2
    """
    if len(expression) > _LONGEST:
        raise SizeError(f"{expression[:40]!r}... has {len(expression)} characters: no size.")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, sizes)
    except (
        SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError,
    ) as error:  # fmt: skip
        if isinstance(error, SizeError):
            raise
        raise SizeError(f"{expression!r} is no size: {error}.") from error
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
                raise SizeError(f"{second} is no exponent of a size.")
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
