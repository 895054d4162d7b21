"""A plan -> one optimizer step by schedule, as the simulator foresees it.

A synchronous step is drawn whole; of an asynchronous schedule one step out of the middle, where
forwards and backwards that began earlier or end later are cut off. All drawings have one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.forecast import (
    OneStep,
    forecast_one_step,
    planned_schedule,
    told_schedules,
)
from ...runtime.pages.gantt import Drawing, Window, draw, scale_of
from ...runtime.plan import Plan
from ...runtime.schedules import ASYNCHRONOUS, AUTO
from ...runtime.wording import counted, write_ms, write_share

_MOST = 16  # micro-batches that are drawn


@dataclass(frozen=True, slots=True)
class Gantt:
    """The drawing of one schedule, and a sentence of its numbers."""

    schedule: str
    is_chosen: bool
    drawing: Drawing
    summary: str
    step_ms: float
    idle_share: float


def gantts(plan: Plan) -> tuple[Gantt, ...]:
    """A drawing for every schedule; the plan's own stands in front."""
    count = min(plan.setting.micro_batches, _MOST)
    schedules = told_schedules(plan)
    steps = {schedule: forecast_one_step(plan, schedule, count) for schedule in schedules}
    scale = scale_of(max(step.step_ms for step in steps.values()))
    chosen = plan.setting.schedule
    return tuple(
        _gantt(plan, schedule, step, count, scale, is_chosen=schedule == chosen)
        for schedule, step in steps.items()
    )


def _gantt(
    plan: Plan, schedule: str, step: OneStep, count: int, scale: float, *, is_chosen: bool
) -> Gantt:
    timeline = step.timeline
    several = len(plan.stages) != timeline.ranks
    is_plain = all(stage.ranks in ((), (stage.index,)) for stage in plan.stages)
    row = "rank" if is_plain or several else "stage"
    return Gantt(
        schedule=schedule,
        is_chosen=is_chosen,
        drawing=draw(
            Window(timeline, step.start_ms, step.end_ms),
            scale,
            count,
            labels=[f"{row} {rank}" for rank in range(timeline.ranks)],
            several=several,
        ),
        summary=_summary(plan, schedule, step, count),
        step_ms=step.step_ms,
        idle_share=step.idle_share,
    )


def _summary(plan: Plan, schedule: str, step: OneStep, count: int) -> str:
    stages = len(plan.stages)
    number = counted(count, "micro-batch", "micro-batches")
    made = planned_schedule(plan, schedule, count)
    in_flight = ", ".join(map(str, made.in_flight))
    text = (
        f"{schedule}: {number} in {write_ms(step.step_ms)}, ranks idle "
        f"{write_share(step.idle_share)}; in flight at most {in_flight}"
    )
    if schedule in ASYNCHRONOUS:
        stale = -(-(stages - 1) // count)
        text += f"; weights at most {counted(stale, 'step')} old" if stale else "; weights are new"
    if schedule in (*ASYNCHRONOUS, AUTO):
        text += ". A step out of the middle of a run: what is cut off belongs to its neighbours"
    return text + "."
