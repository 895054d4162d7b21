"""Our pipelines as the runtime benchmark runs them: plan, schedule and transport."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import peers
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import asyncpipe
from asyncpipe.runtime.executor.compiled import compile_stage
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import StepOptimizers
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS
from asyncpipe.runtime.schedule.builders import AUTO, make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.schedule.finalists import Trial, finalists, medians_of
from asyncpipe.runtime.schedule.run_ahead import times_ahead
from asyncpipe.runtime.schedule.schedule import Schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts
from asyncpipe.runtime.schedule.tasks import Tasks
from asyncpipe.runtime.training.remeasure import with_split_backwards, with_whole_backwards
from asyncpipe.runtime.transports.choose import open_transport

ASYNC_MICRO_BATCHES = 48
MEASURED_STEPS = 3
TRIED_STEPS = 1000
DEFAULT = "default"
"""As many forwards ahead as a run takes by default for the plan."""


@dataclass(frozen=True)
class Ours:
    """A schedule with `each` stages on a rank; asynchronous, it steps every `every` micro-batches,
    by default after each batch, and as many forwards `ahead` as `--ahead` says."""

    schedule: str
    each: int = 1
    transport: str = "shm"
    staleness: str = "none"
    every: int | None = None
    ahead: str | None = None
    compiled: bool = False

    @property
    def is_async(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @property
    def planned(self) -> "Planned":
        return self.schedule, self.each, self.every


Planned = tuple[str, int, int | None]
"""The conditions of a plan: a schedule, stages per rank, micro-batches between two steps."""


OURS = {
    "gpipe": Ours("gpipe"),
    "1f1b": Ours("1f1b"),
    "1f1b over gloo": Ours("1f1b", transport="gloo"),
    "zb-h1": Ours("zb-h1"),
    "interleaved, 2 a rank": Ours("interleaved", 2),
    "interleaved, 4 a rank": Ours("interleaved", 4),
    "looped-bfs, 2 a rank": Ours("looped-bfs", 2),
    "zb-v": Ours("zb-v", 2),
    "auto, 1 a rank": Ours(AUTO, 1),
    "auto, 2 a rank": Ours(AUTO, 2),
    "auto, 4 a rank": Ours(AUTO, 4),
    "1f1b, compiled": Ours("1f1b", compiled=True),
    "async-1f1b, stash": Ours("async-1f1b", staleness="stash"),
    "async-1f1b, none": Ours("async-1f1b"),
    "async-1f1b, stash, k = 1": Ours("async-1f1b", staleness="stash", every=1),
    "async-1f1b, stash, as far ahead as by default": Ours(
        "async-1f1b", staleness="stash", ahead=DEFAULT
    ),
    "async-1f1b, stash, ahead 2x": Ours("async-1f1b", staleness="stash", ahead="2x"),
    "async-1f1b, stash, ahead 2x, k = 1": Ours("async-1f1b", 1, "shm", "stash", 1, "2x"),
}


def build_plans(
    model: nn.Module,
    inputs: dict[str, Tensor],
    ranks: int,
    micro_batches: int,
    names: Sequence[str],
    folder: Path,
    cut_at: Sequence[str] = (),
) -> dict[Planned, Path]:
    """A generated folder for each set of configurations with equal plans, with the cuts of
    `cut_at` if given."""
    folders = {}
    for name in names:
        ours = OURS[name]
        made = folder / f"{ours.schedule}_{ours.each}_{ours.every or micro_batches}"
        if not made.exists():
            asyncpipe.partition(
                model,
                inputs,
                stages=ranks * ours.each,
                ranks=ranks if ours.each > 1 else None,
                schedule=ours.schedule,
                micro_batches=ours.every or micro_batches,
                prefer_modules=0.0,
                cut_at=cut_at,
                threads=1,
                name="gpt",
                output=made,
            )
        folders[ours.planned] = made
    return folders


class StepTimes(StepOptimizers):
    """Steps the optimizers, and records when the first of the rank's stages did so."""

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        super().__init__(optimizers)
        self.seconds: list[float] = []

    def on_step(self, stage: int, version: int) -> None:
        if stage in self.optimizers:
            super().on_step(stage, version)
        if stage == min(self.optimizers):
            self.seconds.append(time.perf_counter())


class Configuration:
    """One of our configurations on this rank; a `step` is one sample."""

    def __init__(
        self, folder: Path, ours: Ours, batch: Sequence[dict[str, Tensor]], rank: int, ranks: int
    ) -> None:
        self._plan, self._batch = read_plan(folder), batch
        ahead = ours.ahead
        if ahead == DEFAULT:
            costs = costs_of_plan(self._plan)
            ahead = f"{times_ahead(costs, len(batch), self._plan.setting.spread)}x"
        made = make_schedule(
            ours.schedule,
            stages=len(self._plan.stages),
            micro_batches=ASYNC_MICRO_BATCHES if ours.is_async else len(batch),
            step_every=ours.every or len(batch),
            ranks=ranks,
            **({"costs": costs_of_plan(self._plan)} if ours.schedule == AUTO else {}),
            **({"ahead": ahead} if ahead else {}),
        )
        self.rank_of_stage = made.rank_of_stage
        own = [stage for stage, at in enumerate(made.rank_of_stage) if at == rank]
        modules = {stage: load_stage(folder, self._plan, stage).train() for stage in own}
        for module in modules.values() if ours.compiled else ():
            compile_stage(module)
        self._pipe = Executor(
            self._plan,
            modules,
            open_transport(ours.transport, dist.group.WORLD, timeout_s=300.0, device="cpu"),
            rank_of_stage=made.rank_of_stage,
            staleness=ours.staleness,
        )
        self._is_async = ours.is_async
        self._observer = StepTimes(
            {
                stage: peers.optimizer_of(parameters)
                for stage, module in modules.items()
                if (parameters := list(module.parameters()))
            }
        )
        self.schedule = self.lowered(made)
        if ours.schedule == AUTO:
            costs, spread = self._measured(made)
            tasks = Tasks(
                costs,
                made.rank_of_stage,
                len(batch),
                edges=forward_edges(self._plan),
                grad_edges=gradient_edges(self._plan),
                shared_stages=[[j for j, _ in each.holders] for each in self._plan.shared],
            )
            self.schedule = self._fastest([self.lowered(each) for each in finalists(tasks, spread)])

    def step(self) -> tuple[float, int] | None:
        """One batch; of an asynchronous pipeline the seconds between its first step and its last,
        and the micro-batches that were done in them, without what fills the pipeline."""
        self._observer.seconds.clear()
        self.run(self.schedule)
        seconds = self._observer.seconds
        done = (len(seconds) - 1) * self.schedule.step_every
        return (seconds[-1] - seconds[0], done) if self._is_async else None

    def run(self, schedule: Schedule, *, record: bool = False) -> Any:
        count = len(self._batch)
        return self._pipe.run(
            schedule, lambda i: self._batch[i % count], observer=self._observer, record=record
        )

    def lowered(self, made: Schedule) -> Schedule:
        return lower(made, forward_edges(self._plan), grad_edges=gradient_edges(self._plan))

    def _measured(self, made: Schedule) -> tuple[ActionCosts, float]:
        """The measured costs of the actions of all ranks, backwards whole and split, and by which
        share they vary; the same on all ranks. `asyncpipe-train --schedule auto` measures its first
        steps the same way."""
        taken: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        orders = with_whole_backwards(made), with_split_backwards(made)
        for is_split, schedule in enumerate(orders):
            lowered = self.lowered(schedule)
            self.run(lowered)
            for _ in range(MEASURED_STEPS):
                for action, start_s, end_s in self.run(lowered, record=True).events:
                    taken[is_split, action.kind, action.stage].append(1e3 * (end_s - start_s))
        own = {key: (median(values), pstdev(values)) for key, values in taken.items()}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        found = {key: value for of_rank in of_ranks for key, value in of_rank.items()}
        ms = {key: middle for key, (middle, _) in found.items()}
        stages = range(made.stages)
        split = [ms[True, "B", stage] + ms[True, "W", stage] for stage in stages]
        costs = ActionCosts(
            forward_ms=tuple(ms[False, "F", stage] for stage in stages),
            backward_ms=tuple(ms[False, "B", stage] for stage in stages),
            step_ms=tuple(ms[False, "S", stage] for stage in stages),
            weight_ms=tuple(ms[True, "W", stage] for stage in stages),
            split_ms=tuple(max(0.0, split[stage] - ms[False, "B", stage]) for stage in stages),
        )
        shares = [off / middle for (_, kind, _), (middle, off) in found.items() if kind != "S"]
        return costs, mean(shares)

    def _fastest(self, schedules: list[Schedule]) -> Schedule:
        """The schedule with the shortest measured steps; they alternate."""
        trials, taken_ms = [Trial.first(len(schedules), TRIED_STEPS)], []
        while len(trials[-1].entrants) > 1:
            for number in range(trials[-1].begin, trials[-1].end):
                start_s = time.perf_counter()
                self.run(schedules[trials[-1].tried_in(number)])
                taken_ms.append(1e3 * (time.perf_counter() - start_s))
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, taken_ms)
            step_ms = [mean(taken) for taken in zip(*of_ranks, strict=True)]
            trials.append(trials[-1].next(medians_of(trials, step_ms)))
        return schedules[trials[-1].entrants[0]]


def costs_of_plan(plan: Plan) -> ActionCosts:
    return ActionCosts(
        forward_ms=tuple(stage.forward_ms for stage in plan.stages),
        backward_ms=tuple(stage.backward_ms for stage in plan.stages),
        step_ms=(0.0,) * len(plan.stages),
    )


def pipeline(
    folders: Mapping[Planned, Path],
    ours: Ours,
    batch: Sequence[dict[str, Tensor]],
    rank: int,
    ranks: int,
) -> Callable[[], Any]:
    """One sample of one of our configurations, on this rank."""
    return Configuration(folders[ours.planned], ours, batch, rank, ranks).step
