"""What a captured graph holds beside tensors: sizes, arguments that follow the mode, regions.

A captured graph is a plain `torch.fx.Graph`. What fx has no word for is an object inside the
arguments or in `node.meta`, so that the graph has no size nodes, no device and no enter and exit
nodes, and any run of it can be cut out and written as Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import sympy
import torch


@dataclass(frozen=True)
class Size:
    """A size of a tensor, arithmetic on sizes, or a condition on them, in the symbols of the
    capture.

    >>> batch = sympy.Symbol("batch", integer=True, positive=True)
    >>> Size(2 * batch - 1)
    2*batch - 1
    >>> Size(2 * batch - 1).evaluate({"batch": 4})
    7
    """

    expr: sympy.Expr

    def evaluate(self, sizes: Mapping[str, int]) -> int | float:
        """The number, given the symbols' numbers."""
        names = {"math": math, "max": max, "min": min, "int": int, "float": float, "abs": abs}
        number: int | float = eval(_compiled(str(self)), names, dict(sizes))  # noqa: S307
        return number

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(symbol.name for symbol in self.expr.free_symbols)

    def __str__(self) -> str:
        return size_text(self.expr)

    __repr__ = __str__


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


# Precedence of Python's operators, loosest first.
_LOGIC, _COMPARE, _ADD, _DIVIDE, _MUL, _POWER, _ATOM = range(7)
_RELATIONS = {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=",
    "StrictGreaterThan": ">", "GreaterThan": ">=",
}  # fmt: skip
_OPERATORS = {
    "FloorDiv": ("//", _DIVIDE),
    "CleanDiv": ("//", _DIVIDE),
    "Mod": ("%", _DIVIDE),
    "PythonMod": ("%", _DIVIDE),
    "IntTrueDiv": ("/", _DIVIDE),
    "FloatTrueDiv": ("/", _DIVIDE),
    "Pow": ("**", _POWER),
    "PowByNatural": ("**", _POWER),
    "FloatPow": ("**", _POWER),
}
_FUNCTIONS = {
    "Max": "max",
    "Min": "min",
    "Abs": "abs",
    "ToFloat": "float",
    "TruncToInt": "int",
    "FloorToInt": "math.floor",
    "CeilToInt": "math.ceil",
    "RoundToInt": "round",
}
_OPAQUE = "OpaqueUnaryFn_"


@lru_cache(maxsize=4096)
def size_text(expr: sympy.Expr) -> str:
    """A size expression as Python, such as `batch*(sequence + 1)//2`.

    Raises ValueError for an operation that has no Python text here.
    """
    return _text(expr)[0]


def _text(expr: sympy.Expr) -> tuple[str, int]:
    """The text and how tightly its outermost operator binds."""
    kind = type(expr).__name__
    if isinstance(expr, sympy.Symbol):
        return expr.name, _ATOM
    if isinstance(expr, sympy.Integer):
        return str(int(expr)), _ATOM if expr >= 0 else _ADD
    if isinstance(expr, sympy.Float):
        return repr(float(expr)), _ATOM if expr >= 0 else _ADD
    if isinstance(expr, sympy.Rational):
        return f"{expr.p}/{expr.q}", _DIVIDE
    if isinstance(expr, sympy.Add):
        return _sum_text(expr), _ADD
    if isinstance(expr, sympy.Mul):
        return "*".join(_wrapped(factor, _POWER) for factor in expr.as_ordered_factors()), _MUL
    if kind in _OPERATORS:
        operator, level = _OPERATORS[kind]
        # A quotient binds looser than a product here: a//b*c is right but reads wrongly.
        left, right = expr.args
        return f"{_wrapped(left, level + 1)}{operator}{_wrapped(right, _ATOM)}", level
    if kind in _RELATIONS:
        # The number stands on the right, as one would write it.
        relation = expr.reversed if expr.args[0].is_number else expr
        left, right = (_wrapped(part, _ADD) for part in relation.args)
        return f"{left} {_RELATIONS[type(relation).__name__]} {right}", _COMPARE
    if isinstance(expr, (sympy.And, sympy.Or)):
        parts = sorted(_wrapped(part, _COMPARE) for part in expr.args)
        return (" and " if isinstance(expr, sympy.And) else " or ").join(parts), _LOGIC
    if isinstance(expr, sympy.Not):
        return f"not {_wrapped(expr.args[0], _ATOM)}", _LOGIC
    if isinstance(expr, sympy.floor):
        over, under = expr.args[0].as_numer_denom()
        return f"{_wrapped(over, _MUL)}//{_wrapped(under, _ATOM)}", _DIVIDE
    if kind in _FUNCTIONS or kind.startswith(_OPAQUE):
        function = _FUNCTIONS.get(kind) or f"math.{kind.removeprefix(_OPAQUE)}"
        inside = sorted(expr.args, key=lambda part: (part.is_number, str(part)))
        return f"{function}({', '.join(_text(part)[0] for part in inside)})", _ATOM
    raise ValueError(f"{expr} ({kind}) is not a size that can be written as Python")


def _sum_text(expr: sympy.Add) -> str:
    text = ""
    for term in expr.as_ordered_terms():
        sign = "-" if term.could_extract_minus_sign() else "+"
        part = _wrapped(-term if sign == "-" else term, _DIVIDE)
        text += f" {sign} {part}" if text else f"-{part}" if sign == "-" else part
    return text


def _wrapped(expr: sympy.Expr, level: int) -> str:
    text, binds = _text(expr)
    return text if binds >= level else f"({text})"


@dataclass(frozen=True)
class IfTraining:
    """An argument that is `train` in training mode and `eval` in evaluation mode."""

    train: Any
    eval: Any

    def __repr__(self) -> str:
        return f"({self.train!r} if self.training else {self.eval!r})"


@dataclass(frozen=True)
class LocalDevice:
    """The device that the model is on, wherever that is."""

    def __repr__(self) -> str:
        return "<local device>"


@dataclass(frozen=True)
class Region:
    """A block around a node: `with` for `no_grad`, `enable_grad` or `autocast`, `if` for what is
    done in one mode only, `training` or `evaluation`, and for what is done `unless` the decision
    of that number is true, or `if` it is."""

    kind: str
    device_type: str | LocalDevice | None = None
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool = True
    decision: int = -1

    @property
    def is_decided(self) -> bool:
        """Whether what is in it is not always done."""
        return self.kind in ("training", "evaluation", "unless", "if")

    def is_left_out(self, training: bool, decided: Mapping[int, bool]) -> bool:
        """Whether nothing in it is done in a mode, where decisions were made so; one that was not
        made is false."""
        if self.decision >= 0:
            return decided.get(self.decision, False) is (self.kind == "unless")
        return self.kind == ("evaluation" if training else "training")


@dataclass(frozen=True)
class Recompute:
    """A call of `torch.utils.checkpoint.checkpoint`: what it does is done again in backward.

    `number` tells the calls of one forward apart, `depth` is how many module calls are around
    it, `function` what its function is called.
    """

    number: int
    depth: int
    function: str
    use_reentrant: bool
    preserve_rng_state: bool

    @property
    def options(self) -> tuple[tuple[str, bool], ...]:
        """The keyword arguments of the call."""
        reentrant = ("use_reentrant", self.use_reentrant)
        return (
            (reentrant,) if self.preserve_rng_state else (reentrant, ("preserve_rng_state", False))
        )


@dataclass(frozen=True)
class ModuleCall:
    """The `index`-th call (from 0) of the module named `path` in one forward."""

    path: str
    index: int


@dataclass(frozen=True)
class CallRecord:
    """What a module that is no leaf was called with, and what it gave back.

    `arguments` has forward's own parameter names in their order; values are nodes, sizes,
    constants and tuples, lists and dicts of them. None stands for what the graph does not need.
    """

    type_name: str
    module_path: str
    arguments: Mapping[str, Any]
    result: Any
