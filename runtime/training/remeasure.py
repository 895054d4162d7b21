"""Measured times of the first steps -> the schedule of all later steps: `--schedule auto`.

The costs of a plan were measured before the run, one stage at a time. A run can measure them with
all ranks at work. So the first schedule, computed from the plan's costs, runs for a few steps with
whole backwards, and for a few more with split backwards, W right after B, which measures the time
of W and the cost of splitting. Then rank 0 computes the schedule again and broadcasts its text.

    step  1         ignored: caches and memory are cold
    steps 2 to 5    measure whole backwards
    steps 6 and 7   measure split backwards
    step  8         first step of the new schedule
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ..config.segments import fit, lowered, waiting_stages
from ..config.settings import RunConfig
from ..distributed.process_groups import World
from ..executor.instrumented import COMPUTING
from ..executor.mailbox import forward_edges, gradient_edges
from ..formatting import write_ms
from ..monitoring.gather import RankFigures
from ..plan.plan import Plan
from ..schedule.builders import AUTO
from ..schedule.schedule import Action, Schedule, one_step
from ..schedule.simulate import ActionCosts, simulate
from ..schedule.text import from_text, to_text

_WHOLE, _SPLIT = range(2, 6), range(6, 8)
_LAST = _SPLIT[-1]
_ENOUGH = 2 * _LAST
"""The steps below which a run keeps the first schedule."""


def when_measured(config: RunConfig) -> str:
    """The step after which the schedule of the run is computed again, in words."""
    if config.steps < _ENOUGH:
        return f"and kept, since the run has fewer than {_ENOUGH} steps"
    return f"and again from measured ones after step {_LAST}"


class Remeasuring:
    """The schedule of every step of a run, lowered; all ranks request the steps in order.

    A resumed run keeps its schedule, because another one would sum gradients in another order.

    Arguments:
    first: the schedule computed from the plan's costs.
    figures: on rank 0, returns the metrics of every rank from the second step up to a step.
    optimizer_ms: on rank 0, returns the time of each rank's optimizer.
    tell: on rank 0, called with a message and the new schedule.
    resumed: the text of the schedule of a resumed run.
    """

    def __init__(
        self,
        plan: Plan,
        config: RunConfig,
        world: World,
        first: Schedule,
        *,
        figures: Callable[[int], Sequence[Sequence[RankFigures]]],
        optimizer_ms: Callable[[], Sequence[float]],
        tell: Callable[[str, Schedule], None],
        resumed: str | None = None,
    ) -> None:
        self._plan, self._config, self._world = plan, config, world
        self._figures, self._optimizer_ms, self._tell = figures, optimizer_ms, tell
        self._first = self.current = first
        self._is_wanted = config.schedule == AUTO and config.steps >= _ENOUGH
        if resumed is not None:
            self._is_wanted = False
            schedule = from_text(resumed, (), grad_edges=()) if resumed else first
            if config.schedule == AUTO and _is_like(schedule, first):
                self.current = lowered(plan, schedule.compute, check=True)
        if self._is_wanted:
            self.current = lowered(plan, with_whole_backwards(first.compute), check=False)

    def narrow(self, plan: Plan) -> None:
        """Continues with a plan in which fewer boundary tensors need a gradient."""
        self._plan = plan
        self.current = lowered(plan, self.current.compute, check=False)

    def text_after(self, step: int) -> str:
        """The schedule with which a run resumed after a step continues: the newest that is not only
        for measurements; "" if it follows from the settings."""
        if self._config.schedule != AUTO:
            return ""
        is_made = not self._is_wanted or step > _LAST
        return to_text(self.current.compute if is_made else self._first.compute)

    def of_step(self, step: int) -> Schedule:
        """The schedule of a step, counted from 1."""
        if self._is_wanted and step == _SPLIT[0]:
            split = with_split_backwards(self._first.compute)
            self.current = lowered(self._plan, split, check=False)
        elif self._is_wanted and step == _LAST + 1:
            text = self._fitted() if self._world.rank == 0 else ""
            schedule = from_text(self._world.text_of_first(text), (), grad_edges=())
            self.current = lowered(self._plan, schedule, check=True)
        return self.current

    def _fitted(self) -> str:
        """The text of the new schedule."""
        plan, first = self._plan, self._first.compute
        costs = costs_of_steps(self._figures(_LAST), self._optimizer_ms(), first)
        fitted = fit(plan, self._config, costs, rank_of_stage=first.rank_of_stage)
        edges, gradients = forward_edges(plan), gradient_edges(plan)
        waiting = waiting_stages(plan, self._config)
        before, after = (
            simulate(schedule, costs, edges, grad_edges=gradients, shared_stages=waiting)
            for schedule in (first, fitted)
        )
        split = len(fitted.split)
        self._tell(
            f"recomputed from the times of steps {_WHOLE[0]} to {_LAST}: "
            f"{write_ms(after.makespan_ms)} per step instead of {write_ms(before.makespan_ms)}; "
            f"{split or 'none'} of {fitted.stages * fitted.micro_batches} backwards split in two",
            fitted,
        )
        return to_text(fitted)


def _is_like(schedule: Schedule, other: Schedule) -> bool:
    """True if one schedule can replace the other."""
    return (schedule.rank_of_stage, schedule.replicas, schedule.micro_batches) == (
        other.rank_of_stage,
        other.replicas,
        other.micro_batches,
    )


def with_whole_backwards(schedule: Schedule) -> Schedule:
    """The same order with whole backwards, each at the place of its B.

    >>> from asyncpipe.runtime.schedule.interleaved import zb_v
    >>> print(with_whole_backwards(zb_v(2, 2, 1)))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 0F1@v0 0B0@v0 1F1@v0 1B1@v0 0B1@v0 0S1 1S1
    """
    rows = [[action for action in row if action.kind in ("F", "B")] for row in schedule.ranks]
    return one_step(schedule.name, rows, schedule.rank_of_stage)


def with_split_backwards(schedule: Schedule) -> Schedule:
    """The same order with split backwards, W right after B.

    >>> from asyncpipe.runtime.schedule.builders import one_f_one_b
    >>> print(with_split_backwards(one_f_one_b(1, 2)))
    rank 0: 0F0@v0 0B0@v0 0W0@v0 0F1@v0 0B1@v0 0W1@v0 0S1
    """
    rows: list[list[Action]] = []
    for row in with_whole_backwards(schedule).ranks:
        rows.append([])
        for action in row:
            if action.kind in ("F", "B"):
                rows[-1].append(action)
            if action.kind == "B":
                rows[-1].append(action._replace(kind="W"))
    return one_step(schedule.name, rows, schedule.rank_of_stage)


def costs_of_steps(
    figures: Sequence[Sequence[RankFigures]], optimizer_ms: Sequence[float], schedule: Schedule
) -> ActionCosts:
    """Medians of the measured steps; transfers are free, a rank's optimizer time is divided among
    its stages."""
    stages, m = range(schedule.stages), schedule.micro_batches

    def of(kind: str, stage: int, steps: range) -> float:
        place = COMPUTING.index(kind) * len(stages) + stage
        rank = schedule.rank_of_stage[stage]
        seconds = [ranks[rank].stage_s[place] for ranks in figures if int(ranks[0].step) in steps]
        return 1e3 * median(seconds) / m

    whole = [of("B", stage, _WHOLE) for stage in stages]
    weight = [of("W", stage, _SPLIT) for stage in stages]
    inputs = [of("B", stage, _SPLIT) for stage in stages]
    on_rank = [schedule.rank_of_stage.count(rank) for rank in schedule.rank_of_stage]
    return ActionCosts(
        forward_ms=tuple(of("F", stage, _WHOLE) for stage in stages),
        backward_ms=tuple(whole),
        step_ms=tuple(
            optimizer_ms[rank] / count
            for rank, count in zip(schedule.rank_of_stage, on_rank, strict=True)
        ),
        weight_ms=tuple(weight),
        split_ms=tuple(max(0.0, i + w - b) for i, w, b in zip(inputs, weight, whole, strict=True)),
    )
