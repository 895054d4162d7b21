"""A plan and a schedule's name -> the step time and idle share that the simulator foresees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .plan import Plan, StageSpec
from .schedules import ASYNCHRONOUS, make_schedule
from .simulate import Costs, Timeline, simulate

_MUCH_IDLE = 1 / 3


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one optimizer step takes, and the share of it that a rank waits, on average."""

    step_ms: float
    idle_share: float
    timeline: Timeline


def forecast_step(
    plan: Plan,
    schedule: str,
    micro_batches: int,
    *,
    processors: int | None = None,
    steps: int = 1,
    step_ms: Iterable[float] | None = None,
) -> Forecast:
    """Simulates `steps` steps (one, unless asynchronous) at the plan's costs.

    A rank is busy with its transfers as the plan says, and at the end of a step with the gradients
    of shared parameters. `processors` is the number of cores that the ranks share, None for one
    each; `step_ms` the optimizer's milliseconds of every stage. For an asynchronous schedule the
    idle share is that of the steady state, fill and drain left out.
    """
    stages = len(plan.stages)
    count = steps if schedule in ASYNCHRONOUS else 1
    made = make_schedule(
        schedule, stages=stages, micro_batches=micro_batches * count, step_every=micro_batches
    )
    costs = Costs(
        forward_ms=tuple(stage.forward_ms + stage.forward_talk_ms for stage in plan.stages),
        backward_ms=tuple(stage.backward_ms + stage.backward_talk_ms for stage in plan.stages),
        step_ms=tuple(
            stage.exchange_ms + optimizer_ms
            for stage, optimizer_ms in zip(plan.stages, step_ms or (0.0,) * stages, strict=True)
        ),
        transfer_ms={(source, target): ms for source, target, ms in plan.setting.transfer_ms},
    )
    shared = [parameter.stages for parameter in plan.shared if len(parameter.stages) > 1]
    edges = {(edge.source, target) for edge in plan.boundaries for target in edge.targets}
    gradients = {
        (edge.source, target)
        for edge in plan.boundaries
        for target in edge.targets
        if edge.tensor.requires_grad
    }
    timeline = simulate(
        made, costs, edges, grad_edges=gradients, shared_stages=shared, processors=processors
    )
    idle = timeline.steady_idle_share if count > 1 else timeline.idle_share
    return Forecast(timeline.makespan_ms / count, idle, timeline)


@dataclass(frozen=True, slots=True)
class OneStep:
    """One optimizer step, from when to when in a timeline, and the share of it that ranks wait."""

    start_ms: float
    end_ms: float
    idle_share: float
    timeline: Timeline

    @property
    def step_ms(self) -> float:
        return self.end_ms - self.start_ms


def forecast_one_step(plan: Plan, schedule: str, micro_batches: int) -> OneStep:
    """A step of a synchronous schedule, or one in the middle of a long asynchronous run. Replicas
    of a stage count as one rank that is as fast as they are together."""
    # Every stage has to make a step before the first one makes its last forward.
    steps = 3 + -(-2 * len(plan.stages) // micro_batches)
    found = forecast_step(_without_replicas(plan), schedule, micro_batches, steps=steps)
    if schedule not in ASYNCHRONOUS:
        timeline = found.timeline
        return OneStep(timeline.start_ms, timeline.end_ms, found.idle_share, timeline)
    return OneStep(*found.timeline.steady_step, found.idle_share, found.timeline)


def _without_replicas(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(map(_as_one_rank, plan.stages)))


def _as_one_rank(stage: StageSpec) -> StageSpec:
    """Its time for a micro-batch is the load of the stage; what is over is its replicas' exchange
    of gradients, as if it came with every backward."""
    replicas = len(stage.ranks)
    if replicas < 2:
        return stage
    names = ("forward_ms", "backward_ms", "forward_talk_ms", "backward_talk_ms")
    shared = {name: getattr(stage, name) / replicas for name in names}
    shared["backward_talk_ms"] += max(0.0, stage.load_ms - sum(shared.values()))
    return replace(stage, **shared)


def describe_forecast(plan: Plan, micro_batches: tuple[int, ...] = (8, 32)) -> str:
    """One sentence: what a 1f1b step takes at a few numbers of micro-batches, and asynchronous."""
    parts = []
    for number in micro_batches:
        step = forecast_step(plan, "1f1b", number)
        parts.append(f"{number} micro-batches {step.step_ms:.0f} ms, {step.idle_share:.0%} idle")
    ahead = len(plan.stages) - 1
    steady = forecast_step(plan, "async-1f1b", micro_batches[0], steps=8)
    parts.append(
        f"async {steady.idle_share:.0%} idle, weights at most "
        f"{-(-ahead // micro_batches[0])} step old"
    )
    return "one 1f1b step on a device a stage: " + " · ".join(parts)


def few_micro_batches_warning(name: str, *, stages: int, micro_batches: int) -> str | None:
    """What 4 micro-batches a stage would change, when equal stages would be idle for more than
    a third of each step for want of them; None otherwise.

    >>> print(few_micro_batches_warning("1f1b", stages=4, micro_batches=2))
    2 micro-batches keep 4 stages idle 60 % of the time (1f1b). 16 would be 16 %. --micro-batches 16
    """
    if name in ASYNCHRONOUS or micro_batches >= 4 * stages:
        return None
    costs = Costs.equal(stages)
    now, then = (
        simulate(make_schedule(name, stages=stages, micro_batches=number), costs).idle_share
        for number in (micro_batches, 4 * stages)
    )
    if now <= _MUCH_IDLE or then > _MUCH_IDLE:
        return None
    return (
        f"{micro_batches} micro-batch{'es keep' if micro_batches > 1 else ' keeps'} "
        f"{stages} stages idle {100 * now:.0f} % of the time ({name}). "
        f"{4 * stages} would be {100 * then:.0f} %. --micro-batches {4 * stages}"
    )
