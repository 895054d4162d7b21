"""Settings -> the pieces of a run that go on without a stop, and their schedules.

A segment is one step of a synchronous schedule; of an asynchronous one the steps up to the next
evaluation, after which it is drained.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..channels import forward_edges, gradient_edges, shared_stages
from ..lowering import lower
from ..plan import Plan
from ..schedule import Schedule
from ..schedules import make_schedule
from ..validation import validate
from .settings import Settings

MICRO_BATCHES_PER_SEGMENT = 4096
"""An asynchronous segment has no more: its actions are listed beforehand."""


def longest_segment(settings: Settings) -> int:
    """The most steps that go on without a stop."""
    if not settings.is_async:
        return 1
    return max(1, MICRO_BATCHES_PER_SEGMENT // (settings.micro_batches or 1))


def make_segment(plan: Plan, settings: Settings, *, steps: int) -> Schedule:
    """The lowered schedule of `steps` optimizer steps (1 when synchronous); a single step is
    validated. Raises ScheduleError."""
    every = settings.micro_batches or 1
    schedule = make_schedule(
        settings.schedule, stages=len(plan.stages), micro_batches=every * steps, step_every=every
    )
    edges, gradients = forward_edges(plan), gradient_edges(plan)
    lowered = lower(schedule, edges, grad_edges=gradients)
    if steps == 1:
        validate(lowered, edges, grad_edges=gradients, shared_stages=shared_stages(plan))
    return lowered


def segments(settings: Settings) -> Iterator[range]:
    """The steps of the run, counted from 0, in pieces that run without a stop.

    >>> list(segments(Settings(folder="x", steps=5, eval_every=2, schedule="async-1f1b")))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    longest = longest_segment(settings)
    start = 0
    while start < settings.steps:
        end = min(start + longest, settings.steps)
        if settings.eval_every:
            end = min(end, (start // settings.eval_every + 1) * settings.eval_every)
        yield range(start, end)
        start = end
