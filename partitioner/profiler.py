"""Capture + example inputs -> milliseconds, FLOPs and saved bytes of every node.

The graph is walked once without computing anything (fake tensors at the real micro-batch size);
every distinct call on the way is measured by itself, so the twelve equal blocks of a GPT-2 are
measured as one. The sum of the parts is not the whole: operations alone find a warmer or a colder
cache than in a row. So the whole model is timed too, and all times are scaled to it. Two kinds of
model keep their times unscaled: one on meta, which is never materialised as a whole, and one that
takes seconds, for which caches matter little (1.007 for GPT-2 at 4 x 128 tokens on one core, where
1 x 128 has 1.2).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .capture import Capture, Recompute
from .capture.interpret import sizes_of
from .clock import threads_set
from .device_specs import DeviceSpec, device_spec
from .measure import Repeats, measure
from .precision import check_dtype
from .profile_cache import ProfileCache, content_key, is_lasting
from .roofline import predict
from .walk import NodeCost, OnProgress, Walk
from .whole import WholeTimes, state_kept, time_whole


@dataclass(frozen=True)
class Profile:
    """Costs of all computed nodes by name, and how they were found.

    `forward_scale` and `backward_scale` are what the measured parts were multiplied with so that
    their sum is the whole; 1 when the whole could not be timed. `unmeasured` nodes count as free:
    they do not accept arguments that are made up. `content` says of each node what was measured.
    `stage_scales` are how many times the sum of its parts each stage took, where stages were timed.
    `bandwidth` is that of a device which was predicted for, bytes a second of its memory.
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
            f"{len(self.nodes)} operators, {self.distinct} distinct, {self.kind} on "
            f"{self.device}{threads} · forward {self.forward_ms:.1f} ms, backward "
            f"{self.backward_ms:.1f} ms a micro-batch"
        )


CPU_CORE = device_spec("cpu-core")
TIMED_UP_TO_MS = 3000.0
"""Models and stages are timed as wholes where a micro-batch of the model takes no longer."""


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
    """Measures the captured model on `device` with `threads` threads a rank.

    `inputs` are forward's keyword arguments at the size of one micro-batch, on the model's
    device. Under `dtype` bfloat16 all is measured under torch's autocast to it. A model whose
    parts take more than `whole_up_to_ms` is not timed as a whole. With `cached` what was measured
    before is read from the user's cache, else it is measured anew; both keep what they measure
    there, None does not. The model runs in training mode; its parameters, buffers, gradients, mode
    and the random state are as before afterwards.
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
        walk = Walk(
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
    """The same from FLOPs and bytes for a device that is described; nothing is run."""
    started = time.perf_counter()
    check_dtype(dtype)
    walk = Walk(
        capture,
        lambda operation: predict(operation, device, dtype),
        torch.device("meta"),
        dtype=dtype,
        on_progress=on_progress,
    )
    # Even on tensors without data, a counter of batches counts.
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
    walk: Walk, cache: ProfileCache | None, measured: Callable[[], WholeTimes]
) -> WholeTimes:
    """The times of the whole model, from the cache if it was timed before."""
    content = "\n".join(walk.content.values())
    if cache is None or not is_lasting(content):
        return measured()
    key = content_key(f"whole\n{walk.capture.graph}\n{content}")
    if (found := cache.get(key)) is not None:
        return WholeTimes(*found)
    whole = measured()
    cache.put(key, [whole.forward_ms, whole.backward_ms])
    return whole


def _sum_ms(costs: Mapping[str, NodeCost]) -> float:
    return sum(cost.forward_ms + cost.backward_ms for cost in costs.values())


def is_on(model: nn.Module, device: torch.device) -> bool:
    return all(parameter.device.type == device.type for parameter in model.parameters())


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


def _with_recomputation(capture: Capture, costs: Mapping[str, NodeCost]) -> dict[str, NodeCost]:
    """The costs where the author checkpoints: backward computes forward again, nothing of it is put
    off, and what is made inside is not kept in between."""
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
