"""What a user calls a model with -> the inputs of its plan by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .plan import Plan, TensorSpec
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
    """The numbers that the plan's symbols stand for in those of its inputs that `values` has.

    Raises DataError where an input has another number of dimensions or another size than the plan
    was made for, and where one symbol would have two numbers.
    """
    found: dict[str, tuple[int, str]] = {}
    for spec in plan.inputs:
        if spec.name not in values:
            continue
        shape = tuple(values[spec.name].shape)
        if len(shape) != len(spec.shape):
            raise DataError(
                f"{spec.name} has the shape {_text(shape)}, but {plan.name} was captured with "
                f"{_text(spec.shape)}.",
                "Give data of that shape, or make the plan again with example inputs of this one.",
            )
        for dim, (wanted, size) in enumerate(zip(spec.shape, shape, strict=True)):
            if isinstance(wanted, int):
                if size != wanted:
                    raise _another_size(plan, spec, dim, shape)
            elif wanted in plan.sizes:
                known, where = found.setdefault(wanted, (size, f"dimension {dim} of {spec.name}"))
                if known != size:
                    raise DataError(
                        f"the {wanted} size is {known} in {where}, but {size} in dimension {dim} "
                        f"of {spec.name} (in {_text(shape)}).",
                        f"Give inputs of one {wanted} size.",
                    )
    return {**plan.sizes, **{symbol: size for symbol, (size, _) in found.items()}}


def _another_size(plan: Plan, spec: TensorSpec, dim: int, shape: tuple[int, ...]) -> DataError:
    wanted, size = spec.shape[dim], shape[dim]
    return DataError(
        f"dimension {dim} of {spec.name} is {size} (in {_text(shape)}), but {plan.name} was "
        f"captured for {wanted} only (in {_text(spec.shape)}).",
        f"Give data that has {wanted} there, or make the plan again with example inputs that have "
        f"{size}.",
    )


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


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
