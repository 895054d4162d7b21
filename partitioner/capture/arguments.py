"""Example arguments of a forward -> the tensors in them by name, and calls with other tensors.

Tensors are called after where they are: `batch_pixels` is `batch.pixels` or `batch["pixels"]`,
`masks_0` the first of `masks`. What is no tensor is a constant of the capture.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...runtime.errors import CaptureError
from ...runtime.structure import described, fields_of, is_named_tuple, is_record
from .hooks import has_forward_hooks


@dataclass(frozen=True)
class Arguments:
    """What forward is called with, by the names of its parameters.

    `structure` tells of it with names for the tensors; the values for `*args` are under `*args`.
    """

    tensors: Mapping[str, Tensor]
    structure: Mapping[str, Any]
    _places: Mapping[str, Any]

    def call(self, model: nn.Module, tensors: Mapping[str, Any]) -> Any:
        """Calls the model with these tensors in the places of those of the example."""
        values = {
            name: _mapped(value, name, lambda leaf, _: tensors[leaf.name])
            for name, value in self._places.items()
        }
        args, kwargs = as_called(model, values)
        return model(*args, **kwargs)


@dataclass(frozen=True)
class _Place:
    """Where a tensor was."""

    name: str


def read_arguments(model: nn.Module, given: Mapping[str, Any]) -> Arguments:
    """Finds the tensors in example arguments.

    Raises CaptureError for an object that keeps tensors where they cannot be replaced.
    """
    tensors: dict[str, Tensor] = {}

    def place(tensor: Tensor, path: str) -> _Place:
        name = _free(_identifier(path), tensors)
        # The user's own tensor shall get no gradient from what is tried here.
        tensors[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        return _Place(name)

    places = {name: _mapped(value, name, place) for name, value in given.items()}
    variadic = _variadic(model)
    structure = {
        f"*{name}" if name == variadic else name: described(value, _name_of)
        for name, value in places.items()
    }
    return Arguments(tensors, structure, places)


def _name_of(leaf: Any) -> str | None:
    return leaf.name if isinstance(leaf, _Place) else None


def _mapped(value: Any, path: str, function: Callable[[Any, str], Any]) -> Any:
    """A value of the same types with `function` applied to its tensors and their paths."""

    def inner(item: Any, key: Any) -> Any:
        return _mapped(item, f"{path}.{key}", function)

    if isinstance(value, (Tensor, _Place)):
        return function(value, path)
    if isinstance(value, PackedSequence):
        raise CaptureError(
            f"the input {path} is a PackedSequence, whose sizes depend on the values of a batch.",
            "Give padded tensors and lengths, and keep the module that packs them as one node: "
            "--leaf Class.",
        )
    if is_named_tuple(value):
        return type(value)(*map(inner, value, value._fields))
    if isinstance(value, (tuple, list)):
        return type(value)([inner(item, position) for position, item in enumerate(value)])
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = inner(item, key)
        return made
    if is_record(value):
        made = copy.copy(value)
        for name, item in fields_of(value).items():
            object.__setattr__(made, name, inner(item, name))
        return made
    if any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise CaptureError(
            f"the input {path} is a {type(value).__name__}, which is no tuple, list, dict or "
            "dataclass, and holds tensors.",
            "Give its tensors to forward, or make it a dataclass.",
        )
    return value


def _identifier(path: str) -> str:
    name = re.sub(r"\W+", "_", path)
    return name if name.isidentifier() else f"input_{name}"


def _free(name: str, taken: Mapping[str, Any]) -> str:
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _variadic(model: nn.Module) -> str | None:
    """What forward calls its `*args`, if it has them."""
    for name, parameter in _parameters(model).items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return name
    return None


def as_called(
    model: nn.Module, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: by position what forward takes in no other way, and all
    that it can if the model has hooks, which see what comes by position only."""
    left = dict(values)
    parameters = _parameters(model)
    variadic = _variadic(model)
    wants_position = variadic in left or has_forward_hooks(model)
    args: list[Any] = []
    for name, parameter in parameters.items():
        if name == variadic:
            args += left.pop(name, ())
            break
        may = wants_position and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if name not in left or not (may or parameter.kind is parameter.POSITIONAL_ONLY):
            break
        args.append(left.pop(name))
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and isinstance(left.get(name), Mapping):
            left |= left.pop(name)
    return tuple(args), left


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A module call's arguments by the names of forward's parameters."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return {f"arg{position}": value for position, value in enumerate(args)} | kwargs
    try:
        named = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:  # forward itself will say what is wrong
        return {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
