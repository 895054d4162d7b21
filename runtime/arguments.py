"""What a user calls a model with -> the inputs of its plan by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .plan import Plan
from .structure import names_in, tensors_by_name


def arguments_of(plan: Plan) -> dict[str, Any]:
    """The structures of forward's arguments by name, `*args` under a name with its star."""
    if plan.arguments is None:
        return {spec.name: spec.name for spec in plan.inputs}
    return dict(plan.arguments)


def named_inputs(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among forward's arguments by the names of the plan's inputs.

    Arguments that the plan has as constants may be left out; those that it does not know may be
    None. Raises DataError for arguments of another structure and for another constant.
    """
    structures = arguments_of(plan)
    given = _by_name(plan, structures, args, kwargs)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in structures:
            values |= tensors_by_name(structures[name], value, name.removeprefix("*"))
        elif value is not None:
            raise _unlike(plan, structures, given)
    if any(spec.name not in values for spec in plan.inputs):
        raise _unlike(plan, structures, given)
    return values


def sizes_of(plan: Plan, values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that the plan's symbols stand for in these inputs."""
    sizes = dict(plan.sizes)
    for spec in plan.inputs:
        pairs = zip(spec.shape, values[spec.name].shape, strict=False)
        sizes.update((symbol, size) for symbol, size in pairs if symbol in sizes)
    return sizes


def _by_name(
    plan: Plan, structures: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name: a positional one has the name at its place."""
    given: dict[str, Any] = {}
    left = list(args)
    for name in structures:
        if name.startswith("*"):
            given[name] = tuple(left)
            left = []
        elif left:
            given[name] = left.pop(0)
    for name, value in kwargs.items():
        given[f"*{name}" if f"*{name}" in structures else name] = value
    if left:
        raise _unlike(plan, structures, given, f" and {len(left)} more")
    return given


def _unlike(
    plan: Plan, structures: Mapping[str, Any], given: Mapping[str, Any], more: str = ""
) -> DataError:
    takes = [name for name, inner in structures.items() if any(names_in(inner))]
    got = ", ".join(name for name, value in given.items() if value is not None)
    return DataError(f"{plan.name} takes {', '.join(takes)}; got {got or 'nothing'}{more}.")
