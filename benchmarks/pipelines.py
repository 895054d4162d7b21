"""Our pipelines as the runtime benchmark runs them: a plan, a schedule, a transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.loading import load_stage
from asyncpipe.runtime.lowering import lower
from asyncpipe.runtime.pipeline import (
    Pipeline,
    StepOptimizers,
    forward_edges,
    gradient_edges,
)
from asyncpipe.runtime.plan import read_plan
from asyncpipe.runtime.schedules import make_schedule
from asyncpipe.runtime.transports.gloo import GlooTransport

ASYNC_STEPS = 6


@dataclass(frozen=True)
class Ours:
    """A schedule with `each` stages a rank; `steps` optimizer steps are one sample."""

    schedule: str
    each: int = 1
    transport: str = "gloo"
    staleness: str = "none"
    steps: int = 1


OURS = {
    "gpipe": Ours("gpipe"),
    "1f1b": Ours("1f1b"),
    "async-1f1b, stash": Ours("async-1f1b", staleness="stash", steps=ASYNC_STEPS),
}


def build_plans(
    model: nn.Module,
    inputs: dict[str, Tensor],
    ranks: int,
    micro_batches: int,
    names: Sequence[str],
    folder: Path,
) -> dict[tuple[str, int], Path]:
    """A generated folder for each schedule and number of stages a rank."""
    folders = {}
    for name in names:
        ours = OURS[name]
        made = folder / f"{ours.schedule}_{ours.each}"
        if not made.exists():
            asyncpipe.partition(
                model,
                inputs,
                stages=ranks * ours.each,
                schedule=ours.schedule,
                micro_batches=micro_batches,
                threads=1,
                name="gpt",
                output=made,
            )
        folders[ours.schedule, ours.each] = made
    return folders


def pipeline(
    folders: Mapping[tuple[str, int], Path],
    ours: Ours,
    batch: Sequence[dict[str, Tensor]],
    rank: int,
    ranks: int,
) -> Callable[[], Any]:
    """One sample of one of our configurations, on this rank."""
    folder = folders[ours.schedule, ours.each]
    plan, count = read_plan(folder), len(batch)
    schedule = lower(
        make_schedule(
            ours.schedule,
            stages=len(plan.stages),
            micro_batches=count * ours.steps,
            step_every=count,
        ),
        forward_edges(plan),
        grad_edges=gradient_edges(plan),
    )
    own = [stage for stage, at in enumerate(schedule.rank_of_stage) if at == rank]
    stages = {stage: load_stage(folder, plan, stage).train() for stage in own}
    pipe = Pipeline(
        plan,
        stages,
        GlooTransport(),
        rank_of_stage=schedule.rank_of_stage,
        staleness=ours.staleness,
    )
    optimizers: dict[int, torch.optim.Optimizer] = {
        stage: peers.optimizer_of(module.parameters()) for stage, module in stages.items()
    }
    observer = StepOptimizers(optimizers)
    return lambda: pipe.run(schedule, lambda i: batch[i % count], observer=observer)
