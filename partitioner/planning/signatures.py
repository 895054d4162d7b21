"""The options of a partition as keyword arguments of Python functions: checks and signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ...runtime.errors import PlanError
from ...runtime.known_names import PARTITION
from ...runtime.user_code import criterion_name
from .keywords import PlanConfig
from .options import NAMED, OPTIONS, PartitionOptions, check_options

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose keyword arguments are checked as the options of their names; `**running`
    takes those of `PlanConfig`."""
    parameters = inspect.signature(function).parameters.values()
    known = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    ]
    known += [] if len(known) == len(parameters) else PlanConfig.__annotations__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise _unknown(function.__name__, name, known)
        check_options(kwargs)
        return function(*args, **kwargs)

    return call


_CALLS = {"model": "partition", "outline": "outline"}
"""The reader of an option -> the name of its function."""


def options_for(call: str, given: Mapping[str, Any]) -> PartitionOptions:
    """The options of "model" or "outline" in Python.

    Raises TypeError for a name that is not an option of the call, PlanError for an illegal value.
    """
    if "loss" in given:
        given = {**given, "loss": criterion_name(given["loss"], PlanError)}
    check_options(given)
    known = [name for name, option in OPTIONS.items() if call in option.read_by]
    for name in given:
        if name not in known:
            raise _unknown(_CALLS[call], name, known)
    return PartitionOptions(**given)


def _unknown(function: str, name: str, known: Collection[str]) -> TypeError:
    """The error for a keyword argument that a function does not have."""
    if name in OPTIONS and OPTIONS[name].read_by == NAMED:
        reason = "it is for a model that asyncpipe-partition builds by --model."
    elif name in OPTIONS:
        readers = [text for call, text in _CALLS.items() if call in OPTIONS[name].read_by]
        reason = f"it is an option of {' and '.join(readers)}."
    else:
        reason = PARTITION.meant(name, known, f"Options: {', '.join(known)}.")
    return TypeError(f"{function} has no option {name}: {reason}")


def shows_options(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Writes the options of a call into the signature of a function that takes `**options`."""

    def show(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=entry.default,
                annotation=entry.type,
            )
            for entry in fields(PartitionOptions)
            if call in OPTIONS[entry.name].read_by and entry.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return show
