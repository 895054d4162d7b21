"""Nested tuples, lists, dicts and slices of tensors: walking them and rebuilding them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Size as TorchSize
from torch import Tensor

from ...runtime.structure import fields_of, is_named_tuple, is_record


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
    elif is_record(value):
        yield from tensors_in(fields_of(value))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` applied to all that is no container.

    Sizes of tensors become plain tuples, named tuples of torch too.
    """
    if isinstance(value, (tuple, TorchSize)):
        return tuple(map_leaves(function, item) for item in value)
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, Mapping):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(
            map_leaves(function, value.start),
            map_leaves(function, value.stop),
            map_leaves(function, value.step),
        )
    return function(value)


def map_result(function: Callable[[Any], Any], value: Any) -> Any:
    """A result of `plain_structure` with `function` applied to all that is no container."""
    if isinstance(value, dict):
        return {key: map_result(function, item) for key, item in value.items()}
    if is_named_tuple(value):
        return type(value)(*(map_result(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([map_result(function, item) for item in value])
    return function(value)


def plain_structure(value: Any) -> Any:
    """A result as tuples, lists and dicts: dataclasses and mappings become dicts; named tuples
    stay what they are."""
    if isinstance(value, Mapping):
        return {key: plain_structure(item) for key, item in value.items()}
    if is_record(value):
        return {key: plain_structure(item) for key, item in fields_of(value).items()}
    if is_named_tuple(value):
        return type(value)(*map(plain_structure, value))
    if isinstance(value, (tuple, list)):
        kind = list if isinstance(value, list) else tuple
        return kind(plain_structure(item) for item in value)
    return value
