"""Records of a run and its plan -> the drawings of its page: curves, and one step.

The measured step is drawn above the predicted one. The plan is read from the run's generated
folder; without it a run has fewer drawings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import AsyncPipeError
from ..formatting import write_count, write_ms, write_share
from ..monitoring.run_files import RunRecords, number, numbers, part, points
from ..plan.plan import Plan, read_plan
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.simulate import Timeline
from .charts import Chart, Series, chart
from .gantt import Drawing, Window, draw, scale_of
from .measures import (
    UNITS,
    after_first_step,
    metrics_of_evaluations,
    other_series,
    rate_field,
    title_of_field,
    unplanned_freezing,
)
from .memory_over_time import MemoryDrawing, memory_over_time
from .model_strip import ModelStrip, model_strip
from .planned_steps import planned_steps

_MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class StepDrawing:
    """One step of a run.

    heading: its origin, measured or predicted.
    caption: a sentence with its numbers.
    """

    heading: str
    caption: str
    drawing: Drawing


def step_drawings(run: RunRecords) -> tuple[StepDrawing, ...]:
    """The measured and the predicted step on one scale; empty if none was recorded."""
    if run.drawn is None:
        return ()
    measured, predicted = run.drawn.measured, run.drawn.simulated
    scale = scale_of(max(measured.makespan_ms, predicted.makespan_ms))
    micro_batches = _micro_batches(run) or 1

    def drawn(timeline: Timeline, heading: str, more: str = "") -> StepDrawing:
        idle = write_share(timeline.idle_share)
        stages = {event.action.stage for event in timeline.events}
        return StepDrawing(
            heading,
            f"{write_ms(timeline.makespan_ms)}, ranks {idle} idle{more}.",
            draw(
                Window(timeline, timeline.start_ms, timeline.end_ms),
                scale,
                micro_batches,
                labels=[f"rank {rank}" for rank in range(timeline.ranks)],
                several=len(stages) > timeline.ranks,
            ),
        )

    return drawn(measured, "Measured"), drawn(predicted, "Predicted", f"; from {run.drawn.costs}")


def _micro_batches(run: RunRecords) -> int | None:
    count = number(run.start, "micro_batches")
    return int(count) if 1 <= count < _MANY else None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run, with the times of its stages at the sizes of the run.

    strip: its modules.
    is_async: True for an asynchronous schedule.
    step, memory: the predicted step and its memory; None for a schedule that the plan cannot
        predict, such as one from a file.
    """

    plan: Plan
    strip: ModelStrip
    is_async: bool
    step: StepDrawing | None
    memory: MemoryDrawing | None

    @classmethod
    def of(cls, run: RunRecords) -> RunPlan | None:
        """None if the generated folder is missing, cannot be read, or has other stages since."""
        for folder in _folders(run):
            with contextlib.suppress(AsyncPipeError, OSError):
                plan = _at_sizes(read_plan(folder), run)
                return cls._with(plan, run) if plan else None
        return None

    @classmethod
    def _with(cls, plan: Plan, run: RunRecords) -> RunPlan:
        named, strip = run.config.get("schedule") or plan.setting.schedule, model_strip(plan)
        try:
            (step,) = planned_steps(plan, (str(named),), _micro_batches(run))
        except (AsyncPipeError, ValueError, KeyError, IndexError):
            return cls(plan, strip, is_async=False, step=None, memory=None)
        drawing = StepDrawing("Predicted", step.summary, step.drawing)
        return cls(plan, strip, named in ASYNCHRONOUS, drawing, step.memory)


def _at_sizes(plan: Plan, run: RunRecords) -> Plan | None:
    """The plan with the times that the run recorded as predicted; None if they are of another."""
    predicted = part(run.start, "predicted")
    forward_ms, backward_ms = (numbers(predicted, f"{name}_ms") for name in ("forward", "backward"))
    if not forward_ms:
        return plan
    if not len(forward_ms) == len(backward_ms) == len(plan.stages):
        return None
    times = zip(plan.stages, forward_ms, backward_ms, strict=True)
    stages = tuple(
        replace(stage, forward_ms=forward, backward_ms=backward)
        for stage, forward, backward in times
    )
    return replace(plan, stages=stages)


def _folders(run: RunRecords) -> list[Path]:
    """The places where a run's generated folder may be, whose path may be relative to the folder in
    which the run was started."""
    named = run.config.get("folder")
    if not isinstance(named, str) or "\0" in named:
        return []
    return [Path(named), *(parent / named for parent in run.folder.resolve().parents)]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The drawings of one step, on one time axis each.

    heading: their heading.
    note: how to get missing drawings, or the limits of these; "" if they are complete.
    steps: the drawings.
    memory, memory_note: the memory of the ranks in the first of them, and a sentence about it.
    """

    heading: str
    note: str
    steps: tuple[StepDrawing, ...]
    memory: MemoryDrawing | None
    memory_note: str

    @property
    def has_cut(self) -> bool:
        return any(step.drawing.has_cut for step in self.steps)


_LATER = (
    "This is the plan's prediction. A run records a step near its end, and draws it here then; "
    "asyncpipe-train --trace 3 also keeps the last three steps."
)
_OVER_STEP = "Sizes from the plan, over the {} step. All ranks have the same scale."


def step_figures(run: RunRecords, planned: RunPlan | None) -> StepFigures | None:
    """The measured above the predicted step, or the predicted one alone; None without both."""
    steps = step_drawings(run)
    if not steps or run.drawn is None:
        if planned is None or planned.step is None:
            return None
        note, about = _LATER if not run.end else "", _OVER_STEP.format("predicted")
        return StepFigures("One step, predicted", note, (planned.step,), planned.memory, about)
    memory, which = None, "measured"
    timeline = run.drawn.measured
    stages = {event.action.stage for event in timeline.events}
    if planned is not None and planned.is_async:
        # Its step begins and ends with activations whose forwards or backwards are in others.
        memory, which = planned.memory, "predicted"
    elif planned is not None and max(stages) < len(planned.plan.stages):
        window = Window(timeline, timeline.start_ms, timeline.end_ms)
        memory = memory_over_time(planned.plan, window, steps[0].drawing)
    heading = "One step, measured above predicted"
    return StepFigures(heading, unplanned_freezing(run), steps, memory, _OVER_STEP.format(which))


Points = tuple[tuple[float, float], ...]


def loss_charts(run: RunRecords) -> list[Chart]:
    """Training and evaluation loss over steps, and over the time after the first step."""
    later = after_first_step(run)
    charts = []
    for ran, by, unit, axis, heading in (
        (run, "step", "step", "step", "Loss over steps"),
        (later, "elapsed_s", "s", "seconds after step 1", "Loss over time"),
    ):
        series = [
            Series("training", points(ran.losses, "loss", by)),
            Series("evaluation", points(ran.evals, "loss", by)),
        ]
        x_floor = 0.0 if ran is later else None
        charts.append(
            chart(
                heading, series, x_unit=unit, x_title=axis, write="{:.4g}".format, x_floor=x_floor
            )
        )
    return _drawn(charts)


def speed_charts(run: RunRecords) -> list[Chart]:
    """Throughput and idle share over steps."""
    rate = rate_field(run)
    series = Series(UNITS.get(rate, rate), run.series(rate))
    idle = Series("all ranks", run.series("idle_share"))
    return _drawn(
        [
            chart(f"Throughput, {series.label}", [series], x_unit="step", write=write_count,
                  floor=0.0),
            chart("Idle share, mean of the ranks", [idle], x_unit="step", write=write_share,
                  floor=0.0),
        ]
    )  # fmt: skip


def more_charts(run: RunRecords) -> list[Chart]:
    """Gradient norm, learning rate and loss scale, if the run recorded them."""
    headings = {"grad_norm": "Gradient norm", "lr": "Learning rate", "loss_scale": "Loss scale"}
    return _drawn(
        [
            chart(heading, [Series(heading, run.series(name))], x_unit="step")
            for name, heading in headings.items()
        ]
    )


def other_charts(run: RunRecords) -> list[Chart]:
    """The metrics of the evaluations, and all other numbers of the steps, such as delays; a line
    for each element of a list."""
    charts = [
        chart(title_of_field(name), [Series("evaluation", series)], x_unit="step")
        for name, series in metrics_of_evaluations(run).items()
    ]
    for name, rows in other_series(run).items():
        title, _, of = title_of_field(name).partition(", of each ")
        labels = [title] if len(rows) == 1 else [f"{of or title} {n}" for n in range(len(rows))]
        drawn = map(_relative, rows) if name == "block_distances" else rows
        series = [Series(label, row) for label, row in zip(labels, drawn, strict=True)]
        charts.append(chart(title, series, x_unit="step", floor=0.0))
    return _drawn(charts)


def _relative(points: Points) -> Points:
    """The numbers in relation to the largest one, as `--freeze plasticity` compares them."""
    largest = max((y for _, y in points), default=0.0)
    return tuple((x, y / largest if largest else 0.0) for x, y in points)


def _drawn(charts: Sequence[Chart | None]) -> list[Chart]:
    return [drawn for drawn in charts if drawn is not None]
