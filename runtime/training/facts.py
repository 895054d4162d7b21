"""A run before it starts -> the lines that say what will be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..boundary_dtypes import BoundaryDtypes
from ..data.task import TARGET
from ..environment import describe as describe_environment
from ..forecast import Forecast, few_micro_batches_warning, forecast_step
from ..launching.placement import describe_placement, describe_ranks, placement_warning
from ..launching.seats import Machine
from ..optimizers.refresh import refresh_periods
from ..pipeline import needed_inputs
from ..plan import Plan, StageMemory
from ..replication.grid import grid_of
from ..replication.replicas import describe_stages, in_words
from ..schedule import Schedule
from ..schedules import AUTO
from ..transports.choose import Choice
from ..watching.metrics import Predicted, Reporter, StartRecord
from ..weight_copies import KEEPS
from .asynchronous import (
    delays_of,
    describe_copies,
    describe_delays,
    longest_segment,
    steps_of_start,
)
from .half import describe_memory, describe_precision, precision_warning
from .remeasure import when_measured
from .resolve import batch_identity, costs_at_sizes
from .segments import make_segment, waiting_stages
from .settings import Settings
from .sources import Data
from .transfers import with_transfers_of_run

if TYPE_CHECKING:
    from .setup import Job

_CLIPPED = {
    "stage": "of each stage",
    "proportion": "of each stage, in proportion to its weights,",
    "global": "over all stages",
    "known": "over all stages, as far as known,",
}


def forecast_run(
    plan: Plan,
    planned: Plan,
    settings: Settings,
    cores: int,
    schedule: Schedule,
    dtypes: BoundaryDtypes,
    *,
    optimizer_ms: Sequence[float] | None = None,
) -> Forecast | None:
    """The simulated step, at the plan's costs scaled to the run's sizes, with the transfers of its
    `dtypes`; None without costs.

    Ranks, and replicas, share the cores when they compute on CPUs. `optimizer_ms` are milliseconds
    of each stage's optimizer, which a plan does not know; without them its steps are free.
    """
    if not all(stage.forward_ms > 0 for stage in plan.stages):
        return None
    steps = max(1, min(settings.steps, 8))
    return forecast_step(
        with_transfers_of_run(costs_at_sizes(plan, planned), planned, dtypes),
        schedule if schedule.synchronous else make_segment(plan, settings, steps=steps),
        settings.micro_batches or 1,
        processors=max(1, cores // (settings.replicas or 1)) if settings.device == "cpu" else None,
        steps=steps,
        step_ms=optimizer_ms,
        shared_stages=waiting_stages(plan, settings),
    )


def announce(
    reporter: Reporter,
    job: Job,
    schedule: Schedule,
    machine: Machine,
    *,
    transport: Choice,
    data: str,
    forecast: Forecast | None,
    dtypes: BoundaryDtypes,
) -> None:
    """Tells the reporter what will be done, and what is legal but probably not meant."""
    settings, plan = job.settings, job.plan
    facts = [
        ("plan", f"{plan.name} · {len(plan.stages)} stages · {plan.method}"),
        ("ranks", describe_ranks(grid_of(schedule, settings.replicas), transport, machine)),
        ("algorithm", describe_algorithm(schedule, settings)),
        *describe_schedule(schedule, settings),
        *describe_staleness(plan, schedule, settings),
        ("batch", batch_identity(settings, job.task)),
        ("data", data),
        ("optimizer", describe_optimizer(settings, schedule.delays)),
    ]
    if placed := describe_placement(plan, schedule, machine):
        facts.insert(2, ("placement", placed))
    if precision := describe_precision(settings, plan, dtypes):
        facts.append(("precision", precision))
    if forecast is not None:
        text = (
            f"{forecast.step_ms:.0f} ms a step without the optimizer, "
            f"ranks idle {forecast.idle_share:.0%}"
        )
        facts.append(("simulated", text))
    if memory := describe_memory(settings, plan):
        facts.append(("memory", memory))
    facts.append(("output", str(job.folder)))
    reporter.on_start(
        StartRecord(
            tuple(facts),
            predict(costs_at_sizes(plan, job.planned), schedule, forecast),
            settings.micro_batches or 1,
            settings.replicas or 1,
            tuple(schedule.stages_of(rank) for rank in range(len(schedule.ranks))),
            describe_environment(),
            tuple((settings.staleness or "none").split("+")) if settings.is_async else (),
        )
    )
    few = few_micro_batches_warning(
        settings.schedule,
        ranks=min(len(schedule.ranks), schedule.stages),
        micro_batches=settings.micro_batches or 1,
    )
    if few:
        reporter.on_warning(few)
    if other := precision_warning(settings, plan):
        reporter.on_warning(other)
    copies = replicas_warning(plan, settings.replicas or 1)
    if copies and not schedule.replicas:
        reporter.on_warning(copies)
    if misplaced := placement_warning(plan, machine):
        reporter.on_warning(misplaced)


def predict(plan: Plan, schedule: Schedule, forecast: Forecast | None) -> Predicted:
    """What the plan, at the sizes of the run, says of its steps, stages and ranks."""
    has_times = all(stage.forward_ms > 0 for stage in plan.stages)
    has_memory = all(stage.peak_bytes for stage in plan.stages)
    memory = [
        [plan.stages[stage].memory for stage in schedule.stages_of(rank)]
        for rank in range(len(schedule.ranks))
    ]
    return Predicted(
        step_ms=forecast.step_ms if forecast else None,
        idle_share=forecast.idle_share if forecast else None,
        forward_ms=tuple(stage.forward_ms for stage in plan.stages) if has_times else (),
        backward_ms=tuple(stage.backward_ms for stage in plan.stages) if has_times else (),
        peak_bytes=tuple(map(together, memory)) if has_memory else (),
    )


def together(stages: Sequence[StageMemory]) -> int:
    """The bytes of a rank with these stages, which share the room that one operation needs."""
    kept = sum(memory.total - memory.transient for memory in stages)
    return kept + max((memory.transient for memory in stages), default=0)


def replicas_warning(plan: Plan, replicas: int) -> str:
    """Of a plan that has stages on several ranks, as a run of whole pipelines has not; "" if it
    has none."""
    replicated = [stage for stage in plan.stages if len(stage.ranks) not in (1, replicas)]
    if not replicated:
        return ""
    stages = ", ".join(f"stage {stage.index} on {len(stage.ranks)} ranks" for stage in replicated)
    return (
        f"the plan has {stages}, but training runs {in_words(replicas)} of each stage, so a step "
        "takes longer than planned."
    )


def describe_data(data: Data, plan: Plan, schedule: Schedule, settings: Settings) -> str:
    """The data, and which ranks read inputs and labels of it."""
    labels = "labels" if plan.loss is not None else "targets"
    ranks = range(len(schedule.ranks))
    inputs, answers = [], []
    for rank in ranks:
        own = schedule.stages_of(rank)
        read = set(needed_inputs(plan, own, criterion=settings.criterion is not None))
        if read - {"labels", TARGET}:
            inputs.append(str(rank))
        if read & {"labels", TARGET}:
            answers.append(str(rank))
    if len(ranks) == 1 or not answers:
        return data.description
    return f"{data.description} · {_readers(inputs)} inputs, {_readers(answers)} {labels}"


def describe_algorithm(schedule: Schedule, settings: Settings) -> str:
    """What the schedule does to the weights, in a sentence."""
    if schedule.synchronous:
        told = f"{schedule.name}, synchronous: the gradients of the plain model"
        if (replicas := settings.replicas or 1) > 1:
            told += f", averaged over {in_words(replicas)}"
        if schedule.replicas:
            told += f", summed over {describe_stages(schedule.replicas)}"
        return told
    delays = delays_of(schedule, settings)
    worst = max(range(schedule.stages), key=delays.most)
    late = f"{delays.most(worst)} step{'' if delays.most(worst) == 1 else 's'}"
    names = (settings.staleness or "none").split("+")
    if not delays.most(worst):
        way = "no weights are stale: one micro-batch at a time goes through all stages"
    elif "2bw" in names:
        way = "two versions of the weights: every stage computes on those of the step before"
    elif "stash" in names:
        way = (
            f"weight stashing: stage {worst} computes on weights at most {late} old, forward and "
            "backward alike"
        )
    elif "pipemare" in names:
        way = f"pipemare: a backward meets an estimate of the weights of up to {late} before"
    elif any(KEEPS[name].predicted for name in names):
        way = f"predicted weights: a forward looks up to {late} ahead"
    else:
        way = f"live weights: a backward meets weights up to {late} newer than its forward"
    if others := [name for name in names if name not in ("2bw", "stash", "pipemare", "none")]:
        way += f", with {' and '.join(others)}"
    return f"{schedule.name}, {way}; {_when_drained(settings)}"


def _when_drained(settings: Settings) -> str:
    longest = min(longest_segment(settings), settings.flush_every or settings.steps)
    often = f" and every {longest} steps" if settings.steps > longest else ""
    borders = "evaluations and checkpoints" if settings.save_every else "evaluations"
    told = f"drained at {borders}{often}"
    if first := steps_of_start(settings):
        told += f"; the first {first} steps are synchronous 1f1b"
    if settings.left_over:
        told += f"; the last step has {settings.left_over} micro-batches, and as much less weight"
    return told


def describe_staleness(plan: Plan, schedule: Schedule, settings: Settings) -> list[tuple[str, str]]:
    """How stale the weights of an asynchronous run are, and which copies of them ranks keep."""
    if not settings.is_async:
        return []
    facts = [("staleness", describe_delays(schedule, settings))]
    if copies := describe_copies(plan, schedule, settings):
        facts.append(("versions", copies))
    return facts


def describe_schedule(schedule: Schedule, settings: Settings) -> list[tuple[str, str]]:
    """Where a schedule without a name comes from, and what ranks have, if some have several."""
    parts = []
    if settings.schedule_file:
        parts.append(f"from {settings.schedule_file}")
    if settings.schedule == AUTO:
        parts.append(f"computed from the plan's costs, {when_measured(settings)}")
    if 1 < len(schedule.ranks) < schedule.stages:
        own: list[list[str]] = [[] for _ in schedule.ranks]
        for stage, rank in enumerate(schedule.rank_of_stage):
            own[rank].append(str(stage))
        of_ranks = (f"{' '.join(stages)} on rank {rank}" for rank, stages in enumerate(own))
        parts.append(f"stages {', '.join(of_ranks)}")
    return [("schedule", "; ".join(parts))] if parts else []


def describe_optimizer(settings: Settings, delays: Sequence[int] = (0,)) -> str:
    """The optimizer, what it is for, its learning rate over time and the clipping."""
    name = str(settings.optimizer)
    if name in ("muon", "soap"):
        name += " of hidden matrices and adamw of the rest"
    parts = [f"{name}, lr {settings.lr:g}"]
    if settings.momentum:
        parts.append(f"momentum {settings.momentum:g}")
    if settings.refresh_every:
        periods = sorted({*refresh_periods(delays, settings.refresh_every)})
        by_stage = f" to {periods[-1]}" if periods[1:] else ""
        parts.append(f"new bases every {periods[0]}{by_stage} steps")
    if settings.weight_decay:
        parts.append(f"weight decay {settings.weight_decay:g} on matrices")
    if settings.warmup:
        parts.append(f"{settings.warmup} step{'s' if settings.warmup > 1 else ''} of warm-up")
    if settings.decay not in (None, "none"):
        parts.append(f"{settings.decay} decay to {settings.final_lr_ratio or 0:.0%}")
    if settings.clip:
        scope = _CLIPPED[settings.clip_by or "global"]
        parts.append(f"gradient norm {scope} at most {settings.clip:g}")
    return ", ".join(parts)


def _readers(ranks: list[str]) -> str:
    return f"rank {ranks[0]} reads" if len(ranks) == 1 else f"ranks {', '.join(ranks)} read"
