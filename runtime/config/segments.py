"""RunConfig -> the segments of a run between two drains of the pipeline, and their schedules.

A segment of a synchronous schedule is one step; of an asynchronous schedule it is the steps up to
the next evaluation, checkpoint or flush, for which the pipeline drains. The synchronous steps at
the start and the end of an asynchronous run, and a short last step, are separate segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ScheduleError
from ..executor.mailbox import forward_edges, gradient_edges
from ..formatting import counted
from ..plan.forecast import costs_of_plan, tied_stages
from ..plan.plan import Plan
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import AUTO, VIRTUAL, Model, fit_auto, make_schedule, one_f_one_b
from ..schedule.dependencies import lower
from ..schedule.finalists import finalists
from ..schedule.interleaved import fold, replicated, side_by_side
from ..schedule.schedule import Schedule
from ..schedule.simulate import ActionCosts
from ..schedule.tasks import Tasks
from ..schedule.text import from_text
from ..schedule.validation import validate
from ..serialization import Origin, read_text
from .asynchronous_options import asynchronous_steps, longest_segment
from .batch_layout import describe_stages, stage_replicas
from .run_ahead import activation_limit, ranks_of_stages
from .settings import RunConfig


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Optimizer steps between two drains of the pipeline.

    steps: the steps, counted from 0
    micro_batches: micro-batches of each step
    synchronous: True when all stages step together
    """

    steps: range
    micro_batches: int
    synchronous: bool


def make_segment(plan: Plan, config: RunConfig, *, steps: int) -> Schedule:
    """The lowered schedule of `steps` optimizer steps (1 when synchronous); a single step is
    validated. Of a computed schedule it is the first, from the plan's costs. Raises ScheduleError.
    """
    schedule = _schedule(plan, config, steps)
    if steps == 1 and config.is_async and config.pipelines > 1:
        lowered(plan, side_by_side(schedule, config.pipelines), check=True)
    return lowered(plan, schedule, check=steps == 1)


def make_flushed_step(plan: Plan, config: RunConfig, micro_batches: int) -> Schedule:
    """The lowered schedule of one synchronous step of so many micro-batches, on the same ranks: of
    an asynchronous schedule it is 1f1b. Raises ScheduleError."""
    if not config.is_async:
        return make_segment(plan, replace(config, micro_batches=micro_batches), steps=1)
    placed = _schedule(plan, config, 1).rank_of_stage
    schedule = one_f_one_b(len(placed), micro_batches)
    if schedule.rank_of_stage != placed:
        schedule = fold(schedule, placed, costs_of_plan(plan))
    return lowered(plan, schedule, check=True)


def schedule_of(plan: Plan, config: RunConfig, segment: RunSegment) -> Schedule:
    """The lowered schedule of a segment. Raises ScheduleError."""
    if segment.synchronous:
        return make_flushed_step(plan, config, segment.micro_batches)
    return make_segment(plan, config, steps=len(segment.steps))


def lowered(plan: Plan, schedule: Schedule, *, check: bool) -> Schedule:
    """The schedule with the plan's messages; validated if asked to."""
    edges, gradients = forward_edges(plan), gradient_edges(plan)
    result = lower(schedule, edges, grad_edges=gradients)
    if check:
        validate(result, edges, grad_edges=gradients, shared_stages=tied_stages(plan))
    return result


def _schedule(plan: Plan, config: RunConfig, steps: int) -> Schedule:
    every = config.micro_batches
    if config.schedule_file:
        return _read(config.schedule_file, plan, config)
    if replicas := stage_replicas(plan, config):
        return replicated(config.schedule, every, replicas)
    ranks = ranks_of_plan(plan, config)
    if config.schedule == AUTO:
        return first_fit(plan, config)
    return make_schedule(
        config.schedule,
        stages=len(plan.stages),
        micro_batches=every * steps,
        step_every=every,
        ranks=ranks,
        rank_of_stage=_planned_placement(plan, ranks) if config.is_async else None,
        ahead=config.ahead,
        staleness_cap=config.staleness_cap,
        costs=costs_of_plan(plan),
    )


def ranks_of_plan(plan: Plan, config: RunConfig) -> int | None:
    """The ranks that were asked for, or those that the plan puts several stages on; None where
    the schedule is to say."""
    if config.ranks is not None:
        return config.ranks
    several = config.schedule in (*VIRTUAL, *ASYNCHRONOUS, AUTO)
    planned = len(set(plan.device_of_stage))
    is_planned = config.schedule == plan.setting.schedule
    return planned if several and (is_planned or planned < len(plan.stages)) else None


def first_fit(plan: Plan, config: RunConfig) -> Schedule:
    """The computed schedule to begin with; its backwards are whole until it is known what parting
    them costs."""
    costs = costs_of_plan(plan) or ActionCosts.equal(len(plan.stages))
    ranks = ranks_of_plan(plan, config) or len(plan.stages)
    fitted = fit_auto(
        costs,
        config.micro_batches,
        ranks=ranks,
        rank_of_stage=_planned_placement(plan, ranks),
        **_model(plan, config, ranks, may_split=False),
    )
    return fitted.schedule


def measured_finalists(
    plan: Plan,
    config: RunConfig,
    costs: ActionCosts,
    spread: float,
    rank_of_stage: tuple[int, ...],
) -> list[Schedule]:
    """The schedules to try for measured costs and the spread of actions' times; see `finalists`."""
    model = _model(plan, config, max(rank_of_stage) + 1, may_split=True)
    return finalists(Tasks(costs, rank_of_stage, config.micro_batches, **model), spread)


def _model(plan: Plan, config: RunConfig, ranks: int, *, may_split: bool) -> Model:
    """What a computed schedule has to know of the plan besides its costs."""
    return Model(
        edges=forward_edges(plan),
        grad_edges=gradient_edges(plan),
        shared_stages=waiting_stages(plan, config),
        limit=activation_limit(plan, ranks),
        may_split=may_split,
    )


def waiting_stages(plan: Plan, config: RunConfig) -> tuple[tuple[int, ...], ...]:
    """The groups of stages each of which steps when all of its group have their gradients.

    Clipping by the norm of all stages makes every stage wait for all others, and so does a loss
    scale, which may skip the step on all together; in an asynchronous run none of them does.
    """
    is_agreed = (config.clip or config.is_scaled) and not config.is_async
    return (tuple(range(len(plan.stages))),) if is_agreed else tuple(tied_stages(plan))


def _planned_placement(plan: Plan, ranks: int | None) -> tuple[int, ...] | None:
    """The ranks of the plan's stages, if it has several stages on as many ranks as there are."""
    planned = ranks_of_stages(plan)
    has_several = len(set(planned)) < len(planned)
    return planned if has_several and len(set(planned)) == ranks else None


def _read(path: str, plan: Plan, config: RunConfig) -> Schedule:
    """The schedule of a text file. Raises ScheduleError where it is not of this plan and run."""
    origin = Origin(
        f"--schedule {path}", ScheduleError, "--print-schedule shows what such a file looks like."
    )
    # Checked with the plan's edges when it is lowered.
    schedule = from_text(read_text(Path(path), origin), (), grad_edges=())
    again = f"Print one that does: --schedule {schedule.name} --print-schedule"
    if schedule.stages != len(plan.stages):
        raise ScheduleError(
            f"{path} has {counted(schedule.stages, 'stage')}, but the plan has {len(plan.stages)}.",
            again,
        )
    if not schedule.synchronous:
        raise ScheduleError(
            f"{path} has {schedule.steps} steps, but a schedule from a file makes one, at its end.",
            "Use --schedule async-1f1b for an asynchronous run.",
        )
    if schedule.micro_batches != config.micro_batches:
        raise ScheduleError(
            f"{path} has {schedule.micro_batches} micro-batches, but a step has "
            f"{config.micro_batches}.",
            f"--micro-batches {schedule.micro_batches}",
        )
    if schedule.replicas != (expected := stage_replicas(plan, config)):
        has = describe_stages(schedule.replicas) or "one rank a stage"
        raise ScheduleError(
            f"{path} has {has}, but the run {describe_stages(expected) or 'one rank a stage'}.",
            "Print it for this plan, or --replicas 1 for one rank a stage.",
        )
    if config.ranks not in (None, len(schedule.ranks)):
        raise ScheduleError(
            f"{path} has {counted(len(schedule.ranks), 'rank')}, but --ranks is {config.ranks}.",
            f"--ranks {len(schedule.ranks)}, or leave it out.",
        )
    return schedule.compute


def segments(
    config: RunConfig,
    start: int = 0,
    event_after: Callable[[int], int] | None = None,
    stop: int | None = None,
) -> Iterator[RunSegment]:
    """The segments of a run after its first `start` steps; a segment ends at the first event after
    a step, as `event_after` says. `stop` is the step to end with, if not that of the options."""
    every = config.micro_batches
    whole = config.steps - (config.left_over > 0) if stop is None else stop
    asynchronous = asynchronous_steps(config, whole)
    while start < whole:
        is_sync = start not in asynchronous
        end = start + 1 if is_sync else min(start + longest_segment(config), asynchronous.stop)
        end = min(end, whole)
        for often in (config.eval_every, config.flush_every, config.save_every):
            if often:
                end = min(end, (start // often + 1) * often)
        if event_after is not None:
            end = min(end, event_after(start))
        yield RunSegment(range(start, end), every, is_sync)
        start = end
    if config.left_over and start < config.steps:
        yield RunSegment(range(whole, config.steps), every, True)
