"""Predicts PipeTransformer's ablation with the planner and compares it with the published figures.

PipeTransformer (He et al., ICML 2021) fine-tunes ViT-B/16 in pipelines of eight GPUs, and reports
how many times sooner ten epochs end with parts of the method. Each phase is planned here as
`asyncpipe-partition --elastic` plans it, on devices that are described, not measured.

published   2 hosts of 8 Quadro RTX 5000, as in the paper: two pipelines at first
a100        1 host of 8 A100: one pipeline at first

The rows of both:
    none            pipelines of eight, all blocks train
    freeze          the same cut; the cost of what is frozen is that of its forward
    shrink, cache   the pipelines become shorter, the GPUs that this frees are idle
    shrink, grow    the GPUs that this frees are replicas
    all             both, and frozen blocks run once

In the paper each replica keeps its batch, so a step has more samples with more replicas ("grown").
"kept" is the same with the samples of a step kept, as `asyncpipe-train --elastic` does by default.

A phase is planned as with `--cache`, except that blocks which have frozen since the epoch before
run in it, once for each sample.

Frozen activations are loaded over the GPU's PCI Express, one after the other with the computation.
Not counted: transitions, evaluations, and loading images.

python benchmarks/predicted_elastic.py
"""

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from machine import write_result

from asyncpipe.partitioner.capture_and_profile import (
    Captured,
    Compilation,
    capture_phase,
    load,
    profile_phase,
)
from asyncpipe.partitioner.compile import (
    Planned,
    plan_phase,
)
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.output import PhaseTimer
from asyncpipe.partitioner.phases import frozen, frozen_nodes
from asyncpipe.partitioner.planning.cluster import ANY_HOST, Cluster, Device
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.profiler import Profile
from asyncpipe.runtime.freezing.blocks import blocks_of
from asyncpipe.runtime.freezing.rules import parse_rule
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan, StageSpec

ALPHA, EPOCHS, BATCH, MICRO_BATCH, PIPELINE = "schedule:1/3", 10, 400, 25, 8
SAMPLES = 1_281_167
"""The paper's setting on ImageNet: the rate of freezing, the epochs, the samples of a pipeline's
step and of its micro-batches (16, the best number that the paper measured for every length), the
first length, and the training images."""

ACTIVATION_BYTES = 197 * 768 * 4
"""What leaves a block of ViT-B/16, of one sample."""

PUBLISHED = {"none": 1.0, "freeze": 0.95, "shrink, cache": 1.26, "shrink, grow": 2.27, "all": 2.83}
RATES = {"1/5": 2.04, "1/4": 2.44, "1/3": 2.83, "2/5": 3.29, "1/2": 3.86}
"""Published: how many times sooner ImageNet ends with parts of the method, and CIFAR-100 with all
of it at each rate of freezing."""

RTX_5000 = """
# Source: NVIDIA Quadro RTX 5000 datasheet (PNY, 2018).
name = "NVIDIA Quadro RTX 5000"
memory_gib = 16
bandwidth_gb_s = 448
call_us = 9
compute_efficiency = 0.75
memory_efficiency = 0.8

[tflops]
float64 = 0.35
float32 = 11.2
float16 = 89.2
"""


@dataclass(frozen=True)
class Hardware:
    """Hosts of eight GPUs; links by the datasheets, with the bandwidth of one direction.

    loading: the link by which a GPU reads the frozen activations of its host.
    """

    hosts: int
    device: str
    memory_gib: int
    within: Link
    between: Link
    loading: Link

    @property
    def processes(self) -> int:
        return PIPELINE * self.hosts

    def all_reduce_ms(self, num_bytes: float, replicas: int) -> float:
        """A ring over the replicas of a stage, which lie on all hosts."""
        link = self.between if self.hosts > 1 else self.within
        return float(link.all_reduce_ms(num_bytes, replicas))


HARDWARE = {
    "published": Hardware(
        2, "rtx5000.toml", 16, Link(0.02, 12e9), Link(0.03, 5e9), Link(0.02, 15.754e9)
    ),
    "a100": Hardware(1, "a100-40g", 40, Link(0.01, 250e9), Link(0.01, 250e9), Link(0.01, 31.5e9)),
}


class Planner:
    """Plans ViT-B/16 for one kind of hardware with some blocks frozen, and some of these cached."""

    def __init__(self, hardware: Hardware, folder: Path, micro_batch: int = MICRO_BATCH) -> None:
        (folder / "rtx5000.toml").write_text(RTX_5000)
        device = hardware.device
        self.hardware = hardware
        self._options: dict[str, Any] = {
            "micro_batch_size": micro_batch,
            "micro_batches": BATCH // micro_batch,
            "meta": True,
            "profile": "analytic",
            "device": str(folder / device) if device.endswith(".toml") else device,
            "schedule": "gpipe",
            "optimizer": "momentum",
            "recompute": "none",
            "stop_after": "plan",
        }
        self._source = load("vit-base", PartitionOptions(**self._options), None)
        self._planned, self._captured = cache(self._plan), cache(self._capture)
        self.frozen_in_place = cache(self._frozen_in_place)

    def _job(self, length: int) -> Compilation:
        options = PartitionOptions(**self._options, stages=length)
        devices = (Device(memory_bytes=math.inf, host="host"),) * length
        cluster = Cluster(devices, within={ANY_HOST: self.hardware.within})
        quiet = PhaseTimer(None)
        return Compilation(
            self._source, options, cluster, length, "", quiet, None, with_advice=False
        )

    def _capture(self, depth: int) -> tuple[Captured, Profile]:
        job = self._job(PIPELINE)
        names = blocks_of(self.plan(0, 0, PIPELINE)).frozen(depth) if depth else frozenset[str]()
        with frozen(self._source.model, names):
            captured = capture_phase(job)
            of_cache = frozen_nodes(captured.capture)
            return replace(captured, cached=of_cache), profile_phase(job, captured)

    def plan(self, depth: int, cached: int, length: int) -> Plan:
        """The plan of a length with `depth` blocks frozen, of which the first `cached` are loaded
        from a cache."""
        return self._planned(depth, cached, length).plan

    def _plan(self, depth: int, cached: int, length: int) -> Planned:
        captured, profile = self._captured(depth)
        captured = replace(captured, cached=self._captured(cached)[0].cached)
        return plan_phase(self._job(length), captured, profile)

    def _frozen_in_place(self, depth: int) -> Plan:
        """The plan with nothing frozen, whose stages have the costs at this depth."""
        planned = self._planned(0, 0, PIPELINE)
        if not depth:
            return planned.plan
        captured, profile = self._captured(depth)
        still = captured.cached

        def at_depth(stage: StageSpec) -> StageSpec:
            own = [node.name for node, place in planned.cut.placed.items() if place == stage.index]
            sends, receives = (
                tuple(
                    replace(b, tensor=replace(b.tensor, requires_grad=b.tensor.name not in still))
                    for b in boundaries
                )
                for boundaries in (stage.sends, stage.receives)
            )
            returned = any(b.tensor.requires_grad for b in sends)
            return replace(
                stage,
                backward_ms=sum(profile.nodes[n].backward_ms for n in own if n in profile.nodes),
                backward_talk_ms=stage.backward_talk_ms if returned else 0.0,
                sends=sends,
                receives=receives,
            )

        return replace(planned.plan, stages=tuple(map(at_depth, planned.plan.stages)))


@dataclass(frozen=True)
class Epoch:
    """One epoch of one row."""

    frozen: int
    stages: int
    replicas: int
    samples_per_s: float


@dataclass(frozen=True)
class Parts:
    """The parts of the method that a row uses."""

    freezes: bool = True
    shrinks: bool = True
    grows: bool = False
    caches: bool = False


ROWS: Mapping[str, Parts] = {
    "none": Parts(freezes=False, shrinks=False),
    "freeze": Parts(shrinks=False),
    "shrink, cache": Parts(caches=True),
    "shrink, grow": Parts(grows=True),
    "all": Parts(grows=True, caches=True),
}


def epochs(planner: Planner, parts: Parts, rule: str, grown: bool) -> list[Epoch]:
    """The phases of a row, by epochs: blocks freeze after each."""
    hardware, result, length, before = planner.hardware, [], PIPELINE, 0
    limit = max(stage.peak_bytes for stage in planner.plan(0, 0, PIPELINE).stages)
    blocks = len(blocks_of(planner.plan(0, 0, PIPELINE)))
    for epoch in range(EPOCHS):
        depth = parse_rule(rule).depth(epoch, blocks) if parts.freezes else 0
        cached = before if parts.caches else 0
        options = [length]
        if parts.shrinks and depth:
            options += [shorter for shorter in (4, 2, 1) if shorter < length]

        def plan_of(stages: int, depth: int = depth, cached: int = cached) -> Plan:
            if not parts.shrinks:
                return planner.frozen_in_place(depth)
            return planner.plan(depth, cached, stages)

        def speed(stages: int, plan_of: Any = plan_of, cached: int = cached) -> float:
            replicas = hardware.processes // (stages if parts.grows else PIPELINE)
            loaded = ACTIVATION_BYTES if cached else 0
            return samples_per_s(hardware, plan_of(stages), replicas, grown, loaded)

        fits = [n for n in options if max(s.peak_bytes for s in plan_of(n).stages) <= limit]
        if parts.grows or not parts.shrinks:
            length = max(fits or options[:1], key=speed)
        else:
            length = min(fits or options[:1])  # as in the paper: as short as memory allows
        replicas = hardware.processes // (length if parts.grows else PIPELINE)
        result.append(Epoch(depth, length, replicas, speed(length)))
        before = depth
    return result


def samples_per_s(
    hardware: Hardware, plan: Plan, replicas: int, grown: bool, loaded_bytes: int
) -> float:
    """The pace of so many replicas of a plan: a step of each has BATCH samples (grown), or all
    together have the BATCH samples of each of the first pipelines (kept). For each sample so many
    bytes are loaded."""
    first = hardware.processes // PIPELINE
    micro_batches = BATCH // MICRO_BATCH
    if not grown:
        micro_batches = max(1, micro_batches * first // replicas)
    schedule = "gpipe" if len(plan.stages) > 1 else "single"
    step_ms = forecast_step(plan, schedule, micro_batches).step_ms
    summed = max(stage.memory.gradients for stage in plan.stages)
    step_ms += micro_batches * hardware.loading.transfer_ms(MICRO_BATCH * loaded_bytes)
    if replicas > 1:
        step_ms += hardware.all_reduce_ms(summed, replicas)
    return 1e3 * micro_batches * MICRO_BATCH * replicas / step_ms


def seconds(phases: Sequence[Epoch]) -> float:
    return sum(SAMPLES / epoch.samples_per_s for epoch in phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", nargs="+", default=[*HARDWARE], choices=HARDWARE)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in args.hardware:
        with tempfile.TemporaryDirectory() as folder:
            planner = Planner(HARDWARE[name], Path(folder))
            for batch in ("grown", "kept"):
                found[f"{name}, {batch}"] = ablation(planner, batch == "grown")
            found[f"{name}, rates"] = rates(planner)
    write_result("predicted_elastic", found)


def ablation(planner: Planner, grown: bool) -> dict[str, Any]:
    rows = {row: epochs(planner, parts, ALPHA, grown) for row, parts in ROWS.items()}
    base = seconds(rows["none"])
    for row, phases in rows.items():
        pace = "  ".join(f"{e.stages}x{e.replicas} {e.samples_per_s:,.0f}" for e in phases)
        times = base / seconds(phases)
        print(f"{row:14} {times:5.2f}x  published {PUBLISHED[row]:.2f}x  {pace}", flush=True)
    return {
        row: {
            "times_sooner": round(base / seconds(phases), 3),
            "published": PUBLISHED[row],
            "hours": round(seconds(phases) / 3600, 2),
            "epochs": [[e.frozen, e.stages, e.replicas, round(e.samples_per_s)] for e in phases],
        }
        for row, phases in rows.items()
    }


def rates(planner: Planner) -> dict[str, Any]:
    """All parts of the method at the paper's rates of freezing."""
    base = seconds(epochs(planner, ROWS["none"], ALPHA, True))
    result = {}
    for rate, published in RATES.items():
        times = base / seconds(epochs(planner, ROWS["all"], f"schedule:{rate}", True))
        print(f"all, schedule:{rate}  {times:5.2f}x  published {published:.2f}x", flush=True)
        result[rate] = {"times_sooner": round(times, 3), "published": published}
    return result


if __name__ == "__main__":
    main()
