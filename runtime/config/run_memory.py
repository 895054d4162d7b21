"""A plan and the options of a run -> the memory of each stage in that run.

A folder is planned for one schedule, optimizer and size of micro-batches, and runs with others.
Activations are those of the micro-batches that the run's schedule has in flight, weights those that
its staleness methods keep, and the optimizer's state that of its optimizer.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ..optimizers.facts import OPTIMIZERS, OWN, PLANNED, OptimizerFacts
from ..plan.plan import Plan, StageMemory, StageSpec
from ..schedule.asynchronous import weight_copies
from ..schedule.schedule import Schedule
from .settings import RunConfig


def memory_in_run(plan: Plan, planned: Plan, config: RunConfig, schedule: Schedule) -> Plan:
    """The plan of a run with the memory of its stages in the run; `planned` is the plan of the
    folder, with the sizes, recomputation and setting that it was made for. Memory of transfers and
    of single operations changes with the sizes alone."""
    stages = (
        _in_run(stage, before.without_sharing(), plan, planned, config, schedule)
        for stage, before in zip(plan.stages, planned.stages, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def _in_run(
    stage: StageSpec,
    before: StageSpec,
    plan: Plan,
    planned: Plan,
    config: RunConfig,
    schedule: Schedule,
) -> StageSpec:
    memory, size = before.memory, relative_size(plan, planned)
    if not memory.total:
        return stage
    in_flight = schedule.in_flight[stage.index]
    saved, received = _of_micro_batch(before, planned)
    again = stage.recompute and in_flight > 1
    activations = in_flight * received + saved if again else in_flight * saved
    copies = 0
    if config.is_async:
        every = schedule.step_every
        copies = weight_copies(config.methods, in_flight - 1, every, recomputes=stage.recompute)
    memory = replace(
        memory,
        optimizer=_optimizer_bytes(memory, planned.setting.optimizer, config),
        versions=copies * memory.gradients,
        activations=round(size * activations),
        transport=round(size * memory.transport),
        transient=round(size * memory.transient),
    )
    return replace(stage, memory=memory, peak_bytes=memory.total, unshared=None)


def _of_micro_batch(stage: StageSpec, planned: Plan) -> tuple[int, int]:
    """Bytes that a micro-batch keeps without and with recomputation."""
    activations = stage.memory.activations
    if stage.recompute:
        saved = stage.activation_bytes
        return saved, (activations - saved) // max(1, stage.in_flight)
    received = sum(
        prod(boundary.tensor.resolve(planned.sizes))
        * getattr(torch, boundary.tensor.dtype).itemsize
        for boundary in stage.receives
    )
    return activations // max(1, stage.in_flight), received


def _optimizer_bytes(memory: StageMemory, planned: str, config: RunConfig) -> int:
    chosen = _counted(config.optimizer, config.momentum)
    is_as_planned = chosen is PLANNED.get(planned)
    return memory.optimizer if is_as_planned else chosen.copies * memory.gradients


def _counted(optimizer: str, momentum: float) -> OptimizerFacts:
    facts = OPTIMIZERS.get(optimizer, OWN)
    return PLANNED["momentum"] if facts.plain_sgd and momentum else facts


def relative_size(plan: Plan, planned: Plan) -> float:
    """The size of a micro-batch of the plan, as a multiple of the planned one."""
    return prod(
        size / planned.sizes[name] for name, size in plan.sizes.items() if planned.sizes.get(name)
    )
