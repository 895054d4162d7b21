"""The arguments and results of a forward: nested structures of tensors, and checks of them.

`read_arguments` finds the tensors in example arguments and names them after their place:
`batch_pixels` is `batch.pixels` or `batch["pixels"]`, `masks_0` is the first of `masks`. Everything
else in the arguments is a constant of the capture.

`tensors_in`, `map_leaves` and `plain_structure` walk nested tuples, lists, dicts, slices and
dataclasses; `plain` keeps the part of a result that a graph can hold.

The `verify_...` functions raise an error for arguments and results that do not fit, and for hooks
and state outside of forward: hooks of forward are recorded like other code, but hooks of backward
and extra state would be lost silently.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Size as TorchSize
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from ...runtime.errors import CaptureError
from ...runtime.formatting import kind_of
from ...runtime.plan.plan import TensorSpec
from ...runtime.plan.structure import described, fields_of, is_named_tuple, is_record


class PassedError(Exception):
    """A module or a function that forward passes to a function, where a graph cannot hold it."""

    def __init__(self, passed: Callable[..., Any]) -> None:
        kind = "module" if isinstance(passed, nn.Module) else "function"
        super().__init__(f"{kind} ({getattr(passed, '__name__', type(passed).__name__)})")


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


def holds(value: Any, kind: type, depth: int = 3) -> bool:
    """True if a value is of this class, or holds one in tuples, lists and dicts of this depth."""
    if isinstance(value, kind) or not depth or not isinstance(value, (tuple, list, dict)):
        return isinstance(value, kind)
    items = value.values() if isinstance(value, dict) else value
    return any(holds(item, kind, depth - 1) for item in items)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` applied to every leaf.

    Sizes of tensors and named tuples of torch become plain tuples.
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
    """A result of `plain_structure` with `function` applied to every leaf."""
    if isinstance(value, dict):
        return {key: map_result(function, item) for key, item in value.items()}
    if is_named_tuple(value):
        return type(value)(*(map_result(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([map_result(function, item) for item in value])
    return function(value)


def plain_structure(value: Any) -> Any:
    """A result as tuples, lists and dicts: dataclasses and mappings become dicts; named tuples
    are kept."""
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


def fresh(value: Any, given: set[int]) -> Any:
    """`value` with every tensor that is an unchanged argument replaced by an alias of it.

    Dropout in evaluation mode returns its very argument; the alias tells the two apart, so that
    later readers name the same node as in training mode.
    """
    if isinstance(value, Tensor):
        return torch.ops.aten.alias.default(value) if id(value) in given else value
    if type(value) in (tuple, list):
        return type(value)(fresh(item, given) for item in value)
    return value


def plain(value: Any) -> Any:
    """A result without leaves that a graph cannot hold, such as a key-value cache."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if any(map(is_plain, leaves(item)))}
    if isinstance(value, (tuple, list)):
        return map_result(lambda leaf: leaf if is_plain(leaf) else None, value)
    return value if is_plain(value) else None


def is_plain(leaf: Any) -> bool:
    """True for a value that a graph can take as it is: None, a tensor, a number or a text."""
    return leaf is None or isinstance(leaf, (Tensor, int, float, str, torch.SymInt))


def leaves(value: Any) -> list[Any]:
    """The values inside nested containers, in order."""
    flat: list[Any] = torch.utils._pytree.tree_leaves(value)
    return flat


def has_forward_hooks(module: nn.Module) -> bool:
    """True if calls of the module run hooks before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def verify_shapes(model: nn.Module) -> None:
    """Raises CaptureError for a parameter or buffer of a lazy module that has no shape yet."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet: a lazy module gets it in its first call.",
                "Call the model once before you give it to asyncpipe, at the end of its factory: "
                "model(**inputs).",
            )


def verify_hooks(model: nn.Module) -> None:
    """Raises CaptureError for a hook of backward, for extra state and for a state_dict that has
    other names than the parameters and buffers."""
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name} has a backward hook, which a graph cannot hold.",
                "Write it as a torch.autograd.Function, or remove the hook for the capture.",
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CaptureError(
                f"{name} has extra state (get_extra_state of {type(module).__name__}), which the "
                "generated stages cannot hold.",
                "Keep it as a buffer: self.register_buffer(name, tensor).",
            )
    _verify_names(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} has a hook, which the generated stages would not have.",
                "Remove it for the capture, and register it on the parameter of the stage.",
            )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model's state_dict, without settings that its class adds."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _verify_names(model: nn.Module) -> None:
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in state_of(model):
        if name not in own:
            raise CaptureError(
                f"the state_dict has {name}, which is neither a parameter nor a buffer: a hook of "
                f"{type(model).__name__} changes its names.",
                "Give the model without the wrapper or hook that changes the names.",
            )


@dataclass(frozen=True)
class Arguments:
    """The example arguments of forward.

    tensors: the tensors in them by name
    structure: a description by forward's parameters, with the names of the tensors; the values
        for `*args` are under `*args`
    left_out: the parameters of forward that the example leaves at their defaults
    """

    tensors: Mapping[str, Tensor]
    structure: Mapping[str, Any]
    left_out: tuple[str, ...]
    _places: Mapping[str, Any]

    def filled(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The example arguments with these tensors in place of the example's."""
        return {
            name: _mapped(value, name, lambda leaf, _: tensors[leaf.name])
            for name, value in self._places.items()
        }

    def call(self, model: nn.Module, tensors: Mapping[str, Any]) -> Any:
        """Calls the model with these tensors in place of the example's."""
        args, kwargs = as_called(model, self.filled(tensors))
        return model(*args, **kwargs)


@dataclass(frozen=True)
class _Place:
    """Stands for the tensor of this name in the example arguments."""

    name: str


def read_arguments(model: nn.Module, given: Mapping[str, Any]) -> Arguments:
    """Finds the tensors in example arguments.

    Raises CaptureError for an object that keeps tensors where they cannot be replaced.
    """
    tensors: dict[str, Tensor] = {}

    def place(tensor: Tensor, path: str) -> _Place:
        name = _free(_identifier(path), tensors)
        # Trial runs must not give the user's own tensor a gradient.
        tensors[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        return _Place(name)

    places = {name: _mapped(value, name, place) for name, value in given.items()}
    variadic = _variadic(model)
    structure = {
        f"*{name}" if name == variadic else name: described(value, _name_of)
        for name, value in places.items()
    }
    left_out = (
        name
        for name, parameter in _parameters(model).items()
        if parameter.default is not parameter.empty and name not in given
    )
    return Arguments(tensors, structure, tuple(left_out), places)


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
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = inner(item, key)
        return copied
    if is_record(value):
        copied = copy.copy(value)
        for name, item in fields_of(value).items():
            object.__setattr__(copied, name, inner(item, name))
        return copied
    if any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise CaptureError(
            f"the input {path} is {kind_of(value)}, which holds tensors but is not a "
            "tuple, list, dict or dataclass.",
            "Pass its tensors to forward, or make it a dataclass.",
        )
    return value


def _identifier(path: str) -> str:
    name = re.sub(r"\W+", "_", path)
    return name if name.isidentifier() else f"input_{name}"


def _free(name: str, used: Mapping[str, Any]) -> str:
    free, count = name, 1
    while free in used:
        count += 1
        free = f"{name}_{count}"
    return free


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _variadic(model: nn.Module) -> str | None:
    """The name of forward's `*args`; None if it has none."""
    for name, parameter in _parameters(model).items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return name
    return None


def as_called(
    model: nn.Module, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a call of the model.

    Only positional-only parameters and `*args` are passed by position; if the model has hooks, all
    that can be, because hooks see positional arguments only.
    """
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
    except TypeError:  # forward itself will raise it
        return {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def verify_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises CaptureError unless forward accepts exactly these arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        args, kwargs = as_called(model, inputs)
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error}.",
            f"It takes {', '.join(map(str, signature.parameters.values())) or 'nothing'}; "
            f"given: {', '.join(inputs) or 'nothing'}.",
        ) from error


def verify_result(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureError for a forward that returns no computed tensor."""
    (output,) = graph.find_nodes(op="output")
    if not output.all_input_nodes:
        raise CaptureError(
            f"{type(model).__name__}.forward returns no tensor.",
            "Return the loss, or the tensors that it is computed from.",
        )


def describe_arguments(tensors: Mapping[str, Tensor]) -> str:
    """Names, dtypes and shapes, such as `x f32[4, 8], mask bool[4]`."""
    parts = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(f"{name} {TensorSpec(name, dtype, tuple(tensor.shape), False)}")
    return ", ".join(parts)
