"""A described device that is here -> the same with the speeds that were measured.

Operations of a transformer's and a convolutional network's kind are measured as a profile does,
and three numbers of the roofline are fitted to them: the time of a call that computes nothing,
the reached FLOP/s of matrix products, and the reached bandwidth of everything else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .clock import threads_set
from .device_specs import DeviceSpec, device_spec
from .measure import Operation, OperationCost, Repeats, measure
from .precision import mixed_precision
from .profile_cache import device_identity

_OFTEN = Repeats(enough_ms=80.0, most=9)


def this_cpu() -> DeviceSpec:
    """The processor of this machine, with a guess at its speeds and all of its memory."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    name = device_identity(torch.device("cpu"))
    return replace(device_spec("cpu-core"), name=name, memory_bytes=pages * size)


def calibrated(spec: DeviceSpec, device: torch.device, dtype: str, threads: int) -> DeviceSpec:
    """`spec` with its call time and efficiencies as measured on `device`, which it describes."""
    spec.flops(dtype)  # refuses what the device cannot do
    # One after the other: a call is in the time of all, and traffic in that of products.
    with (
        threads_set(threads),
        torch.random.fork_rng(devices=[]),
        mixed_precision(dtype, device.type, cached=False),
    ):
        calls = [_measured(operation, device) for operation in _smallest()]
        traffic = [_measured(operation, device) for operation in _elementwise()]
        products = [_measured(operation, device) for operation in _products()]
    call_ms = statistics.median(cost.forward_ms for cost in calls)
    return replace(
        spec,
        call_ms=call_ms,
        memory_efficiency=_rate(traffic, call_ms, lambda cost: 3e3 * cost.moved_bytes)
        / spec.bytes_per_s,
        compute_efficiency=_rate(
            products, call_ms, lambda cost: 1e3 * (cost.forward_flops + cost.backward_flops)
        )
        / spec.flops_per_s[dtype],
    )


def _rate(
    costs: Sequence[OperationCost], call_ms: float, work: Callable[[OperationCost], float]
) -> float:
    """Work by second of the middle operation: forward and backward, calls taken off."""
    return statistics.median(
        work(cost) / max(cost.forward_ms + cost.backward_ms - 2 * call_ms, 1e-6) for cost in costs
    )


def _measured(operation: Operation, device: torch.device) -> OperationCost:
    return measure(operation, device, _OFTEN)


def _smallest() -> list[Operation]:
    return [_function(torch.add, (4, 4), (4, 4)), _function(torch.tanh, (4, 4))]


def _elementwise() -> list[Operation]:
    wide, image = (512, 3072), (8, 64, 56, 56)
    return [
        _function(torch.add, wide, wide),
        _function(F.gelu, wide),
        _function(F.relu, image),
        _function(lambda x: F.dropout(x, 0.1), wide),
        _function(lambda x: F.softmax(x, -1), (8, 12, 128, 128)),
        _module(nn.LayerNorm(768, device="meta"), (512, 768)),
        _module(nn.BatchNorm2d(64, device="meta"), image),
    ]


def _products() -> list[Operation]:
    return [
        _module(nn.Linear(768, 3072, device="meta"), (256, 768)),
        _module(nn.Linear(3072, 768, device="meta"), (256, 3072)),
        _module(nn.Linear(1024, 1024, device="meta"), (512, 1024)),
        _module(nn.Conv2d(64, 64, 3, padding=1, bias=False, device="meta"), (4, 64, 56, 56)),
        _module(nn.Conv2d(256, 256, 3, padding=1, bias=False, device="meta"), (4, 256, 14, 14)),
    ]


def _function(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Operation:
    def call(_: nn.Module | None, tensors: Sequence[Tensor]) -> Any:
        return function(*tensors)

    return Operation(call, None, _examples(shapes), (False,) * len(shapes))


def _module(module: nn.Module, *shapes: tuple[int, ...]) -> Operation:
    def call(own: nn.Module | None, tensors: Sequence[Tensor]) -> Any:
        assert own is not None
        return own(*tensors)

    return Operation(call, module, _examples(shapes), (False,) * len(shapes))


def _examples(shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
