"""A capture and real inputs -> the values of its nodes, one node after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from .graph import Capture, attribute
from .restore import in_mode
from .structure import map_leaves
from .targets import averaging, runnable
from .values import IfTraining, LocalDevice, Region, Size

Around = Callable[[fx.Node, Callable[[], Any]], Any]


def run(
    capture: Capture,
    inputs: Mapping[str, Any],
    *,
    training: bool,
    nodes: Collection[fx.Node] | None = None,
    env: MutableMapping[fx.Node, Any] | None = None,
    around: Around | None = None,
) -> Any:
    """Runs the graph on the original model's modules and returns the output's structure.

    `nodes` limits the run to some nodes, in program order, the values of others being taken from
    `env`; the values made are left in `env`. Without `env`, a value is freed after its last use.
    `around(node, thunk)` is called for every call node in place of `thunk()` and returns its
    value. Parameters that a node needs are read from the model when they are not in `env`.
    """
    chosen = list(capture.graph.nodes) if nodes is None else _in_order(capture.graph, nodes)
    values: MutableMapping[fx.Node, Any] = {} if env is None else env
    last_use = _last_uses(chosen) if env is None else {}
    reader = _Reader(capture, inputs, values, training)
    result = None
    decided: dict[int, bool] = {}
    with in_mode(capture.model, training), _Regions() as regions:
        for node in chosen:
            if node.op == "output":
                result = reader.value(node.args[0])
                continue
            if node.op in ("placeholder", "get_attr"):
                values[node] = reader.external(node)
                continue
            if any(region.is_left_out(training, decided) for region in node.meta["regions"]):
                values[node] = None
                continue
            regions.enter(_resolved(node.meta["regions"], reader.device))

            def thunk(node: fx.Node = node) -> Any:
                args, kwargs = reader.value((node.args, node.kwargs))
                return call_node(capture.model, node, args, kwargs)

            values[node] = around(node, thunk) if around else thunk()
            if "decision" in node.meta:
                decided[node.meta["decision"]] = _is_true(values[node])
            for done in last_use.get(node, ()):
                del values[done]
    return result


class _Reader:
    """Turns arguments of nodes into values."""

    def __init__(
        self,
        capture: Capture,
        inputs: Mapping[str, Any],
        values: MutableMapping[fx.Node, Any],
        training: bool,
    ) -> None:
        self.capture, self.inputs, self.values = capture, inputs, values
        self.training = training
        self.sizes = sizes_of(capture, inputs)
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        tensors += list(capture.model.parameters())[:1]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def external(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs[str(node.target)]
        return attribute(self.capture.model, self.capture.constants, str(node.target))

    def value(self, argument: Any) -> Any:
        return map_leaves(self._leaf, argument)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            if leaf not in self.values and leaf.op in ("placeholder", "get_attr"):
                self.values[leaf] = self.external(leaf)
            return self.values[leaf]
        if isinstance(leaf, Size):
            return leaf.evaluate(self.sizes)
        if isinstance(leaf, IfTraining):
            return self.value(leaf.train if self.training else leaf.eval)
        if isinstance(leaf, LocalDevice):
            return self.device
        return leaf


def sizes_of(capture: Capture, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of the size symbols, read off the inputs; those of the example for the rest."""
    sizes = dict(capture.sizes)
    for spec in capture.inputs:
        tensor = inputs.get(spec.name)
        if isinstance(tensor, Tensor):
            sizes.update(
                (symbol, size)
                for symbol, size in zip(spec.shape, tensor.shape, strict=True)
                if isinstance(symbol, str)
            )
    return sizes


def call_node(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Does what a node calls."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        with averaging(module):
            return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return runnable(node.target, args)(*args, **kwargs)


def _is_true(value: Any) -> bool:
    has_none = isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)
    return not has_none and bool(value)


def _in_order(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    chosen = set(nodes)
    return [node for node in graph.nodes if node in chosen]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it is the last to read."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for used, user in last.items():
        found.setdefault(user, []).append(used)
    return found


def _resolved(regions: tuple[Region, ...], device: torch.device) -> tuple[Region, ...]:
    return tuple(
        Region(region.kind, device.type, region.dtype, region.enabled, region.cache_enabled)
        if isinstance(region.device_type, LocalDevice)
        else region
        for region in regions
    )


class _Regions:
    """Keeps the `with` blocks of the current node open, for as long as nodes share them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._current: tuple[Region, ...] = ()

    def __enter__(self) -> _Regions:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def enter(self, regions: tuple[Region, ...]) -> None:
        if regions == self._current:
            return
        self._stack.close()
        self._current = ()
        for region in regions:
            if not region.is_decided:
                self._stack.enter_context(_context(region))
        self._current = regions


def _context(region: Region) -> Any:
    if region.kind == "no_grad":
        return torch.no_grad()
    if region.kind == "enable_grad":
        return torch.enable_grad()
    return torch.autocast(
        str(region.device_type),
        dtype=region.dtype,
        enabled=region.enabled,
        cache_enabled=region.cache_enabled,
    )
