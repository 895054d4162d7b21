"""A run -> when each optimizer step would be over, with a rank a stage.

Synchronous steps are those of 1f1b with a flush, one after the other. Of an asynchronous segment
the beginning and the end are simulated; the steps in between follow at the pace at which they
follow one another by then. Costs are the plan's; an optimizer's own time is in neither.
"""

from __future__ import annotations

from dataclasses import replace

from ..boundary_dtypes import AS_PLANNED
from ..forecast import forecast_step
from ..plan import Plan
from ..schedules import make_schedule
from ..training.resolve import costs_at_sizes
from ..training.segments import Segment, segments
from ..training.settings import Settings
from ..training.setup import Job
from ..training.transfers import with_transfers_of_run

_FLUSHED = "1f1b"
_PACE = 4
"""Steps that tell the pace."""


def step_ends_ms(job: Job) -> tuple[float, ...]:
    """Milliseconds from the start until all stages have made step 1, 2, ..."""
    settings = job.settings
    sized = costs_at_sizes(job.plan, job.planned)
    plan = with_transfers_of_run(sized, job.planned, AS_PLANNED)
    ends: list[float] = []
    known: dict[Segment, list[float]] = {}
    for segment in segments(replace(settings, eval_every=0)):
        alike = replace(segment, steps=range(len(segment.steps)))
        if alike not in known:
            known[alike] = _ends(plan, settings, alike)
        start = ends[-1] if ends else 0.0
        ends += [start + end for end in known[alike]]
    return tuple(ends)


def _ends(plan: Plan, settings: Settings, segment: Segment) -> list[float]:
    if segment.synchronous:
        return [forecast_step(plan, _FLUSHED, segment.micro_batches).step_ms]
    steps, stages = len(segment.steps), len(plan.stages)
    # By then every stage has been full for a while, and all stages are as far.
    filled = 2 + -(-4 * stages // segment.micro_batches)
    simulated = min(steps, 2 * filled + _PACE)
    schedule = make_schedule(
        settings.schedule,
        stages=stages,
        micro_batches=segment.micro_batches * simulated,
        step_every=segment.micro_batches,
        ahead=settings.ahead,
        staleness_cap=settings.staleness_cap,
    )
    ends = [0.0] * simulated
    for event in forecast_step(
        plan, schedule, segment.micro_batches, steps=simulated
    ).timeline.events:
        if event.action.kind == "S":
            ends[event.action.index - 1] = max(ends[event.action.index - 1], event.end_ms)
    left_out = steps - simulated
    if not left_out:
        return ends
    middle = filled + _PACE
    pace_ms = (ends[middle - 1] - ends[filled - 1]) / _PACE
    even = [ends[middle - 1] + pace_ms * (1 + step) for step in range(left_out)]
    return [*ends[:middle], *even, *(end + pace_ms * left_out for end in ends[middle:])]
