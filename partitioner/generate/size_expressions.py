"""Symbolic sizes -> Python expressions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

import sympy

from ...runtime.errors import PlanError
from ..capture.values import size_text
from . import layout
from .constants import write_constant
from .infix import infix
from .layout import Code, call

_OPERATORS: Mapping[type[ast.AST], tuple[str, int]] = {
    ast.Add: ("+", layout.ADD),
    ast.Sub: ("-", layout.ADD),
    ast.Mult: ("*", layout.MULTIPLY),
    ast.Div: ("/", layout.MULTIPLY),
    ast.FloorDiv: ("//", layout.MULTIPLY),
    ast.Mod: ("%", layout.MULTIPLY),
    ast.Pow: ("**", layout.POWER),
}


_RELATIONS: Mapping[type[ast.AST], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def write_size(expression: sympy.Basic | int, symbol: Callable[[str], Code]) -> Code:
    """A size such as `batch * (sequence + 1)`, or a condition on sizes; `symbol` says what each
    symbol is called.

    Raises PlanError for an operation that has no Python text here.
    """

    def write(part: ast.AST) -> Code:
        match part:
            case ast.Constant(value=value):
                return write_constant(value)
            case ast.Name(id=name):
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Code(f"-{write(operand).within(layout.UNARY)}", layout.UNARY)
            case ast.BinOp(left=left, op=op, right=right):
                sign, binds = _OPERATORS[type(op)]
                return infix(sign, binds, write(left), write(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return infix(_RELATIONS[type(op)], layout.COMPARE, write(left), write(right))
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                parts = [write(value).within(layout.COMPARE) for value in values]
                return Code(word.join(parts), layout.CONDITIONAL)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Code(f"not {write(operand).within(layout.NOT)}", layout.NOT)
            case ast.Call(func=function, args=args):
                return call(ast.unparse(function), tuple(map(write, args)))
        raise AssertionError(ast.dump(part))

    try:
        text = size_text(sympy.sympify(expression))
    except ValueError as error:
        raise PlanError(f"cannot write a size in generated code: {error}.") from error
    return write(ast.parse(text, mode="eval").body)
