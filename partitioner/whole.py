"""A captured model and its inputs -> how long one forward and one backward of all of it take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .capture import Capture, run
from .capture.restore import unchanged
from .clock import Clock, clock_of
from .precision import mixed_precision


@dataclass(frozen=True, slots=True)
class WholeTimes:
    """Milliseconds of one micro-batch through a whole model or stage in training mode."""

    forward_ms: float
    backward_ms: float

    def scaled(self, by: float) -> WholeTimes:
        """The same on a machine that takes `by` times as long."""
        return WholeTimes(by * self.forward_ms, by * self.backward_ms)


def time_whole(
    capture: Capture,
    inputs: Mapping[str, Any],
    device: torch.device,
    *,
    dtype: str = "float32",
    enough_ms: float = 1500.0,
) -> WholeTimes:
    """Runs the graph forward and backward, after one run to warm up, until `enough_ms` are spent.

    Takes the median of three to seven runs. Gradients are added up, as over the micro-batches of
    a step; the first run touches their memory, which for a GPT-2 doubles the time of its backward.
    Buffers and gradients are the caller's to keep; inputs that the model changes are copies.
    """
    clock = clock_of(device)
    inputs = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    _run(capture, inputs, dtype, clock)
    times: list[tuple[float, float]] = []
    while len(times) < 3 or (len(times) < 7 and sum(map(sum, times)) < enough_ms):
        times.append(_run(capture, inputs, dtype, clock))
    forward_ms, backward_ms = zip(*times, strict=True)
    return WholeTimes(statistics.median(forward_ms), statistics.median(backward_ms))


def _run(
    capture: Capture, inputs: Mapping[str, Any], dtype: str, clock: Clock
) -> tuple[float, float]:
    started = clock.mark()
    device = next(capture.model.parameters(), torch.empty(0)).device
    with mixed_precision(dtype, device.type):
        outputs = started_from(run(capture, inputs, training=True))
    middle = clock.mark()
    seeds = [torch.ones_like(output) for output in outputs]
    between = clock.mark()
    if outputs:
        torch.autograd.backward(outputs, seeds)
    return clock.ms(started, middle), clock.ms(between, clock.mark())


def started_from(result: Any) -> list[Tensor]:
    """What backward starts from: the loss if there is one, else every output with a gradient."""
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        result = result["loss"]
    if isinstance(result, Mapping):
        result = list(result.values())
    return [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]


@contextmanager
def state_kept(capture: Capture) -> Iterator[None]:
    """After the block, the model of a capture is as before."""
    parameters = list(capture.model.parameters())
    with unchanged(capture.model, capture.changed):
        for parameter in parameters:
            parameter.grad = None
        yield
