"""A captured graph -> the cost of every node.

`CostWalk` runs the graph on tensors without data. It measures or estimates every distinct call
once: calls of equal signature (the same function or an equal leaf module, arguments of equal
shape, stride and dtype) have equal costs.

`weight_ms` is the part of a backward that computes weight gradients and that a schedule may
delay (W of zero-bubble schedules). It is measured with the operation, by the runtime's own split
backward. Without a measurement a rule applies: the backward of a product of an input and a
weight, a convolution or an embedding has two halves of equal FLOPs, one for the input, for which
the previous stage waits, and one for the weight; if the input requires no gradient, all of it is
the weight's. Other operations delay nothing: their weights are small, or the runtime cannot
split their backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ...runtime.errors import PlanError
from ...runtime.tensor_parallel.functions import local
from ..capture import Capture, IfTraining, Local, LocalDevice, Size, run
from ..capture.arguments import map_leaves, tensors_in
from ..capture.graph import is_external, sizes_of
from ..capture.model_state import attributes_kept, is_on_meta, silent
from ..capture.operations import runnable
from .cache import (
    ProfileCache,
    content_key,
    describe_function,
    describe_module,
    is_lasting,
    mixed_precision,
)
from .measure import Operation, OperationCost, dense_bytes


class OnProgress(Protocol):
    """A callback for progress: how many calls are done, of how many."""

    def __call__(self, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Costs of one node for one micro-batch.

    forward_ms, backward_ms: times
    flops, backward_flops: floating-point operations of forward and of backward
    moved_bytes: bytes of arguments, results, parameters and buffers
    transient_bytes: further peak memory of the call or its backward, beyond arguments, result,
        `saved` and parameters
    saved: bytes saved for backward, without parameters, by the name of the node that made the
        storage; equal names are the same storage
    weight_share: share of the backward that computes weight gradients; None if not measured
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    transient_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    weight_share: float | None = None


class CostWalk:
    """Runs the graph once and asks `cost_of` for the cost of every distinct call.

    For a `dtype` other than float32 everything runs under autocast. The results:

    costs: cost of every computed node, by name
    content: description of each node's call, equal in every process
    known: cost of each distinct call, by its description
    unmeasured: nodes whose call rejects invented arguments
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
        else:  # autocast has no effect on meta
            with FakeTensorMode(allow_non_fake_inputs=True), _as_on_cpu(self.capture.model):
                self._run({name: _on_cpu(tensor) for name, tensor in tensors.items()})

    def _run(self, inputs: Mapping[str, Tensor]) -> None:
        self._calls = sum(node.op.startswith("call") for node in self.capture.graph.nodes)
        half = mixed_precision(self.dtype, "cpu", self.device.type, cached=False)
        with half, silent():
            run(self.capture, inputs, training=True, env=self._values, around=self._visit)
        for node in self._values:
            if not is_external(node):
                self.costs.setdefault(node.name, NodeCost())  # It runs in evaluation only.

    def _visit(self, node: fx.Node, thunk: Callable[[], Any]) -> Any:
        """Makes the call on tensors without data, and records its cost on real ones."""
        call = _Call.of(node, self.capture.model, self._resolved((node.args, node.kwargs)))
        try:
            # torch 2.13 damages memory when it copies a fake tensor that a module has stored.
            kept = attributes_kept(call.module) if call.module else nullcontext()
            with kept, torch.compiler.set_stance("force_eager"):
                result = thunk()
        except Exception as error:
            # A user's module may read values, which tensors without data do not have.
            if node.op != "call_module" and not needs_values(error):
                if self.dtype != "float32":
                    raise _impossible(node, self.dtype, error) from error
                raise
            result = made_up(node, self._resolved)
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

    def _cost(self, call: _Call) -> OperationCost:
        """The cost of a call, from the cache if it is there; zero if the call rejects
        invented arguments."""
        key = content_key(call.content) if self.cache and is_lasting(call.content) else None
        if self.cache and key and (stored := OperationCost.read(self.cache.get(key))):
            return stored
        try:
            cost = self.cost_of(call.operation())
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            self.unmeasured.append(call.node.name)
            return OperationCost()
        if self.cache and key:
            self.cache.put(key, asdict(cost))
        return cost

    def _saved(self, call: _Call, cost: OperationCost, result: Any) -> dict[str, int]:
        """Bytes of the storages that a call saves for backward, by the node that made them."""
        name = call.node.name
        saved: dict[str, int] = {}
        for index in cost.saved_arguments:
            source = call.sources[index]
            maker = f"{name}:{index}" if source is None else self._makers[source]
            if maker is not None:
                saved[maker] = call.tensors[index].untyped_storage().nbytes()
        if cost.saves_result:
            saved[self._makers[call.node] or name] = sum(map(dense_bytes, tensors_in(result)))
        if cost.internal_bytes:
            saved[f"{name}:internal"] = cost.internal_bytes
        return saved

    def _resolved(self, argument: Any) -> Any:
        """An argument in training mode, with values for nodes and numbers for sizes."""

        def resolve(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self._values[leaf]
            if isinstance(leaf, Size):
                return leaf.evaluate(self._sizes)
            if isinstance(leaf, IfTraining):
                return self._resolved(leaf.train)
            if isinstance(leaf, LocalDevice):
                return self.device
            if isinstance(leaf, Local):
                return local(resolve(leaf.number), uneven=leaf.uneven)
            return leaf

        return map_leaves(resolve, argument)


@dataclass(frozen=True)
class _Call:
    """A node's call.

    node: the node
    module: the leaf module that it calls; None for a function or method
    leaves: arguments and keyword arguments as a flat list
    structure: the tree that `leaves` is flattened from
    places: positions of the tensors in `leaves`
    sources: the nodes that give these tensors, in order; None if a node gives several
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
        """A description of everything that determines the call's cost."""
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
        return lambda *args, **kwargs: runnable(function, (args, kwargs))(*args, **kwargs)


def storage_makers(graph: fx.Graph) -> dict[fx.Node, str | None]:
    """The node that allocated each node's tensor, by name; None for a parameter or buffer."""
    first: dict[int, fx.Node] = {}
    makers: dict[fx.Node, str | None] = {}
    for node in graph.nodes:
        # Negative numbers are memory of evaluation mode.
        storages = [number for number in node.meta.get("storages", ()) if number >= 0]
        makers_here = {first.setdefault(storage, node) for storage in storages}
        maker = makers_here.pop() if len(makers_here) == 1 else node
        makers[node] = None if maker.op == "get_attr" else maker.name
    return makers


def needs_values(error: Exception) -> bool:
    """True if a call failed because its tensors have no data, or no shapes of results are known."""
    without = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    if isinstance(error, without):
        return True
    return isinstance(error, (RuntimeError, NotImplementedError)) and any(
        word in str(error)
        for word in ("meta tensor", "FakeTensor", "data-dependent", "meta backend")
    )


def _impossible(node: fx.Node, dtype: str, error: Exception) -> PlanError:
    """The error of a call that autocast gives tensors of two dtypes."""
    file, line = node.meta.get("source") or ("", 0)
    at = f" at {file.rpartition('/')[2]}:{line}" if file else ""
    reason = str(error).strip().split("\n")[0]
    return PlanError(
        f"in {dtype} the model raises{at}: {reason}.",
        "Give the operation tensors of one dtype, as by y.to(x.dtype), or leave --dtype out.",
    )


def made_up(node: fx.Node, resolved: Callable[[Any], Any]) -> Any:
    """A result like the one that a node had in the capture; `resolved` gives numbers for sizes."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list, Mapping)):
        items = {part.args[1]: part for part in node.users if part.target is operator.getitem}
        keys = value if isinstance(value, Mapping) else range(len(value))
        results = {key: made_up(items[key], resolved) if key in items else None for key in keys}
        return results if isinstance(value, Mapping) else [*results.values()]
    if isinstance(value, Tensor):
        shape = node.meta.get("example") or resolved(node.meta["shape"])
        made = torch.empty(
            shape, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )
        return made.clone()  # unlike a leaf, it may be changed in place
    return node.meta.get("example")


@contextmanager
def _as_on_cpu(model: nn.Module) -> Iterator[None]:
    """Replaces the parameters and buffers of a model on meta, for the block, by fake ones on the
    CPU; needs an active FakeTensorMode."""
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


_PRODUCTS: frozenset[Callable[..., Any] | str] = frozenset(
    {
        F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.addmm, torch.mm, torch.matmul, "addmm", "mm", "matmul",
    }
)  # fmt: skip
_OTHERS = (nn.RNNBase, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def weight_ms(node: fx.Node, model: nn.Module, cost: NodeCost) -> float:
    """Milliseconds of the backward that a schedule may delay."""
    share = cost.weight_share
    return cost.backward_ms * (weight_share(node, model) if share is None else share)


def weight_share(node: fx.Node, model: nn.Module) -> float:
    """The share of the backward that a schedule may delay, by the rule above: 0, 0.5 or 1."""
    if not _multiplies_a_weight(node, model):
        return 0.0
    read = [source for source in node.all_input_nodes if source.op != "get_attr"]
    return 0.5 if any(map(_needs_gradient, read)) else 1.0


def _multiplies_a_weight(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        leaf = model.get_submodule(str(node.target))
        is_other = isinstance(leaf, _OTHERS)
        return not is_other and any(weight.dim() > 1 for weight in leaf.parameters())
    if node.target not in _PRODUCTS:
        return False
    read = {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    names = (name for name, _ in model.named_parameters(remove_duplicate=False)) if read else ()
    return not read.isdisjoint(names)


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad
