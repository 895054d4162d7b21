"""Trained stages and the figures of a run -> its weights on disk, and the summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ..activity import Activities, Activity
from ..boundary_dtypes import BoundaryDtypes
from ..launching.world import World
from ..plan import Plan
from ..schedule import Schedule
from ..watching.idleness import simulated_step, split_of_run
from ..watching.metrics import EvalRecord, Reporter, Summary
from ..watching.tracing import Tracing
from ..watching.watch import Watch
from .export import copy_configuration, write_weights
from .facts import forecast_run
from .settings import Settings


def save_weights(
    plan: Plan,
    settings: Settings,
    folder: Path,
    modules: Mapping[int, nn.Module],
    unused: Mapping[str, Tensor],
    world: World,
    activities: Activities,
) -> None:
    """Writes the first replica's weights, and exports them if asked to; every rank calls it.
    `unused` are as for `write_weights`."""
    targets = [folder / "weights", *([Path(settings.export_hf)] if settings.export_hf else [])]
    for target in targets:
        with activities.during(Activity("other", "writes the weights")):
            write_weights(target, plan, modules if world.copy == 0 else {}, unused, world)
    if settings.export_hf and world.rank == 0:
        copy_configuration(Path(settings.export_hf), Path(settings.folder))
    with activities.during(Activity("meet", "the weights are written")):
        world.meet()


def tell_end(
    plan: Plan,
    planned: Plan,
    settings: Settings,
    folder: Path,
    *,
    world: World,
    schedule: Schedule,
    tracing: Tracing,
    watch: Watch | None,
    reporter: Reporter | None,
    evaluated: EvalRecord | None,
    cores: int,
    dtypes: BoundaryDtypes,
) -> None:
    """Puts the ranks' traces together, and reports the end of the run on rank 0; every rank calls
    it."""
    traced = tracing.write(world, schedule, folder)
    if watch is None or reporter is None:
        return
    if not watch.records:
        exported = f", {settings.export_hf}" if settings.export_hf else ""
        reporter.on_note("weights", f"{folder / 'weights'}{exported} · no step was to be made")
        return
    # The stages of all replicas take alike; the first one's ranks come first.
    optimizer_ms = watch.optimizer_ms
    by_stage = [
        optimizer_ms[rank] / schedule.rank_of_stage.count(rank) for rank in schedule.rank_of_stage
    ]
    forecast = forecast_run(plan, planned, settings, cores, schedule, dtypes, optimizer_ms=by_stage)
    first, last = watch.records[0], watch.records[-1]
    whole, by_rank = split_of_run(plan, settings, schedule, watch.times)
    if traced and traced[1].events:
        in_pipeline = watch.times[: len(schedule.ranks)]
        costs, simulated = simulated_step(plan, settings, schedule, forecast, in_pipeline)
        reporter.on_timelines(costs, simulated, traced[1])
    reporter.on_end(
        Summary(
            steps=settings.steps,
            seconds=last.elapsed_s,
            first_loss=first.loss,
            last_loss=last.loss,
            eval_loss=evaluated.loss if evaluated else None,
            accuracy=evaluated.accuracy if evaluated else None,
            idle=whole.total,
            idle_parts=whole,
            idle_parts_by_rank=by_rank,
            simulated_idle=forecast.idle_share if forecast else None,
            step_ms=watch.step_ms,
            simulated_step_ms=forecast.step_ms if forecast else None,
            output=str(folder),
            weights=str(folder / "weights"),
            exported=settings.export_hf,
            trace=traced[0] if traced else None,
            staleness=watch.staleness,
            epoch=last.epoch,
            rate=watch.rate,
            unit=last.unit,
        )
    )
