"""A run's plan, settings and figures -> the parts of its idle share, and one step as simulated."""

from __future__ import annotations

from collections.abc import Sequence

from ..channels import forward_edges, gradient_edges, shared_stages
from ..forecast import Forecast
from ..idle import IdleSplit, RankTime, mean_split, measured_costs, split_idle
from ..plan import Plan
from ..schedule import Schedule
from ..simulate import simulate
from ..timeline import Timeline
from ..training.segments import make_segment
from ..training.settings import Settings


def split_of_run(
    plan: Plan, settings: Settings, schedule: Schedule, times: Sequence[RankTime]
) -> tuple[IdleSplit, tuple[IdleSplit, ...]]:
    """Why ranks were idle in a usual step, over all ranks and of each; see `runtime/idle.py`.

    Every replica is taken by itself: what it waits for the others is communication.
    """
    played, ranks = _enough_steps(plan, settings, schedule), len(schedule.ranks)
    replicas = [times[first : first + ranks] for first in range(0, len(times), ranks)]
    splits = [
        split_idle(
            own,
            played,
            forward_edges(plan),
            grad_edges=gradient_edges(plan),
            shared_stages=shared_stages(plan),
        )
        for own in replicas
    ]
    walls_ms = [sum(time.wall_ms for time in own) for own in replicas]
    whole = mean_split([split for split, _ in splits], walls_ms)
    return whole, tuple(split for _, by_rank in splits for split in by_rank)


def simulated_step(
    plan: Plan,
    settings: Settings,
    schedule: Schedule,
    forecast: Forecast | None,
    times: Sequence[RankTime],
) -> tuple[str, Timeline]:
    """One step as it was foreseen, and what it was made of; a plan without costs has those that
    the run measured."""
    if forecast is not None:
        costs, timeline = "the plan's costs, the optimizer as measured", forecast.timeline
    else:
        schedule = _enough_steps(plan, settings, schedule)
        costs = "measured costs"
        timeline = simulate(
            schedule,
            measured_costs(times, schedule),
            forward_edges(plan),
            grad_edges=gradient_edges(plan),
            shared_stages=shared_stages(plan),
        )
    return costs, timeline.between(*timeline.steady_step) if settings.is_async else timeline


def _enough_steps(plan: Plan, settings: Settings, schedule: Schedule) -> Schedule:
    """The synchronous step, or so many asynchronous ones that every rank is in its steady state."""
    if not settings.is_async:
        return schedule
    ahead = -(-2 * len(plan.stages) // (settings.micro_batches or 1))
    return make_segment(plan, settings, steps=3 + ahead)
