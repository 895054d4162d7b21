"""A captured graph, walked on tensors without data -> the cost of every node.

Every distinct call on the way is handed to be measured or estimated once; calls of equal signature
(the same function or an equal leaf module, arguments of equal shape, stride and dtype) cost the
same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from .capture import Capture, IfTraining, LocalDevice, Size, run
from .capture.graph import is_external
from .capture.interpret import sizes_of
from .capture.structure import map_leaves, tensors_in
from .capture.targets import runnable
from .content import describe_function, describe_module
from .measure import Operation, OperationCost, num_bytes
from .precision import mixed_precision
from .profile_cache import ProfileCache, content_key, is_lasting


class OnProgress(Protocol):
    """Told how much of a step of the work is done."""

    def __call__(self, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Costs of one node for one micro-batch.

    `saved` are the storages kept for backward, parameters left out, by the name of the node that
    made them; storages of the same name are the same one. `transient_bytes` are the most that
    live during the call or its backward beyond arguments, result, `saved` and parameters.
    `weight_share` of the backward makes gradients of weights and can be put off, if that is known.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    transient_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    weight_share: float | None = None

    @property
    def recompute_ms(self) -> float:
        """Backward where the activations are computed again: a forward with gradients first."""
        return self.forward_ms + self.backward_ms


def is_on_meta(model: nn.Module) -> bool:
    """Whether some of a model is without data."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Walk:
    """Goes through the graph once and asks for the cost of every call that it has not seen yet.

    Afterwards `costs` has every computed node by name, `content` what was called in words that
    mean the same elsewhere, `known` every distinct call, `unmeasured` the nodes whose call does
    not accept arguments that are made up. Under `dtype` other than float32 all is done under
    torch's autocast to it.
    """

    def __init__(
        self,
        capture: Capture,
        cost_of: Callable[[Operation], OperationCost],
        device: torch.device,
        *,
        dtype: str = "float32",
        cache: ProfileCache | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.capture = capture
        self.cost_of = cost_of
        self.device = device
        self.dtype = dtype
        self.cache = cache
        self.on_progress = on_progress
        self.known: dict[str, OperationCost] = {}
        self.content: dict[str, str] = {}
        self.costs: dict[str, NodeCost] = {}
        self.unmeasured: list[str] = []
        self._makers = storage_makers(capture.graph)
        self._values: dict[fx.Node, Any] = {}
        self._calls = 0
        self._sizes: dict[str, int] = {}

    def visit_all(self, inputs: Mapping[str, Any]) -> None:
        """Runs the graph in training mode on tensors without data, at the sizes of `inputs`."""
        self._sizes = sizes_of(self.capture, inputs)
        tensors = {spec.name: inputs[spec.name] for spec in self.capture.inputs}
        if not is_on_meta(self.capture.model):
            with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
                self._run({name: fakes.from_tensor(tensor) for name, tensor in tensors.items()})
        elif self.dtype == "float32":
            self._run({name: tensor.to("meta") for name, tensor in tensors.items()})
        else:  # autocast does nothing on meta
            with FakeTensorMode(allow_non_fake_inputs=True), _as_on_cpu(self.capture.model):
                self._run({name: _on_cpu(tensor) for name, tensor in tensors.items()})

    def _run(self, inputs: Mapping[str, Tensor]) -> None:
        self._calls = sum(node.op.startswith("call") for node in self.capture.graph.nodes)
        with mixed_precision(self.dtype, "cpu", self.device.type, cached=False):
            run(self.capture, inputs, training=True, env=self._values, around=self._visit)
        for node in self._values:
            if not is_external(node):
                self.costs.setdefault(node.name, NodeCost())  # It is done in evaluation only.

    def _visit(self, node: fx.Node, thunk: Callable[[], Any]) -> Any:
        """Makes the call on tensors without data and notes what it costs on real ones."""
        call = _Call.of(node, self.capture.model, self._resolved((node.args, node.kwargs)))
        try:
            result = thunk()
        except Exception as error:
            if not _needs_values(error):
                raise
            result = self._made_up(node)
        if node.target is operator.getitem and not isinstance(call.leaves[0], Tensor):
            self.costs[node.name] = NodeCost()
            return result
        with unset_fake_temporarily():
            self.content[node.name] = call.content
            if call.content not in self.known:
                self.known[call.content] = self._cost(call)
        cost = self.known[call.content]
        self.costs[node.name] = NodeCost(
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            flops=cost.forward_flops,
            backward_flops=cost.backward_flops,
            moved_bytes=cost.moved_bytes,
            transient_bytes=cost.transient_bytes,
            saved=self._saved(call, cost, result),
            weight_share=cost.weight_share,
        )
        if self.on_progress:
            self.on_progress(len(self.costs), self._calls)
        return result

    def _made_up(self, node: fx.Node) -> Any:
        """A result of the kind that the node had when it was captured."""
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            items = {part.args[1]: part for part in node.users if part.target is operator.getitem}
            return [self._made_up(items[i]) if i in items else None for i in range(len(value))]
        if isinstance(value, Tensor):
            shape = node.meta.get("example") or self._resolved(node.meta["shape"])
            return torch.empty(shape, dtype=value.dtype, requires_grad=value.requires_grad)
        return node.meta.get("example")

    def _cost(self, call: _Call) -> OperationCost:
        """The cost of a call, from the cache if it is there; none for one that does not accept
        made-up arguments."""
        key = content_key(call.content) if self.cache and is_lasting(call.content) else None
        if self.cache and key and (found := OperationCost.read(self.cache.get(key))):
            return found
        try:
            cost = self.cost_of(call.operation())
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            self.unmeasured.append(call.node.name)
            return OperationCost()
        if self.cache and key:
            self.cache.put(key, asdict(cost))
        return cost

    def _saved(self, call: _Call, cost: OperationCost, result: Any) -> dict[str, int]:
        """The storages that a call keeps for backward, named by what made them."""
        name = call.node.name
        saved: dict[str, int] = {}
        for index in cost.saved_arguments:
            source = call.sources[index]
            maker = f"{name}:{index}" if source is None else self._makers[source]
            if maker is not None:
                saved[maker] = call.tensors[index].untyped_storage().nbytes()
        if cost.saves_result:
            saved[self._makers[call.node] or name] = sum(map(num_bytes, tensors_in(result)))
        if cost.internal_bytes:
            saved[f"{name}:internal"] = cost.internal_bytes
        return saved

    def _resolved(self, argument: Any) -> Any:
        """An argument with values for nodes and numbers for sizes, as in training mode."""

        def resolve(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self._values[leaf]
            if isinstance(leaf, Size):
                return leaf.evaluate(self._sizes)
            if isinstance(leaf, IfTraining):
                return self._resolved(leaf.train)
            if isinstance(leaf, LocalDevice):
                return self.device
            return leaf

        return map_leaves(resolve, argument)


@dataclass(frozen=True)
class _Call:
    """A node's call, its arguments and keyword arguments as a flat list.

    `sources` are the nodes that give the tensors among the arguments, in order: unknown where a
    node gives a tuple of them.
    """

    node: fx.Node
    module: nn.Module | None
    leaves: list[Any]
    structure: pytree.TreeSpec
    places: tuple[int, ...]
    sources: tuple[fx.Node | None, ...]

    @classmethod
    def of(cls, node: fx.Node, model: nn.Module, arguments: Any) -> _Call:
        leaves, structure = pytree.tree_flatten(arguments)
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        given = pytree.tree_leaves((node.args, node.kwargs))
        sources = tuple(leaf for leaf in given if isinstance(leaf, fx.Node))
        return cls(
            node=node,
            module=model.get_submodule(str(node.target)) if node.op == "call_module" else None,
            leaves=leaves,
            structure=structure,
            places=places,
            sources=sources if len(sources) == len(places) else (None,) * len(places),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.leaves[place] for place in self.places)

    @property
    def is_parameter(self) -> tuple[bool, ...]:
        return tuple(source is not None and source.op == "get_attr" for source in self.sources)

    @cached_property
    def content(self) -> str:
        """What decides the call's cost, in words."""
        arguments = tuple(
            (tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else repr(leaf)
            for leaf in self.leaves
        )
        called = (
            describe_function(self.node.target)
            if self.module is None
            else describe_module(self.module)
        )
        regions = self.node.meta.get("regions", ())
        return repr((called, arguments, str(self.structure), self.is_parameter, regions))

    def operation(self) -> Operation:
        def again(module: nn.Module | None, tensors: Sequence[Tensor]) -> Any:
            leaves = list(self.leaves)
            for place, tensor in zip(self.places, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = pytree.tree_unflatten(leaves, self.structure)
            return self._function(module)(*args, **kwargs)

        return Operation(again, self.module, self.tensors, self.is_parameter)

    def _function(self, module: nn.Module | None) -> Callable[..., Any]:
        if module is not None:
            return module
        if self.node.op == "call_method":
            name = str(self.node.target)
            return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
        function = self.node.target
        assert callable(function)
        return lambda *args, **kwargs: runnable(function, args)(*args, **kwargs)


def storage_makers(graph: fx.Graph) -> dict[fx.Node, str | None]:
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


def _needs_values(error: Exception) -> bool:
    """Whether a call failed because its tensors have no data."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    return isinstance(error, (RuntimeError, NotImplementedError)) and any(
        word in str(error)
        for word in ("meta tensor", "FakeTensor", "data-dependent", "meta backend")
    )


@contextmanager
def _as_on_cpu(model: nn.Module) -> Iterator[None]:
    """Within, a model on meta has parameters and buffers that stand for some on a CPU; a
    FakeTensorMode must be on."""
    stand_ins = {
        name: nn.Parameter(_on_cpu(parameter), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    } | {name: _on_cpu(buffer) for name, buffer in model.named_buffers()}
    with _reparametrize_module(model, stand_ins, tie_weights=True):
        yield


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
    ).requires_grad_(tensor.requires_grad)
