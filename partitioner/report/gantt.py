"""A plan -> one optimizer step by schedule, as the simulator foresees it, in SVG units.

A synchronous step is drawn whole; of an asynchronous schedule one step out of the middle, where
forwards and backwards that began earlier or end later are cut off. All drawings have one scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...runtime.forecast import (
    OneStep,
    forecast_one_step,
    planned_schedule,
    told_schedules,
)
from ...runtime.plan import Plan
from ...runtime.schedules import ASYNCHRONOUS, AUTO
from ...runtime.timeline import Event
from ..wording import counted, write_ms, write_share

_MOST = 16  # micro-batches that are drawn

_WIDTH, _LEFT, _ROW, _BOX = 1000, 52, 28, 22
_LETTER, _AROUND = 7, 3  # the width of a digit in a box, and what is beside it
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights", "S": "step"}


@dataclass(frozen=True, slots=True)
class Box:
    """One action of a rank; its label is the place of the micro-batch in its optimizer step,
    where there is room for it."""

    kind: str
    x: float
    y: float
    width: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    y: float
    text_y: float
    label: str
    idle: str


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """The drawing of one schedule, and a sentence of its numbers."""

    schedule: str
    is_chosen: bool
    height: int
    end_x: float
    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]
    summary: str
    step_ms: float
    idle_share: float


def gantts(plan: Plan) -> tuple[Gantt, ...]:
    """A drawing for every schedule; the plan's own stands in front."""
    count = min(plan.setting.micro_batches, _MOST)
    schedules = told_schedules(plan)
    steps = {schedule: forecast_one_step(plan, schedule, count) for schedule in schedules}
    scale = (_WIDTH - _LEFT) / (max(step.step_ms for step in steps.values()) or 1.0)
    chosen = plan.setting.schedule
    return tuple(
        _gantt(plan, schedule, step, count, scale, is_chosen=schedule == chosen)
        for schedule, step in steps.items()
    )


def _gantt(
    plan: Plan, schedule: str, step: OneStep, count: int, scale: float, *, is_chosen: bool
) -> Gantt:
    timeline = step.timeline
    shown = [event for event in timeline.events if _is_in(event, step)]
    several = len(plan.stages) != timeline.ranks
    is_plain = all(stage.ranks in ((), (stage.index,)) for stage in plan.stages)
    boxes = [_box(event, step, scale, count, several=several) for event in shown]
    rows = tuple(
        Row(
            y=rank * _ROW,
            text_y=rank * _ROW + 16,
            label=f"{'rank' if is_plain or several else 'stage'} {rank}",
            idle=write_share(_idle_share(timeline.of_rank(rank), step)),
        )
        for rank in range(timeline.ranks)
    )
    return Gantt(
        schedule=schedule,
        is_chosen=is_chosen,
        height=timeline.ranks * _ROW + 24,
        end_x=round(_LEFT + step.step_ms * scale, 2),
        rows=rows,
        boxes=tuple(sorted(boxes, key=lambda box: box.kind == "S")),  # steps, the narrow ones, last
        ticks=_ticks(step.step_ms, scale),
        summary=_summary(plan, schedule, step, count),
        step_ms=step.step_ms,
        idle_share=step.idle_share,
    )


def _is_in(event: Event, step: OneStep) -> bool:
    if event.action.kind == "S":
        return step.start_ms < event.end_ms <= step.end_ms
    return event.end_ms > step.start_ms and event.start_ms < step.end_ms


def _box(event: Event, step: OneStep, scale: float, micro_batches: int, *, several: bool) -> Box:
    action = event.action
    start = max(event.start_ms, step.start_ms) - step.start_ms
    end = min(event.end_ms, step.end_ms) - step.start_ms
    width = max((end - start) * scale, 3.0 if action.kind == "S" else 0.0)
    what = f"{_NAMES[action.kind]} {action.index}" + (f" of stage {action.stage}" * several)
    label = str(action.index % micro_batches) if action.kind != "S" else ""
    from_ms, to_ms = event.start_ms - step.start_ms, event.end_ms - step.start_ms
    return Box(
        kind=action.kind,
        x=round(_LEFT + min(start * scale, _WIDTH - _LEFT - width), 2),
        y=event.rank * _ROW,
        width=round(width, 2),
        label=label if width >= _LETTER * len(label) + _AROUND else "",
        title=f"rank {event.rank}, {what}: {write_ms(from_ms)} to {write_ms(to_ms)}",
    )


def _idle_share(events: list[Event], step: OneStep) -> float:
    busy_ms = sum(
        max(0.0, min(event.end_ms, step.end_ms) - max(event.start_ms, step.start_ms))
        for event in events
    )
    return max(0.0, 1 - busy_ms / step.step_ms) if step.step_ms else 0.0


def _ticks(step_ms: float, scale: float) -> tuple[Tick, ...]:
    """At round numbers of milliseconds, at most ten of them."""
    if step_ms <= 0:
        return ()
    power = 10.0 ** math.floor(math.log10(step_ms / 10))
    apart = next(power * factor for factor in (1, 2, 5, 10) if step_ms <= 10 * power * factor)
    return tuple(
        Tick(round(_LEFT + number * apart * scale, 2), f"{number * apart:g}")
        for number in range(int(step_ms / apart) + 1)
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
