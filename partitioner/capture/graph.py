"""A captured model: its graph, inputs and module calls, and the operations on such a graph.

`Capture` holds the graph, `run` computes the values of its nodes from real inputs.

Guards: a captured graph is one path through forward. If the path depends on the values of tensors,
the graph calls `must_hold` or `must_fail`; if it depends on sizes, `must_fit`. They raise an error
for inputs that would take another branch, because the graph's results would be wrong.

`prune` erases nodes that no output, no state and no random draw needs.
`fx.Graph.eliminate_dead_code` would also erase a statement such as `y.add_(1)`, whose result has no
reader.

`LocalNames` names modules and tensors that a model holds in several places. The graph calls them
by their first name, but generated code must use the name below the innermost module call that
has one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...runtime.plan.plan import TensorSpec
from ...runtime.tensor_parallel.functions import local
from ...runtime.tensor_parallel.ranks import Split
from .arguments import Arguments, map_leaves, state_of
from .model_state import in_mode
from .operations import on_fakes, runnable
from .values import CallRecord, IfTraining, Local, LocalDevice, ModuleCall, Region, Size, size_text


@dataclass(frozen=True)
class Capture:
    """A model's forward as one `torch.fx.Graph` of named modules and torch functions.

    graph: the graph
    model: the model
    inputs: the tensors that forward takes, in the graph's order
    arguments: their places in forward's arguments
    sizes: the numbers of the size symbols in the example
    calls: the module calls that are not nodes, with arguments and results
    constants: tensors that forward reads and that are neither parameters nor buffers, by the name
        that `get_attr` nodes use
    notes: remarks for the user
    changed, changed_buffers: the parameters and buffers that forward changes in place
    modes: the captured modes, True for training
    flags: `training` of a module in training and in evaluation mode, by path, if its class
        overrides `train` so that it differs from the model's mode
    splits: how tensor ranks share out a parameter, by name, or a leaf module, by path
    shared: the paths of leaf modules whose parameters are whole although their inputs are split
    """

    graph: fx.Graph
    model: nn.Module
    inputs: tuple[TensorSpec, ...]
    arguments: Arguments
    sizes: Mapping[str, int]
    calls: Mapping[ModuleCall, CallRecord]
    constants: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    changed_buffers: frozenset[str] = frozenset()
    modes: tuple[bool, ...] = (True, False)
    flags: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    @property
    def sha256(self) -> str:
        """SHA-256 of the graph's text and of the names and shapes of its tensors."""
        state = state_of(self.model)
        shapes = "".join(f"{name}{tuple(tensor.shape)}" for name, tensor in state.items())
        return hashlib.sha256(f"{self.graph}{shapes}".encode()).hexdigest()

    def tensor_spec(self, node: fx.Node) -> TensorSpec:
        """Name, dtype and symbolic shape of a node whose value is a tensor.

        Raises TypeError when the node's value is not a tensor.
        """
        return tensor_spec(node)


def tensor_spec(node: fx.Node) -> TensorSpec:
    """Name, dtype and shape of a node that computes a tensor. Raises TypeError for another node."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise TypeError(f"{node.name} is {type(value).__name__}, not a tensor")
    return TensorSpec(
        name=node.name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(
            size if isinstance(size, int) else size_text(size.expr) for size in node.meta["shape"]
        ),
        requires_grad=value.requires_grad,
    )


def is_external(node: fx.Node) -> bool:
    """True if the node is an input, a parameter, a buffer or a constant."""
    return node.op in ("placeholder", "get_attr")


def attribute(model: nn.Module, constants: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of a `get_attr` node of that name."""
    if name in constants:
        return constants[name]
    path, _, last = name.rpartition(".")
    value = getattr(model.get_submodule(path), last)
    assert isinstance(value, torch.Tensor)
    return value


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

    `nodes` limits the run to some nodes, in program order; the values of other nodes come from
    `env`, and new values are added to it. Without `env`, a value is freed after its last use.
    `around(node, thunk)` is called for every call node in place of `thunk()` and returns its
    value. Parameters that are not in `env` are read from the model.
    """
    chosen = list(capture.graph.nodes) if nodes is None else _in_order(capture.graph, nodes)
    values: MutableMapping[fx.Node, Any] = {} if env is None else env
    last_use = _last_uses(chosen) if env is None else {}
    reader = Reader(capture, inputs, values, training)
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


class Reader:
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
        if isinstance(leaf, Local):
            return local(self._leaf(leaf.number), uneven=leaf.uneven)
        return leaf


def sizes_of(capture: Capture, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of the size symbols in the inputs; those of the example for other symbols."""
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
    """Calls the module, method or function of a node."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        with on_fakes(module):
            return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return runnable(node.target, (args, kwargs))(*args, **kwargs)


def run_node(capture: Capture, reader: Reader, node: fx.Node) -> Any:
    """Computes one call node from the values that the reader has, in the model's present mode."""
    with _Regions() as regions:
        regions.enter(_resolved(node.meta["regions"], reader.device))
        args, kwargs = reader.value((node.args, node.kwargs))
        return call_node(capture.model, node, args, kwargs)


def _is_true(value: Any) -> bool:
    has_none = isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)
    return not has_none and bool(value)


def _in_order(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    chosen = set(nodes)
    return [node for node in graph.nodes if node in chosen]


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that it reads as the last node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    last_read_by: dict[fx.Node, list[fx.Node]] = {}
    for used, user in last.items():
        last_read_by.setdefault(user, []).append(used)
    return last_read_by


def _resolved(regions: tuple[Region, ...], device: torch.device) -> tuple[Region, ...]:
    return tuple(
        Region(region.kind, device.type, region.dtype, region.enabled, region.cache_enabled)
        if isinstance(region.device_type, LocalDevice)
        else region
        for region in regions
    )


class _Regions:
    """Keeps the `with` blocks of the current node open as long as successive nodes share them."""

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


def must_hold(condition: Any, where: str) -> None:
    """Raises RuntimeError unless the condition, a tensor or a bool, is true."""
    if not condition:
        raise RuntimeError(other_way(where))


def must_fail(condition: Any, where: str) -> None:
    """Raises RuntimeError if the condition, a tensor or a bool, is true."""
    if condition:
        raise RuntimeError(other_way(where))


def must_fit(fits: bool, condition: str, sizes: Mapping[str, int]) -> None:
    """Raises RuntimeError, with the condition and its line, unless `fits`."""
    if not fits:
        raise RuntimeError(unfit(condition, {name: str(size) for name, size in sizes.items()}))


def is_guard(node: fx.Node) -> bool:
    """True for a node that only checks a condition of the inputs."""
    return node.target in (must_hold, must_fail, must_fit)


def other_way(where: str) -> str:
    """The error for inputs that take another branch at a user's line."""
    return f"captured for inputs that go the other way at {where}"


def unfit(condition: str, sizes: Mapping[str, str]) -> str:
    """The error for inputs whose sizes violate a condition."""
    given = " and ".join(f"{name} {size}" for name, size in sizes.items())
    return f"captured for {condition}, not for {given}: make the plan again with such an example"


def is_refusal(error: BaseException | None) -> bool:
    """True if an exception comes from a guard."""
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("captured for "):
            return True
        error = error.__cause__
    return False


def refused_sizes(graph: fx.Graph, sizes: Mapping[str, int]) -> str:
    """The error of the first guard that refuses the sizes; empty if none does."""
    for node in graph.find_nodes(op="call_function", target=must_fit):
        condition, where, symbols = node.args
        if not condition.evaluate(sizes):
            return unfit(where, {name: str(sizes[name]) for name in symbols})
    return ""


def prune(graph: fx.Graph) -> None:
    """Erases nodes that are not needed.

    A node is needed if it is the output or a needed node reads it; if it changes an input, a
    parameter, a buffer, or memory that a later needed node reads; if it is a guard; or if it draws
    random numbers, because later draws would change without it.
    """
    nodes = list(graph.nodes)
    read: set[int] = set()
    for node in nodes:
        if is_external(node):
            read |= node.meta["storages"]
        read |= node.meta["touches"]
    needed: set[fx.Node] = set()
    decisions: set[int] = set()
    for node in reversed(nodes):
        if (
            node.op in ("output", "placeholder")
            or node.meta["random"]
            or node.meta.get("decision") in decisions
            or is_guard(node)
            or node.meta["mutates"] & read
            or any(user in needed for user in node.users)
        ):
            needed.add(node)
            decisions.update(region.decision for region in node.meta["regions"])
            read |= node.meta["storages"]
            for used in node.all_input_nodes:
                read |= used.meta["storages"]
    for node in reversed(nodes):
        if node not in needed:
            graph.erase_node(node)


class LocalNames:
    """The names by which each node of a captured graph reaches modules, calls and tensors."""

    def __init__(self, capture: Capture) -> None:
        model = capture.model
        self._modules: dict[int, list[str]] = defaultdict(list)
        self._module_ids: dict[str, int] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._modules[id(module)].append(path)
            self._module_ids[path] = id(module)
        self._changed = {each for n in capture.graph.nodes for each in n.meta.get("mutates", ())}
        self._tensors: dict[int, list[str]] = defaultdict(list)
        self._tensor_ids: dict[str, int] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._tensors[id(tensor)].append(name)
            self._tensor_ids[name] = id(tensor)

    def calls(self, node: fx.Node) -> tuple[ModuleCall, ...]:
        """The module calls around a node, each with its name below the outer call if it has one."""
        calls: tuple[ModuleCall, ...] = ()
        for call in node.meta.get("calls", ()):
            names = self._modules.get(self._module_ids.get(call.path, -1), [])
            calls += (ModuleCall(_innermost(call.path, names, calls), call.index),)
        return calls

    def module(self, node: fx.Node) -> str:
        """The path of the leaf module that a `call_module` node calls."""
        path = str(node.target)
        names = self._modules.get(self._module_ids.get(path, -1), [])
        return _innermost(path, names, self.calls(node))

    def tensor(self, reader: fx.Node, node: fx.Node) -> str:
        """The name of a `get_attr` node's tensor for the node that reads it: one for all of them if
        forward changes the tensor, as a stage registers a buffer for each name."""
        name, is_changed = str(node.target), self._changed & node.meta["storages"]
        names = self._tensors.get(self._tensor_ids.get(name, -1), [])
        return name if is_changed else _innermost(name, names, self.calls(reader))


def _innermost(name: str, names: list[str], calls: tuple[ModuleCall, ...]) -> str:
    if len(names) > 1:
        for call in reversed(calls):
            below = [other for other in (name, *names) if other.startswith(f"{call.path}.")]
            if below:
                return below[0]
    return name
