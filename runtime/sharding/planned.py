"""A plan and `--zero` -> the plan with the memory of the replica that owns most of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..config.batch_layout import stage_replicas
from ..config.settings import RunConfig
from ..executor.loading import stage_builder
from ..executor.tied_parameters import shared_weights
from ..formatting import counted, write_share
from ..plan.forecast import summing_ms
from ..plan.plan import Plan, StageMemory
from ..plan.sharing import GRADIENTS, MESSAGE_BYTES, UNDER_WAY, passes_over_gradients
from .owners import owners_of, sizes_of


def with_shares(
    plan: Plan, config: RunConfig, ranks: Iterable[Sequence[int]], code: Mapping[str, str]
) -> tuple[Plan, str]:
    """The plan with the memory of stages whose replicas share out what `--zero` says, and a phrase
    about it, "" for none. `ranks` are the stages of each rank of a pipeline, `code` has the SHA-256
    of each file of the stages."""
    plan = replace(plan, stages=tuple(stage.without_sharing() for stage in plan.stages))
    of_stage = stage_replicas(plan, config)
    memories: dict[int, StageMemory] = {}
    shares: list[tuple[float, str]] = []
    for stages in ranks if config.zero else ():
        copies = len(of_stage[stages[0]]) if of_stage and stages else config.pipelines
        if copies > 1 and stages:
            with torch.device("meta"):
                modules = {j: stage_builder(config.folder, plan.stages[j], code)() for j in stages}
            share, largest, own = _of_fullest(plan, modules, config, copies)
            indivisible = f" ({largest} is one tensor)" if share > 1.25 / copies else ""
            text = f"{counted(copies, 'replica')}, of which the fullest has {write_share(share)}"
            shares.append((share, text + indivisible))
            memories |= own
    if not shares:
        return plan, ""
    changed = (
        replace(stage, memory=memory, peak_bytes=memory.total)
        if stage.peak_bytes and (memory := memories.get(stage.index))
        else stage
        for stage in plan.stages
    )
    what = "optimizer state" if config.zero < GRADIENTS else "optimizer state and gradients"
    return replace(plan, stages=tuple(changed)), f"{what} shared out over {max(shares)[1]}"


def with_sums(
    plan: Plan, config: RunConfig, step_ms: Sequence[float] | None
) -> Sequence[float] | None:
    """The milliseconds of each stage's step, if known, with those of the sums of gradients that
    `--zero 2` makes after every micro-batch, where a step has one: as many passes over the
    gradients as micro-batches and one over the weights, in place of two."""
    more = passes_over_gradients(config.zero, config.micro_batches) - 1
    if not more:
        return step_ms
    sums_ms = summing_ms(plan, config.pipelines)
    return [
        own + more * ms for own, ms in zip(step_ms or [0.0] * len(sums_ms), sums_ms, strict=True)
    ]


def _of_fullest(
    plan: Plan, modules: Mapping[int, nn.Module], config: RunConfig, copies: int
) -> tuple[float, str, dict[int, StageMemory]]:
    """The share of the replica that owns most of a rank's stages, the name of the largest
    parameter, and its memory of each stage."""
    sizes = sizes_of(plan, modules, config)
    owners = owners_of([size for *_, size in sizes], copies)
    loads = [0] * copies
    for (_, _, size), owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    most = loads.index(max(loads))
    own = {id(each) for (_, each, _), owner in zip(sizes, owners, strict=True) if owner == most}
    of_size = {id(each): size for _, each, size in sizes}
    names = {id(p): name for each in modules.values() for name, p in each.named_parameters()}
    largest = max(of_size, key=of_size.__getitem__, default=0)
    return (
        max(loads) / (sum(loads) or 1),
        names.get(largest, ""),
        {
            stage: _divided(plan, stage, module, own, of_size, config)
            for stage, module in modules.items()
        },
    )


def _divided(
    plan: Plan,
    stage: int,
    module: nn.Module,
    own: set[int],
    of_size: Mapping[int, int],
    config: RunConfig,
) -> StageMemory:
    """The memory of a stage on the replica that owns some of its parameters. Gradients of tied
    parameters are whole everywhere, and some messages are under way."""
    memory, tied = plan.stages[stage].memory, shared_weights(plan, stage)
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    state = sum(of_size[id(each)] for each in named.values())
    owned = sum(of_size[id(each)] for each in named.values() if id(each) in own)
    optimizer = round(memory.optimizer * owned / (state or 1))
    if config.zero < GRADIENTS:
        return replace(memory, optimizer=optimizer)
    total = sum(each.nbytes for each in named.values())
    kept = sum(each.nbytes for name, each in named.items() if id(each) in own or name in tied)
    largest = max((each.nbytes for each in named.values()), default=0)
    kept += min(total - kept, largest + UNDER_WAY * MESSAGE_BYTES)
    return replace(
        memory, optimizer=optimizer, gradients=round(memory.gradients * kept / (total or 1))
    )
