"""A size expression such as `"batch*sequence"` and the symbols' numbers -> a number."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from .errors import PlanError

_LONGEST = 500
_LARGEST = 2**63
_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min}


class SizeError(PlanError, ValueError):
    """A text that is no size, or that has none for the numbers given."""


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression of whole numbers, symbols, `+ - * // % **`, max and min.

    Raises SizeError for anything else, for a symbol that `sizes` does not have, and where a number
    on the way is 2**63 or more.

    >>> evaluate_size("batch*(sequence + 1)//2", {"batch": 3, "sequence": 7})
    12
    """
    if len(expression) > _LONGEST:
        raise SizeError(f"{expression[:40]!r}... has {len(expression)} characters: no size.")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, sizes)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        if isinstance(error, SizeError):
            raise
        raise SizeError(f"{expression!r} is no size: {error}.") from error


def _value(node: ast.AST, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
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
            name in _FUNCTIONS
        ):
            return _FUNCTIONS[name](*(_value(arg, sizes) for arg in args))
    names = ", ".join(sizes) or "numbers"
    raise SizeError(f"{ast.unparse(node)!r} is not a size in {names}.")


def _bounded(value: int) -> int:
    if abs(value) >= _LARGEST:
        raise SizeError("a size has more than 63 bits.")
    return value
