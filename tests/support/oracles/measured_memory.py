"""Memory that a rank really allocates: every allocation of the CPU's allocator, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import Observer
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.gloo import GlooTransport
from asyncpipe.tests.support.models.generated import LARGER

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


@dataclass
class Peak:
    """The most bytes at one time, and how many were left at the end."""

    num_bytes: int = 0
    left: int = 0


@contextmanager
def peak_of_allocations() -> Iterator[Peak]:
    """Around code: the most bytes that were allocated in it and not yet freed, at one time.

    The profiler sees each call of the allocator, from any thread and from inside of operations.
    """
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak.num_bytes = max(peak.num_bytes, now)
    peak.left = now


class Stepping(Observer):
    def __init__(self, optimizers: dict[int, torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def on_step(self, stage: int, version: int) -> None:
        self.optimizers[stage].step()


def peak_of_rank(rank: int, name: str, folder: Path, steps: int = 3) -> int:
    """Trains `steps` steps as the plan is meant to run; the peak bytes of this rank."""
    case, plan = LARGER[name], read_plan(folder)
    setting = plan.setting
    is_asynchronous = setting.schedule in ASYNCHRONOUS
    made = make_schedule(
        setting.schedule,
        stages=len(plan.stages),
        micro_batches=setting.micro_batches * (steps if is_asynchronous else 1),
        step_every=setting.micro_batches,
    )
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
    inputs = [case.micro_batch(i) for i in range(steps * setting.micro_batches)]
    with peak_of_allocations() as peak:
        stages = {rank: load_stage(folder, plan, rank).train()}
        pipeline = Executor(
            plan,
            stages,
            GlooTransport(),
            criterion=torch.nn.functional.cross_entropy if case.criterion else None,
            staleness=setting.staleness,
        )
        optimizers = {
            j: OPTIMIZERS[setting.optimizer](
                [weight for weight in stage.parameters() if weight.requires_grad]
                or [torch.zeros(0)]
            )
            for j, stage in stages.items()
        }
        for number in range(1 if is_asynchronous else steps):
            pipeline.run(
                schedule,
                inputs.__getitem__,
                first_micro_batch=number * setting.micro_batches,
                observer=Stepping(optimizers),
            )
        pipeline.close()
    return peak.num_bytes
