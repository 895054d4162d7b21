"""Capture + example inputs -> milliseconds, FLOPs and saved bytes of every node.

The graph is walked once without computing anything (fake tensors at the real micro-batch size);
every distinct call on the way is measured by itself, so the twelve equal blocks of a GPT-2 are
measured as one. The sum of the parts is not the whole: operations alone find a warmer or a colder
cache than in a row. So the whole model is timed too, and all times are scaled to it. A model on
meta is never materialised as a whole, and keeps its times unscaled.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from .capture import Capture, IfTraining, LocalDevice, Size, run
from .capture.interpret import sizes_of
from .capture.structure import map_leaves, tensors_in
from .clock import threads_set
from .measure import (
    Operation,
    OperationCost,
    Repeats,
    estimate,
    measure,
    num_bytes,
)
from .whole import WholeTimes, state_kept, time_whole


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Costs of one node for one micro-batch.

    `saved` are the storages kept for backward, parameters left out, by the name of the node that
    made them; storages of the same name are the same one.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Costs of all computed nodes by name, and how they were found.

    `forward_scale` and `backward_scale` are what the measured parts were multiplied with so that
    their sum is the whole; 1 when the whole could not be timed. `unmeasured` nodes count as free:
    they do not accept arguments that are made up.
    """

    nodes: Mapping[str, NodeCost]
    kind: str
    device: str
    threads: int
    sizes: Mapping[str, int]
    distinct: int
    forward_scale: float
    backward_scale: float
    unmeasured: tuple[str, ...]
    seconds: float

    @property
    def forward_ms(self) -> float:
        return sum(cost.forward_ms for cost in self.nodes.values())

    @property
    def backward_ms(self) -> float:
        return sum(cost.backward_ms for cost in self.nodes.values())

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.nodes.values())

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan records of a profile: no clock and no machine, but what was assumed."""
        return {
            "kind": self.kind,
            "device": self.device,
            "threads": self.threads,
            "sizes": dict(self.sizes),
            "distinct": self.distinct,
            "forward_ms": round(self.forward_ms, 4),
            "backward_ms": round(self.backward_ms, 4),
            "forward_scale": round(self.forward_scale, 4),
            "backward_scale": round(self.backward_scale, 4),
            "flops": self.flops,
            "unmeasured": list(self.unmeasured),
        }

    @property
    def summary(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        return (
            f"{len(self.nodes)} operators, {self.distinct} distinct, {self.kind} on "
            f"{self.device}{threads} · forward {self.forward_ms:.1f} ms, backward "
            f"{self.backward_ms:.1f} ms a micro-batch"
        )


@dataclass(frozen=True, slots=True)
class Device:
    """A device that need not be here: its peak speed, memory bandwidth and cost of one call."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    call_ms: float


CPU_CORE = Device("one cpu core", flops_per_s=50e9, bytes_per_s=10e9, call_ms=0.005)


def profile(
    capture: Capture,
    inputs: Mapping[str, Any],
    *,
    threads: int | None = None,
    device: str = "cpu",
    repeats: Repeats | None = None,
) -> Profile:
    """Measures the captured model on `device` with `threads` threads a rank.

    `inputs` are forward's keyword arguments at the size of one micro-batch, on the model's
    device. The model runs in training mode; its parameters, buffers, gradients, mode and the
    random state are as before afterwards.
    """
    started = time.perf_counter()
    where = torch.device(device)
    with (
        threads_set(threads) as used,
        torch.random.fork_rng(devices=[]),
        state_kept(capture.model),
    ):
        often = repeats or Repeats()
        walk = _Walk(capture, lambda operation: measure(operation, where, often), where)
        walk.visit_all(inputs)
        tensors = {spec.name: inputs[spec.name] for spec in capture.inputs}
        whole = None if _on_meta(capture.model) else time_whole(capture, tensors, where)
    costs, forward_scale, backward_scale = _scaled(walk.costs, whole)
    return Profile(
        nodes=MappingProxyType(costs),
        kind="measured",
        device=device,
        threads=used,
        sizes=sizes_of(capture, inputs),
        distinct=len(walk.known),
        forward_scale=forward_scale,
        backward_scale=backward_scale,
        unmeasured=tuple(walk.unmeasured),
        seconds=time.perf_counter() - started,
    )


def profile_analytic(
    capture: Capture, inputs: Mapping[str, Any], device: Device = CPU_CORE
) -> Profile:
    """The same from FLOPs and bytes for a device that is described: the roofline of each call.

    A call takes as long as its arithmetic or its memory traffic, whichever is longer; nothing is
    run. Williams, Waterman, Patterson: "Roofline" (CACM 2009).
    """
    started = time.perf_counter()
    walk = _Walk(
        capture, lambda operation: _roofline(estimate(operation), device), torch.device("meta")
    )
    # Even on tensors without data, a counter of batches counts.
    with state_kept(capture.model):
        walk.visit_all(inputs)
    return Profile(
        nodes=MappingProxyType(walk.costs),
        kind="analytic",
        device=device.name,
        threads=0,
        sizes=sizes_of(capture, inputs),
        distinct=len(walk.known),
        forward_scale=1.0,
        backward_scale=1.0,
        unmeasured=tuple(walk.unmeasured),
        seconds=time.perf_counter() - started,
    )


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class _Walk:
    """Goes through the graph once and asks for the cost of every call that it has not seen yet."""

    def __init__(
        self,
        capture: Capture,
        cost_of: Callable[[Operation], OperationCost],
        device: torch.device,
    ) -> None:
        self.capture = capture
        self.cost_of = cost_of
        self.device = device
        self.known: dict[Hashable, OperationCost] = {}
        self.costs: dict[str, NodeCost] = {}
        self.unmeasured: list[str] = []
        self.maker = _makers(capture.graph)
        self.values: dict[fx.Node, Any] = {}
        self.sizes: dict[str, int] = {}

    def visit_all(self, inputs: Mapping[str, Any]) -> None:
        """Runs the graph on tensors without data, at the sizes of `inputs`."""
        self.sizes = sizes_of(self.capture, inputs)
        tensors = {spec.name: inputs[spec.name] for spec in self.capture.inputs}
        if _on_meta(self.capture.model):
            self._run({name: tensor.to("meta") for name, tensor in tensors.items()})
        else:
            with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
                self._run({name: fakes.from_tensor(tensor) for name, tensor in tensors.items()})

    def _run(self, inputs: Mapping[str, Tensor]) -> None:
        run(self.capture, inputs, training=True, env=self.values, around=self._visit)

    def _visit(self, node: fx.Node, thunk: Callable[[], Any]) -> Any:
        """Makes the call on tensors without data and notes what it costs on real ones."""
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        result = thunk()
        if node.target is operator.getitem and not isinstance(args[0], Tensor):
            self.costs[node.name] = NodeCost()
            return result
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sources = _sources(node, len(places))
        is_parameter = tuple(source is not None and source.op == "get_attr" for source in sources)
        module = self.capture.model.get_submodule(node.target) if node.op == "call_module" else None
        key = _signature(node, module, leaves, structure, is_parameter)
        if key not in self.known:

            def again(own: nn.Module | None, made: Sequence[Tensor]) -> Any:
                filled = list(leaves)
                for place, tensor in zip(places, made, strict=True):
                    filled[place] = tensor
                args, kwargs = pytree.tree_unflatten(filled, structure)
                return _function(node, own)(*args, **kwargs)

            tensors = tuple(leaves[place] for place in places)
            with unset_fake_temporarily():
                self.known[key] = self._cost(node, Operation(again, module, tensors, is_parameter))
        cost = self.known[key]
        saved = {}
        for index in cost.saved_arguments:
            source = sources[index]
            name = f"{node.name}:{index}" if source is None else self.maker[source]
            if name is not None:
                saved[name] = leaves[places[index]].untyped_storage().nbytes()
        if cost.saves_result:
            saved[self.maker[node] or node.name] = sum(map(num_bytes, tensors_in(result)))
        if cost.internal_bytes:
            saved[f"{node.name}:internal"] = cost.internal_bytes
        self.costs[node.name] = NodeCost(
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            flops=cost.forward_flops,
            backward_flops=cost.backward_flops,
            moved_bytes=cost.moved_bytes,
            saved=saved,
        )
        return result

    def _resolved(self, argument: Any) -> Any:
        """An argument with values for nodes and numbers for sizes, as in training mode."""

        def resolve(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self.values[leaf]
            if isinstance(leaf, Size):
                return leaf.evaluate(self.sizes)
            if isinstance(leaf, IfTraining):
                return self._resolved(leaf.train)
            if isinstance(leaf, LocalDevice):
                return self.device
            return leaf

        return map_leaves(resolve, argument)

    def _cost(self, node: fx.Node, operation: Operation) -> OperationCost:
        """The cost of a call; none for one that does not accept made-up arguments."""
        try:
            return self.cost_of(operation)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            self.unmeasured.append(node.name)
            return OperationCost()


def _makers(graph: fx.Graph) -> dict[fx.Node, str | None]:
    """Which node made the memory of each node's tensor; None for a parameter or buffer."""
    first: dict[int, fx.Node] = {}
    makers: dict[fx.Node, str | None] = {}
    for node in graph.nodes:
        # Numbers below zero are memory of evaluation mode.
        storages = [number for number in node.meta.get("storages", ()) if number >= 0]
        found = {first.setdefault(storage, node) for storage in storages}
        maker = found.pop() if len(found) == 1 else node
        makers[node] = None if maker.op == "get_attr" else maker.name
    return makers


def _function(node: fx.Node, module: nn.Module | None) -> Callable[..., Any]:
    if module is not None:
        return module
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _sources(node: fx.Node, number: int) -> list[fx.Node | None]:
    """The nodes that give the `number` tensors among a call's arguments, in order.

    Unknown where an argument is a tuple of tensors made by one node.
    """
    found = [
        leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)
    ]
    return [*found] if len(found) == number else [None] * number


def _signature(
    node: fx.Node,
    module: nn.Module | None,
    leaves: list[Any],
    structure: pytree.TreeSpec,
    is_parameter: tuple[bool, ...],
) -> Hashable:
    """What decides a call's cost: calls of equal signature are measured once."""
    operation = str(node.target) if module is None else _configuration(module)
    arguments = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in leaves
    )
    return operation, arguments, str(structure), is_parameter, node.meta.get("regions", ())


def _configuration(module: nn.Module) -> Hashable:
    plain = (bool, int, float, str, type(None))
    settings = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        type(module),
        repr(module),
        repr(sorted(settings.items())),
        tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
    )


def _scaled(
    costs: Mapping[str, NodeCost], whole: WholeTimes | None
) -> tuple[dict[str, NodeCost], float, float]:
    """The costs made to add up to the whole, and the two factors that took."""
    parts_forward_ms = sum(cost.forward_ms for cost in costs.values())
    parts_backward_ms = sum(cost.backward_ms for cost in costs.values())
    if whole is None:
        return dict(costs), 1.0, 1.0
    forward = whole.forward_ms / parts_forward_ms if parts_forward_ms else 1.0
    backward = whole.backward_ms / parts_backward_ms if parts_backward_ms else 1.0
    scaled = {
        name: replace(
            cost, forward_ms=cost.forward_ms * forward, backward_ms=cost.backward_ms * backward
        )
        for name, cost in costs.items()
    }
    return scaled, forward, backward


def _roofline(cost: OperationCost, device: Device) -> OperationCost:
    if cost.view_of is not None:
        return cost
    traffic_ms = 1e3 * cost.moved_bytes / device.bytes_per_s
    forward_ms = max(1e3 * cost.forward_flops / device.flops_per_s, traffic_ms) + device.call_ms
    if not cost.has_backward:
        return replace(cost, forward_ms=forward_ms)
    # Backward reads what forward read and wrote, and writes gradients of as much.
    backward_ms = max(1e3 * cost.backward_flops / device.flops_per_s, 2 * traffic_ms)
    return replace(cost, forward_ms=forward_ms, backward_ms=backward_ms + device.call_ms)
