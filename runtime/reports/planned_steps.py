"""A plan -> one simulated step under each schedule, with the memory of its ranks.

A synchronous step is drawn whole. For an asynchronous schedule the drawing shows one step from the
middle of a run, cuts off forwards and backwards that begin earlier or end later, and marks them.
All steps have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..formatting import counted, write_ms, write_share
from ..plan.forecast import OneStep, compared_schedules, forecast_one_step, planned_schedule
from ..plan.plan import Plan
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import AUTO
from .gantt import Drawing, Window, draw, scale_of
from .memory_over_time import MemoryDrawing, memory_over_time

_MOST = 16  # micro-batches that are drawn


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step under a schedule.

    schedule, is_chosen: the schedule, and whether it is the plan's own
    drawing, memory: its actions, and below them the memory of each rank
    summary: a sentence with its numbers
    step_ms, idle_share: its time, and the share of it that ranks wait
    """

    schedule: str
    is_chosen: bool
    drawing: Drawing
    memory: MemoryDrawing
    summary: str
    step_ms: float
    idle_share: float


def planned_steps(
    plan: Plan, schedules: Sequence[str] = (), micro_batches: int | None = None
) -> tuple[PlannedStep, ...]:
    """A step under each of these schedules, by default the plan's own and those that its report
    compares it with, with so many micro-batches, by default the plan's."""
    count = min(micro_batches or plan.setting.micro_batches, _MOST)
    steps = {
        schedule: forecast_one_step(plan, schedule, count)
        for schedule in schedules or compared_schedules(plan)
    }
    scale = scale_of(max(step.step_ms for step in steps.values()))
    return tuple(
        _planned_step(plan, schedule, step, count, scale) for schedule, step in steps.items()
    )


def _planned_step(
    plan: Plan, schedule: str, step: OneStep, count: int, scale: float
) -> PlannedStep:
    timeline = step.timeline
    several = len(plan.stages) != timeline.ranks
    is_plain = all(stage.ranks in ((), (stage.index,)) for stage in plan.stages)
    row = "rank" if is_plain or several else "stage"
    window = Window(timeline, step.start_ms, step.end_ms)
    drawing = draw(
        window,
        scale,
        count,
        labels=[f"{row} {rank}" for rank in range(timeline.ranks)],
        several=several,
    )
    return PlannedStep(
        schedule=schedule,
        is_chosen=schedule == plan.setting.schedule,
        drawing=drawing,
        memory=memory_over_time(plan, window, drawing),
        summary=_summary(plan, schedule, step, count),
        step_ms=step.step_ms,
        idle_share=step.idle_share,
    )


def _summary(plan: Plan, schedule: str, step: OneStep, count: int) -> str:
    stages = len(plan.stages)
    number = counted(count, "micro-batch", "micro-batches")
    timetable = planned_schedule(plan, schedule, count)
    in_flight = ", ".join(map(str, timetable.in_flight))
    text = (
        f"{schedule}: {number} in {write_ms(step.step_ms)}, ranks "
        f"{write_share(step.idle_share)} idle; in flight at most {in_flight}"
    )
    if schedule in ASYNCHRONOUS:
        stale = -(-(stages - 1) // count)
        text += f"; weights at most {counted(stale, 'step')} stale" if stale else "; no staleness"
    if schedule in (*ASYNCHRONOUS, AUTO):
        text += ". The step is from the middle of a run; pale actions extend beyond it"
    return text + "."
