"""Stages, costs and placement -> the tasks of a step as numbers, and the time that an order of them
takes.

`DependencyRule` is asked once for the dependencies of each task, which are kept as indices: timing
an order of some hundred tasks takes less than a millisecond. The times equal those of `simulate`,
which a test compares. A task's number is `kind * count + stage * micro_batches + micro_batch`. A
backward is WHOLE, or INPUTS and WEIGHTS; the first two make the same gradients of inputs, and share
one place in the list of times.

Steps follow one another: a rank begins its next step when its own last action is over, regardless
of the others. The period is the time of a step when this repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from .dependencies import DependencyRule, Edge
from .schedule import Action, Kind, Schedule, one_step
from .simulate import ActionCosts

FORWARD, WHOLE, INPUTS, WEIGHTS = range(4)
_AFTER = {WHOLE: FORWARD, INPUTS: FORWARD, WEIGHTS: INPUTS}
_LIKE = {
    FORWARD: (FORWARD,),
    WHOLE: (WHOLE, INPUTS, WEIGHTS),
    INPUTS: (WHOLE, INPUTS),
    WEIGHTS: (WHOLE, WEIGHTS),
}
"""The kinds of one stage that run in the order of micro-batches: forwards, backwards that make
gradients of inputs, and those that add gradients of weights. So each sum of gradients equals that
of the plain model to the last bit."""
_LETTERS: tuple[Kind, ...] = ("F", "B", "B", "W")
Rows = list[list[int]]
_LAPS = 12
_SAME = 1e-9


@dataclass(frozen=True)
class Steady:
    """The steady state of an order: its period, when each rank is free again, and when tasks
    end."""

    period_ms: float
    free_ms: tuple[float, ...]
    end_ms: tuple[float, ...]


@dataclass(frozen=True)
class ActivationLimit:
    """The most live activations of ranks.

    most: the limit of each rank, in units of `weights`; () for unlimited ranks
    weights: the activations of one micro-batch at each stage (default 1)
    """

    most: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


NO_LIMIT = ActivationLimit()


class Tasks:
    """All tasks of one step.

    - `costs`, `rank_of_stage`, `micro_batches`: the costs and the placement
    - `edges`, `grad_edges`, `shared_stages`: as for `DependencyRule`
    - `limit`: the most live activations of each rank
    - `may_split`: allow split backwards
    """

    def __init__(
        self,
        costs: ActionCosts,
        rank_of_stage: Sequence[int],
        micro_batches: int,
        *,
        edges: Iterable[Edge] | None = None,
        grad_edges: Iterable[Edge] | None = None,
        shared_stages: Iterable[Sequence[int]] = (),
        limit: ActivationLimit = NO_LIMIT,
        may_split: bool = True,
    ) -> None:
        self.costs, self.rank_of_stage = costs, tuple(rank_of_stage)
        self.stages, self.micro_batches = len(self.rank_of_stage), micro_batches
        self.ranks = max(self.rank_of_stage) + 1
        self.count = self.stages * micro_batches
        self.may_split = may_split
        self.limit, self.weights = limit.most, limit.weights or (1.0,) * self.stages
        self.of_rank = [
            [stage for stage, at in enumerate(self.rank_of_stage) if at == rank]
            for rank in range(self.ranks)
        ]
        self.shared_stages = tuple(map(tuple, shared_stages))
        self.rule = rule = DependencyRule(
            one_step("auto", self._plain_rows(), self.rank_of_stage),
            edges,
            grad_edges=grad_edges,
            shared_stages=self.shared_stages,
        )
        self._link(rule)
        self._others = {
            stage: sorted(
                {needed.stage for needed in rule.dependencies(Action(stage, "S", 1))} - {stage}
            )
            for stage in range(self.stages)
        }
        self._shares = any(self._others.values())
        self._sources = [rule.sources("F", stage) for stage in range(self.stages)]
        self._targets = [rule.targets("B", stage) for stage in range(self.stages)]
        self.readers = [
            {self.rank_of_stage[j] for j in rule.targets("F", stage) + rule.targets("B", stage)}
            for stage in range(self.stages)
        ]

    def _plain_rows(self) -> Iterable[list[Action]]:
        for own in self.of_rank:
            kinds: tuple[Kind, Kind] = ("F", "B")
            yield [Action(j, k, i) for k in kinds for j in own for i in range(self.micro_batches)]

    def _link(self, rule: DependencyRule) -> None:
        n, m = self.count, self.micro_batches
        self.cost_ms: list[float] = []
        self.needs: list[tuple[int, ...]] = []
        self.sends: list[tuple[tuple[int, int, float], ...]] = [()] * (4 * n)
        self.place = [task if task < 2 * n else task - n for task in range(4 * n)]
        self.places, self.links = 3 * n, 0
        arrivals: dict[tuple[int, int], int] = {}  # of a task's result, at a stage
        for kind, stage in product((FORWARD, WHOLE), range(self.stages)):
            for sent in rule.sends(Action(stage, _LETTERS[kind], 0)):
                assert sent.peer is not None
                transfer_ms = self._transfer_ms(*sorted((stage, sent.peer)))
                if not transfer_ms:
                    continue
                for index in range(m):
                    task = self.number(kind, stage, index)
                    arrivals[task, sent.peer] = self.places
                    self.sends[task] += ((self.places, self.links, transfer_ms),)
                    self.places += 1
                self.links += 1
        self.sends[2 * n : 3 * n] = self.sends[n : 2 * n]
        for kind, stage, index in product(range(4), range(self.stages), range(m)):
            action = Action(stage, _LETTERS[kind], index)
            self.cost_ms.append(self.costs.of(action, split=kind in (INPUTS, WEIGHTS)))
            waits = []
            for needed in rule.dependencies(action):
                other = self.number(_LETTERS.index(needed.kind), needed.stage, index)
                waits.append(arrivals.get((other, stage), other))
            self.needs.append(tuple(waits))

    @property
    def whole(self) -> Tasks:
        """The same without split backwards."""
        return Tasks(
            self.costs,
            self.rank_of_stage,
            self.micro_batches,
            edges=self.rule.edges,
            grad_edges=self.rule.grad_edges,
            shared_stages=self.shared_stages,
            limit=ActivationLimit(self.limit, self.weights),
            may_split=False,
        )

    def number(self, kind: int, stage: int, index: int) -> int:
        """The task of an action."""
        return kind * self.count + stage * self.micro_batches + index

    def kind(self, task: int) -> int:
        """The kind of a task."""
        return task // self.count

    def stage(self, task: int) -> int:
        """The stage of a task."""
        return task % self.count // self.micro_batches

    def index(self, task: int) -> int:
        """The micro-batch of a task."""
        return task % self.micro_batches

    def is_fixed(self, task: int, other: int) -> bool:
        """True if two tasks of a rank have a fixed order: tasks of one micro-batch at a stage, and
        kinds that run in the order of micro-batches."""
        (kind, own), (other_kind, other_own) = divmod(task, self.count), divmod(other, self.count)
        m = self.micro_batches
        if own // m != other_own // m:
            return False
        return own == other_own or other_kind in _LIKE[kind]

    def is_ordered(self, row: Sequence[int]) -> bool:
        """True if the row respects all fixed orders."""
        last: dict[tuple[int, int], int] = {}
        for task in row:
            kind, stage, index = self.kind(task), self.stage(task), self.index(task)
            if kind != FORWARD and last.get((_AFTER[kind], stage), -1) < index:
                return False
            if any(last.get((other, stage), -1) > index for other in _LIKE[kind]):
                return False
            last[kind, stage] = index
        return True

    def rows_of(self, schedule: Schedule) -> Rows:
        """The order of a schedule of these stages and micro-batches."""
        kinds, split = {"F": FORWARD, "B": WHOLE, "W": WEIGHTS}, schedule.split
        return [
            [
                self.number(
                    INPUTS if a.kind == "B" and (a.stage, a.index) in split else kinds[a.kind],
                    a.stage,
                    a.index,
                )
                for a in row
                if a.kind in kinds
            ]
            for row in schedule.ranks
        ]

    def schedule_of(self, rows: Rows, name: str) -> Schedule:
        """The schedule that runs these tasks, an order for each rank."""
        actions = (
            [Action(self.stage(t), _LETTERS[self.kind(t)], self.index(t)) for t in row]
            for row in rows
        )
        return one_step(name, actions, self.rank_of_stage)

    def run(
        self,
        rows: Rows,
        free_ms: Sequence[float],
        links_ms: list[float],
        cost_ms: Sequence[float] | None = None,
    ) -> tuple[list[float], list[float]] | None:
        """When each rank is free after one step, and when each task ended, at these costs or the
        tasks' own; None if it never ends."""
        cost_ms = cost_ms or self.cost_ms
        needs, sends, place = self.needs, self.sends, self.place
        end_ms = [-1.0] * self.places
        at = [0] * self.ranks
        now = list(free_ms)
        left = sum(map(len, rows))
        while left:
            before = left
            for rank, row in enumerate(rows):
                position, length, time = at[rank], len(row), now[rank]
                while position < length:
                    task = row[position]
                    start = time
                    for need in needs[task]:
                        ready = end_ms[need]
                        if ready < 0.0:
                            break
                        if ready > start:
                            start = ready
                    else:
                        time = start + cost_ms[task]
                        end_ms[place[task]] = time
                        for slot, link, transfer_ms in sends[task]:
                            begin = links_ms[link]
                            arrived = (time if time > begin else begin) + transfer_ms
                            end_ms[slot] = links_ms[link] = arrived
                        position += 1
                        left -= 1
                        continue
                    break
                at[rank], now[rank] = position, time
            if left == before:
                return None
        return self._stepped(now, end_ms), end_ms

    def _stepped(self, now: list[float], end_ms: list[float]) -> list[float]:
        gradients_ms = [0.0] * self.stages
        if self._shares:
            m, n = self.micro_batches, self.count
            for stage in range(self.stages):
                of_stage = range(stage * m, stage * m + m)
                gradients_ms[stage] = max(max(end_ms[n + t], end_ms[2 * n + t]) for t in of_stage)
        for rank, own in enumerate(self.of_rank):
            for stage in own:
                for other in self._others[stage]:
                    now[rank] = max(now[rank], gradients_ms[other])
                now[rank] += self.costs.step_ms[stage]
        return now

    def steady(
        self, rows: Rows, free_ms: Sequence[float] | None = None, *, below_ms: float = math.inf
    ) -> Steady | None:
        """The steady state of the order, from ranks that are free at `free_ms`; None if it never
        ends, or if its period is certainly not below `below_ms`."""
        free = list(free_ms or [0.0] * self.ranks)
        links_ms = [0.0] * self.links
        for _ in range(_LAPS):
            first = min(free)
            free = [time - first for time in free]
            links_ms = [time - first for time in links_ms]
            run = self.run(rows, free, links_ms)
            if run is None:
                return None
            after, end_ms = run
            gains = [end - begin for begin, end in zip(free, after, strict=True)]
            if max(gains) - min(gains) <= _SAME:
                break
            if min(gains) > below_ms:  # the period is between the gains of one step
                return None
            free = after
        return Steady(max(gains), tuple(free), tuple(end_ms))

    def peaks(self, rows: Rows) -> list[float]:
        """The most live activations of each rank."""
        return [self.peak(row) for row in rows]

    def peak(self, row: Sequence[int]) -> float:
        """The most that a rank holds between forwards and backwards of this order."""
        in_flight = most = 0.0
        for task in row:
            kind = self.kind(task)
            if kind == FORWARD:
                in_flight += self.weights[self.stage(task)]
                most = max(most, in_flight)
            elif kind != INPUTS:
                in_flight -= self.weights[self.stage(task)]
        return most

    def fits(self, rows: Rows) -> bool:
        """True if the order keeps to the limit, and to whole backwards without `may_split`."""
        if not self.may_split and any(task >= 2 * self.count for row in rows for task in row):
            return False
        return not self.limit or all(
            peak <= most + _SAME for peak, most in zip(self.peaks(rows), self.limit, strict=True)
        )

    @cached_property
    def gap_ms(self) -> list[float]:
        """The idle time of each rank that only a delayed W can fill: its first forward comes later
        than that of stage 0, its last backward earlier."""
        base, step_ms = self.rank_of_stage[0], self.costs.step_ms
        gaps = []
        for rank, own in enumerate(self.of_rank):
            inside = min(map(self._head, own)) + min(map(self._tail, own))
            stepping = sum(step_ms[stage] for stage in own)
            gaps.append(0.0 if rank == base else max(0.0, inside + step_ms[0] - stepping))
        return gaps

    @cached_property
    def bound_ms(self) -> float:
        """A lower bound of the period: a rank does all its work in it, and fills its gap with idle
        time, or with W, where delaying 1 ms costs `price` ms more."""
        costs, n = self.costs, self.count
        bound = 0.0
        for own, gap in zip(self.of_rank, self.gap_ms, strict=True):
            prices = [1.0]
            for whole in (self.number(WHOLE, stage, 0) for stage in own):
                if (weight := self.cost_ms[whole + 2 * n]) > 0:
                    split = self.cost_ms[whole + n] + weight
                    prices.append((split - self.cost_ms[whole]) / weight)
            micro_batch_ms = sum(costs.forward_ms[j] + costs.backward_ms[j] for j in own)
            work = self.micro_batches * micro_batch_ms + sum(costs.step_ms[j] for j in own)
            price = max(0.0, min(prices)) if self.may_split else 1.0
            bound = max(bound, work + price * gap)
        return bound

    def _head(self, stage: int) -> float:
        """The shortest time from the first forward of all to that of the stage."""
        ways = [
            self._head(source) + self.costs.forward_ms[source] + self._transfer_ms(source, stage)
            for source in self._sources[stage]
        ]
        return max(ways, default=0.0)

    def _tail(self, stage: int) -> float:
        """The shortest time from the stage's last backward to that of stage 0, if stage 0 waits for
        it."""
        ways = []
        for target in self._targets[stage]:
            ways_back = (WHOLE, INPUTS) if self.may_split else (WHOLE,)
            each_ms = min(self.cost_ms[self.number(kind, target, 0)] for kind in ways_back)
            if target == 0 or self._targets[target]:
                ways.append(self._transfer_ms(target, stage) + each_ms + self._tail(target))
        return max(ways, default=0.0)

    def _transfer_ms(self, source: int, target: int) -> float:
        remote = self.rank_of_stage[source] != self.rank_of_stage[target]
        return self.costs.transfer_ms.get((source, target), 0.0) if remote else 0.0
