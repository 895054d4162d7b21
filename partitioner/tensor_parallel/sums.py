"""A captured model with split layers -> the sums over tensor ranks that each of its nodes makes.

The model runs once on tensors without data, for ranks whose collectives only count. Operations of
`runtime/tensor_parallel` run backward as well, each by itself: all others exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...runtime import tensor_parallel
from ...runtime.tensor_parallel.ranks import Reduction, TensorRanks, reading_loss_alone, using
from ..capture import Capture, run
from ..capture.arguments import tensors_in
from ..capture.graph import Reader
from ..capture.model_state import is_on_meta
from ..profile.operation_costs import made_up, needs_values
from .exchanging import has_loss


@dataclass(slots=True)
class Sums:
    """Sums over tensor ranks, and the bytes of all of them; a gather is half a sum of the whole."""

    number: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeSums:
    """The sums of a node for one micro-batch."""

    forward: Sums
    backward: Sums


class _Counter:
    """Collectives that exchange nothing and count in `sums`."""

    def __init__(self, size: int) -> None:
        self.size, self.sums = size, Sums()

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        self._add(1.0, tensor.nbytes)
        return tensor.clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._add(0.5, self.size * tensor.nbytes / 2)
        return [tensor.clone(memory_format=torch.contiguous_format) for _ in range(self.size)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        self._add(0.5, self.size * parts[0].nbytes / 2)
        return parts[0].clone(memory_format=torch.contiguous_format)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self._add(0.5, tensor.nbytes / 2)
        return tensor

    def close(self) -> None:
        pass

    def _add(self, number: float, num_bytes: float) -> None:
        self.sums.number += number
        self.sums.num_bytes += num_bytes


def sums_of(capture: Capture, inputs: Mapping[str, Tensor], size: int) -> dict[str, NodeSums]:
    """The sums of each node that makes some, by its name, over `size` ranks that train: `capture`
    has the parts of one of them."""
    counter, counted = _Counter(size), dict[str, NodeSums]()
    values: dict[fx.Node, Any] = {}
    tensors = {spec.name: inputs[spec.name] for spec in capture.inputs}

    def visit(node: fx.Node, call: Callable[[], Any]) -> Any:
        counter.sums = forward = Sums()
        try:
            result = call()
        except Exception as error:
            # A user's module may read values, which tensors without data do not have.
            if node.op != "call_module" and not needs_values(error):
                raise
            result = made_up(node, Reader(capture, tensors, values, training=True).value)
        counter.sums = backward = Sums()
        if _may_sum(node, capture):
            _run_backward(node, result, values)
        _add_shared(node, capture, backward)
        if forward.number or backward.number:
            counted[node.name] = NodeSums(forward, backward)
        return result

    is_meta = is_on_meta(capture.model)
    ranks = TensorRanks(size=size, collectives=counter)
    with using(ranks), reading_loss_alone(has_loss(capture)), torch.enable_grad():
        if is_meta:
            on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
            run(capture, on_meta, training=True, env=values, around=visit)
        else:
            with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
                faked = {name: fakes.from_tensor(tensor) for name, tensor in tensors.items()}
                run(capture, faked, training=True, env=values, around=visit)
    return counted


_OWN = tensor_parallel.__name__


def _may_sum(node: fx.Node, capture: Capture) -> bool:
    """True for an operation or a layer of `runtime/tensor_parallel`."""
    called = node.target
    if node.op == "call_module":
        called = type(capture.model.get_submodule(str(node.target)))
    return str(getattr(called, "__module__", "")).startswith(_OWN)


def _run_backward(node: fx.Node, result: Any, values: Mapping[fx.Node, Any]) -> None:
    """Computes the gradients of a node's arguments from ones; those of parameters need no sum, and
    tied ones would be reached through the nodes before."""
    outputs = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
    given = tensors_in([values[source] for source in node.all_input_nodes if source in values])
    reached = [tensor for tensor in given if tensor.requires_grad]
    if outputs and reached:
        ones = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, reached, ones, retain_graph=True, allow_unused=True)


def _add_shared(node: fx.Node, capture: Capture, sums: Sums) -> None:
    """Adds the gradients of the whole parameters of a layer that runs on split tensors."""
    if node.op != "call_module" or str(node.target) not in capture.shared:
        return
    for parameter in capture.model.get_submodule(str(node.target)).parameters(recurse=False):
        if parameter.requires_grad:
            sums.number += 1
            sums.num_bytes += parameter.nbytes
