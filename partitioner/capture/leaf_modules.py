"""Leaf modules, which the graph keeps as one node: the rule for them, and their constructors.

`leaf_rule` keeps modules of torch.nn, and those that the user names with `--leaf`.

`AutomaticLeaves` keeps further modules after a failed trace: modules that decide by values, or do
something that the tracer cannot see. The innermost module around the failing line comes first,
then those around it. Never kept are the root, a module of modules with more than half of the
model's parameters, and a module for which no constructor can be written.

`construct` finds the constructor call that builds an equal module. It reads arguments from the
module's attributes by the names of `__init__`'s parameters; a transformers configuration, or
the index of a layer, from the modules around it. Every candidate is built, on meta if that shows
all, and compared with the module (`equal_modules.py`). Arguments that make no difference are
defaults, and left out.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.errors import CaptureError, PlanError
from ...runtime.tensor_parallel.ranks import Split
from ..models.builtin import (
    configuration_arguments,
    configurations_around,
    is_asked_for,
    is_configuration,
)
from ..models.equal_modules import has_unsaved, is_equal, plain_attributes
from ..models.torch_modules import ACTIVATIONS, is_torch_leaf
from .model_state import same_draws

LeafRule = Callable[[nn.Module, str], bool]

_OF_ALL_RNNS = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
_INDEX = ("idx", "id", "index", "number", "num", "i")


def leaf_rule(model: nn.Module, names: Collection[str]) -> LeafRule:
    """A function of a module and its path: True if the module is kept as one node.

    Raises CaptureError for a name that no module of the model has.
    """
    wanted = frozenset(names)
    known = {
        name for path, module in model.named_modules() for name in (path, *_class_names(module))
    }
    for name in sorted(wanted - known):
        near = difflib.get_close_matches(name, sorted(known - {""}), n=3)
        raise CaptureError(
            f"no module of {type(model).__name__} is called {name}.",
            f"Did you mean --leaf {' or '.join(near)}?" if near else "",
        )

    def is_leaf(module: nn.Module, path: str) -> bool:
        named = path in wanted or not wanted.isdisjoint(_class_names(module))
        return named or is_torch_leaf(module)

    return is_leaf


def _class_names(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def modes_in_call(module: nn.Module, path: str) -> dict[str, bool]:
    """`training` of a leaf and its parts when forward calls it, by path: forward may have called
    `eval()`. Modules of torch.nn whose forward does not ask for the mode are left out."""
    return {
        name: part.training
        for name, part in module.named_modules(prefix=path)
        if not is_torch_leaf(part) or "training" in type(part).forward.__code__.co_names
    }


@dataclass(frozen=True, slots=True)
class LeafArgument:
    """An argument of a constructor.

    name: the parameter's name
    value: its value
    is_default: the argument may be left out
    is_positional: the argument is written without its name
    """

    name: str
    value: Any
    is_default: bool
    is_positional: bool


@dataclass(frozen=True, slots=True)
class Constructor:
    """The constructor call of a module.

    type: the class
    arguments: the arguments
    frozen: no parameter requires a gradient
    frozen_names: the parameters that require no gradient, if only some of them
    split: how tensor ranks share out its parameters
    is_shared: its parameters are whole, and its inputs are split
    """

    type: type[nn.Module]
    arguments: tuple[LeafArgument, ...]
    frozen: bool = False
    frozen_names: tuple[str, ...] = ()
    split: Split | None = None
    is_shared: bool = False

    @property
    def name(self) -> str:
        name = self.type.__name__
        return f"nn.{name}" if getattr(nn, name, None) is self.type else self.type.__qualname__


def construct(module: nn.Module, path: str, model: nn.Module | None = None) -> Constructor:
    """The constructor of a leaf module at `path` of `model`; raises PlanError if there is none."""
    kind = type(module)
    if not is_importable(kind):
        raise PlanError(
            f"cannot write a constructor for {path} ({kind.__name__}): its class is defined in a "
            "function or in the script that runs, and a stage cannot import it.",
            f"Define {kind.__name__} at the top level of a module of its own.",
        )
    required, optional = _parameters(module)
    given = next(
        (
            values
            for values in _guesses(module, path, model)
            if all(name in values for name in required)
            and all(map(_is_writable, values.values()))
            and _builds(module, values)
        ),
        None,
    )
    if given is None:
        raise PlanError(
            f"cannot write a constructor for {path} ({kind.__name__}): __init__ with arguments "
            f"from its attributes builds no module with the same tensors and attributes.",
            _cure(module),
        )
    given = {name: _simplest(module, given, name) for name in given}
    defaults = _defaults(module, given, required)
    arguments = [
        LeafArgument(name, given[name], name in defaults, position < 2)
        for position, name in enumerate(required)
    ]
    arguments += [
        LeafArgument(name, given[name], name in defaults, len(name) == 1 and not required)
        for name in optional
        if name in given
    ]
    parameters = dict(module.named_parameters())
    stuck = tuple(name for name, value in parameters.items() if not value.requires_grad)
    frozen = bool(parameters) and len(stuck) == len(parameters)
    return Constructor(kind, tuple(arguments), frozen, () if frozen else stuck)


def _cure(module: nn.Module) -> str:
    kind = type(module)
    if is_torch_leaf(module):
        own = sorted(plain_attributes(module).keys() - inspect.signature(kind).parameters.keys())
        changed = f" ({', '.join(own)})" if own else ""
        return (
            f"It was changed after its construction{changed}: write a class of its own with its "
            "operations in forward, which is then captured."
        )
    return (
        f"Remove --leaf {kind.__name__} so that it is captured, or store the arguments of its "
        "__init__ as attributes of the same names."
    )


def _guesses(module: nn.Module, path: str, model: nn.Module | None) -> Iterator[dict[str, Any]]:
    """Candidates for the arguments of a module's constructor."""
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
        configuration
        for configuration in configurations_around(model, path)
        if configuration_arguments(configuration) is not None
    ]
    for configuration in (*around, None):
        for index in indices or [None]:
            values = dict(known)
            for name, parameter in parameters.items():
                if configuration is not None and is_asked_for(parameter):
                    values[name] = configuration
                elif name not in known and index is not None and name.split("_")[-1] in _INDEX:
                    values[name] = index
                elif name not in known and hasattr(configuration, name):
                    values[name] = getattr(configuration, name)
            yield values


def _is_writable(value: Any) -> bool:
    return not is_configuration(value) or configuration_arguments(value) is not None


def is_importable(kind: type) -> bool:
    """True if a stage can import a class."""
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


_UNKNOWN = object()


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the required and of the optional parameters of `__init__`, in order."""
    if isinstance(module, nn.RNNBase):
        further = ((nn.LSTM, "proj_size"), (nn.RNN, "nonlinearity"))
        own = (name for kind, name in further if isinstance(module, kind))
        return ("input_size", "hidden_size"), (*_OF_ALL_RNNS, *own, "dtype")
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
        if name == "dtype":
            value = _dtype(module)
        elif value is None or isinstance(value, Tensor):
            # `bias=True` makes a tensor of that name, `padding_idx=None` stays None.
            switch = inspect.signature(type(module)).parameters.get(name)
            if isinstance(value, Tensor) or (switch and isinstance(switch.default, bool)):
                value = value is not None
        if name != "device" and not isinstance(value, nn.Module):
            values[name] = value
    return values


def _dtype(module: nn.Module) -> Any:
    same = {p.dtype for p in module.parameters() if p.is_floating_point() or p.is_complex()}
    return same.pop() if len(same) == 1 else None


def _from_parts(module: nn.Module) -> dict[str, Any]:
    """Arguments that are attributes under other names, or attributes of child modules."""
    match module:
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
                "activation": ACTIVATIONS.get(module.activation, _UNKNOWN),
                "layer_norm_eps": module.norm1.eps,
                "batch_first": module.self_attn.batch_first,
                "norm_first": module.norm_first,
                "bias": module.linear1.bias is not None,
            }
    return {}


def _builds(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """True if the constructor builds an equal module from these arguments."""
    device = torch.device("cpu" if has_unsaved(module) else "meta")
    try:
        with same_draws(module), device, warnings.catch_warnings(action="ignore"):
            built = type(module)(**given)
        return is_equal(built, module)
    except Exception:
        # Any error only means that this candidate is wrong.
        return False


def _simplest(module: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """`3` instead of `(3, 3)`, if it builds the same module."""
    value = given[name]
    if not isinstance(value, tuple) or not value or any(item != value[0] for item in value):
        return value
    return value[0] if _builds(module, {**given, name: value[0]}) else value


def _defaults(module: nn.Module, given: Mapping[str, Any], required: Collection[str]) -> set[str]:
    """The optional arguments that can all be left out."""
    left_out: set[str] = set()
    for name in reversed([name for name in given if name not in required]):
        fewer = {key: value for key, value in given.items() if key not in left_out | {name}}
        if _builds(module, fewer):
            left_out.add(name)
    return left_out


class FailedTrace(Exception):
    """A forward that could not be traced.

    error: the reason
    paths: the paths of the modules in which it failed, the outermost first
    """

    def __init__(self, error: CaptureError, paths: Sequence[str]) -> None:
        super().__init__(error.what)
        self.error, self.paths = error, paths


class AutomaticLeaves:
    """The rule of `leaf_rule`, and the classes that failed traces have added to it."""

    def __init__(self, model: nn.Module, rule: LeafRule) -> None:
        self._model, self._rule = model, rule
        self._kept: dict[type[nn.Module], str] = {}
        self._tried: set[type[nn.Module]] = set()

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        return type(module) in self._kept or self._rule(module, path)

    def keep(self, paths: Sequence[str], error: CaptureError) -> bool:
        """Keeps one more class after a failure in the modules at these paths, the outermost first;
        returns False if there is none left."""
        for path in reversed(paths):
            module = self._model.get_submodule(path)
            kind = type(module)
            if kind in self._tried or kind.__module__.startswith("torch.nn"):
                continue
            self._tried.add(kind)
            if self._is_small(module) and is_constructible(module, path, self._model):
                self._kept[kind] = f"{kind.__name__} is kept as one operation: {error.what}"
                return True
        return False

    def notes(self, called: set[str]) -> list[str]:
        """The reason for each kept class among the modules called in the graph."""
        kinds = dict.fromkeys(type(self._model.get_submodule(path)) for path in sorted(called))
        return [self._kept[kind] for kind in kinds if kind in self._kept]

    def _is_small(self, module: nn.Module) -> bool:
        """True for at most half of the model's parameters, or for a module that cannot be cut."""
        inside = [submodule for submodule in module.modules() if submodule is not module]
        if all(is_torch_leaf(each) or not list(each.parameters()) for each in inside):
            return True
        own, all_ = (
            sum(parameter.numel() for parameter in tree.parameters())
            for tree in (module, self._model)
        )
        return 2 * own <= all_


def is_constructible(module: nn.Module, path: str, model: nn.Module) -> bool:
    """True if the constructor of a module can be written, so that it can be a leaf."""
    try:
        construct(module, path, model)
    except PlanError:
        return False
    return True
