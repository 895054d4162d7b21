"""Functions and classes -> what a generated file calls them, and what it must import for that."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import resolve_name

from ...runtime.errors import PlanError
from ..capture.random_numbers import Draw
from .quoting import is_path

_HOMES = (
    ("F", torch.nn.functional),
    ("torch", torch),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.linalg", torch.linalg),
    ("math", math),
    ("operator", operator),
)
# A function that torch and F both have is written as torch's: torch.relu, not F.relu.
_SORTED_HOMES = (_HOMES[1], _HOMES[0], *_HOMES[2:])


def name_callable(target: Callable[..., Any], require: Callable[[str, str], None]) -> str:
    """What a function is called where `torch`, `F`, `math` and `operator` are imported.

    `require(module, name)` is told what else must be imported. Raises PlanError for a function
    that no import can reach.
    """
    short = getattr(target, "__name__", "")
    if getattr(builtins, short, None) is target:
        return short
    if isinstance(target, Draw):
        require(target.__module__.partition(".")[0], "")
        return target.text
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    homes = _HOMES if "functional" in (getattr(target, "__module__", "") or "") else _SORTED_HOMES
    for prefix, home in homes:
        if short and getattr(home, short, None) is target:
            return f"{prefix}.{short}"
    owner = getattr(target, "__self__", None)
    if short == "apply" and isinstance(owner, type):
        _import(owner, owner.__qualname__, require)
        return f"{owner.__qualname__}.apply"
    resolved = resolve_name(target) or ""
    if resolved.startswith("torch.Tensor."):
        return resolved.removeprefix("torch.")
    if resolved.startswith("torch.nn.functional."):
        return f"F.{resolved.removeprefix('torch.nn.functional.')}"
    if resolved.startswith("torch."):
        return resolved
    qualified = str(getattr(target, "__qualname__", short))
    _import(target, qualified, require)
    return qualified


def _import(thing: Any, qualified: str, require: Callable[[str, str], None]) -> None:
    module = getattr(thing, "__module__", None)
    if module == "__main__" or not is_path(module) or not is_path(qualified):
        raise PlanError(
            f"cannot write a call of {qualified or thing!r} of {module}: generated code could not "
            f"import it.",
            "Move it to the top level of a module that can be imported.",
        )
    require(module, qualified)
