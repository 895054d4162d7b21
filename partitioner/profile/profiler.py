"""Capture + example inputs -> milliseconds, FLOPs and saved bytes of every node.

The graph runs once on fake tensors at the real micro-batch size, and every distinct call is
measured alone, so that the twelve equal blocks of a GPT-2 are measured once. The sum of these times
is not the time of the whole model: an operation alone finds a warmer or colder cache than in a
sequence. Therefore the whole model is timed too, and all times are scaled to it. Two kinds of
models are not scaled: those on meta, which never get memory as a whole, and those that take
seconds, for which caches matter little (factor 1.007 for GPT-2 at 4 x 128 tokens on one core,
against 1.2 at 1 x 128).

`update_ms_per_byte` gives the time of an optimizer step per byte of parameters, from a profile and
the optimizer's name. It is measured on the device of the profile, on matrices that together with
their gradients and moments exceed every cache, because other work runs between two steps. A
prediction counts the moved bytes: parameters and moments read and written, and gradients read.

Sutskever's momentum counts as torch's. Muon and SOAP count as AdamW, which updates their parameters
other than hidden matrices: their matrix products grow with a hidden layer's own work, which is
balanced anyway.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...runtime.formatting import write_ms
from ...runtime.optimizers.facts import PLANNED
from ..capture import Capture, Recompute, run
from ..capture.graph import sizes_of
from ..capture.model_state import unchanged
from .cache import (
    ProfileCache,
    check_dtype,
    content_key,
    is_lasting,
    mixed_precision,
    threads_set,
)
from .measure import Clock, Repeats, clock_of, measure
from .operation_costs import CostWalk, NodeCost, OnProgress
from .roofline import DeviceSpec, device_spec, predict


@dataclass(frozen=True)
class Profile:
    """Costs of all computed nodes, and the conditions of their measurement.

    nodes: costs by name of the node
    kind: "measured" or "analytic"
    device: name of the device
    threads: threads of a rank; 0 for an analytic profile
    sizes: numbers of the size symbols
    distinct: number of distinct calls
    forward_scale, backward_scale: factors that scale the sum of the parts to the time of the whole
        model; 1 if the whole was not timed
    unmeasured: nodes that reject invented arguments; they count as free
    seconds: duration of the profile
    dtype: dtype of matrix products
    content: description of each node's call
    stage_scales: time of each stage relative to the sum of its parts, if stages were timed
    bandwidth: memory bandwidth of the predicted device in bytes per second
    spread: standard deviation of the time of a stage's forward or backward, as a share of it, if
        stages were timed
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
    dtype: str = "float32"
    content: Mapping[str, str] = field(default_factory=dict)
    stage_scales: tuple[float, ...] = ()
    bandwidth: float | None = None
    spread: float = 0.0

    @property
    def forward_ms(self) -> float:
        return sum(cost.forward_ms for cost in self.nodes.values())

    @property
    def backward_ms(self) -> float:
        return sum(cost.backward_ms for cost in self.nodes.values())

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.nodes.values())

    def without_forward(self, names: Collection[str]) -> Profile:
        """The profile in which the forward of these nodes takes no time."""
        nodes = {
            name: replace(cost, forward_ms=0.0) if name in names else cost
            for name, cost in self.nodes.items()
        }
        return replace(self, nodes=MappingProxyType(nodes))

    @property
    def facts(self) -> dict[str, Any]:
        """The part of a profile that a plan records: assumptions, no wall-clock time."""
        return {
            "kind": self.kind,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "sizes": dict(self.sizes),
            "distinct": self.distinct,
            "forward_ms": round(self.forward_ms, 4),
            "backward_ms": round(self.backward_ms, 4),
            "forward_scale": round(self.forward_scale, 4),
            "backward_scale": round(self.backward_scale, 4),
            "stage_scales": [round(scale, 4) for scale in self.stage_scales],
            "flops": self.flops,
            "unmeasured": list(self.unmeasured),
        }

    @property
    def summary(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        threads += f", {self.dtype}" * (self.dtype != "float32")
        return (
            f"{len(self.nodes)} operations ({self.distinct} distinct), {self.kind} on "
            f"{self.device}{threads} · forward {write_ms(self.forward_ms)}, backward "
            f"{write_ms(self.backward_ms)} per micro-batch"
        )


CPU_CORE = device_spec("cpu-core")
TIMED_UP_TO_MS = 3000.0
"""Models and stages are timed as a whole if a micro-batch of the model takes at most this."""


def profile(
    capture: Capture,
    inputs: Mapping[str, Any],
    *,
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    repeats: Repeats | None = None,
    whole_up_to_ms: float = TIMED_UP_TO_MS,
    cached: bool | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Measures the captured model on `device` with `threads` threads per rank.

    `inputs` are forward's keyword arguments at the size of one micro-batch, on the model's
    device. With `dtype` bfloat16 everything is measured under autocast. A model whose
    parts take more than `whole_up_to_ms` is not timed as a whole. `cached` True reads known costs
    from the user's cache, False measures everything again; both write to the cache, None uses no
    cache. The model runs in training mode; its parameters, buffers, gradients and mode and the
    random state are restored afterwards.
    """
    started = time.perf_counter()
    check_dtype(dtype)
    where = torch.device(device)
    with (
        threads_set(threads) as used,
        state_kept(capture),
    ):
        often = repeats or Repeats()
        cache = None if cached is None else ProfileCache.of(where, used, dtype, read=cached)
        walk = CostWalk(
            capture,
            lambda operation: measure(operation, where, often),
            where,
            dtype=dtype,
            cache=cache,
            on_progress=on_progress,
        )
        walk.visit_all(inputs)
        is_timed = is_on(capture.model, where) and _sum_ms(walk.costs) <= whole_up_to_ms
        whole = None
        if is_timed:
            whole = _whole(walk, cache, lambda: time_whole(capture, inputs, where, dtype=dtype))
        if cache:
            cache.save()
    costs, forward_scale, backward_scale = _scaled(walk.costs, whole)
    return Profile(
        nodes=MappingProxyType(_with_recomputation(capture, costs)),
        kind="measured",
        device=device,
        dtype=dtype,
        threads=used,
        sizes=sizes_of(capture, inputs),
        distinct=len(walk.known),
        forward_scale=forward_scale,
        backward_scale=backward_scale,
        unmeasured=tuple(walk.unmeasured),
        content=MappingProxyType(walk.content),
        seconds=time.perf_counter() - started,
    )


def profile_analytic(
    capture: Capture,
    inputs: Mapping[str, Any],
    device: DeviceSpec = CPU_CORE,
    *,
    dtype: str = "float32",
    on_progress: OnProgress | None = None,
) -> Profile:
    """Predicts the profile on a described device from FLOPs and bytes; nothing is computed."""
    started = time.perf_counter()
    check_dtype(dtype)
    walk = CostWalk(
        capture,
        lambda operation: predict(operation, device, dtype),
        torch.device("meta"),
        dtype=dtype,
        on_progress=on_progress,
    )
    # Buffers that count batches increase even on tensors without data.
    with state_kept(capture):
        walk.visit_all(inputs)
    return Profile(
        nodes=MappingProxyType(_with_recomputation(capture, walk.costs)),
        kind="analytic",
        device=device.name,
        dtype=dtype,
        threads=0,
        sizes=sizes_of(capture, inputs),
        distinct=len(walk.known),
        forward_scale=1.0,
        backward_scale=1.0,
        unmeasured=tuple(walk.unmeasured),
        content=MappingProxyType(walk.content),
        seconds=time.perf_counter() - started,
        bandwidth=device.bandwidth,
    )


def _whole(
    walk: CostWalk, cache: ProfileCache | None, measured: Callable[[], WholeTimes]
) -> WholeTimes:
    """The times of the whole model, from the cache if it was timed before."""
    content = "\n".join(walk.content.values())
    if cache is None or not is_lasting(content):
        return measured()
    key = content_key(f"whole\n{walk.capture.graph}\n{content}")
    if (times := cache.get(key)) is not None:
        return WholeTimes(*times)
    whole = measured()
    cache.put(key, [whole.forward_ms, whole.backward_ms])
    return whole


def _sum_ms(costs: Mapping[str, NodeCost]) -> float:
    return sum(cost.forward_ms + cost.backward_ms for cost in costs.values())


def is_on(model: nn.Module, device: torch.device) -> bool:
    """True if all parameters are on devices of this type."""
    return all(parameter.device.type == device.type for parameter in model.parameters())


def _scaled(
    costs: Mapping[str, NodeCost], whole: WholeTimes | None
) -> tuple[dict[str, NodeCost], float, float]:
    """The costs scaled to the time of the whole model, and the factors of forward and backward."""
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


def _with_recomputation(capture: Capture, costs: Mapping[str, NodeCost]) -> dict[str, NodeCost]:
    """The costs under the author's own checkpointing: backward includes a forward, delays no
    weight gradients, and activations inside the checkpoint are not saved."""
    inside: dict[Recompute, set[str]] = defaultdict(set)
    outermost: dict[str, Recompute] = {}
    for node in capture.graph.nodes:
        for recompute in node.meta.get("recomputes", ())[:1]:
            outermost[node.name] = recompute
            inside[recompute].add(node.name)
    result = dict(costs)
    for name in outermost.keys() & costs.keys():
        cost, made_inside = costs[name], inside[outermost[name]]
        result[name] = replace(
            cost,
            backward_ms=cost.backward_ms + cost.forward_ms,
            weight_share=0.0,
            backward_flops=cost.backward_flops + cost.flops,
            saved={
                maker: count
                for maker, count in cost.saved.items()
                if maker.partition(":")[0] not in made_inside
            },
        )
    return result


@dataclass(frozen=True, slots=True)
class WholeTimes:
    """Milliseconds of one micro-batch through a whole model or stage in training mode, and their
    standard deviation as a share of them (0 if unknown)."""

    forward_ms: float
    backward_ms: float
    spread: float = 0.0

    def scaled(self, by: float) -> WholeTimes:
        """The times on a machine that is `by` times slower."""
        return WholeTimes(by * self.forward_ms, by * self.backward_ms, self.spread)


def time_whole(
    capture: Capture,
    inputs: Mapping[str, Any],
    device: torch.device,
    *,
    dtype: str = "float32",
    enough_ms: float = 1500.0,
) -> WholeTimes:
    """Runs the graph forward and backward, after a warm-up run, until `enough_ms` are spent.

    Returns the medians of three to seven runs. Gradients accumulate, as over the micro-batches of
    a step; the warm-up allocates them, which for a GPT-2 doubles the time of its backward.
    The inputs are copied; the caller has to restore buffers and gradients (`state_kept`).
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
    """The tensors to start backward from: the loss, or all outputs that require a gradient."""
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
    """Restores the captured model after the block."""
    parameters = list(capture.model.parameters())
    with unchanged(capture.model, capture.changed):
        for parameter in parameters:
            parameter.grad = None
        yield


# --- the optimizer's step -------------------------------------------------------------------

_UPDATED_SHAPE = (1024, 1024)
_UPDATED_MATRICES = 8
_UPDATES = 5


def update_ms_per_byte(profile: Profile, optimizer: str, *, cached: bool = True) -> float:
    """Milliseconds of a step for each byte of parameters, on the device of the profile and with its
    threads; with `cached` an earlier measurement, if there is one.
    """
    optimizer = PLANNED[optimizer].timed_as or optimizer
    if profile.bandwidth is not None:
        return 1e3 * (3 + 2 * PLANNED[optimizer].copies) / profile.bandwidth
    device = torch.device(profile.device)
    known = ProfileCache.of(device, profile.threads, "float32", read=cached)
    key = f"update of {optimizer}"
    if (ms_per_byte := known.get(key)) is None:
        with threads_set(profile.threads), torch.random.fork_rng(devices=[]):
            ms_per_byte = _measured_update(optimizer, device)
        known.put(key, ms_per_byte)
        known.save()
    return float(ms_per_byte)


def _measured_update(optimizer: str, device: torch.device) -> float:
    matrices = [torch.randn(_UPDATED_SHAPE).to(device) for _ in range(_UPDATED_MATRICES)]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    facts = PLANNED[optimizer]
    fused: dict[str, Any] = {"fused": True} if facts.fused else {}
    stepping = facts.load()(matrices, **facts.arguments, **fused)
    stepping.step()  # makes what it keeps
    clock = clock_of(device)
    marks = [clock.mark()]
    for _ in range(_UPDATES):
        stepping.step()
        marks.append(clock.mark())
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    return statistics.median(clock.ms(*pair) for pair in pairwise(marks)) / num_bytes
