"""A leaf module -> the constructor call that makes one like it, verified by building it.

Arguments are read off the module's attributes by the names of `__init__`'s parameters; a
configuration of transformers, or the index of a layer, off what is around the module. Every
constructor is built on meta and compared with the module: class, parameters and buffers with
shape and dtype, `extra_repr` and plain attributes. Arguments without which the built module is
still the same are defaults, and left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.errors import PlanError
from .capture.leaves import is_torch_leaf
from .configurations import (
    configuration_arguments,
    configurations_around,
    is_asked_for,
    is_configuration,
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a constructor; it may be left out if `is_default`."""

    name: str
    value: Any
    is_default: bool
    is_positional: bool


@dataclass(frozen=True, slots=True)
class Constructor:
    """A class and its arguments; `frozen` if no parameter of the module requires a gradient,
    `frozen_names` those that do not where only some do."""

    type: type[nn.Module]
    arguments: tuple[Argument, ...]
    frozen: bool = False
    frozen_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        name = self.type.__name__
        return f"nn.{name}" if getattr(nn, name, None) is self.type else self.type.__qualname__


def construct(module: nn.Module, path: str, model: nn.Module | None = None) -> Constructor:
    """The constructor of a leaf module, which is at `path` of `model`. Raises PlanError that names
    it if there is none."""
    kind = type(module)
    required, optional = _parameters(module)
    given = next(
        (
            values
            for values in _guesses(module, path, model)
            if all(name in values for name in required)
            and all(map(_is_writable, values.values()))
            and _is_same(_build(kind, values), module)
        ),
        None,
    )
    if given is None or not _is_importable(kind):
        raise PlanError(
            f"cannot write a constructor for {path} ({kind.__name__}): no arguments of its "
            f"__init__ that its attributes give build a module with the same tensors.",
            _cure(module),
        )
    given = {name: _simplest(module, given, name) for name in given}
    defaults = _defaults(module, given, required)
    arguments = [
        Argument(name, given[name], name in defaults, position < 2)
        for position, name in enumerate(required)
    ]
    arguments += [
        Argument(name, given[name], name in defaults, len(name) == 1 and not required)
        for name in optional
        if name in given
    ]
    held = dict(module.named_parameters())
    stuck = tuple(name for name, value in held.items() if not value.requires_grad)
    frozen = bool(held) and len(stuck) == len(held)
    return Constructor(kind, tuple(arguments), frozen, () if frozen else stuck)


def _cure(module: nn.Module) -> str:
    kind = type(module)
    if is_torch_leaf(module):
        own = sorted(set(_plain(module)) - set(_plain_names(kind)))
        told = f" ({', '.join(own)})" if own else ""
        return (
            f"Something was changed on it after it was made{told}: give it a class of its own with "
            "what it does in forward, which is then captured."
        )
    return (
        f"Leave it to be captured: remove --leaf {kind.__name__}, or store the arguments of its "
        "__init__ as attributes of the same names."
    )


def _plain_names(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _guesses(module: nn.Module, path: str, model: nn.Module | None) -> Iterator[dict[str, Any]]:
    """Arguments that may have made a module."""
    known = {
        name: value
        for name, value in {**_from_attributes(module), **_from_parts(module)}.items()
        if value is not _UNKNOWN
    }
    yield known
    if model is None or is_torch_leaf(module):
        return
    parameters = inspect.signature(type(module)).parameters
    indices: list[int | None] = [int(part) for part in path.split(".")[::-1] if part.isdigit()]
    around = [
        found
        for found in configurations_around(model, path)
        if configuration_arguments(found) is not None
    ]
    for configuration in (*around, None):
        for index in indices or [None]:
            values = dict(known)
            for name, parameter in parameters.items():
                if configuration is not None and is_asked_for(parameter):
                    values[name] = configuration
                elif name not in known and index is not None and _is_index(name):
                    values[name] = index
                elif name not in known and hasattr(configuration, name):
                    values[name] = getattr(configuration, name)
            yield values


def _is_writable(value: Any) -> bool:
    return not is_configuration(value) or configuration_arguments(value) is not None


def _is_index(name: str) -> bool:
    return name.rpartition("_")[2] in ("idx", "id", "index", "number", "num", "i")


def _is_importable(kind: type) -> bool:
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


class _Unknown:
    pass


_UNKNOWN = _Unknown()


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the required and of the optional parameters of `__init__`, in its order."""
    if isinstance(module, nn.RNNBase):
        return ("input_size", "hidden_size"), tuple(_rnn_options(module))
    required, optional = [], []
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            required.append(name)
        elif not name.startswith("_"):
            optional.append(name)
    return tuple(required), tuple(optional)


def _from_attributes(module: nn.Module) -> dict[str, Any]:
    required, optional = _parameters(module)
    values: dict[str, Any] = {}
    for name in (*required, *optional):
        value = getattr(module, name, _UNKNOWN)
        if name == "device":
            continue
        if name == "dtype":
            value = _dtype(module)
        elif value is None or isinstance(value, Tensor):
            # `bias=True` makes a tensor of that name, `padding_idx=None` stays None.
            switch = inspect.signature(type(module)).parameters.get(name)
            if isinstance(value, Tensor) or (switch and isinstance(switch.default, bool)):
                value = value is not None
        elif isinstance(value, nn.Module):
            continue
        values[name] = value
    return values


def _dtype(module: nn.Module) -> Any:
    tensors = [value for value in module.parameters() if value.is_floating_point()]
    same = {value.dtype for value in tensors}
    return same.pop() if len(same) == 1 else None


def _rnn_options(module: nn.RNNBase) -> dict[str, Any]:
    names = ["num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    names += ["proj_size"] if isinstance(module, nn.LSTM) else []
    names += ["nonlinearity"] if isinstance(module, nn.RNN) else []
    return {name: getattr(module, name) for name in names} | {"dtype": _dtype(module)}


def _from_parts(module: nn.Module) -> dict[str, Any]:
    """Arguments that the module's attributes hold under other names, or in its children."""
    match module:
        case nn.RNNBase():
            sizes = {"input_size": module.input_size, "hidden_size": module.hidden_size}
            return {**sizes, **_rnn_options(module)}
        case nn.MultiheadAttention():
            return {
                "bias": module.in_proj_bias is not None,
                "add_bias_kv": module.bias_k is not None,
            }
        case nn.TransformerEncoderLayer() | nn.TransformerDecoderLayer():
            return {
                "d_model": module.self_attn.embed_dim,
                "nhead": module.self_attn.num_heads,
                "dim_feedforward": module.linear1.out_features,
                "dropout": module.dropout.p,
                "activation": _activation_name(module.activation),
                "layer_norm_eps": module.norm1.eps,
                "batch_first": module.self_attn.batch_first,
                "norm_first": module.norm_first,
                "bias": module.linear1.bias is not None,
            }
    return {}


def _activation_name(activation: Callable[..., Any]) -> Any:
    known = {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}
    return known.get(activation, _UNKNOWN)


def _build(kind: type[nn.Module], given: Mapping[str, Any]) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return kind(**given)
    except Exception:
        # Any failure of a guess means only that the guess was wrong.
        return None


def _is_same(built: nn.Module | None, module: nn.Module) -> bool:
    if built is None or type(built) is not type(module):
        return False
    mine, other = (
        {
            name: (type(value), tuple(value.shape), value.dtype)
            for name, value in (*tree.named_parameters(), *tree.named_buffers())
        }
        for tree in (built, module)
    )
    if mine != other or list(built.state_dict()) != list(module.state_dict()):
        return False
    return all(
        one.extra_repr() == two.extra_repr() and _plain(one) == _plain_beside(one, two)
        for one, two in zip(built.modules(), module.modules(), strict=True)
    )


def _plain_beside(built: nn.Module, module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module; of one of torch.nn those that its class knows: others, such
    as a `qconfig`, are notes that somebody left on it."""
    found = _plain(module)
    if is_torch_leaf(module):
        return {name: value for name, value in found.items() if name in vars(built)}
    return found


def _plain(module: nn.Module) -> dict[str, Any]:
    """Attributes that are plain values, or functions."""
    plain = (bool, int, float, str, tuple, list, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "training"
        and (isinstance(value, plain) or inspect.isroutine(value))
    }


def _simplest(module: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """`3` for `(3, 3)` where it makes the same module."""
    value = given[name]
    if not isinstance(value, tuple) or not value or any(item != value[0] for item in value):
        return value
    simpler = _build(type(module), {**given, name: value[0]})
    return value[0] if _is_same(simpler, module) else value


def _defaults(module: nn.Module, given: Mapping[str, Any], required: Collection[str]) -> set[str]:
    """The optional arguments that can be left out together."""
    left_out: set[str] = set()
    for name in reversed([name for name in given if name not in required]):
        fewer = {key: value for key, value in given.items() if key not in left_out | {name}}
        if _is_same(_build(type(module), fewer), module):
            left_out.add(name)
    return left_out
