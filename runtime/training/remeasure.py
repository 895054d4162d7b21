"""Measured times of the first steps -> the schedule of all later steps: `--schedule auto`.

The costs of a plan were measured before the run, one stage at a time. A run can measure them with
all ranks at work. So the first schedule, computed from the plan's costs, runs for a few steps with
whole backwards, and for a few more with split backwards, W right after B, which measures the time
of W, the cost of splitting, and by how much actions vary. Then rank 0 computes the schedule again
and broadcasts the text of the few that are worth trying (`finalists`). These alternate, as a
pipeline drains after every synchronous step, then the two fastest do, and the run keeps the one
whose measured steps are the shortest.

    step  1         ignored: caches and memory are cold
    steps 2 to 5    measure whole backwards
    steps 6 and 7   measure split backwards
    from step 8     each finalist for 3 steps in a row, up to 3 times
    then            the two fastest for 3 steps in a row, up to 9 times; a third of the run at most
    then            the finalist with the shortest steps
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from statistics import mean, median

from ..config.segments import lowered, measured_finalists, waiting_stages
from ..config.settings import RunConfig
from ..distributed.process_groups import World
from ..executor.instrumented import COMPUTING
from ..executor.mailbox import forward_edges, gradient_edges
from ..formatting import write_ms
from ..monitoring.gather import RankFigures
from ..plan.plan import Plan
from ..schedule.builders import AUTO
from ..schedule.finalists import Trial, medians_of
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
    return f"and again from measured ones after step {_LAST}; the ones that come close are tried"


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
        self._finalists: list[Schedule] = []
        self._trials = [Trial()]
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
        self._finalists = [lowered(plan, each.compute, check=False) for each in self._finalists]

    def text_after(self, step: int) -> str:
        """The schedule with which a run resumed after a step continues: the newest that is not only
        for measurements; "" if it follows from the settings."""
        if self._config.schedule != AUTO:
            return ""
        is_decided = bool(self._finalists) and len(self._trials[-1].entrants) == 1
        if not self._is_wanted or is_decided:
            return to_text(self.current.compute)
        return to_text((self._finalists or [self._first])[0].compute)

    def of_step(self, step: int) -> Schedule:
        """The schedule of a step, counted from 1."""
        if not self._is_wanted:
            return self.current
        since = step - _LAST - 1
        if step == _SPLIT[0]:
            split = with_split_backwards(self._first.compute)
            self.current = lowered(self._plan, split, check=False)
        elif since == 0:
            texts = json.loads(self._agreed(lambda: json.dumps([*map(to_text, self._computed())])))
            schedules = (from_text(text, (), grad_edges=()) for text in texts)
            self._finalists = [lowered(self._plan, each, check=True) for each in schedules]
            self._trials = [Trial.first(len(texts), self._config.steps - _LAST)]
        elif since == self._trials[-1].end > 0:
            self._go_on(dict(json.loads(self._agreed(lambda: json.dumps([*self._medians_ms()])))))
        if since >= 0:
            self.current = self._finalists[self._trials[-1].tried_in(since)]
        return self.current

    def _agreed(self, decided: Callable[[], str]) -> str:
        """What rank 0 has decided."""
        return self._world.text_of_first(decided() if self._world.rank == 0 else "")

    def _computed(self) -> list[Schedule]:
        """The finalists, the one with the shortest expected steps first."""
        plan, first = self._plan, self._first.compute
        seen = self._figures(_LAST)
        costs = costs_of_steps(seen, self._optimizer_ms(), first)
        spread = spread_of_steps(seen, first)
        made = measured_finalists(plan, self._config, costs, spread, first.rank_of_stage)
        edges, gradients = forward_edges(plan), gradient_edges(plan)
        waiting = waiting_stages(plan, self._config)
        before, after = (
            simulate(schedule, costs, edges, grad_edges=gradients, shared_stages=waiting)
            for schedule in (first, made[0])
        )
        split = len(made[0].split)
        self._tell(
            f"recomputed from the times of steps {_WHOLE[0]} to {_LAST}, in which actions vary by "
            f"{spread:.0%}: {write_ms(after.makespan_ms)} per step instead of "
            f"{write_ms(before.makespan_ms)}; "
            f"{split or 'none'} of {first.stages * first.micro_batches} backwards split in two",
            made[0],
        )
        return made

    def _medians_ms(self) -> Iterable[tuple[int, float]]:
        """The finalists and their median steps so far."""
        taken_ms = {
            int(ranks[0].step): 1e3 * mean(rank.wall_s for rank in ranks)
            for ranks in self._figures(_LAST + self._trials[-1].end)
        }
        step_ms = [taken_ms[_LAST + 1 + number] for number in range(self._trials[-1].end)]
        return medians_of(self._trials, step_ms).items()

    def _go_on(self, medians_ms: Mapping[int, float]) -> None:
        """Continues with the next trial, or the finalist that is kept."""
        self._trials.append(self._trials[-1].next(medians_ms))
        trial = self._trials[-1]
        if len(trial.entrants) == 1 and self._world.rank == 0:
            kept = self._finalists[trial.entrants[0]]
            tried = ", ".join(
                f"{_described(self._finalists[number])} {write_ms(ms)}"
                for number, ms in medians_ms.items()
            )
            self._tell(
                f"tried in steps {_LAST + 1} to {_LAST + trial.begin}: {tried} per step; "
                f"continues with {_described(kept)}",
                kept.compute,
            )


def _described(schedule: Schedule) -> str:
    """The schedule's name, and whether a computed one splits backwards."""
    if schedule.name != AUTO:
        return schedule.name
    return f"{AUTO} with {'split' if schedule.split else 'whole'} backwards"


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
        return 1e3 * median(_seconds(figures, schedule, kind, stage, steps)) / m

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


def spread_of_steps(figures: Sequence[Sequence[RankFigures]], schedule: Schedule) -> float:
    """The standard deviation of an action's time as a share of it, from the measured steps with
    whole backwards: that of a step's sum of one kind, times the root of the micro-batches in it."""
    deviations = [
        seconds / mean(taken) - 1
        for stage in range(schedule.stages)
        for kind in ("F", "B")
        if all(taken := _seconds(figures, schedule, kind, stage, _WHOLE))
        for seconds in taken
    ]
    if not deviations:
        return 0.0
    free = len(deviations) * (1 - 1 / len(_WHOLE))
    return sqrt(schedule.micro_batches * sum(each**2 for each in deviations) / free)


def _seconds(
    figures: Sequence[Sequence[RankFigures]],
    schedule: Schedule,
    kind: str,
    stage: int,
    steps: range,
) -> list[float]:
    """The time of a stage's actions of one kind in each of these steps."""
    place = COMPUTING.index(kind) * schedule.stages + stage
    rank = schedule.rank_of_stage[stage]
    return [ranks[rank].stage_s[place] for ranks in figures if int(ranks[0].step) in steps]
