"""A plan and a way to step -> when every optimizer step of a run would be over, one rank a stage.

Synchronous steps are those of 1f1b with a flush, one after the other. Of an asynchronous run as
many steps are simulated as it takes until they follow one another evenly; the rest follow at that
pace. Costs are the plan's; an optimizer's own time is in neither.
"""

from __future__ import annotations

from itertools import accumulate

from ..forecast import forecast_step
from ..plan import Plan

_SYNCHRONOUS = "1f1b"
_PACE = 4
"""Steps at the end of what is simulated that tell the pace."""


def step_ends_ms(
    plan: Plan, micro_batches: int, steps: int, *, schedule: str | None, sync_start: int = 0
) -> tuple[float, ...]:
    """Milliseconds from the start until all stages have made step 1, 2, ... `steps`.

    `schedule` is the asynchronous one, None for a run that is synchronous throughout; its first
    `sync_start` steps are.
    """
    flushed = forecast_step(plan, _SYNCHRONOUS, micro_batches).step_ms
    first = steps if schedule is None else min(sync_start, steps)
    ends = list(accumulate([flushed] * first))
    if schedule is not None and first < steps:
        start = ends[-1] if ends else 0.0
        ends += [
            start + end for end in _without_flush(plan, schedule, micro_batches, steps - first)
        ]
    return tuple(ends)


def _without_flush(plan: Plan, schedule: str, micro_batches: int, steps: int) -> list[float]:
    # By then every stage has been full for a while, even if the slowest is the last.
    filled = 2 + -(-4 * len(plan.stages) // micro_batches)
    simulated = min(steps, filled + _PACE)
    timeline = forecast_step(plan, schedule, micro_batches, steps=simulated).timeline
    ends = [0.0] * simulated
    for event in timeline.events:
        if event.action.kind == "S":
            step = event.action.index - 1
            ends[step] = max(ends[step], event.end_ms)
    if simulated < steps:
        # The last of what is simulated are of a pipeline that runs empty.
        even = simulated - -(-len(plan.stages) // micro_batches)
        pace = (ends[even - 1] - ends[even - 1 - _PACE]) / _PACE
        ends = ends[:even] + [ends[even - 1] + pace * (1 + n) for n in range(steps - even)]
    return ends
