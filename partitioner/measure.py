"""One operation and the shapes of its arguments -> its times, FLOPs and what it keeps for backward.

The arguments are made up: random floats, zeros for integers (valid as indices and as classes),
True for booleans, with the shapes, strides and dtypes of the captured ones. Parameters are made up
too when the model has none in memory. Nothing of the model is changed.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from ..runtime.split_backward import SplitBackward
from .capture.structure import tensors_in
from .clock import clock_of
from .live_bytes import counting


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Costs of one call; what it saves for backward is named by where it comes from.

    `saved_arguments` are positions among the call's tensors; `internal_bytes` are storages that
    are neither an argument, a parameter nor the result. `transient_bytes` are the most that live
    inside the forward or the backward beyond all these, gradients on their way among them.
    `is_view` says that the result is in the memory of an argument, which is as before: such a
    call counts as free. `weight_share` is what W takes of a backward that the runtime does in two
    parts, None where that was not timed.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    forward_flops: int = 0
    backward_flops: int = 0
    moved_bytes: int = 0
    internal_bytes: int = 0
    transient_bytes: int = 0
    saved_arguments: tuple[int, ...] = ()
    saves_result: bool = False
    is_view: bool = False
    has_backward: bool = False
    weight_share: float | None = None

    @classmethod
    def read(cls, stored: Any) -> OperationCost | None:
        """The cost that was stored as a JSON object; None for anything else."""
        try:
            return cls(**{**stored, "saved_arguments": tuple(stored["saved_arguments"])})
        except (TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Operation:
    """A call to measure: a function or a leaf module, and its arguments as a flat list.

    `tensors` are examples (fake, meta or real) of the tensor arguments; `is_parameter` says of
    each whether it is one of the model's own, whose gradient is added up over micro-batches.
    `call(module, tensors)` makes the call.
    """

    call: Callable[[nn.Module | None, Sequence[Tensor]], Any]
    module: nn.Module | None
    tensors: tuple[Tensor, ...]
    is_parameter: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often to measure: until `enough_ms` have been spent, at most `most` times."""

    enough_ms: float = 60.0
    most: int = 7

    def __iter__(self) -> Iterator[int]:
        started = time.perf_counter()
        for number in range(self.most):
            yield number
            if 1e3 * (time.perf_counter() - started) > self.enough_ms:
                return


def measure(operation: Operation, device: torch.device, repeats: Repeats) -> OperationCost:
    """Runs the operation forward and backward on `device`, once to look at it, then timed."""
    bench = _Bench(operation, device)
    facts = bench.look()
    if facts.is_view:
        return facts
    forward_ms, backward_ms = zip(*(bench.time() for _ in repeats), strict=True)
    return replace(
        facts,
        forward_ms=statistics.median(forward_ms),
        backward_ms=statistics.median(backward_ms),
        weight_share=bench.weight_share(repeats),
    )


def estimate(operation: Operation, dtype: str = "float32") -> OperationCost:
    """The same without times and without running anything, on tensors without data; under
    autocast to `dtype` they stand for some on a CPU, since it does nothing on meta."""
    if dtype == "float32":
        return _Bench(operation, torch.device("meta")).look()
    with FakeTensorMode():
        return _Bench(operation, torch.device("cpu")).look()


class _Bench:
    """The operation with arguments made for it."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        self.operation = operation
        self.device = device
        self.clock = clock_of(device)
        self.module = None if operation.module is None else _own_copy(operation.module, device)
        self.tensors = [_made_up(tensor, device) for tensor in operation.tensors]
        self.wanted = [tensor for tensor in self.tensors if tensor.requires_grad]
        of_module = [] if self.module is None else list(self.module.parameters())
        self.parameters = [parameter for parameter in of_module if parameter.requires_grad] + [
            tensor
            for tensor, is_parameter in zip(self.tensors, operation.is_parameter, strict=True)
            if is_parameter and tensor.requires_grad
        ]
        self.wanted += [parameter for parameter in of_module if parameter.requires_grad]
        self.gradients: dict[int, Tensor] = {}
        self.mutates = False

    def look(self) -> OperationCost:
        """What does not need a clock: FLOPs, aliases, saved storages."""
        given = [tensor.clone() if tensor.requires_grad else tensor for tensor in self.tensors]
        versions = [tensor._version for tensor in given]
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[_storage(tensor)] = tensor
            return tensor

        own = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()
        with counter as flops, counting(self.device, [*given, *own]) as counted:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = self.operation.call(self.module, given)
            forward_flops, kept_bytes = flops.get_total_flops(), counted.live
            forward_bytes = counted.peak - kept_bytes
            outputs = list(tensors_in(result))
            facts = self._facts(given, versions, outputs, saved, own)
            saved.clear()  # backward may free what it has read
            counted.reset()
            self._backward(_seeds(outputs))
            backward_bytes = counted.peak - kept_bytes
        return replace(
            facts,
            forward_flops=forward_flops,
            backward_flops=flops.get_total_flops() - forward_flops,
            transient_bytes=max(forward_bytes, backward_bytes),
        )

    def _facts(
        self,
        given: list[Tensor],
        versions: list[int],
        outputs: list[Tensor],
        saved: dict[int, Tensor],
        own: list[Tensor],
    ) -> OperationCost:
        self.mutates = any(
            tensor._version != version for tensor, version in zip(given, versions, strict=True)
        )
        where = {_storage(tensor): index for index, tensor in enumerate(given)}
        made = {_storage(tensor) for tensor in outputs} - where.keys()
        known = where.keys() | made | {_storage(tensor) for tensor in own}
        is_view = bool(outputs) and not made and not self.mutates
        return OperationCost(
            moved_bytes=sum(map(num_bytes, [*given, *outputs, *own])),
            internal_bytes=sum(
                tensor.untyped_storage().nbytes()
                for key, tensor in saved.items()
                if key not in known
            ),
            saved_arguments=tuple(sorted(where[key] for key in saved.keys() & where.keys())),
            saves_result=bool(saved.keys() & made),
            is_view=is_view,
            has_backward=bool(self.wanted) and any(output.requires_grad for output in outputs),
        )

    def time(self) -> tuple[float, float]:
        """Milliseconds of one forward and one backward, gradients of parameters added up."""
        given = list(self.tensors)
        if self.mutates:
            given = [tensor.clone() for tensor in given]
        mark, marks = self.clock.mark, []
        marks.append(mark())
        outputs = list(tensors_in(self.operation.call(self.module, given)))
        marks.append(mark())
        seeds = _seeds(outputs)
        marks.append(mark())
        self._backward(seeds)
        marks.append(mark())
        return self.clock.ms(*marks[:2]), self.clock.ms(*marks[2:])

    def weight_share(self, repeats: Repeats) -> float | None:
        """The share of W in a backward in two parts; 0 where all is in B."""
        if not self.parameters:
            return 0.0
        if self.mutates:  # its arguments are copies, and no leaves
            return None
        shares = []
        for number in repeats:
            inputs_ms, weights_ms, is_split = self._time_parts()
            if number == 0 and not is_split:
                return 0.0
            shares.append(weights_ms / (inputs_ms + weights_ms))
        return statistics.median(shares)

    def _time_parts(self) -> tuple[float, float, bool]:
        """Milliseconds of B and of W, and whether W has made a gradient that there was not."""
        parts = SplitBackward({str(index): each for index, each in enumerate(self.parameters)})
        with parts:
            outputs = list(tensors_in(self.operation.call(self.module, self.tensors)))
        parts.open()
        seeds, mark = _seeds(outputs), self.clock.mark
        marks = [mark()]
        if seeds:
            results, ones = zip(*seeds, strict=True)
            torch.autograd.backward(results, ones)
        marks.append(mark())
        missing = [parameter for parameter in self.parameters if parameter.grad is None]
        marks.append(mark())
        parts.backward()
        marks.append(mark())
        is_split = any(parameter.grad is not None for parameter in missing)
        own = {id(parameter) for parameter in self.parameters}
        for tensor in self.wanted:
            if id(tensor) not in own:
                tensor.grad = None
        return self.clock.ms(*marks[:2]), self.clock.ms(*marks[2:]), is_split

    def _backward(self, seeds: list[tuple[Tensor, Tensor]]) -> None:
        if not seeds or not self.wanted:
            return
        outputs, ones = zip(*seeds, strict=True)
        grads = torch.autograd.grad(outputs, self.wanted, ones, allow_unused=True)
        by_tensor = dict(zip(map(id, self.wanted), grads, strict=True))
        for parameter in self.parameters:
            gradient = by_tensor[id(parameter)]
            if gradient is None:
                continue
            if id(parameter) in self.gradients:
                self.gradients[id(parameter)].add_(gradient)
            else:
                self.gradients[id(parameter)] = gradient


class _NoModules(ModuleTracker):
    """Sets no hooks: they fail inside an autograd function that calls modules."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def _seeds(outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that have a gradient, and one to start backward from."""
    return [(output, torch.ones_like(output)) for output in outputs if output.requires_grad]


def _made_up(example: Tensor, device: torch.device) -> Tensor:
    """A tensor like the example, with every element of its storage set."""
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(example.shape, example.stride(), strict=True)
    )
    storage = _filled(reach if example.numel() else 0, example.dtype, device)
    made = storage.as_strided(example.shape, example.stride())
    return made.requires_grad_(example.requires_grad)


def _filled(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(numel, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, dtype=dtype, device=device)
    return torch.zeros(numel, dtype=dtype, device=device)


def _own_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with parameters and buffers of its own on `device`."""
    shapes = dict(module.named_parameters()) | dict(module.named_buffers())
    memo = {
        id(tensor): nn.Parameter(_filled_like(tensor, device), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else _filled_like(tensor, device)
        for tensor in shapes.values()
    }
    return copy.deepcopy(module, memo)


def _filled_like(tensor: Tensor, device: torch.device) -> Tensor:
    filled = _filled(tensor.numel(), tensor.dtype, device).view(tensor.shape)
    return filled.mul_(0.02) if tensor.is_floating_point() else filled


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
