"""A run's plan and options -> the lines that describe it at its start, and the summary at its end.

The transfer times of a plan hold for its sizes and dtypes. A run may have others; beyond its
latency, the time of a transfer scales with its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config.asynchronous_options import (
    delays_of,
    describe_copies,
    describe_delays,
    longest_segment,
    synchronous_steps,
)
from ..config.batch_layout import describe_stages, in_words
from ..config.freezing_options import describe_freezing
from ..config.mixed_precision import (
    describe_average,
    describe_memory,
    describe_precision,
    precision_warning,
)
from ..config.resolve import batch_identity, costs_at_sizes
from ..config.run_memory import memory_in_run
from ..config.segments import make_segment, waiting_stages
from ..config.settings import RunConfig
from ..control.learning_rate import WSD_SHARE
from ..data.task import TARGET
from ..distributed.cpu_affinity import Machine
from ..distributed.grid import Grid, grid_of
from ..distributed.placement import describe_placement, describe_ranks, placement_warnings
from ..executor.precision import BoundaryDtypes
from ..executor.run import needed_inputs
from ..formatting import counted, write_ms, write_share
from ..monitoring.idle import simulated_step, split_of_run
from ..monitoring.records import EvalRecord, PredictedStep, Reporter, StartRecord, Summary
from ..monitoring.trace import Tracing
from ..optimizers.facts import facts_of
from ..optimizers.soap import refresh_periods
from ..plan.forecast import (
    Forecast,
    few_micro_batches_warning,
    forecast_step,
    has_times,
    spec_bytes,
)
from ..plan.plan import Boundary, Plan, StageMemory, StageSpec, TensorSpec
from ..process import describe_environment
from ..schedule.asynchronous import KEEPS
from ..schedule.builders import AUTO
from ..schedule.schedule import Schedule
from ..sharding.planned import with_shares, with_sums
from ..staleness import parse
from ..transports.choose import TransportChoice
from ..transports.left_out import WITHOUT_NETWORK
from .batches import Data, tokenizer_warning
from .remeasure import when_measured
from .step_records import Watch

if TYPE_CHECKING:
    from .setup import Job, Setup


def with_transfers_of_run(plan: Plan, planned: Plan, dtypes: BoundaryDtypes) -> Plan:
    """The plan at the sizes of the run, with the transfers of its `dtypes` between ranks; the
    transfer times hold for the sizes of `planned`."""
    latency_ms = plan.setting.latency_ms

    def before(tensor: TensorSpec) -> float:
        return spec_bytes(tensor, planned.sizes)

    def now(tensor: TensorSpec) -> float:
        return math.prod(tensor.resolve(plan.sizes)) * dtypes.between_ranks(tensor).itemsize

    def scaled(time_ms: float, crossing: Collection[Boundary]) -> float:
        fixed_ms = min(time_ms, latency_ms * len(crossing))
        planned_bytes = _total(before, crossing)
        share = _total(now, crossing) / planned_bytes if planned_bytes else 1.0
        return fixed_ms + (time_ms - fixed_ms) * share

    def talking(stage: StageSpec) -> StageSpec:
        rank_of = plan.device_of_stage
        crossing = [*_leaving(stage.sends, rank_of), *_leaving(stage.receives, rank_of)]
        returning = [boundary for boundary in crossing if boundary.tensor.requires_grad]
        return replace(
            stage,
            forward_talk_ms=scaled(stage.forward_talk_ms, crossing),
            backward_talk_ms=scaled(stage.backward_talk_ms, returning),
        )

    def over(source: int, target: int) -> list[Boundary]:
        return [boundary for boundary in plan.stages[source].sends if target in boundary.targets]

    transfer_ms = tuple(
        (source, target, scaled(time_ms, over(source, target)))
        for source, target, time_ms in plan.setting.transfer_ms
    )
    return replace(
        plan,
        stages=tuple(map(talking, plan.stages)),
        setting=replace(plan.setting, transfer_ms=transfer_ms),
    )


def _total(size: Callable[[TensorSpec], float], crossing: Iterable[Boundary]) -> float:
    return sum(size(boundary.tensor) for boundary in crossing)


def _leaving(boundaries: Iterable[Boundary], rank_of: tuple[int, ...]) -> Iterable[Boundary]:
    """The boundaries that go to another rank."""
    for boundary in boundaries:
        if {rank_of[target] for target in boundary.targets} != {rank_of[boundary.source]}:
            yield boundary


_CLIPPED = {
    "stage": "per stage",
    "proportion": "per stage, in proportion to its weights",
    "global": "global norm",
    "known": "global norm, latest known",
}


def forecast_run(
    plan: Plan,
    planned: Plan,
    config: RunConfig,
    cores: int,
    schedule: Schedule,
    dtypes: BoundaryDtypes,
    *,
    optimizer_ms: Sequence[float] | None = None,
) -> Forecast | None:
    """The simulated step, with the plan's costs scaled to the run's sizes and the transfers of its
    `dtypes`; None without costs.

    On CPUs, ranks and replicas share the cores. `optimizer_ms` are the milliseconds of each stage's
    optimizer, which the plan lacks; without them optimizer steps cost nothing.
    """
    if not has_times(plan):
        return None
    steps = max(1, min(config.steps, 8))
    side_by_side = config.pipelines * config.tensor_ranks
    return forecast_step(
        with_transfers_of_run(costs_at_sizes(plan, planned), planned, dtypes),
        schedule if schedule.synchronous else make_segment(plan, config, steps=steps),
        config.micro_batches,
        processors=max(1, cores // side_by_side) if config.device == "cpu" else None,
        steps=steps,
        replicas=config.pipelines,
        step_ms=with_sums(plan, config, optimizer_ms),
        shared_stages=waiting_stages(plan, config),
    )


def announce(
    reporter: Reporter,
    job: Job,
    schedule: Schedule,
    machine: Machine,
    *,
    transport: TransportChoice,
    data: str,
    forecast: Forecast | None,
    dtypes: BoundaryDtypes,
) -> None:
    """Reports the setup of the run, with warnings of legal but probably unintended options."""
    config = job.config
    stages = tuple(schedule.stages_of(rank) for rank in range(len(schedule.ranks)))
    in_run = memory_in_run(job.plan, job.planned, config, schedule)
    plan, shared_out = with_shares(in_run, config, stages, job.code)
    if not config.has_network:
        reporter.on_warning(WITHOUT_NETWORK)
    grid = grid_of(schedule, config.pipelines, config.tensor_ranks)
    facts = [
        ("plan", f"{plan.name} · {len(plan.stages)} stages · {plan.method}"),
        ("ranks", describe_ranks(grid, transport, machine)),
        ("schedule", "; ".join(describe_schedule(schedule, config))),
        *describe_staleness(plan, schedule, config),
        ("batch", batch_identity(config, job.task)),
        ("data", data),
        ("optimizer", describe_optimizer(config, schedule.delays)),
    ]
    if placed := describe_placement(plan, schedule, machine, grid.tensor_ranks):
        facts.insert(2, ("placement", placed))
    if config.ema is not None:
        facts.append(("average", describe_average(config, plan)))
    if config.freeze is not None:
        facts.append(("freezing", describe_freezing(config, plan)))
    if precision := describe_precision(config, plan, dtypes):
        facts.append(("precision", precision))
    if forecast is not None:
        idle = write_share(forecast.idle_share)
        text = f"{write_ms(forecast.step_ms)} per step without the optimizer, {idle} idle"
        facts.append(("predicted", text))
    if memory := ", ".join(filter(None, (describe_memory(config, plan), shared_out))):
        facts.append(("memory", memory))
    facts.append(("output", str(job.folder)))
    reporter.on_start(
        StartRecord(
            tuple(facts),
            predict(costs_at_sizes(plan, job.planned), schedule, forecast),
            config.micro_batches,
            config.pipelines,
            stages,
            describe_environment(),
            parse(config.methods) if config.is_async else (),
            config.tensor_ranks,
        )
    )
    for warning in _warnings(job, schedule, machine, grid):
        reporter.on_warning(warning)


def _warnings(job: Job, schedule: Schedule, machine: Machine, grid: Grid) -> Iterator[str]:
    """Warnings of legal but probably unintended options."""
    config, plan = job.config, job.plan
    few = few_micro_batches_warning(
        config.schedule,
        ranks=min(len(schedule.ranks), schedule.stages),
        micro_batches=config.micro_batches,
    )
    if few:
        yield few
    if other := precision_warning(config, plan):
        yield other
    if bytes_alone := tokenizer_warning(config, plan, job.task):
        yield bytes_alone
    yield from placement_warnings(plan, machine, grid)


def predict(plan: Plan, schedule: Schedule, forecast: Forecast | None) -> PredictedStep:
    """The plan's predictions, at the sizes of the run, for steps, stages and ranks."""
    has_memory = all(stage.peak_bytes for stage in plan.stages)
    memory = [
        [plan.stages[stage].memory for stage in schedule.stages_of(rank)]
        for rank in range(len(schedule.ranks))
    ]
    return PredictedStep(
        step_ms=forecast.step_ms if forecast else None,
        idle_share=forecast.idle_share if forecast else None,
        forward_ms=tuple(stage.forward_ms for stage in plan.stages) if forecast else (),
        backward_ms=tuple(stage.backward_ms for stage in plan.stages) if forecast else (),
        peak_bytes=tuple(map(together, memory)) if has_memory else (),
    )


def together(stages: Sequence[StageMemory]) -> int:
    """The memory of a rank with these stages in bytes; transient memory is shared between
    stages."""
    lasting = sum(memory.total - memory.transient for memory in stages)
    return lasting + max((memory.transient for memory in stages), default=0)


def describe_data(data: Data, plan: Plan, schedule: Schedule, config: RunConfig) -> str:
    """The data, and the ranks that read inputs and labels, of tensor ranks the first."""
    labels = "labels" if plan.loss is not None else "targets"
    inputs, answers = [], []
    of_answers = {"labels", TARGET, plan.next_labels}
    for rank in range(len(schedule.ranks)):
        own = schedule.stages_of(rank)
        read = set(needed_inputs(plan, own, criterion=config.criterion is not None))
        if read - of_answers:
            inputs.append(str(rank * config.tensor_ranks))
        if read & of_answers:
            answers.append(str(rank * config.tensor_ranks))
    if len(schedule.ranks) == 1 or not answers:
        return data.description
    return f"{data.description} · {_readers(inputs)} inputs, {_readers(answers)} {labels}"


def describe_algorithm(schedule: Schedule, config: RunConfig) -> str:
    """The effect of the schedule on the weights, in one sentence."""
    averaged = f"averaged over {in_words(config.pipelines)}" if config.pipelines > 1 else ""
    if schedule.synchronous:
        summed = f"summed over {describe_stages(schedule.replicas)}" if schedule.replicas else ""
        parts = ["same gradients as single-device training", averaged, summed]
        return f"{schedule.name} (synchronous; {', '.join(filter(None, parts))})"
    delays = delays_of(schedule, config)
    worst = max(range(schedule.stages), key=delays.most)
    late = f"{delays.most(worst)} step{'' if delays.most(worst) == 1 else 's'}"
    names = parse(config.methods)
    if not delays.most(worst):
        way = "no stale weights: one micro-batch at a time passes through all stages"
    elif "2bw" in names:
        way = "two weight versions: every stage computes on the weights of the previous step"
    elif "stash" in names:
        way = (
            "weight stashing: the backward uses the weights of its forward, at most "
            f"{late} stale at stage {worst}"
        )
    elif "pipemare" in names:
        way = f"pipemare: the backward estimates the weights of up to {late} earlier"
    elif any(KEEPS[name].predicted for name in names):
        way = f"predicted weights: the forward predicts weights up to {late} ahead"
    else:
        way = f"no stashing: the backward uses weights up to {late} newer than its forward"
    if others := [name for name in names if name not in ("2bw", "stash", "pipemare", "none")]:
        way += f", with {' and '.join(others)}"
    gradients = f", gradients {averaged}" if averaged else ""
    return f"{schedule.name} (asynchronous{gradients}; {way}); {_when_drained(config)}"


def _when_drained(config: RunConfig) -> str:
    longest = min(longest_segment(config), config.flush_every or config.steps)
    often = f" and every {longest} steps" if config.steps > longest else ""
    borders = "evaluations and checkpoints" if config.save_every else "evaluations"
    text = f"drained at {borders}{often}"
    ends = zip(("first", "last"), synchronous_steps(config), strict=True)
    parts = [f"the {which} {counted(steps, 'step')}" for which, steps in ends if steps]
    return f"{text}; synchronous 1f1b for {' and '.join(parts)}" if parts else text


def describe_staleness(plan: Plan, schedule: Schedule, config: RunConfig) -> list[tuple[str, str]]:
    """The staleness of an asynchronous run's weights, and the copies that ranks keep."""
    if not config.is_async:
        return []
    facts = [("staleness", describe_delays(schedule, config))]
    if copies := describe_copies(plan, schedule, config):
        facts.append(("versions", copies))
    return facts


def describe_schedule(schedule: Schedule, config: RunConfig) -> list[str]:
    """The effect of the schedule on the weights, its origin if it has no name, and each rank's
    stages if some have several."""
    parts = [describe_algorithm(schedule, config)]
    if config.schedule_file:
        parts.append(f"from {config.schedule_file}")
    if config.ahead:
        parts.append(f"--ahead {config.ahead}")
    if config.schedule == AUTO:
        parts.append(f"computed from the plan's costs, {when_measured(config)}")
    if 1 < len(schedule.ranks) < schedule.stages:
        own: list[list[str]] = [[] for _ in schedule.ranks]
        for stage, rank in enumerate(schedule.rank_of_stage):
            own[rank].append(str(stage))
        of_ranks = (f"{' '.join(stages)} on rank {rank}" for rank, stages in enumerate(own))
        parts.append(f"stages {', '.join(of_ranks)}")
    return parts


def describe_optimizer(config: RunConfig, delays: Sequence[int] = (0,)) -> str:
    """The optimizer, its parameters, its learning rate over time and the clipping."""
    name = str(config.optimizer)
    facts = facts_of(name)
    arguments = [f"lr={config.lr:g}"]
    if config.momentum:
        arguments.append(f"momentum={config.momentum:g}")
        arguments += ["nesterov=True"] * bool(config.nesterov)
    if config.weight_decay:
        arguments.append(f"weight_decay={config.weight_decay:g} on matrices")
    title = facts.title or name
    parts = [f"{title}({', '.join(arguments)})"]
    if facts.hidden_matrices_only:
        parts.append("AdamW for parameters other than hidden matrices")
    if config.refresh_every:
        periods = sorted({*refresh_periods(delays, config.refresh_every)})
        by_stage = f" to {periods[-1]}" if periods[1:] else ""
        parts.append(f"new bases every {periods[0]}{by_stage} steps")
    if config.lr_schedule:
        parts.append(f"lr schedule {config.lr_schedule}")
    if config.warmup:
        parts.append(f"warmup {counted(config.warmup, 'step')}")
    if config.decay not in (None, "none"):
        part = f"{config.decay} decay to {write_share(config.final_lr_ratio)}"
        is_late = config.decay == "wsd"
        parts.append(part + (f" in the last {write_share(WSD_SHARE)} of the steps" * is_late))
    if config.clip:
        parts.append(f"grad clip {config.clip:g} ({_CLIPPED[config.clip_by or 'global']})")
    return " · ".join(parts)


def _readers(ranks: list[str]) -> str:
    return f"rank {ranks[0]} reads" if len(ranks) == 1 else f"ranks {', '.join(ranks)} read"


def report_end(
    setup: Setup,
    schedule: Schedule,
    tracing: Tracing,
    *,
    watch: Watch | None,
    evaluated: EvalRecord | None,
) -> None:
    """Merges the ranks' traces, and reports the end of the run on rank 0; every rank calls it."""
    job, reporter = setup.job, setup.reporter
    plan, config, folder = job.plan, job.config, job.folder
    traced = tracing.write(setup.world, schedule, folder)
    if watch is None or reporter is None:
        return
    if not watch.records:
        exported = f", {config.export_hf}" if config.export_hf else ""
        reporter.on_note("weights", f"{folder / 'weights'}{exported} · no steps left to train")
        return
    # Stages take the same time in all replicas and tensor ranks; those of the first come first.
    optimizer_ms = watch.optimizer_ms
    by_stage = [
        optimizer_ms[rank] / schedule.rank_of_stage.count(rank) for rank in schedule.rank_of_stage
    ]
    cores, dtypes = setup.world.machine.cores, setup.dtypes
    forecast = forecast_run(
        plan, job.planned, config, cores, schedule, dtypes, optimizer_ms=by_stage
    )
    first, last = watch.records[0], watch.records[-1]
    whole, by_rank = split_of_run(plan, config, schedule, watch.times)
    if traced and traced[1].events:
        in_pipeline = watch.times[:: config.tensor_ranks][: len(schedule.ranks)]
        costs, simulated = simulated_step(plan, config, schedule, forecast, in_pipeline)
        reporter.on_timelines(costs, simulated, traced[1])
    reporter.on_end(
        Summary(
            steps=last.step,
            seconds=last.elapsed_s,
            first_loss=first.loss,
            last_loss=last.loss,
            eval_loss=evaluated.loss if evaluated else None,
            accuracy=evaluated.accuracy if evaluated else None,
            metrics=evaluated.metrics if evaluated else {},
            idle=whole.total,
            idle_parts=whole,
            idle_parts_by_rank=by_rank,
            simulated_idle=forecast.idle_share if forecast else None,
            step_ms=watch.step_ms,
            simulated_step_ms=forecast.step_ms if forecast else None,
            output=str(folder),
            weights=str(folder / "weights") if config.has_network else "",
            exported=config.export_hf,
            trace=traced[0] if traced else None,
            staleness=watch.staleness,
            epoch=last.epoch,
            rate=watch.rate,
            unit=last.unit,
            sent_bytes=watch.sent_bytes,
            pace=watch.pace,
        )
    )
