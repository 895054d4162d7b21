"""A model that the tracer cannot see through -> torch's own graph of it, made by TorchDynamo.

Dynamo reads byte code where the tracer runs it, and therefore understands `torch.jit.script` and
NumPy. `torch_graph` replaces every module's forward for the time of the export: the forward of a
leaf becomes one call of the graph, that of any other module marks its begin and end, with values.

`undisturbed` removes Dynamo's obstacles for a block, and cleans up after it: locks, log lines and
warnings become no-ops, and a user's autograd function stays one call of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from ...runtime.plan.structure import is_named_tuple
from .arguments import Arguments
from .fake_inputs import Dynamic, PinnedSizeError
from .leaf_modules import LeafRule
from .model_state import in_mode, is_on_meta, silent, unchanged, without_cache
from .source_lines import user_lines


@dataclasses.dataclass(frozen=True)
class TorchGraph:
    """Dynamo's graph: calls of torch functions, and of functions that mark modules.

    module: the graph
    leaves: functions that stand for leaf modules, with the modules' paths
    buffers: the buffers of other modules, each as module and name
    enter: called at the begin of a module, with path, arguments and keyword arguments
    leave: called at the end of a module, with its result
    assigned: called once at the end, with the final values of `buffers`
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
    """The graph of a call of the model in one mode; its placeholders are the tensors in order.

    Raises any exception of Dynamo.
    """
    with (
        unchanged(model),
        in_mode(model, training),
        without_cache(model),
        undisturbed(model, globals()),
        torch.enable_grad(),
    ):
        enter, leave, assigned = _mark(), _mark(), _mark()
        leaves, buffers = _reporting(model, is_leaf, enter, leave)
        exported = _exported(
            _Entry(model, call, tuple(tensors), buffers, assigned),
            # Copies, because Dynamo would merge inputs that are the same tensor.
            tuple(_copy(tensor, is_on_meta(model)) for tensor in tensors.values()),
            [dict.fromkeys(dims.get(name, {}), torch.export.Dim.DYNAMIC) for name in tensors],
        )
        return TorchGraph(exported, leaves, buffers, enter, leave, assigned)


def _copy(tensor: Tensor, to_meta: bool) -> Tensor:
    copied = tensor.detach().to("meta") if to_meta else tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad)


class _Entry(nn.Module):
    """A model as a module from tensors to tensors."""

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
    """The graph of torch functions that `torch.export` makes before it lowers to operators."""
    from torch.export import _trace

    shapes = {"tensors": tuple(dynamic)}
    export: Any = getattr(_trace, "_export_to_torch_ir", None)
    if export is None:
        exporter = torch._dynamo.export(entry, dynamic_shapes=shapes, tracing_mode="symbolic")
        module: fx.GraphModule = exporter(*tensors).graph_module
        return module
    options = {"restore_fqn": False, "_log_export_usage": False}
    known = inspect.signature(export).parameters
    given = {name: value for name, value in options.items() if name in known}
    exported: fx.GraphModule = export(entry, tensors, dynamic_shapes=shapes, **given)
    return exported


# --- marks of modules -----------------------------------------------------------------------


def _allow_in_graph(function: Callable[..., Any]) -> None:
    allow: Any = torch._dynamo.allow_in_graph
    allow(function)


def _mark() -> Callable[..., Any]:
    """A function without effect whose calls stay in the graph."""

    def mark(*values: Any) -> Any:
        return torch.zeros(())

    _allow_in_graph(mark)
    return mark


def _reporting(
    model: nn.Module, is_leaf: LeafRule, enter: Callable[..., Any], leave: Callable[..., Any]
) -> tuple[dict[Any, str], list[tuple[nn.Module, str]]]:
    """Replaces the forward of each module by one that marks it.

    Returns the functions that stand for leaves, with their paths, and the buffers of other modules.
    """
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
            return _marked(leave, type(module).forward(module, *args, **kwargs))
        return _marked(leave, own(*args, **kwargs))

    return forward


def _marked(leave: Callable[..., Any], value: Any) -> Any:
    leave(_plain(value))
    return value


def _plain(value: Any) -> Any:
    """The part of a value that a graph can hold, with None for the rest.

    Dynamo reads this function too, and names values after the first variables that hold them:
    therefore it has no variables.
    """
    if value is None or isinstance(value, (Tensor, int, float, str)):
        return value
    if is_named_tuple(value):
        return type(value)(*map(_plain, value))
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


@contextmanager
def undisturbed(model: nn.Module, of_entry: dict[str, Any]) -> Iterator[None]:
    """Lets Dynamo read the model within the block, and removes its traces afterwards.

    `of_entry` are the globals of the function at which Dynamo begins.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_locks(model))
        stack.enter_context(_functions_as_calls())
        stack.enter_context(_same_globals(of_entry))
        stack.enter_context(_quiet())
        yield


@contextmanager
def _without_locks(model: nn.Module) -> Iterator[None]:
    """Replaces locks of the model's modules and packages, for the block, by contexts without
    effect: Dynamo cannot enter a lock."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    scopes: list[dict[str, Any]] = [module.__dict__ for module in model.modules()]
    scopes += [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and isinstance(module, ModuleType)
    ]
    locks: list[tuple[dict[str, Any], str, Any]] = [
        (scope, name, value)
        for scope in scopes
        for name, value in list(scope.items())
        if isinstance(value, kinds)
    ]
    for scope, name, _ in locks:
        scope[name] = contextlib.nullcontext()
    try:
        yield
    finally:
        for scope, name, value in locks:
            scope[name] = value


@contextmanager
def _functions_as_calls() -> Iterator[None]:
    """Keeps a user's autograd function, for the block, as one call of the graph."""
    from torch._dynamo import trace_rules

    allowed: Any = trace_rules._allowed_callable_ids
    new = {id(kind) for kind in _subclasses(Function) if id(kind) not in allowed()}
    for identity in new:
        allowed.add(identity)
    try:
        yield
    finally:
        for identity in new:
            allowed.remove(identity)


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        if not child.__module__.startswith("torch."):
            yield child
        yield from _subclasses(child)


@contextmanager
def _same_globals(of_entry: dict[str, Any]) -> Iterator[None]:
    """Removes the globals that Dynamo adds to the function it reads: they would keep the model's
    parameters in memory."""
    from torch._dynamo import functional_export

    scopes = [(scope, set(scope)) for scope in (of_entry, vars(functional_export))]
    try:
        yield
    finally:
        for scope, before in scopes:
            for name in scope.keys() - before:
                del scope[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves logging by forward out of the graph, and hides Dynamo's own messages."""
    logging_functions = [
        getattr(owner, name)
        for owner, names in (
            (logging.Logger, ("debug", "info", "warning", "error", "critical", "log")),
            (warnings, ("warn",)),
        )
        for name in names
    ]
    with (
        warnings.catch_warnings(),
        silent(),
        torch._dynamo.config.patch(
            ignore_logging_functions={
                *torch._dynamo.config.ignore_logging_functions,
                *logging_functions,
            }
        ),
    ):
        warnings.simplefilter("ignore")
        yield


_PINNED = re.compile(
    r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)


def pinned(error: Exception, given: Arguments, dims: Dynamic) -> PinnedSizeError | None:
    """Dynamo's error for a size that forward fixes at one value; None for any other error."""
    match = _PINNED.search(str(error))
    if match is None:
        return None
    position, dim, value = map(int, match.groups())
    symbol = dims[list(given.tensors)[position]][dim]
    lines = user_lines(str(error)[match.end() :].partition("\n\n  - ")[0])
    where = f"{Path(lines[-1].file).name}:{lines[-1].line}" if lines else "forward"
    return PinnedSizeError(
        symbol, where, value, f"Leave {symbol} out of dynamic=... to fix it at {value}."
    )
