"""Symbolic sizes -> Python expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from ...runtime.errors import PlanError
from . import layout
from .constants import write_constant
from .infix import infix
from .layout import Code, call


def write_size(expression: sympy.Expr | int, symbol: Callable[[str], Code]) -> Code:
    """A size such as `batch * (sequence + 1)`; `symbol` says what each symbol is called.

    Raises PlanError for an operation that has no Python text here.
    """

    def write(part: Any) -> Code:
        kind = type(part).__name__
        if isinstance(part, int) or part.is_Integer:
            return write_constant(int(part))
        if part.is_Symbol:
            return symbol(part.name)
        if part.is_Add:
            return _sum(part, write)
        if kind == "floor":
            over, under = part.args[0].as_numer_denom()
            return infix("//", layout.MULTIPLY, write(over), write(under))
        if part.is_Mul:
            factors = sorted(part.args, key=lambda factor: (not factor.is_number, str(factor)))
            code = write(factors[0])
            for factor in factors[1:]:
                code = infix("*", layout.MULTIPLY, code, write(factor))
            return code
        if kind in _SIZE_OPERATORS:
            sign, binds = _SIZE_OPERATORS[kind]
            left, right = map(write, part.args)
            return infix(sign, binds, left, right)
        if kind in _SIZE_FUNCTIONS or kind.startswith(_OPAQUE):
            name = _SIZE_FUNCTIONS.get(kind) or f"math.{kind.removeprefix(_OPAQUE)}"
            inside = sorted(
                map(write, part.args), key=lambda code: (code.flat.isdigit(), code.flat)
            )
            return call(name, tuple(inside))
        if part.is_Float or part.is_Rational:
            return write_constant(float(part))
        raise PlanError(f"cannot write the size {expression} ({kind}) in generated code.")

    return write(expression)


_OPAQUE = "OpaqueUnaryFn_"
_SIZE_OPERATORS = {
    "FloorDiv": ("//", layout.MULTIPLY),
    "CleanDiv": ("//", layout.MULTIPLY),
    "IntTrueDiv": ("/", layout.MULTIPLY),
    "FloatTrueDiv": ("/", layout.MULTIPLY),
    "Mod": ("%", layout.MULTIPLY),
    "PythonMod": ("%", layout.MULTIPLY),
    "Pow": ("**", layout.POWER),
    "PowByNatural": ("**", layout.POWER),
    "FloatPow": ("**", layout.POWER),
}
_SIZE_FUNCTIONS = {
    "Max": "max",
    "Min": "min",
    "Abs": "abs",
    "ToFloat": "float",
    "TruncToInt": "int",
    "FloorToInt": "math.floor",
    "CeilToInt": "math.ceil",
    "RoundToInt": "round",
}


def _sum(expression: Any, write: Callable[[Any], Code]) -> Code:
    terms = sorted(
        expression.args,
        key=lambda term: (term.is_number, term.could_extract_minus_sign(), str(term)),
    )
    code = write(terms[0])
    for term in terms[1:]:
        if term.could_extract_minus_sign():
            code = infix("-", layout.ADD, code, write(-term))
        else:
            code = infix("+", layout.ADD, code, write(term))
    return code
