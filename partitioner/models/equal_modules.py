"""Two modules -> True if they compute the same with the same saved weights.

A module that a stage constructs again has to be as the model's. `is_equal` compares classes,
parameters and buffers with shape and dtype, `extra_repr` and attributes, but of torch.nn only the
plain attributes: those modules hold their arguments in them. The values of tensors outside the
state_dict count too, where both modules have values: `has_unsaved` says whether there are such
tensors, for which a module built on meta is not enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .torch_modules import is_torch_leaf

_INTERNAL = frozenset(vars(nn.Module()))
_DEEPEST = 6


def is_equal(built: nn.Module | None, module: nn.Module) -> bool:
    """True if `built` is as the module."""
    if built is None or type(built) is not type(module) or _contents(built) != _contents(module):
        return False
    return all(
        ours.extra_repr() == theirs.extra_repr() and _have_equal_attributes(ours, theirs)
        for ours, theirs in zip(built.modules(), module.modules(), strict=True)
    )


def has_unsaved(module: nn.Module) -> bool:
    """True if tensors of the module are not in its state_dict."""
    return any(
        not is_torch_leaf(part) and any(isinstance(value, Tensor) for value in _unsaved(part))
        for part in module.modules()
    )


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that are plain values, or functions, and properties with an argument's name."""
    plain = (bool, int, float, str, tuple, list, type(None))
    arguments = inspect.signature(type(module)).parameters
    kept = [name for name in arguments if isinstance(getattr(type(module), name, None), property)]
    values = vars(module) | {name: getattr(module, name, None) for name in kept}
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_")
        and name != "training"
        and (isinstance(value, plain) or inspect.isroutine(value))
    }


def _contents(module: nn.Module) -> tuple[Any, ...]:
    """The classes, the names of the state_dict, and the parameters and buffers."""
    tensors = {
        name: (type(value), tuple(value.shape), value.dtype)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    return list(map(type, module.modules())), list(module.state_dict()), tensors


def _have_equal_attributes(built: nn.Module, module: nn.Module) -> bool:
    ours, theirs = plain_attributes(built), plain_attributes(module)
    if is_torch_leaf(module):  # other attributes, such as a `qconfig`, are annotations
        return all(name in theirs and _are_equal(ours[name], theirs[name]) for name in ours)
    if ours.keys() != theirs.keys():
        return False
    others = vars(module) | _unsaved_buffers(module)
    return all(
        name in others and _are_equal(value, others[name])
        for name, value in (vars(built) | _unsaved_buffers(built)).items()
        if name not in _INTERNAL
    )


def _unsaved(module: nn.Module) -> Iterator[Any]:
    yield from _unsaved_buffers(module).values()
    for value in vars(module).values():
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: module._buffers[name] for name in module._non_persistent_buffers_set}


def _are_equal(ours: Any, theirs: Any, depth: int = _DEEPEST) -> bool:
    """True if two attributes are equal; False if they go deeper than is looked."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs) or not depth:
        return False
    below = partial(_are_equal, depth=depth - 1)
    match ours:
        case Tensor():
            return _are_equal_tensors(ours, theirs)
        case nn.Module():  # not registered: its weights would be those of its construction
            has_tensors = any(True for _ in chain(ours.parameters(), ours.buffers()))
            return not has_tensors and is_equal(ours, theirs)
        case Mapping():
            return list(ours) == list(theirs) and all(map(below, ours.values(), theirs.values()))
        case list() | tuple():
            return len(ours) == len(theirs) and all(map(below, ours, theirs))
        case partial():
            return all(below(getattr(ours, name), getattr(theirs, name)) for name in _OF_PARTIAL)
        case MethodType():
            return below(ours.__func__, theirs.__func__)
        case FunctionType():
            return ours.__code__ == theirs.__code__ and below(_given(ours), _given(theirs))
    if any("__eq__" in vars(kind) for kind in type(ours).__mro__[:-1]):
        same = ours == theirs
        return bool(same.all() if hasattr(same, "all") else same)
    return below(_fields(ours), _fields(theirs))


_OF_PARTIAL = ("func", "args", "keywords")


def _fields(value: Any) -> list[Any]:
    """What an object of a class without `==` holds."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(value, "__dict__", None), *(getattr(value, name, None) for name in names)]


def _given(function: FunctionType) -> list[Any]:
    """What a function has besides its code: defaults and the values of its closure."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__defaults__, function.__kwdefaults__, cells]


def _are_equal_tensors(ours: Tensor, theirs: Tensor) -> bool:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if ours.is_meta or theirs.is_meta:
        return True
    other = theirs.detach().to(ours.device)
    return bool(((ours == other) | (ours != ours)).all())
