"""Runs hand models through the executor: in one thread, or on one rank of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import Observer, RunReport
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.schedule.schedule import Action, Schedule, count_in_flight
from asyncpipe.runtime.schedule.validation import validate
from asyncpipe.runtime.staleness.weight_versions import IsFinal, LedgerEntry, WeightVersions
from asyncpipe.runtime.training.clipping import share_of
from asyncpipe.runtime.training.replica_gradients import GradientSums
from asyncpipe.runtime.transports import LocalHub, Transport, run_together
from asyncpipe.tests.support.models.hand_plans import HandModel
from asyncpipe.tests.support.oracles.async_simulation import (
    Gradients,
    Optimize,
    one_group_each,
    scaled_step,
)

Factors = Callable[[int], float]
"""The factor on the learning rate of the step that makes a version, by version."""


def lowered(
    model: HandModel, name: str, micro_batches: int, step_every: int | None = None, **options: Any
) -> Schedule:
    schedule = make_schedule(
        name,
        stages=len(model.stages),
        micro_batches=micro_batches,
        step_every=step_every,
        **options,
    )
    return lower(schedule, forward_edges(model.plan), grad_edges=gradient_edges(model.plan))


def with_split_backwards(schedule: Schedule, model: HandModel, *, behind: int) -> Schedule:
    """The same schedule with every backward in two parts, W `behind` backwards after its B, but
    before the stage's step."""
    rows = []
    for row in schedule.compute.ranks:
        made: list[Action] = []
        waiting: dict[int, list[Action]] = {}
        for action in row:
            put_off = waiting.setdefault(action.stage, [])
            if action.kind == "S":
                made += put_off
                put_off.clear()
            made.append(action)
            if action.kind == "B":
                put_off.append(action._replace(kind="W"))
                if len(put_off) > behind:
                    made.append(put_off.pop(0))
        rows.append(tuple(made))
    compute = replace(
        schedule.compute,
        ranks=tuple(rows),
        in_flight=count_in_flight(rows, schedule.stages),
    )
    lowered = lower(compute, forward_edges(model.plan), grad_edges=gradient_edges(model.plan))
    validate(lowered, forward_edges(model.plan), grad_edges=gradient_edges(model.plan))
    return lowered


def on_ranks(schedule: Schedule, model: HandModel, rank_of_stage: Sequence[int]) -> Schedule:
    """The forwards and backwards of a one-rank schedule on other ranks, each in the same order."""
    ranks = [
        tuple(action for action in schedule.compute.ranks[0] if rank_of_stage[action.stage] == rank)
        for rank in range(max(rank_of_stage) + 1)
    ]
    spread = replace(schedule.compute, ranks=tuple(ranks), rank_of_stage=tuple(rank_of_stage))
    return lower(spread, forward_edges(model.plan), grad_edges=gradient_edges(model.plan))


@dataclass
class Seen(Observer):
    """Notes losses, outputs, steps and the gradients at each step; steps optimizers if given."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    scale: Callable[[int, int, str], float] = lambda stage, version, name: 1.0
    steps: list[tuple[int, int]] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)

    def on_action(self, action: Any, start_s: float, end_s: float) -> None:
        assert start_s <= end_s
        self.actions.append(str(action.unversioned))

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        self.losses[micro_batch] = loss

    def on_outputs(self, micro_batch: int, outputs: Any) -> None:
        self.outputs.setdefault(micro_batch, {}).update(outputs)

    def on_step(self, stage: int, version: int) -> None:
        self.steps.append((stage, version))
        gradients = self.gradients.setdefault(version, {})
        for name, parameter in self.modules[stage].named_parameters():
            if parameter.grad is not None:
                gradients[stage, name] = parameter.grad.clone()
        if stage in self.optimizers:
            factors = {
                id(weight): self.scale(stage, version, name)
                for name, weight in self.modules[stage].named_parameters()
            }
            scaled_step(self.optimizers[stage], factors)


@dataclass
class Replica(Seen):
    """Sums gradients over the replicas of its rank, as a run does; each action takes `slow_s` more
    seconds."""

    sums: GradientSums | None = None
    slow_s: float = 0.0

    def on_begin(self, action: Action) -> None:
        time.sleep(self.slow_s)

    def on_backward(self, stage: int, version: int, *, is_last: bool) -> IsFinal | None:
        if self.sums is None or not is_last:
            return None
        self.sums.expect(stage)
        return self.sums.accumulated

    def on_gradients(self, stage: int, version: int) -> None:
        if self.sums is not None:
            self.sums.begin(stage)

    def on_sums(self, stage: int, version: int) -> None:
        if self.sums is not None:
            self.sums.finish(stage)


@dataclass
class Trained:
    """What came out of runs of all ranks."""

    modules: list[nn.Module]
    pipelines: list[Executor]
    seen: Seen
    reports: list[RunReport] = field(default_factory=list)

    @property
    def ledger(self) -> set[tuple[int, int, int, int]]:
        return {_row(entry) for report in self.reports for entry in report.ledger}


def train_together(
    model: HandModel,
    schedule: Schedule,
    *,
    segments: int = 1,
    then: Sequence[Schedule] = (),
    optimize: Optimize | None = None,
    factors: Factors | None = None,
    criterion: Callable[[Any, Tensor], Tensor] | None = None,
    staleness: str = "none",
    seed: int = 0,
    modules: list[nn.Module] | None = None,
    sizes: Sequence[Mapping[str, int]] | None = None,
    observer: type[Seen] = Seen,
    **options: Any,
) -> Trained:
    """All ranks of a schedule in this thread, for some segments one after the other, and `then`
    those of other schedules."""
    modules = modules or model.build()
    hub = LocalHub(len(schedule.ranks))
    pipelines = [
        make_pipeline(
            model,
            schedule,
            modules,
            hub.transport(rank),
            staleness,
            seed,
            criterion=criterion,
            **options,
        )
        for rank in range(len(schedule.ranks))
    ]
    seen = _seen(modules, optimize, observer)
    if optimize:
        _attach(pipelines, seen, factors or (lambda version: 1.0))
    trained = Trained(modules, pipelines, seen)
    first = 0
    for part in (*[schedule] * segments, *then):
        trained.reports += run_together(
            [
                pipeline.steps(
                    part,
                    model.make_inputs,
                    first_micro_batch=first,
                    observer=trained.seen,
                    sizes=sizes,
                )
                for pipeline in pipelines
            ]
        )
        first += part.micro_batches
        for pipeline in pipelines:
            pipeline.close()
    return trained


def train_rank(
    model: HandModel,
    schedule: Schedule,
    transport: Transport,
    *,
    segments: int = 1,
    optimize: Optimize | None = None,
    staleness: str = "none",
    seed: int = 0,
    replica: int = 0,
    copies: dist.ProcessGroup | None = None,
    slow_s: float = 0.0,
) -> dict[str, Any]:
    """One rank's part of the same, as plain data that a process can send back. `copies` are the
    ranks with the same stages in all replicas."""
    modules = model.build()
    pipeline = make_pipeline(model, schedule, modules, transport, staleness, seed)
    seen = _seen(modules, optimize, Replica)
    assert isinstance(seen, Replica)
    seen.slow_s, replicas = slow_s, 1
    if copies is not None:
        shares = {j: share_of(model.plan, j, modules[j]) for j in pipeline.stages}
        seen.sums, replicas = GradientSums(shares, copies, "replicas"), dist.get_world_size(copies)
    if optimize:
        _attach([pipeline], seen, lambda version: 1.0)
    ledger, in_all = [], replicas * schedule.step_every
    for segment in range(segments):
        report = pipeline.run(
            schedule,
            model.make_inputs,
            first_micro_batch=segment * schedule.steps * in_all + replica * schedule.step_every,
            micro_batches_in_all=in_all,
            step_samples=in_all * model.plan.sizes["batch"],
            observer=seen,
        )
        ledger += [_row(entry) for entry in report.ledger]
    pipeline.close()
    return {
        "losses": seen.losses,
        "gradients": seen.gradients,
        "ledger": ledger,
        "states": {j: modules[j].state_dict() for j in pipeline.stages},
    }


def make_pipeline(
    model: HandModel,
    schedule: Schedule,
    modules: Sequence[nn.Module],
    transport: Transport,
    staleness: str = "none",
    seed: int = 0,
    **options: Any,
) -> Executor:
    own = [j for j, rank in enumerate(schedule.rank_of_stage) if rank == transport.rank]
    return Executor(
        model.plan,
        {j: modules[j] for j in own},
        transport,
        rank_of_stage=schedule.rank_of_stage,
        staleness=staleness,
        seed=seed,
        **options,
    )


@dataclass(frozen=True)
class Planned:
    """An optimizer whose learning rate follows given factors."""

    optimizer: torch.optim.Optimizer | None
    factors: Factors
    weights: WeightVersions
    annealing_steps: int = 4
    moves_weights: bool = False

    def clip_factor(self, gradients: Sequence[Tensor], scale: float) -> float:
        return 1.0

    def follow(self, act: Callable[[], None]) -> None:
        pass

    def spread(self, tensors: Mapping[Tensor, Tensor]) -> None:
        pass

    def future_lr(self, steps: int) -> tuple[float, ...]:
        return tuple(self.factors(self.weights.version + 1 + step) for step in range(steps))


def _attach(pipelines: Sequence[Executor], seen: Seen, factors: Factors) -> None:
    """Lets staleness methods see the optimizers, and scale their learning rates."""
    home = {stage: pipeline for pipeline in pipelines for stage in pipeline.stages}

    def scale(stage: int, version: int, name: str) -> float:
        return factors(version) * home[stage].lr_scale(stage, version, name)

    for stage, pipeline in home.items():
        weights = pipeline.weights[stage]
        pipeline.attach({stage: Planned(seen.optimizers.get(stage), factors, weights)})
    seen.scale = scale


def _seen(modules: list[nn.Module], optimize: Optimize | None, observer: type[Seen] = Seen) -> Seen:
    stepped = {j: own for j, m in enumerate(modules) if (own := list(m.parameters()))}
    optimizers = (
        {j: one_group_each(optimize(own)) for j, own in stepped.items()} if optimize else {}
    )
    return observer(dict(enumerate(modules)), optimizers)


def _row(entry: LedgerEntry) -> tuple[int, int, int, int]:
    return entry.stage, entry.micro_batch, entry.forward_version, entry.backward_version
