"""A plan and a schedule -> the predicted step time and idle share, and the bytes between stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..formatting import counted, write_ms, write_share
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import AUTO, SYNCHRONOUS, VIRTUAL, fit_auto, make_schedule
from ..schedule.interleaved import REPLICATED, replicated
from ..schedule.schedule import Action, Schedule, count_versions
from ..schedule.simulate import ActionCosts, Timeline, simulate
from .plan import Boundary, Plan, StageSpec, TensorSpec
from .sharing import passes_over_gradients

_MUCH_IDLE = 1 / 3
_LAPS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted time of one optimizer step, and the mean share of it that a rank waits."""

    step_ms: float
    idle_share: float
    timeline: Timeline


def forecast_step(
    plan: Plan,
    schedule: str | Schedule,
    micro_batches: int,
    *,
    processors: int | None = None,
    steps: int = 1,
    replicas: int = 1,
    step_ms: Iterable[float] | None = None,
    shared_stages: Iterable[Sequence[int]] | None = None,
) -> Forecast:
    """Simulates `steps` steps (one, unless asynchronous) at the plan's costs, of the schedule of
    that name on the plan's ranks, or of a given schedule.

    A rank is busy with its transfers as the plan says, and at the end of a step with the gradients
    of shared parameters and of replicas, which are all as fast. For an asynchronous schedule the
    idle share is that of the steady state, without fill and drain. A step of a computed schedule is
    one of several in a row.

    - `processors`: the number of cores that the ranks share; None for one each
    - `replicas`: the pipelines that sum their gradients in every step of a stage
    - `step_ms`: the optimizer's milliseconds of every stage
    - `shared_stages`: the groups of stages that step when all have their gradients; by default
      those that share a parameter
    """
    name = schedule if isinstance(schedule, str) else schedule.name
    count = steps if name in ASYNCHRONOUS else 1
    costs = _costs(plan, step_ms)
    waiting = tied_stages(plan) if shared_stages is None else [*shared_stages]
    if isinstance(schedule, str):
        planned = planned_schedule(plan, schedule, micro_batches, steps=count)
    else:
        planned = schedule.compute
    if planned.replicas or replicas > 1:
        sums_ms = summing_ms(plan, replicas)
        costs = replace(costs, step_ms=tuple(map(sum, zip(costs.step_ms, sums_ms, strict=True))))

    def simulated(of: Schedule) -> Timeline:
        return simulate(
            of,
            costs,
            _edges(plan),
            grad_edges=_edges(plan, with_gradient=True),
            shared_stages=waiting,
            processors=processors,
        )

    timeline = simulated(planned)
    if name == AUTO:
        row = simulated(_in_a_row(planned, 2 * _LAPS))
        period_ms = (row.end_ms - simulated(_in_a_row(planned, _LAPS)).end_ms) / _LAPS
        busy_ms = (1 - timeline.idle_share) * timeline.makespan_ms
        return Forecast(period_ms, max(0.0, 1 - busy_ms / period_ms if period_ms else 0.0), row)
    idle = timeline.steady_idle_share if count > 1 else timeline.idle_share
    return Forecast(timeline.makespan_ms / count, idle, timeline)


def planned_schedule(
    plan: Plan, name: str, micro_batches: int, *, steps: int = 1, may_split: bool = False
) -> Schedule:
    """The schedule of that name for a plan: on the plan's ranks if it has several stages on a rank
    or several ranks on a stage, and computed from the plan's costs if it is `auto`."""
    if has_stage_replicas(plan, name, micro_batches):
        return replicated(name, micro_batches, plan.stage_replicas)
    stages, ranks = len(plan.stages), planned_ranks(plan, name)
    if name == AUTO:
        placed = sorted(set(plan.device_of_stage))
        return fit_auto(
            _costs(plan),
            micro_batches,
            ranks=ranks or stages,
            rank_of_stage=tuple(map(placed.index, plan.device_of_stage)) if ranks else None,
            edges=_edges(plan),
            grad_edges=_edges(plan, with_gradient=True),
            shared_stages=tied_stages(plan),
            may_split=may_split,
        ).schedule
    return make_schedule(
        name,
        stages=stages,
        micro_batches=micro_batches * steps,
        step_every=micro_batches,
        ranks=ranks,
    )


def has_stage_replicas(plan: Plan, name: str, micro_batches: int) -> bool:
    """True if the schedule of that name uses the plan's replicas of single stages, each with at
    least one micro-batch."""
    most = max(map(len, plan.stage_replicas), default=0)
    return name in REPLICATED and 0 < most <= micro_batches


def summing_ms(plan: Plan, replicas: int) -> list[float]:
    """The time in which the ranks of each stage sum their gradients once.

    Where the plan has these ranks it has that time. Otherwise it is that of a ring over so many
    whole pipelines, at the speed of the plan's slowest transfers.
    """
    ring, setting = 2 * (replicas - 1), plan.setting
    slowest_ms = max((_byte_ms(stage, plan) for stage in plan.stages), default=0.0)
    summing_ms = []
    for stage in plan.stages:
        count = len(stage.ranks)
        if count > 1 and replicas in (1, count):
            passes = passes_over_gradients(setting.zero, -(-setting.micro_batches // count))
            summing_ms.append(stage.summing_ms / passes)
        elif replicas > 1 and stage.gradient_bytes:
            part_ms = slowest_ms * stage.gradient_bytes / replicas
            summing_ms.append(ring * (setting.latency_ms + part_ms))
        else:
            summing_ms.append(0.0)
    return summing_ms


def _byte_ms(stage: StageSpec, plan: Plan) -> float:
    """The time of a byte that the stage sends or receives, without latencies."""
    rank_of = plan.device_of_stage
    crossing = [
        (spec_bytes(boundary.tensor, plan.sizes), 1 + boundary.tensor.requires_grad)
        for boundary in (*stage.sends, *stage.receives)
        if {rank_of[target] for target in boundary.targets} != {rank_of[boundary.source]}
    ]
    messages, total = sum(n for _, n in crossing), sum(size * n for size, n in crossing)
    overlapped = [ms for *stages, ms in plan.setting.transfer_ms if stage.index in stages]
    talk_ms = stage.forward_talk_ms + stage.backward_talk_ms + 2 * sum(overlapped)
    return max(0.0, talk_ms - messages * plan.setting.latency_ms) / max(1, total)


def planned_ranks(plan: Plan, name: str) -> int | None:
    """The plan's number of ranks, if the schedule of that name can put several stages on a rank as
    the plan does, or is the plan's own; None for the schedule's default."""
    stages, ranks = len(plan.stages), len(set(plan.device_of_stage))
    if name not in (*VIRTUAL, AUTO) or (ranks == stages and name != plan.setting.schedule):
        return None
    is_even = stages == 2 * ranks if name == "zb-v" else stages % ranks == 0
    return ranks if is_even or name == AUTO else None


def has_times(plan: Plan) -> bool:
    """False for a plan without costs. A stage for which a cache stands in takes no time."""
    return any(stage.forward_ms > 0 for stage in plan.stages)


def costs_of_plan(plan: Plan) -> ActionCosts | None:
    """The plan's costs of a micro-batch, without optimizers; None if it has no costs."""
    return _costs(plan) if has_times(plan) else None


def _costs(plan: Plan, step_ms: Iterable[float] | None = None) -> ActionCosts:
    stages = plan.stages
    return ActionCosts(
        forward_ms=tuple(stage.forward_ms + stage.forward_talk_ms for stage in stages),
        backward_ms=tuple(stage.backward_ms + stage.backward_talk_ms for stage in stages),
        step_ms=tuple(
            stage.exchange_ms + optimizer_ms
            for stage, optimizer_ms in zip(stages, step_ms or (0.0,) * len(stages), strict=True)
        ),
        transfer_ms={(source, target): ms for source, target, ms in plan.setting.transfer_ms},
        weight_ms=tuple(stage.weight_ms for stage in stages),
    )


def _edges(plan: Plan, *, with_gradient: bool = False) -> set[tuple[int, int]]:
    return {
        (edge.source, target)
        for edge in plan.boundaries
        for target in edge.targets
        if edge.tensor.requires_grad or not with_gradient
    }


def tied_stages(plan: Plan) -> list[tuple[int, ...]]:
    """The groups of stages that exchange the gradient of one (tied) parameter."""
    return [each.stages for each in plan.shared if len(each.stages) > 1 and each.trains]


def _in_a_row(schedule: Schedule, steps: int) -> Schedule:
    """A schedule of several steps, in which a rank begins the next step when its own is over."""

    def row(actions: Iterable[Action]) -> Iterator[Action]:
        own = list(actions)
        for step in range(steps):
            for action in own:
                later = step if action.kind == "S" else step * schedule.micro_batches
                yield action._replace(index=action.index + later, version=None)

    return replace(
        schedule,
        micro_batches=steps * schedule.micro_batches,
        ranks=tuple(tuple(count_versions(row(own))) for own in schedule.ranks),
    )


@dataclass(frozen=True, slots=True)
class OneStep:
    """One optimizer step of a timeline: its start and end, and the share of it that ranks wait."""

    start_ms: float
    end_ms: float
    idle_share: float
    timeline: Timeline

    @property
    def step_ms(self) -> float:
        return self.end_ms - self.start_ms


def forecast_one_step(plan: Plan, schedule: str, micro_batches: int) -> OneStep:
    """A step of a synchronous schedule, or one in the middle of a long asynchronous run or of a row
    of computed steps. If the schedule has no replicas of single stages, those of the plan count as
    one rank that is as fast as all of them."""
    # Every stage has to make a step before the first one makes its last forward.
    steps = 3 + -(-2 * len(plan.stages) // micro_batches)
    if not has_stage_replicas(plan, schedule, micro_batches):
        plan = _without_replicas(plan)
    forecast = forecast_step(plan, schedule, micro_batches, steps=steps)
    timeline = forecast.timeline
    if schedule == AUTO:
        row = [event for event in timeline.events if event.action.kind != "S"]
        start_ms = min(event.start_ms for event in row if event.action.index >= micro_batches)
        return OneStep(start_ms, start_ms + forecast.step_ms, forecast.idle_share, timeline)
    if schedule not in ASYNCHRONOUS:
        return OneStep(timeline.start_ms, timeline.end_ms, forecast.idle_share, timeline)
    return OneStep(*timeline.steady_step, forecast.idle_share, timeline)


def compared_schedules(plan: Plan) -> tuple[str, ...]:
    """The schedules that a plan's report compares: its own first, then others that it can run
    under; with several stages per rank, those that put them on the same ranks."""
    planned = plan.setting.schedule
    others = [name for name in VIRTUAL if planned_ranks(plan, name)]
    is_folded = len(set(plan.device_of_stage)) < len(plan.stages)
    if not is_folded or planned_ranks(plan, planned) is None:
        others = ["gpipe", "1f1b", "async-1f1b"]
    return tuple(others) if planned in others else (planned, *others)


def _without_replicas(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(map(_as_one_rank, plan.stages)))


def _as_one_rank(stage: StageSpec) -> StageSpec:
    """A stage without replicas, whose time for a micro-batch is the load of the replicated one; the
    rest of the load is the exchange of gradients, counted with every backward."""
    replicas = len(stage.ranks)
    if replicas < 2:
        return stage
    names = ("forward_ms", "backward_ms", "forward_talk_ms", "backward_talk_ms", "weight_ms")
    shared = {name: getattr(stage, name) / replicas for name in names}
    busy_ms = sum(shared.values()) - shared["weight_ms"]  # which the backward has in it
    shared["backward_talk_ms"] += max(0.0, stage.load_ms - busy_ms)
    return replace(stage, **shared)


def describe_forecast(plan: Plan, micro_batches: tuple[int, ...] = (8, 32)) -> str:
    """One sentence: the step time of the plan's schedule (1f1b if that is asynchronous) for several
    numbers of micro-batches, and the asynchronous idle share."""
    steps = []
    planned = plan.setting.schedule
    name = "1f1b" if planned in ASYNCHRONOUS else planned
    ranks = planned_ranks(plan, name)
    for number in micro_batches:
        step = forecast_step(plan, name, number)
        steps.append(
            f"{write_ms(step.step_ms)} with {number} micro-batches "
            f"({write_share(step.idle_share)} idle)"
        )
    if ranks and ranks < len(plan.stages):
        return f"predicted {name} step on {ranks} ranks: " + ", ".join(steps)
    ahead = len(plan.stages) - 1
    on = "with one device per stage"
    if any(has_stage_replicas(plan, name, number) for number in micro_batches):
        on = f"on {sum(map(len, plan.stage_replicas))} ranks"
    steady = forecast_step(plan, "async-1f1b", micro_batches[0], steps=8)
    return (
        f"predicted {name} step {on}: {', '.join(steps)}; async-1f1b: "
        f"{write_share(steady.idle_share)} idle, weights at most "
        f"{counted(-(-ahead // micro_batches[0]), 'step')} stale"
    )


def few_micro_batches_warning(name: str, *, ranks: int, micro_batches: int) -> str | None:
    """The effect of 4 micro-batches per rank, if equal ranks with one stage each would otherwise be
    idle for more than a third of each step; None otherwise.

    >>> few_micro_batches_warning("1f1b", ranks=4, micro_batches=2).split(". ")[0]
    'with 2 micro-batches, 1f1b leaves 4 ranks idle 60% of the time'
    """
    if name not in SYNCHRONOUS or micro_batches >= 4 * ranks:
        return None
    costs = ActionCosts.equal(ranks)
    now, then = (
        simulate(make_schedule(name, stages=ranks, micro_batches=number), costs).idle_share
        for number in (micro_batches, 4 * ranks)
    )
    if now <= _MUCH_IDLE or then > _MUCH_IDLE:
        return None
    return (
        f"with {counted(micro_batches, 'micro-batch', 'micro-batches')}, {name} leaves {ranks} "
        f"ranks idle {write_share(now)} of the time. Use --micro-batches {4 * ranks} to reduce "
        f"this to {write_share(then)}."
    )


_ITEM_BYTES = {
    "complex128": 16, "complex64": 8, "complex32": 4, "float64": 8, "float32": 4, "float16": 2,
    "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


def spec_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Bytes of one tensor of that spec at the given sizes."""
    return math.prod(spec.resolve(sizes)) * _ITEM_BYTES[spec.dtype]


def boundary_bytes(boundary: Boundary, sizes: Mapping[str, int]) -> int:
    """Bytes of a boundary tensor, sent to each of its readers."""
    return spec_bytes(boundary.tensor, sizes) * len(boundary.targets)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of one micro-batch from one stage to another; gradients send the same bytes
    back."""

    source: int
    target: int
    sent: int
    if_sent: int
    """The bytes if the target recomputed nothing."""


def traffic(plan: Plan) -> tuple[Traffic, ...]:
    """The bytes between every two stages, with and without recomputation."""
    sent = _bytes_between(plan, plan.boundaries)
    if_sent = _bytes_between(plan, plan.if_sent or plan.boundaries)
    return tuple(
        Traffic(*pair, sent.get(pair, 0), if_sent.get(pair, 0))
        for pair in sorted(sent.keys() | if_sent.keys())
    )


def step_volumes(plan: Plan) -> dict[tuple[int, int], int]:
    """The bytes of one step from each stage to each other: tensors to later stages, and gradients
    to earlier ones."""
    volumes = _bytes_between(plan, plan.boundaries)
    trained = [boundary for boundary in plan.boundaries if boundary.tensor.requires_grad]
    volumes |= {(to, source): size for (source, to), size in _bytes_between(plan, trained).items()}
    return {pair: plan.setting.micro_batches * size for pair, size in volumes.items()}


def _bytes_between(plan: Plan, boundaries: Iterable[Boundary]) -> dict[tuple[int, int], int]:
    total: dict[tuple[int, int], int] = {}
    for boundary in boundaries:
        size = spec_bytes(boundary.tensor, plan.sizes)
        for target in boundary.targets:
            pair = boundary.source, target
            total[pair] = total.get(pair, 0) + size
    return total
