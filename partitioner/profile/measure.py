"""One operation and the shapes of its arguments -> its times, FLOPs and tensors saved for backward.

`measure` runs the operation on invented arguments: random floats, zeros for integers (valid as
indices and as classes), True for booleans, with the shapes, strides and dtypes of the captured
ones. Parameters are copies, filled with random numbers. The model is not changed.

`clock_of` gives the clock of a device, `counting` its live and peak bytes. On CUDA the allocator
counts bytes. Elsewhere every operation below autograd is observed (tensors without data too): a
storage counts from the operation that returns it until it is freed. Memory that a kernel
allocates and frees within one call is not counted.
"""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.executor.split_backward import SplitBackward
from ..capture.arguments import tensors_in
from .flops import flop_counter


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Costs of one call.

    forward_ms, backward_ms: medians of the measured times
    forward_flops, backward_flops: floating-point operations
    moved_bytes: bytes of arguments, results, parameters and buffers
    internal_bytes: saved for backward, and neither argument, parameter, buffer nor result
    transient_bytes: further peak memory within forward or backward, gradients included
    saved_arguments: positions, among the call's tensors, of those saved for backward
    saves_result: the result is saved for backward
    is_view: the result lies in the memory of an unchanged argument; such a call counts as free
    has_backward: the call has a backward
    weight_share: share of W in a split backward (B and W); None if not measured
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
        """The cost from its JSON object; None if it is not one."""
        try:
            return cls(**{**stored, "saved_arguments": tuple(stored["saved_arguments"])})
        except (TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Operation:
    """A call to measure: a function or a leaf module.

    call: `call(module, tensors)` makes the call
    module: the leaf module, None for a function
    tensors: examples (fake, meta or real) of the tensor arguments
    is_parameter: for each tensor, True for a parameter, whose gradient is accumulated
    """

    call: Callable[[nn.Module | None, Sequence[Tensor]], Any]
    module: nn.Module | None
    tensors: tuple[Tensor, ...]
    is_parameter: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Number of repetitions: until `enough_ms` have been spent, at most `most` times."""

    enough_ms: float = 60.0
    most: int = 7

    def __iter__(self) -> Iterator[int]:
        started = time.perf_counter()
        for number in range(self.most):
            yield number
            if 1e3 * (time.perf_counter() - started) > self.enough_ms:
                return


def measure(operation: Operation, device: torch.device, repeats: Repeats) -> OperationCost:
    """Runs the operation forward and backward on `device`: once to inspect it, then timed."""
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
    """The cost without times, from tensors without data; nothing is computed.

    For a `dtype` under autocast they are fake tensors on the CPU: autocast has no effect on meta.
    """
    if dtype == "float32":
        return _Bench(operation, torch.device("meta")).look()
    with FakeTensorMode():
        return _Bench(operation, torch.device("cpu")).look()


class _Bench:
    """An operation with invented arguments and parameters, ready to run."""

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
        """The costs that need no clock: FLOPs, aliases, saved storages."""
        given = [tensor.clone() if tensor.requires_grad else tensor for tensor in self.tensors]
        versions = [tensor._version for tensor in given]
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[_storage(tensor)] = tensor
            return tensor

        own = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        # TorchDynamo never compiles code again that it has met under a mode.
        eager = torch.compiler.set_stance("force_eager")
        with eager, flop_counter() as flops, counting(self.device, [*given, *own]) as counted:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = self.operation.call(self.module, given)
            forward_flops, kept_bytes = flops.get_total_flops(), counted.live
            forward_bytes = counted.peak - kept_bytes
            outputs = list(tensors_in(result))
            facts = self._facts(given, versions, outputs, saved, own)
            saved.clear()  # lets backward free saved tensors after reading them
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
        allocated = {_storage(tensor) for tensor in outputs} - where.keys()
        known = where.keys() | allocated | {_storage(tensor) for tensor in own}
        is_view = bool(outputs) and not allocated and not self.mutates
        return OperationCost(
            moved_bytes=sum(map(dense_bytes, [*given, *outputs, *own])),
            internal_bytes=sum(
                saved[key].untyped_storage().nbytes() for key in saved.keys() - known
            ),
            saved_arguments=tuple(sorted(where[key] for key in saved.keys() & where.keys())),
            saves_result=bool(saved.keys() & allocated),
            is_view=is_view,
            has_backward=bool(self.wanted) and any(output.requires_grad for output in outputs),
        )

    def time(self) -> tuple[float, float]:
        """Milliseconds of one forward and one backward that accumulates parameter gradients."""
        given = [tensor.clone() for tensor in self.tensors] if self.mutates else self.tensors
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
        """The share of W in a split backward; 0 if all of it is in B."""
        if not self.parameters:
            return 0.0
        if self.mutates:  # its arguments are copies, not leaf tensors
            return None
        shares = []
        for number in repeats:
            inputs_ms, weights_ms, is_split = self._time_parts()
            if number == 0 and not is_split:
                return 0.0
            both_ms = inputs_ms + weights_ms  # 0 on a coarse clock
            shares.append(weights_ms / both_ms if both_ms else 0.0)
        return statistics.median(shares)

    def _time_parts(self) -> tuple[float, float, bool]:
        """Milliseconds of B and of W, and True if W made a gradient that was missing after B."""
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


def _seeds(outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an output that requires a gradient, and ones to start backward from."""
    return [(output, torch.ones_like(output)) for output in outputs if output.requires_grad]


def _made_up(example: Tensor, device: torch.device) -> Tensor:
    """A tensor like the example, with every element of its storage set."""
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(example.shape, example.stride(), strict=True)
    )
    storage = _filled(reach if example.numel() else 0, example.dtype, device)
    tensor = storage.as_strided(example.shape, example.stride())
    return tensor.requires_grad_(example.requires_grad)


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


def dense_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; `nbytes` is not defined for sparse tensors."""
    return tensor.numel() * tensor.element_size()


class Clock(Protocol):
    """Marks moments in the work of a device, and gives the milliseconds between two of them."""

    def mark(self) -> Any: ...

    def ms(self, start: Any, end: Any) -> float: ...


class _CpuClock:
    """Wall-clock time; with one thread the CPU time of this thread, so that other processes on the
    machine cannot distort a profile: a rank has its core for itself."""

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self.mark = time.thread_time if alone else time.perf_counter

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)


class _CudaClock:
    """CUDA events in the current stream. The time between two events includes waiting for launches;
    reading it waits only for the second event."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`, for the current number of threads."""
    return _CudaClock(device) if device.type == "cuda" else _CpuClock()


class LiveBytes(Protocol):
    """Counts bytes that a block allocates.

    live: bytes allocated and not yet freed
    peak: maximum of `live` since `reset`
    """

    @property
    def live(self) -> int: ...

    @property
    def peak(self) -> int: ...

    def reset(self) -> None: ...


@contextmanager
def counting(device: torch.device, given: Iterable[Tensor]) -> Iterator[LiveBytes]:
    """Counts the bytes that the block allocates on `device`, not those of its arguments `given`."""
    if device.type == "cuda":
        yield _OfAllocator(device)
    else:
        with _OfOperations(given) as counted:
            yield counted


class _OfAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        self.reset()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _OfOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._given = [tensor.untyped_storage() for tensor in given]
        self._known: dict[int, Any] = {storage._cdata: None for storage in self._given}

    def reset(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
