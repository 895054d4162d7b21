"""The plan and the memory of its ranks -> how far an asynchronous run goes ahead by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..executor.mailbox import forward_edges, gradient_edges
from ..plan.forecast import costs_of_plan
from ..plan.plan import Plan
from ..process import memory_bytes
from ..schedule.asynchronous import async_1f1b
from ..schedule.run_ahead import times_ahead
from ..schedule.tasks import NO_LIMIT, ActivationLimit
from .asynchronous_options import longest_segment
from .batch_layout import stage_replicas
from .run_memory import memory_in_run
from .settings import RunConfig

_OF_MACHINE = 0.1
"""The share of this machine's memory that more activations may take where ranks have no limit."""


def with_ahead(config: RunConfig, plan: Plan, planned: Plan) -> RunConfig:
    """The options with the multiple of the usual forwards ahead that the plan's measured times ask
    for; the usual number where it has none, or the options say something else. `planned` is the
    folder's plan, and `plan` has the sizes and the recomputation of the run."""
    is_open = config.schedule == "async-1f1b" and config.ahead is None
    costs = costs_of_plan(plan)
    stages = len(plan.stages)
    if not is_open or config.staleness_cap is not None or not plan.setting.spread or costs is None:
        return config
    is_alone = config.ranks in (None, stages) and len(set(plan.device_of_stage)) == stages
    if not is_alone or stage_replicas(plan, config):
        return config
    times = times_ahead(
        costs,
        config.micro_batches,
        plan.setting.spread,
        edges=forward_edges(plan),
        grad_edges=gradient_edges(plan),
        fits=lambda warmup: _fits(warmup, config, plan, planned),
    )
    return config if times == 1 else replace(config, ahead=f"{times}x")


def _fits(warmup: Sequence[int], config: RunConfig, plan: Plan, planned: Plan) -> bool:
    """True if stages with so many forwards ahead fit into the memory of the ranks; without limits,
    if they take little more of this machine's memory."""
    every, usual = config.micro_batches, range(len(warmup) - 1, -1, -1)
    if warmup[0] > longest_segment(config) * every:
        return False
    count = -(-(warmup[0] + 1) // every) * every
    needed, before = (
        [
            stage.memory.total
            for stage in memory_in_run(
                plan, planned, config, async_1f1b(len(warmup), count, every, ahead)
            ).stages
        ]
        for ahead in (warmup, usual)
    )
    room = [rank.memory_bytes for rank in plan.setting.ranks][:: plan.tensor_parallel]
    if len(room) == len(warmup) and None not in room:
        return all(size <= (most or 0) for size, most in zip(needed, room, strict=True))
    more = (sum(needed) - sum(before)) * config.pipelines
    return config.device == "cpu" and more <= _OF_MACHINE * memory_bytes()


def activation_limit(plan: Plan, ranks: int) -> ActivationLimit:
    """The bytes that each rank of the plan has left for activations, if it has a memory limit."""
    processes = [rank.memory_bytes for rank in plan.setting.ranks]
    is_of_all = len(processes) == ranks * plan.tensor_parallel
    room = processes[:: plan.tensor_parallel] if is_of_all else processes
    if len(room) != ranks or None in room:
        return NO_LIMIT
    left = [float(size or 0) for size in room]
    for stage, rank in zip(plan.stages, ranks_of_stages(plan), strict=True):
        left[rank] -= stage.memory.total - stage.memory.activations
    of_micro_batch = (stage.memory.activations / max(1, stage.in_flight) for stage in plan.stages)
    return ActivationLimit(tuple(left), tuple(of_micro_batch))


def ranks_of_stages(plan: Plan) -> tuple[int, ...]:
    """The rank of each stage, without gaps."""
    planned = sorted(set(plan.device_of_stage))
    return tuple(map(planned.index, plan.device_of_stage))
