"""Measured costs + a placement of stages -> the schedule with the shortest steps that was found.

Steps follow one another without a barrier, so what counts is the period (`tasks.py`). The named
schedules of the same placement and list schedules by several policies (`greedy.py`) are timed, and
the best of them improved (`search.py`). So no named schedule is better, and a backward is in two
parts only where that shortens the step. How far the result can be from the best there is, is said
by `Fit.gap`. The idea of filling bubbles at measured costs is of Qi et al., "Zero bubble pipeline
parallelism", ICLR 2024, section 3.1; there each backward is split and steps end together.

Of orders whose periods differ by less than 0.1 % the one with the fewest live activations is taken.
How much is tried depends on the size alone, not on the clock: equal input, equal schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ..errors import ScheduleError
from ..schedule import Schedule
from .greedy import orders, policies
from .search import Order, improve, merged, timed
from .tasks import Tasks

_GREEDY_TASKS = 5_000
_SEARCHED_TASKS = 250_000
_MOST_TRIES = 2_000
_CLOSE = 1.001


@dataclass(frozen=True)
class Fit:
    """A computed schedule; no schedule of this placement has a period below `bound_ms`."""

    schedule: Schedule
    period_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """How far the period is above its bound, as a share."""
        return self.period_ms / self.bound_ms - 1 if self.bound_ms else 0.0


def fit_schedule(tasks: Tasks, named: Iterable[Schedule] = (), *, effort: float = 1.0) -> Fit:
    """The best schedule found, never worse than one of `named`; `effort` times as many tries.

    Raises ScheduleError where one micro-batch alone holds more than the tasks' limit.

    >>> from asyncpipe.runtime.simulate import Costs
    >>> fit = fit_schedule(Tasks(Costs.equal(4), [0, 1, 0, 1], 4))
    >>> fit.period_ms, fit.gap
    (24.0, 0.0)
    """
    _check_limit(tasks)
    known = (rows for made in named if all(map(tasks.is_ordered, rows := tasks.rows_of(made))))
    found = [order for rows in known if (order := timed(tasks, rows))]
    enough = min((order.period_ms for order in found), default=math.inf)
    size = 2 * tasks.count
    for policy in islice(policies(tasks), max(1, int(effort * _GREEDY_TASKS / size))):
        if any(order.period_ms <= tasks.bound_ms for order in found):
            break
        found += [order for rows in orders(tasks, policy) if (order := timed(tasks, rows))]
    tries = int(effort * min(_MOST_TRIES, _SEARCHED_TASKS / size))
    starts = [merged(tasks, min(found, key=_rank), tries)]
    whole = min((order for order in found if not order.splits), key=_rank, default=starts[0])
    if whole.rows != starts[0].rows:
        starts.append(whole)
    ends = [improve(tasks, start, tries) for start in starts]
    shortest = min(order.period_ms for order in found + ends)
    close = min(shortest * _CLOSE, enough) + 1e-9
    near = [order for order in found + ends if order.period_ms <= close]
    best = min(near, key=lambda order: (sum(tasks.peaks(order.rows)), _rank(order)))
    return Fit(tasks.schedule_of(best.rows, "auto"), best.period_ms, tasks.bound_ms)


def _rank(order: Order) -> tuple[float, int]:
    return round(order.period_ms, 9), order.splits


def _check_limit(tasks: Tasks) -> None:
    for rank, (most, own) in enumerate(zip(tasks.limit, tasks.of_rank, strict=False)):
        if (least := sum(tasks.weights[stage] for stage in own)) > most:
            raise ScheduleError(
                f"one micro-batch holds {least:g} on rank {rank}, whose limit is {most:g}.",
                "Use smaller micro-batches, or recompute activations.",
            )
