"""Measured idle time of ranks -> its causes: bubble, imbalance, data, overhead, communication,
exchange, writing.

A rank's time in one optimizer step is computation (forwards, backwards, optimizer) and the rest, in
which it is *idle*:

    idle = waiting + sending + data + overhead + exchange + writing

waiting    for a tensor, or for all ranks
sending    handing tensors to the transport
data       making micro-batches: the data loader
overhead   everything else: the executor between two actions
exchange   summing gradients over replicas and products over tensor ranks, and waiting for these
writing    checkpoints and records, also between the steps

The causes of waiting are found by simulating the same schedule (`simulate.py`) with other costs and
free transfers, and comparing how long each rank waits:

    equal    every rank has the mean cost of the ranks
    real     every stage has its measured cost
    fed      and every forward the time of reading its micro-batch
    whole    and every action its rank's overhead
    written  and every step its rank's writing

The measured waiting w is attributed in this order, never more than w in total:

    bubble         the waiting under `real` costs, as far as it also occurs under `equal` ones
    imbalance      the rest of the waiting under `real` costs
    data           additional waiting while other ranks read data, and its own reading
    overhead       additional waiting for the other ranks' overhead, and its own
    writing        additional waiting for other ranks that write, and its own writing
    communication  the rest of w: transfers, wake-ups, uneven actions; and its own sending

Exchange is what was measured. So no part is negative, and all add up to the idle time, for any
schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain

from ..config.segments import make_segment
from ..config.settings import RunConfig
from ..executor.mailbox import forward_edges, gradient_edges
from ..plan.forecast import Forecast, tied_stages
from ..plan.plan import Plan
from ..schedule.dependencies import Edge
from ..schedule.schedule import Schedule
from ..schedule.simulate import ActionCosts, Timeline, simulate


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's time in one optimizer step, on average, in milliseconds.

    stage_ms: computation by kind of action (F, B, W, S; norm is part of a step, cache of a forward)
        and stage.
    waiting_ms, sending_ms, data_ms, overhead_ms, exchange_ms, writing_ms: idle time by reason.
    """

    stage_ms: Mapping[tuple[str, int], float]
    waiting_ms: float
    sending_ms: float
    data_ms: float
    overhead_ms: float
    exchange_ms: float = 0.0
    writing_ms: float = 0.0

    @property
    def idle_ms(self) -> float:
        """The sum of the idle times."""
        waits_ms = self.waiting_ms + self.exchange_ms
        return waits_ms + self.sending_ms + self.data_ms + self.overhead_ms + self.writing_ms

    @property
    def wall_ms(self) -> float:
        """Computation and idle time together."""
        return sum(self.stage_ms.values()) + self.idle_ms


@dataclass(frozen=True, slots=True)
class IdleSplit:
    """The parts of an idle share, each a share of the whole time from 0 to 1.

    bubble: the schedule leaves the rank nothing to do, even if all ranks cost the same.
    imbalance: the rank waits because others take longer.
    communication: transfers, wake-ups and sends.
    data: reading micro-batches, here or on the ranks that it waits for.
    overhead: the executor between actions, here or on the ranks that it waits for.
    exchange: summing over replicas and tensor ranks; 0 without them.
    writing: checkpoints and records, here or on the ranks that it waits for.
    """

    bubble: float
    imbalance: float
    communication: float
    data: float
    overhead: float
    exchange: float = 0.0
    writing: float = 0.0

    @property
    def total(self) -> float:
        """The idle share."""
        return math.fsum(astuple(self))


def split_idle(
    times: Sequence[RankTime],
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    shared_stages: Iterable[Sequence[int]] = (),
) -> tuple[IdleSplit, tuple[IdleSplit, ...]]:
    """The split over all ranks, and that of each rank; `times` has an entry per rank.

    `schedule` is the one that the ranks executed; an asynchronous one needs enough steps for a
    steady state. Edges and shared stages are as for `Rule`. The total of a split is the idle share
    `sum(idle_ms) / sum(wall_ms)` of `times`.
    """
    edges = None if edges is None else list(edges)
    grad_edges = None if grad_edges is None else list(grad_edges)
    shared_stages = [tuple(group) for group in shared_stages]

    def waits(costs: ActionCosts) -> tuple[float, ...]:
        played = simulate(
            schedule, costs, edges, grad_edges=grad_edges, shared_stages=shared_stages
        )
        return played.idle_ms_a_step

    real = measured_costs(times, schedule)
    fed = _with_data(real, times, schedule)
    equal = waits(_equalised(real, schedule))
    whole = _with_overhead(fed, times, schedule)
    written = _with_writing(whole, times, schedule)
    levels = zip(equal, *map(waits, (real, fed, whole, written)), strict=True)
    parts = [_parts(time, waited) for time, waited in zip(times, levels, strict=True)]
    walls = [time.wall_ms for time in times]
    by_rank = tuple(_shares([part], wall) for part, wall in zip(parts, walls, strict=True))
    return _shares(parts, sum(walls)), by_rank


def mean_split(splits: Sequence[IdleSplit], walls_ms: Sequence[float]) -> IdleSplit:
    """The mean of the splits of several groups of ranks, weighted by their times `walls_ms`; a
    single split is returned unchanged."""
    if len(splits) == 1:
        return splits[0]
    total_ms = sum(walls_ms)
    parts = (
        sum(getattr(split, part.name) * ms for split, ms in zip(splits, walls_ms, strict=True))
        for part in fields(IdleSplit)
    )
    return IdleSplit(*(part / total_ms if total_ms else 0.0 for part in parts))


def measured_costs(times: Sequence[RankTime], schedule: Schedule) -> ActionCosts:
    """The mean cost of each stage's actions, with free transfers."""
    counted = _counts(schedule)
    stages = range(schedule.stages)
    split = schedule.split

    def total_ms(kind: str, stage: int) -> float:
        ranks = schedule.ranks_of(stage)
        return sum(times[rank].stage_ms.get((kind, stage), 0.0) for rank in ranks)

    def mean(kind: str, stage: int) -> float:
        count = counted.get((kind, stage), 0.0)
        return total_ms(kind, stage) / count if count else 0.0

    def steps_ms(stage: int) -> float:
        return mean("S", stage) + total_ms("norm", stage) / counted.get(("S", stage), 1.0)

    def cache_ms(stage: int) -> float:
        return total_ms("cache", stage) / counted.get(("F", stage), 1.0)

    weight = tuple(mean("W", stage) for stage in stages)
    backward = []
    for stage in stages:
        # A whole backward includes the time of W, a split one does not.
        in_two = sum(1 for of, _ in split if of == stage)
        in_all = sum(
            action.kind == "B" and action.stage == stage for row in schedule.ranks for action in row
        )
        backward.append(mean("B", stage) + weight[stage] * (in_two / in_all if in_all else 0.0))
    return ActionCosts(
        tuple(mean("F", stage) + cache_ms(stage) for stage in stages),
        tuple(backward),
        tuple(steps_ms(stage) for stage in stages),
        weight_ms=weight,
    )


def _counts(schedule: Schedule) -> dict[tuple[str, int], float]:
    """The number of actions of each kind and stage in one optimizer step."""
    counted: dict[tuple[str, int], float] = {}
    for action in (action for row in schedule.compute.ranks for action in row):
        key = action.kind, action.stage
        counted[key] = counted.get(key, 0.0) + 1 / max(1, schedule.steps)
    return counted


def _equalised(costs: ActionCosts, schedule: Schedule) -> ActionCosts:
    """The same work, distributed evenly among the ranks, and among the stages of each. Each replica
    of a stage runs a part of its micro-batches."""
    stages_of_rank = [schedule.rank_of_stage.count(rank) for rank in schedule.rank_of_stage]
    replicas = [len(schedule.ranks_of(stage)) for stage in range(schedule.stages)]

    def even(values: Sequence[float]) -> tuple[float, ...]:
        of_rank = sum(values) / len(schedule.ranks)
        return tuple(
            of_rank * parts / stages for parts, stages in zip(replicas, stages_of_rank, strict=True)
        )

    # Every replica makes every optimizer step.
    steps_ms = [ms * parts for ms, parts in zip(costs.step_ms, replicas, strict=True)]
    return replace(
        costs,
        forward_ms=even(costs.forward_ms),
        backward_ms=even(costs.backward_ms),
        step_ms=tuple(ms / parts for ms, parts in zip(even(steps_ms), replicas, strict=True)),
        weight_ms=even(costs.weight_ms),
    )


def _with_data(costs: ActionCosts, times: Sequence[RankTime], schedule: Schedule) -> ActionCosts:
    """Adds the data loading to the forwards of each rank's first stage."""
    more = [0.0] * schedule.stages
    for rank, time in enumerate(times):
        more[schedule.stages_of(rank)[0]] += time.data_ms / schedule.step_every
    return replace(costs, forward_ms=_added(costs.forward_ms, more))


def _with_overhead(
    costs: ActionCosts, times: Sequence[RankTime], schedule: Schedule
) -> ActionCosts:
    """Adds an equal part of its rank's overhead to every action."""
    counted = _counts(schedule)
    of_rank = [0.0] * len(times)
    for (_, stage), count in counted.items():
        of_rank[schedule.rank_of_stage[stage]] += count
    overhead_ms = [
        sum(times[rank].overhead_ms for rank in schedule.ranks_of(stage))
        for stage in range(schedule.stages)
    ]
    more = [
        ms / (of_rank[rank] or 1.0)
        for ms, rank in zip(overhead_ms, schedule.rank_of_stage, strict=True)
    ]
    parts = [counted.get(("W", stage), 0.0) > 0 for stage in range(schedule.stages)]
    return replace(
        costs,
        forward_ms=_added(costs.forward_ms, more),
        backward_ms=_added(
            costs.backward_ms, [ms * (1 + two) for ms, two in zip(more, parts, strict=True)]
        ),
        step_ms=_added(costs.step_ms, more),
        weight_ms=_added(costs.weight_ms, [ms * two for ms, two in zip(more, parts, strict=True)]),
    )


def _with_writing(costs: ActionCosts, times: Sequence[RankTime], schedule: Schedule) -> ActionCosts:
    """Adds the writing of each rank to the optimizer steps of its stages, in equal parts."""
    more = []
    for stage in range(schedule.stages):
        ranks = schedule.ranks_of(stage)
        own_ms = (times[rank].writing_ms / len(schedule.stages_of(rank)) for rank in ranks)
        more.append(sum(own_ms) / len(ranks))
    return replace(costs, step_ms=_added(costs.step_ms, more))


def _added(values: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    return tuple(value + ms for value, ms in zip(values, more, strict=True))


def _parts(time: RankTime, levels_ms: Sequence[float]) -> dict[str, float]:
    """The parts of one rank's idle time in milliseconds; `levels_ms` are its waits with more and
    more of the real costs."""
    left_ms, explained_ms = time.waiting_ms, 0.0
    parts = []
    equal_ms, real_ms, *_ = levels_ms
    for level_ms in (min(equal_ms, real_ms), *levels_ms[1:]):
        parts.append(min(left_ms, max(0.0, level_ms - explained_ms)))
        left_ms -= parts[-1]
        explained_ms = max(explained_ms, level_ms)
    bubble, imbalance, data, overhead, writing = parts
    return {
        "bubble": bubble,
        "imbalance": imbalance,
        "communication": left_ms + time.sending_ms,
        "data": data + time.data_ms,
        "overhead": overhead + time.overhead_ms,
        "exchange": time.exchange_ms,
        "writing": writing + time.writing_ms,
    }


def _shares(parts: Sequence[Mapping[str, float]], wall_ms: float) -> IdleSplit:
    names = [part.name for part in fields(IdleSplit)]
    return IdleSplit(*(sum(p[name] for p in parts) / (wall_ms or 1.0) for name in names))


_WITHOUT_WORK = IdleSplit(
    **{part.name: float(part.name == "imbalance") for part in fields(IdleSplit)}
)


def split_of_run(
    plan: Plan, config: RunConfig, schedule: Schedule, times: Sequence[RankTime]
) -> tuple[IdleSplit, tuple[IdleSplit, ...]]:
    """The parts of the idle share in a typical step, over all ranks and for each.

    Replicas and tensor ranks are split separately: waiting for sums with others is exchange. A
    rank that the schedule does not have is idle for lack of work.
    """
    played, ranks = _enough_steps(plan, config, schedule), len(schedule.ranks)
    every = config.tensor_ranks
    in_all = len(times) // (config.pipelines * every)
    firsts = [
        replica * in_all * every + tensor_rank
        for replica in range(config.pipelines)
        for tensor_rank in range(every)
    ]
    replicas = [times[first : first + ranks * every : every] for first in firsts]
    splits = [
        split_idle(
            own,
            played,
            forward_edges(plan),
            grad_edges=gradient_edges(plan),
            shared_stages=tied_stages(plan),
        )
        for own in replicas
    ]
    walls_ms = [sum(time.wall_ms for time in own) for own in replicas]
    without = [_WITHOUT_WORK] * (in_all - ranks)
    busiest_ms = max((time.wall_ms for time in times), default=0.0)
    more = len(without) * len(replicas)
    whole = mean_split(
        [split for split, _ in splits] + [_WITHOUT_WORK] * more, walls_ms + [busiest_ms] * more
    )
    by_pipeline = [(*by_rank, *without) for _, by_rank in splits]
    groups = (by_pipeline[first : first + every] for first in range(0, len(by_pipeline), every))
    neighbors = (ranks for group in groups for ranks in zip(*group, strict=True))
    return whole, tuple(chain.from_iterable(neighbors))


def simulated_step(
    plan: Plan,
    config: RunConfig,
    schedule: Schedule,
    forecast: Forecast | None,
    times: Sequence[RankTime],
) -> tuple[str, Timeline]:
    """The origin of the costs and the timeline of one simulated step; a plan without costs uses
    those that the run measured."""
    if forecast is not None:
        costs = "the plan's costs and the measured optimizer time"
        timeline = forecast.timeline
    else:
        schedule = _enough_steps(plan, config, schedule)
        costs = "measured costs"
        timeline = simulate(
            schedule,
            measured_costs(times, schedule),
            forward_edges(plan),
            grad_edges=gradient_edges(plan),
            shared_stages=tied_stages(plan),
        )
    return costs, timeline.between(*timeline.steady_step) if config.is_async else timeline


def _enough_steps(plan: Plan, config: RunConfig, schedule: Schedule) -> Schedule:
    """The synchronous step, or enough asynchronous ones for every rank's steady state."""
    if not config.is_async:
        return schedule
    ahead = -(-2 * len(plan.stages) // config.micro_batches)
    return make_segment(plan, config, steps=3 + ahead)
