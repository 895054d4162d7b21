"""A size expression such as `"batch*sequence"` and the symbols' numbers -> a number."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

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


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression of whole numbers, symbols, `+ - * // % **`, max and min.

    Raises ValueError for anything else and for a symbol that `sizes` does not have.

    >>> evaluate_size("batch*(sequence + 1)//2", {"batch": 3, "sequence": 7})
    12
    """
    return _value(ast.parse(expression, mode="eval").body, sizes)


def _value(node: ast.AST, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand, sizes))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg, sizes) for arg in args))
    raise ValueError(f"{ast.unparse(node)!r} is not a size in {', '.join(sizes) or 'numbers'}")
