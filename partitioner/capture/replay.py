"""Torch's own graph of a model -> a run of it under the tracer, as if it were the forward.

What the tracer writes down is then what it always writes: functions, modules and their calls,
sizes as symbols, changes in place, regions. Only names and lines come from Dynamo's graph.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..effects import AUGMENTED
from .dynamo import TorchGraph
from .fakes import FakeWorld
from .frames import Line, is_good_name, short_name, user_lines
from .functorch import Transforms
from .structure import map_leaves
from .tracer import Tracer


def replay(
    found: TorchGraph, model: nn.Module, world: FakeWorld, tracer: Tracer, tensors: list[Tensor]
) -> Any:
    """The model's result for fake tensors, which are the graph's placeholders in order."""
    return _Replay(found, model, world, tracer).run(tensors)


class _Replay:
    def __init__(
        self, found: TorchGraph, model: nn.Module, world: FakeWorld, tracer: Tracer
    ) -> None:
        self._found, self._model = found, model
        self._world, self._tracer = world, tracer
        self._values: dict[fx.Node, Any] = {}
        self._transforms = Transforms(tracer)
        self._place: fx.Node | None = None

    def run(self, tensors: list[Tensor]) -> Any:
        nodes = self._nodes(self._found.module.graph, tensors)
        for node in takewhile(lambda node: node.target is not self._found.enter, nodes):
            self._run(node)
        result = self._until_leave(nodes)
        self._until_leave(nodes)
        return result

    def _nodes(self, graph: fx.Graph, arguments: Sequence[Any]) -> Iterator[fx.Node]:
        """The nodes of a graph to run for these arguments."""
        placeholders = graph.find_nodes(op="placeholder")
        self._values.update(zip(placeholders, arguments, strict=True))
        return iter([node for node in graph.nodes if node.op != "placeholder"])

    def _until_leave(self, nodes: Iterator[fx.Node]) -> Any:
        """Runs nodes up to the end of the module that they are in, and returns its result."""
        for node in nodes:
            if node.op == "output" or node.target is self._found.leave:
                return self._value(node.args[0])
            if node.target is self._found.assigned:
                values = self._value(node.args[0])
                for (module, name), value in zip(self._found.buffers, values, strict=True):
                    self._tracer.assign_buffer(module, name, value)
                continue
            if node.target is not self._found.enter:
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
        made = takewhile(lambda new: new is not before, reversed(self._tracer.graph.nodes))
        if self._place is None or _lines(node):
            self._place = node  # what torch adds at the end of a transform has no line
        _describe(list(made)[::-1], node, _lines(self._place))

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        if node.op == "call_method":
            return _method(str(node.target), args, kwargs)
        if node.op == "call_module":
            return self._found.module.get_submodule(str(node.target))(*args, **kwargs)
        path = self._found.leaves.get(node.target)
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
            return torch.device("cpu")  # where the fake twins are
        return leaf


# --- what Dynamo writes for numbers and arrays ----------------------------------------------


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
    def extreme(one: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            one, other = other, one
        return one.clamp(**{bound: other}) if isinstance(one, Tensor) else number(one, other)

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


def _describe(made: list[fx.Node], node: fx.Node, lines: list[Line]) -> None:
    """Gives new nodes the line and the variables of the node that they come from."""
    if not lines or not made:
        return
    place = lines[-1]
    for new in made:
        if new.meta["source"] is None:
            new.meta["source"] = (short_name(place.file, _module_of(place.file)), place.line)
    last = made[-1]
    if node.target in AUGMENTED and last.op == "call_method":
        # Torch calls the same what was written `x += y`.
        last.op, last.target = "call_function", node.target
    parts = _assigned(place.text)
    name = re.sub(r"_\d+$", "", node.name)
    if len(parts) == len(made) - 1 > 0:
        for new, part in zip(made[1:], parts, strict=True):
            _hint(new, part)
    elif any(name in _assigned(line.text) for line in lines):
        _hint(last, name)


def _name_result(result: Any, enter: fx.Node) -> None:
    """Names what a module returns after the variable that its caller puts it in."""
    lines = _lines(enter)
    names = _assigned(lines[-1].text) if lines else []
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(names) == len(results):
        for node, name in zip(results, names, strict=True):
            if isinstance(node, fx.Node) and node.op.startswith("call"):
                _hint(node, name)


def _lines(node: fx.Node) -> list[Line]:
    """The user's lines that a node comes from, the innermost last."""
    return user_lines(node.meta.get("stack_trace") or "")


def _assigned(text: str) -> list[str]:
    """The variables that a line of Python assigns.

    >>> _assigned("query, key = self.both(states == 0)")
    ['query', 'key']
    """
    found = re.match(r"([\w\s,()]+?)\s*[-+*/|&@]?=(?!=)", text)
    return [name.strip(" ()") for name in found[1].split(",")] if found else []


def _hint(node: fx.Node, name: str) -> None:
    if is_good_name(name):
        node.meta.setdefault("hint", name)


@lru_cache(maxsize=4096)
def _module_of(file: str) -> str:
    """The name of the imported module that a file is."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file:
            return name
    return ""
