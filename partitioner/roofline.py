"""One operation and a device that need not be here -> its FLOPs, bytes, and predicted times.

A call takes as long as its arithmetic or its memory traffic, whichever is longer, and never less
than a call that computes nothing:

    t = max(flops / reached FLOP/s of its dtype, bytes / reached bandwidth) + t_call

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model" (CACM 2009).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .device_specs import DeviceSpec
from .measure import Operation, OperationCost, estimate


def predict(operation: Operation, device: DeviceSpec, dtype: str = "float32") -> OperationCost:
    """What the operation would take on `device`; with `dtype` bfloat16 under autocast to it."""
    used = arithmetic_dtype(operation) if dtype == "float32" else dtype
    return with_times(estimate(operation, dtype), device, used)


def with_times(cost: OperationCost, device: DeviceSpec, dtype: str) -> OperationCost:
    """The cost with the times of the formula above, its matrix products in `dtype`."""
    if cost.is_view:
        return cost
    traffic_ms = 1e3 * cost.moved_bytes / device.bandwidth
    arithmetic_ms = 1e3 / device.flops(dtype)
    forward_ms = max(cost.forward_flops * arithmetic_ms, traffic_ms) + device.call_ms
    if not cost.has_backward:
        return replace(cost, forward_ms=forward_ms)
    # Backward reads what forward read and wrote, and writes gradients of as much.
    backward_ms = max(cost.backward_flops * arithmetic_ms, 2 * traffic_ms) + device.call_ms
    return replace(cost, forward_ms=forward_ms, backward_ms=backward_ms)


def arithmetic_dtype(operation: Operation) -> str:
    """The widest floating dtype among what an operation works on; float32 where there is none."""
    given = [*operation.tensors, *(operation.module.parameters() if operation.module else ())]
    kinds = {tensor.dtype for tensor in given if tensor.dtype.is_floating_point}
    kinds &= {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    widest = max(kinds, key=lambda kind: (kind.itemsize, str(kind)), default=torch.float32)
    return str(widest).removeprefix("torch.")
