"""A model that the tracer cannot see through -> torch's own graph of it, made by TorchDynamo.

Dynamo reads byte code where the tracer runs it, so that it knows what `torch.jit.script`, `vmap`
and NumPy do. For the time of its work every module's forward is another: that of a leaf is one
call of the graph, that of another module says when it begins and ends, and with which values.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from .check import is_on_meta
from .fakes import Dynamic
from .leaves import LeafRule
from .restore import in_mode, unchanged, without_cache
from .undisturbed import undisturbed


@dataclasses.dataclass(frozen=True)
class TorchGraph:
    """A graph of torch functions whose nodes call, beside them, three kinds of marks.

    `leaves` are functions that stand for a leaf module, with its path; a call of `enter` has the
    path, the arguments and the keyword arguments of a module that begins, a call of `leave` the
    result of the one that ends. At the end `assigned` has what every one of `buffers`, a module
    and a name each, is then.
    """

    module: fx.GraphModule
    leaves: Mapping[Any, str]
    buffers: Sequence[tuple[nn.Module, str]]
    enter: Callable[..., Any]
    leave: Callable[..., Any]
    assigned: Callable[..., Any]


def torch_graph(
    model: nn.Module,
    call: Callable[[dict[str, Tensor]], Any],
    tensors: Mapping[str, Tensor],
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
) -> TorchGraph:
    """The graph in one mode of a call of the model with tensors like these, which are its
    placeholders in order. Raises what Dynamo raises."""
    with (
        unchanged(model),
        in_mode(model, training),
        without_cache(model),
        undisturbed(model, globals()),
        torch.enable_grad(),
    ):
        enter, leave, assigned = _mark(), _mark(), _mark()
        leaves, buffers = _reporting(model, is_leaf, enter, leave)
        found = _exported(
            _Entry(model, call, tuple(tensors), buffers, assigned),
            # Copies, because Dynamo would make one input of a tensor that is given twice.
            tuple(_copy(tensor, is_on_meta(model)) for tensor in tensors.values()),
            [dict.fromkeys(dims.get(name, {}), torch.export.Dim.DYNAMIC) for name in tensors],
        )
        return TorchGraph(found, leaves, buffers, enter, leave, assigned)


def _copy(tensor: Tensor, to_meta: bool) -> Tensor:
    made = tensor.detach().to("meta") if to_meta else tensor.detach().clone()
    return made.requires_grad_(tensor.requires_grad)


class _Entry(nn.Module):
    """A model as a module of tensors to tensors."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[dict[str, Tensor]], Any],
        names: tuple[str, ...],
        state: Sequence[tuple[nn.Module, str]],
        assigned: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.model = model
        self._call, self._names = call, names
        self._state, self._assigned = state, assigned

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        result = _plain(self._call(dict(zip(self._names, tensors, strict=True))))
        self._assigned([getattr(module, name) for module, name in self._state])
        return _tensors(result)


def _exported(entry: nn.Module, tensors: tuple[Tensor, ...], dynamic: list[Any]) -> fx.GraphModule:
    """What `torch.export` makes of a module before it goes down to operators."""
    from torch.export import _trace

    shapes = {"tensors": tuple(dynamic)}
    export: Any = getattr(_trace, "_export_to_torch_ir", None)
    if export is None:
        found = torch._dynamo.export(entry, dynamic_shapes=shapes, tracing_mode="symbolic")
        module: fx.GraphModule = found(*tensors).graph_module
        return module
    options = {"restore_fqn": False, "_log_export_usage": False}
    known = inspect.signature(export).parameters
    given = {name: value for name, value in options.items() if name in known}
    exported: fx.GraphModule = export(entry, tensors, dynamic_shapes=shapes, **given)
    return exported


# --- what modules say of themselves ---------------------------------------------------------


def _allow_in_graph(function: Callable[..., Any]) -> None:
    allow: Any = torch._dynamo.allow_in_graph
    allow(function)


def _mark() -> Callable[..., Any]:
    """A function that does nothing, and whose calls stay in the graph."""

    def mark(*values: Any) -> Any:
        return torch.zeros(())

    _allow_in_graph(mark)
    return mark


def _reporting(
    model: nn.Module, is_leaf: LeafRule, enter: Callable[..., Any], leave: Callable[..., Any]
) -> tuple[dict[Any, str], list[tuple[nn.Module, str]]]:
    """Gives modules a forward of their own each.

    The result is the functions that stand for leaves, and the buffers of other modules."""
    leaves: dict[Any, str] = {}
    buffers: list[tuple[nn.Module, str]] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        if path and is_leaf(module, path):
            inside.update(map(id, module.modules()))
            function = _leaf(module)
            leaves[function] = path
            # The real module is called later, with its hooks.
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()
            module.__dict__["forward"] = function
        else:
            own = module._buffers.items()
            buffers += [(module, name) for name, buffer in own if buffer is not None]
            module.__dict__["forward"] = MethodType(
                _reported(path, module.__dict__.get("forward"), enter, leave), module
            )
    return leaves, buffers


def _leaf(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    def leaf(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    _allow_in_graph(leaf)
    return leaf


def _reported(
    path: str, own: Any, enter: Callable[..., Any], leave: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        enter(path, _plain(args), _plain(kwargs))
        if own is None:
            return _told(leave, type(module).forward(module, *args, **kwargs))
        return _told(leave, own(*args, **kwargs))

    return forward


def _told(leave: Callable[..., Any], value: Any) -> Any:
    leave(_plain(value))
    return value


def _plain(value: Any) -> Any:
    """What a graph can hold of a value, None for the rest.

    Dynamo reads this function too, and names values after the variables they are first stored in:
    there must be none.
    """
    if value is None or isinstance(value, (Tensor, int, float, str)):
        return value
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return dict(zip(value.keys(), map(_plain, value.values()), strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
