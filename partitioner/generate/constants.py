"""Values that are no tensors -> the expressions that make them."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...runtime.errors import PlanError
from . import layout
from .layout import Code, bracket, call, prefixed
from .quoting import quoted

_CONSTANTS: Mapping[float, Code] = {
    math.pi: Code("math.pi"),
    math.sqrt(2.0 / math.pi): Code("math.sqrt(2.0 / math.pi)"),
    math.sqrt(2.0): Code("math.sqrt(2.0)"),
    torch.finfo(torch.float32).min: Code("torch.finfo(torch.float32).min"),
    torch.finfo(torch.float32).max: Code("torch.finfo(torch.float32).max"),
    torch.finfo(torch.bfloat16).min: Code("torch.finfo(torch.bfloat16).min"),
    torch.finfo(torch.float16).min: Code("torch.finfo(torch.float16).min"),
    torch.finfo(torch.float64).min: Code("torch.finfo(torch.float64).min"),
}


def write_constant(value: Any) -> Code:
    """A value that is no tensor, as the expression that makes it; PlanError if there is none."""
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None | bool() | int():
            return Code(repr(value), layout.UNARY if _is_negative(value) else layout.ATOM)
        case float():
            if value in _CONSTANTS:
                return _CONSTANTS[value]
            if not math.isfinite(value):
                return Code(f'float("{value}")')
            return Code(repr(value), layout.UNARY if value < 0 else layout.ATOM)
        case str():
            return Code(quoted(value))
        case types.EllipsisType():
            return Code("...")
        case torch.dtype() | torch.memory_format() | torch.layout():
            return Code(str(value))
        case torch.device():
            text = f'torch.device("{value}")'
            return Code(text)
        case slice():
            ends = (value.start, value.stop, value.step)
            return call("slice", tuple(map(write_constant, ends)))
        case list():
            return bracket("[", tuple(map(write_constant, value)), "]")
        case tuple():
            return bracket("(", tuple(map(write_constant, value)), ")", lone_comma=True)
        case dict():
            pairs = [
                prefixed(f"{write_constant(key)}: ", write_constant(item))
                for key, item in value.items()
            ]
            return bracket("{", tuple(pairs), "}")
        case complex():
            return Code(repr(value))
    raise PlanError(
        f"cannot write {_short(value)} ({type(value).__name__}) as an argument in generated code.",
        "Keep the module that uses it as one node: --leaf CLASS",
    )


def _is_negative(value: Any) -> bool:
    return isinstance(value, int) and value < 0


def _short(value: Any) -> str:
    first, *more = repr(value).split("\n")
    return f"{first[:60]}.." if more or len(first) > 60 else first
