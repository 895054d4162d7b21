"""Dynamo's graph of a model -> a run of it under the tracer, in place of the forward.

`replay` runs the graph's nodes, and the tracer records them as usual: functions, modules and their
calls, sizes as symbols, changes in place, regions. Only names and lines come from Dynamo's graph.

`Transforms` handles nodes inside `vmap` or `grad` of torch.func. There a tensor is a wrapper (a
vmapped row stands for the whole batch), and only the operators one level below see real tensors.
These operators are recorded and called again as torch functions, for the tracer.
`traced_transforms` does the same for a forward that runs under the tracer itself.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, autograd, fx, nn
from torch._functorch import eager_transforms, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.errors import CaptureError
from .arguments import map_leaves, map_result, tensors_in
from .dynamo import TorchGraph
from .fake_inputs import FakeWorld
from .patches import replaced
from .source_lines import SourceLine, is_good_name, short_name, user_lines
from .tracer import Tracer
from .values import AUGMENTED


def replay(
    exported: TorchGraph, model: nn.Module, world: FakeWorld, tracer: Tracer, tensors: list[Tensor]
) -> Any:
    """The model's result for fake tensors, given in the order of the graph's placeholders."""
    return _Replay(exported, model, world, tracer).run(tensors)


class _Replay:
    def __init__(
        self, exported: TorchGraph, model: nn.Module, world: FakeWorld, tracer: Tracer
    ) -> None:
        self._exported, self._model = exported, model
        self._world, self._tracer = world, tracer
        self._values: dict[fx.Node, Any] = {}
        self._transforms = Transforms(tracer)
        self._place: fx.Node | None = None

    def run(self, tensors: list[Tensor]) -> Any:
        nodes = self._nodes(self._exported.module.graph, tensors)
        for node in takewhile(lambda node: node.target is not self._exported.enter, nodes):
            self._run(node)
        result = self._until_leave(nodes)
        self._until_leave(nodes)
        return result

    def _nodes(self, graph: fx.Graph, arguments: Sequence[Any]) -> Iterator[fx.Node]:
        """The nodes of a graph to run, with these arguments as its placeholders."""
        placeholders = graph.find_nodes(op="placeholder")
        self._values.update(zip(placeholders, arguments, strict=True))
        return iter([node for node in graph.nodes if node.op != "placeholder"])

    def _until_leave(self, nodes: Iterator[fx.Node]) -> Any:
        """Runs nodes up to the end of the current module, and returns its result."""
        for node in nodes:
            if node.op == "output" or node.target is self._exported.leave:
                return map_result(self._leaf, node.args[0])
            if node.target is self._exported.assigned:
                values = self._value(node.args[0])
                for (module, name), value in zip(self._exported.buffers, values, strict=True):
                    self._tracer.assign_buffer(module, name, value)
                continue
            if node.target is not self._exported.enter:
                self._run(node)
                continue
            path, args, kwargs = self._value(node.args)
            module = self._model.get_submodule(path)
            self._tracer.within(module, args, kwargs, lambda: self._until_leave(nodes))
            _name_result(next(reversed(self._tracer.calls.values())).result, node)
        raise AssertionError("a graph of Dynamo has no output")

    def _run(self, node: fx.Node) -> None:
        before = next(iter(reversed(self._tracer.graph.nodes)), None)
        args, kwargs = self._value((node.args, node.kwargs))
        transformed = self._transforms.take(node, args, kwargs, self._values)
        if not transformed:
            self._values[node] = self._called(node, args, kwargs)
        new_nodes = takewhile(lambda new: new is not before, reversed(self._tracer.graph.nodes))
        if self._place is None or _lines(node):
            self._place = node  # nodes that torch adds at the end of a transform have no line
        _describe(list(new_nodes)[::-1], node, _lines(self._place))

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        if node.op == "call_method":
            return _method(str(node.target), args, kwargs)
        if node.op == "call_module":
            return self._exported.module.get_submodule(str(node.target))(*args, **kwargs)
        path = self._exported.leaves.get(node.target)
        if path is not None:
            return self._tracer.call_module(self._model.get_submodule(path), args, kwargs)
        if getattr(node.target, "__name__", "") == "wrapped_item":  # of an array
            return _method("item", args, kwargs)
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            self._tracer.notes.append("recomputation inside forward is left to the runtime")
            body, *arguments = args
            return self._until_leave(self._nodes(body.graph, arguments))
        function: Any = _FUNCTIONS.get(node.target, node.target)
        return function(*args, **kwargs)

    def _attribute(self, node: fx.Node) -> Any:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return self._world.twin(value) if isinstance(value, Tensor) else value

    def _value(self, argument: Any) -> Any:
        return map_leaves(self._leaf, argument)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return self._values[leaf]
        if isinstance(leaf, torch.device) and leaf.type == "meta" and self._world.is_on_meta:
            return torch.device("cpu")  # the device of the fake twins
        return leaf


# --- Dynamo's functions for numbers and arrays ----------------------------------------------


def _method(name: str, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if name == "item":
        # A tensor without dimensions counts as a number in arithmetic.
        return tensor.detach()
    if name == "view_as" and args[1] is tensor:
        return tensor  # `x.numpy()`
    return getattr(tensor, name)(*args[1:], **kwargs)


def _converted(number: Callable[[Any], Any], dtype: torch.dtype) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else number(value)

    return convert


def _bounded(number: Callable[..., Any], bound: str) -> Callable[..., Any]:
    def extreme(value: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            value, other = other, value
        return value.clamp(**{bound: other}) if isinstance(value, Tensor) else number(value, other)

    return extreme


def _as_tensor(value: Any, **options: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(**options) if options else value  # `torch.from_numpy(x)`
    return torch.as_tensor(value, **options)


def _tensor(value: Any, **options: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _as_tensor(value.detach().clone(), **options)  # `torch.tensor(array)`
    return torch.tensor(value, **options)


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.as_tensor: _as_tensor,
    torch.tensor: _tensor,
    torch._C._nn.pad: F.pad,
    torch.sym_int: _converted(torch.sym_int, torch.int64),
    torch.sym_float: _converted(torch.sym_float, torch.float64),
    torch.sym_max: _bounded(torch.sym_max, "min"),
    torch.sym_min: _bounded(torch.sym_min, "max"),
}


# --- names and lines ------------------------------------------------------------------------


def _describe(new_nodes: list[fx.Node], node: fx.Node, lines: list[SourceLine]) -> None:
    """Gives new nodes the line and the variable names of the node that they come from."""
    if not lines or not new_nodes:
        return
    place = lines[-1]
    for new in new_nodes:
        if new.meta["source"] is None:
            new.meta["source"] = (short_name(place.file, _module_of(place.file)), place.line)
    last = new_nodes[-1]
    if node.target in AUGMENTED and last.op == "call_method":
        # The graph has the method for the written `x += y`.
        last.op, last.target = "call_function", node.target
    parts = _assigned(place.text)
    name = re.sub(r"_\d+$", "", node.name)
    if len(parts) == len(new_nodes) - 1 > 0:
        for new, part in zip(new_nodes[1:], parts, strict=True):
            _hint(new, part)
    elif any(name in _assigned(line.text) for line in lines):
        _hint(last, name)


def _name_result(result: Any, enter: fx.Node) -> None:
    """Names the results of a module after the variables that its caller assigns."""
    lines = _lines(enter)
    names = _assigned(lines[-1].text) if lines else []
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(names) == len(results):
        for node, name in zip(results, names, strict=True):
            if isinstance(node, fx.Node) and node.op.startswith("call"):
                _hint(node, name)


def _lines(node: fx.Node) -> list[SourceLine]:
    """The user's lines that a node comes from, the innermost last."""
    return user_lines(node.meta.get("stack_trace") or "")


def _assigned(text: str) -> list[str]:
    """The variables that a line of Python assigns.

    >>> _assigned("query, key = self.both(states == 0)")
    ['query', 'key']
    """
    match = re.match(r"([\w\s,()]+?)\s*[-+*/|&@]?=(?!=)", text)
    return [name.strip(" ()") for name in match[1].split(",")] if match else []


def _hint(node: fx.Node, name: str) -> None:
    if is_good_name(name):
        node.meta.setdefault("hint", name)


@lru_cache(maxsize=4096)
def _module_of(file: str) -> str:
    """The name of the imported module that a file is."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and vars(module).get("__file__") == file:
            return name
    return ""


class Transforms:
    """Runs the nodes of a graph that are inside a transform, and replays them at its end."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._depth = 0
        self._operators = _Operators()

    def take(
        self, node: fx.Node, args: Any, kwargs: Any, values: MutableMapping[fx.Node, Any]
    ) -> bool:
        """Runs a node if it is inside a transform; returns True if it is."""
        name = getattr(node.target, "__name__", str(node.target))
        opens = name.endswith("_increment_nesting")
        if not self._depth and not opens:
            return False
        self._depth += opens
        with _lowered(self._tracer, self._operators):
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_function" and callable(node.target):
                values[node] = node.target(*args, **kwargs)
            else:
                raise CaptureError(f"{node.target} is used inside a transform of torch.func.")
        self._depth -= name.endswith("_decrement_nesting")
        if not self._depth:
            self._operators.again()
            for source, value in list(values.items()):
                values[source] = map_leaves(self._operators.now, value)
        return True


@contextmanager
def _lowered(tracer: Tracer, operators: _Operators) -> Iterator[None]:
    """Records operators in place of torch functions, of which the tracer has short cuts."""
    with (
        tracer.quiet(),
        tracer.sizes.in_transform(),
        torch._C.DisableTorchFunction(),
        operators,
    ):
        yield


_TRANSFORMS = (
    (vmap, "_flat_vmap"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
    (eager_transforms, "_vjp_with_argnums"),
)


@contextmanager
def traced_transforms(tracer: Tracer) -> Iterator[None]:
    """Records what the transforms of torch.func compute within the block."""
    operators = _Operators()

    def traced(transform: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tracer.is_recording:
                return transform(*args, **kwargs)
            with _lowered(tracer, operators):
                result = transform(*args, **kwargs)
            operators.again()
            return pytree.tree_map(outside, result)

        return call

    def outside(leaf: Any) -> Any:
        # vjp returns a function, which computes with tensors of the transform.
        return traced(leaf) if isinstance(leaf, FunctionType) else operators.now(leaf)

    with ExitStack() as stack:
        for module, name in _TRANSFORMS:
            stack.enter_context(replaced(module, **{name: traced(getattr(module, name))}))
        stack.enter_context(replaced(autograd.function, custom_function_call=_refuse_function))
        yield


def _refuse_function(function: type[autograd.Function], *_: Any, **__: Any) -> None:
    raise CaptureError(
        f"{function.__qualname__} is an autograd function inside a transform of torch.func, where "
        "only its forward can be seen.",
        "Call it on the whole batch, outside of the transform.",
    )


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run within the mode, and calls them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any, bool]] = []
        self._again: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor
            self._calls.append((func, args, kwargs or {}, result, torch.is_grad_enabled()))
        return result

    def now(self, leaf: Any) -> Any:
        """The tensor of the second call, for one of the first; any other value unchanged."""
        return self._again.get(id(leaf), (leaf, leaf))[1]

    def again(self) -> None:
        """Calls every new operator again as a torch function."""
        for func, args, kwargs, old, has_gradients in self._calls:
            options = map_leaves(self.now, _written(kwargs))
            with torch.set_grad_enabled(has_gradients):
                new = spelled(func)(*map_leaves(self.now, args), **options)
            # A number may stand for a single tensor.
            pairs = zip(tensors_in(old), tensors_in(new), strict=True)
            for before, after in [(old, new)] if isinstance(old, Tensor) else pairs:
                self._again[id(before)] = before, after
        self._calls.clear()


def spelled(func: Any) -> Callable[..., Any]:
    """The usual name of an operator: a method of tensors, or a function of torch.

    >>> spelled(torch.ops.aten.add.Tensor) is Tensor.add
    True
    """
    namespace, name = func._schema.name.split("::")
    if namespace != "aten":
        return func  # type: ignore[no-any-return]
    if name in _NAMES:
        return _NAMES[name]
    arguments = func._schema.arguments
    is_method = bool(arguments) and arguments[0].name == "self"
    homes = [Tensor] if is_method else []
    for home in (*homes, torch, torch._C._nn):
        public = getattr(home, name, None)
        if public is not None and not name.startswith("_"):
            return public  # type: ignore[no-any-return]
    return func  # type: ignore[no-any-return]


def _written(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an operator without those that are never written."""
    return {
        name: value
        for name, value in options.items()
        if name not in ("pin_memory", "layout", "non_blocking")
        and value is not None
        and value is not torch.preserve_format
    }


def _to(value: Any, **options: Any) -> Any:
    # A number needs no conversion.
    return value.to(**options) if isinstance(value, Tensor) else value


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    # Not Tensor.index, which torch adds for its first-class dimensions.
    return tensor[tuple(slice(None) if index is None else index for index in indices)]


def _norm(
    tensor: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, ord, dim, keepdim, **options)
    return norm


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(tensor: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return function(tensor, dim, dtype=torch.float32 if half_to_float else None)

    return call


_NAMES: Mapping[str, Callable[..., Any]] = {
    "_to_copy": _to,
    "alias": _same,
    "_efficientzerotensor": torch.zeros,
    "index": _index,
    "_unsafe_view": Tensor.view,
    "linalg_vector_norm": _norm,
    "_softmax": _softmax(F.softmax),
    "_log_softmax": _softmax(F.log_softmax),
}
