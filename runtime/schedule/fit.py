"""Measured costs + the rank of each stage -> the schedule with the shortest steps that was found.

Steps follow one another without a barrier, so the search minimizes the period (`tasks.py`). It
times the named schedules of the same placement and list schedules by several policies, and improves
the best of them (`search.py`). Thus no named schedule is better, and a backward is split only if
that shortens the step. `Fit.gap` bounds the distance from the optimum. The idea of filling bubbles
at measured costs is from Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 3.1;
there each backward is split and steps end together.

Among orders whose periods differ by less than 0.1% it takes the one with the fewest live
activations. Where actions vary, it takes among the orders that are at most 2% longer the one whose
steps are expected to be the shortest under that noise (`noise.py`). The number of tries depends on
the size alone, not on the clock: equal input, equal schedule.

`blocks_of` merges neighboring stages of one rank into one stage. A schedule computed for these
blocks, with fewer tasks to order, is a valid start for the stages: running a block's stages one
after the other takes as long as the block, and their messages leave no later. So splitting a stage
on its rank makes no step longer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice

from ..errors import ScheduleError
from .dependencies import Edge
from .noise import Noise
from .schedule import Schedule, one_step
from .search import TaskOrder, improve, merged, orders, policies, timed
from .simulate import ActionCosts
from .tasks import ActivationLimit, Tasks

_GREEDY_TASKS = 5_000
_SEARCHED_TASKS = 250_000
_MOST_TRIES = 2_000
_CLOSE = 1.001
_SLACK, _MOST_STEADY = 1.02, 40


@dataclass(frozen=True)
class Fit:
    """A computed schedule."""

    schedule: Schedule
    period_ms: float
    bound_ms: float
    """No schedule of this placement has a shorter period."""

    @property
    def gap(self) -> float:
        """The share by which the period is above its bound."""
        return self.period_ms / self.bound_ms - 1 if self.bound_ms else 0.0


def fit_schedule(
    tasks: Tasks, named: Iterable[Schedule] = (), *, effort: float = 1.0, spread: float = 0.0
) -> Fit:
    """The best schedule found, never worse than one of `named`; `effort` multiplies the number of
    tries, `spread` is the standard deviation of a task's time, as a share of it.

    Raises ScheduleError if one micro-batch alone holds more than the tasks' limit.

    >>> from asyncpipe.runtime.schedule.simulate import ActionCosts
    >>> fit = fit_schedule(Tasks(ActionCosts.equal(4), [0, 1, 0, 1], 4))
    >>> fit.period_ms, fit.gap
    (24.0, 0.0)
    """
    _check_limit(tasks)
    known = (
        rows for schedule in named if all(map(tasks.is_ordered, rows := tasks.rows_of(schedule)))
    )
    candidates = [order for rows in known if (order := timed(tasks, rows))]
    enough = min((order.period_ms for order in candidates), default=math.inf)
    size = 2 * tasks.count
    for policy in islice(policies(tasks), max(1, int(effort * _GREEDY_TASKS / size))):
        if any(order.period_ms <= tasks.bound_ms for order in candidates):
            break
        candidates += [order for rows in orders(tasks, policy) if (order := timed(tasks, rows))]
    tries = int(effort * min(_MOST_TRIES, _SEARCHED_TASKS / size))
    starts = [merged(tasks, min(candidates, key=_rank), tries)]
    whole = min((order for order in candidates if not order.splits), key=_rank, default=starts[0])
    if whole.rows != starts[0].rows:
        starts.append(whole)
    ends = [improve(tasks, start, tries) for start in starts]
    if spread:
        best = _steadiest(tasks, candidates + ends, spread)
    else:
        shortest = min(order.period_ms for order in candidates + ends)
        best = _smallest(tasks, candidates + ends, min(shortest * _CLOSE, enough))
    return Fit(tasks.schedule_of(best.rows, "auto"), best.period_ms, tasks.bound_ms)


def _smallest(tasks: Tasks, found: Iterable[TaskOrder], most_ms: float) -> TaskOrder:
    """The order with the fewest live activations whose period is at most `most_ms`."""
    near = [order for order in found if order.period_ms <= most_ms + 1e-9]
    return min(near, key=lambda order: (sum(tasks.peaks(order.rows)), _rank(order)))


def _steadiest(tasks: Tasks, found: Iterable[TaskOrder], spread: float) -> TaskOrder:
    """The order with the shortest expected steps under noise; of those as short to 0.1% the one
    with the fewest live activations."""
    different = {str(order.rows): order for order in sorted(found, key=_rank, reverse=True)}
    best = sorted(different.values(), key=_rank)[:_MOST_STEADY]
    near = [order for order in best if order.period_ms <= best[0].period_ms * _SLACK]
    noise = Noise.of(tasks, spread)
    expected_ms = {id(order): noise.expected_ms(tasks, order.rows) for order in near}
    limit = min(expected_ms.values()) * _CLOSE
    return _smallest(tasks, [order for order in near if expected_ms[id(order)] <= limit], math.inf)


def _rank(order: TaskOrder) -> tuple[float, int]:
    return round(order.period_ms, 9), order.splits


def _check_limit(tasks: Tasks) -> None:
    for rank, (most, own) in enumerate(zip(tasks.limit, tasks.of_rank, strict=False)):
        if (least := sum(tasks.weights[stage] for stage in own)) > most:
            raise ScheduleError(
                f"one micro-batch holds {least:g} on rank {rank}, whose limit is {most:g}.",
                "Use smaller micro-batches, or recompute activations.",
            )


@dataclass(frozen=True)
class MergedStages:
    """The blocks as stages, and the original stages of each."""

    tasks: Tasks
    stages: tuple[tuple[int, ...], ...]

    def expanded(self, schedule: Schedule) -> Schedule:
        """A schedule of the blocks as a schedule of the stages."""
        rows = (
            [
                action._replace(stage=stage)
                for action in row
                if action.kind != "S"
                for stage in self.stages[action.stage][:: 1 if action.kind == "F" else -1]
            ]
            for row in schedule.ranks
        )
        at = schedule.rank_of_stage
        return one_step(
            schedule.name, rows, [at[block] for block, own in enumerate(self.stages) for _ in own]
        )


def blocks_of(tasks: Tasks) -> MergedStages | None:
    """The tasks with neighboring stages of one rank merged; None if there are none."""
    at, rule = tasks.rank_of_stage, tasks.rule
    blocks = tuple(tuple(own) for _, own in groupby(range(len(at)), key=at.__getitem__))
    if len(blocks) == len(at):
        return None
    block_of = {stage: block for block, own in enumerate(blocks) for stage in own}

    def between(edges: Iterable[Edge]) -> set[Edge]:
        pairs = ((block_of[source], block_of[target]) for source, target in edges)
        return {(source, target) for source, target in pairs if source != target}

    shared = {tuple(sorted({block_of[stage] for stage in group})) for group in tasks.shared_stages}
    merged = Tasks(
        _summed(tasks.costs, blocks, block_of),
        [at[own[0]] for own in blocks],
        tasks.micro_batches,
        edges=between(rule.edges),
        grad_edges=between(rule.grad_edges),
        shared_stages=sorted(group for group in shared if len(group) > 1),
        limit=ActivationLimit(tasks.limit, _sums(tasks.weights, blocks)),
        may_split=tasks.may_split,
    )
    return MergedStages(merged, blocks)


def _summed(
    costs: ActionCosts, blocks: tuple[tuple[int, ...], ...], block_of: dict[int, int]
) -> ActionCosts:
    transfer_ms: dict[Edge, float] = defaultdict(float)
    for (source, target), time_ms in costs.transfer_ms.items():
        if block_of[source] != block_of[target]:
            transfer_ms[block_of[source], block_of[target]] += time_ms
    return ActionCosts(
        forward_ms=_sums(costs.forward_ms, blocks),
        backward_ms=_sums(costs.backward_ms, blocks),
        step_ms=_sums(costs.step_ms, blocks),
        transfer_ms=dict(transfer_ms),
        weight_ms=_sums(costs.weight_ms, blocks),
        split_ms=_sums(costs.split_ms, blocks),
    )


def _sums(amounts: tuple[float, ...], blocks: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    return tuple(sum(amounts[stage] for stage in own) for own in blocks) if amounts else ()
