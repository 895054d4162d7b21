"""Orders of tasks: list schedules by several policies, and local search on the critical cycle.

`orders` makes list schedules (Graham, 1969): each free rank takes the ready task that the policy
prefers. A rank begins its next step when its own is over, so the order settles to one that fits the
ranks' different beginnings. A policy says in which order tasks come, how far a rank may run ahead,
and which backwards are split; their W run when no other task is ready. A forward begins only if the
activations of its micro-batch fit at the rank's later stages too. So the oldest micro-batch can
always continue, and no limit can make all ranks wait for each other.

`improve` makes an order better by small changes. The period of an order is the length of a critical
cycle: tasks of which each waits for the one before it, on its rank or for its tensors, across as
many steps as the cycle has. Only a change on that cycle can shorten it (Van Laarhoven, Aarts and
Lenstra, "Job shop scheduling by simulated annealing", 1992): an earlier place for a task that holds
up another, a split backward with a delayed W, or a W moved to where its rank waits; if every sum of
gradients stays in the order of micro-batches (`Tasks.is_fixed`). Worse orders are accepted for a
while (late acceptance, Burke and Bykov, 2017), the best is kept. Random numbers have a fixed seed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from .tasks import FORWARD, INPUTS, WEIGHTS, WHOLE, Rows, Steady, Tasks

_HISTORY = 5
_PATIENCE = 4  # a search without splits ends when so great a part of its tries brought nothing
_NEAR = 1e-6
_TIED = 1e-7  # of the bound, for every backward in two parts


@dataclass(frozen=True)
class TaskOrder:
    """An order with its timing; of two orders with one period the one with fewer split backwards is
    better."""

    rows: Rows
    steady: Steady
    splits: int

    @property
    def period_ms(self) -> float:
        return self.steady.period_ms


def timed(
    tasks: Tasks, rows: Rows, near: TaskOrder | None = None, *, below_ms: float = math.inf
) -> TaskOrder | None:
    """The order with its timing; None if it never ends, holds too much, or has a period above
    `below_ms`."""
    if not tasks.fits(rows):
        return None
    steady = tasks.steady(rows, near.steady.free_ms if near else None, below_ms=below_ms)
    if steady is None:
        return None
    return TaskOrder(rows, steady, sum(task >= 3 * tasks.count for row in rows for task in row))


def improve(tasks: Tasks, order: TaskOrder, tries: int) -> TaskOrder:
    """The best order found in `tries` changes of this one, or fewer if they bring nothing."""
    random = Random(0)
    bound = tasks.bound_ms * (1 + _NEAR)
    tie = _TIED * tasks.bound_ms

    def cost(order: TaskOrder) -> float:
        return order.period_ms + tie * order.splits

    best = current = order
    history = deque([cost(order)] * _HISTORY)
    cycle = critical_cycle(tasks, current)
    patience = tries if tasks.may_split else tries // _PATIENCE
    best_at = 0
    for number in range(tries):
        if best.period_ms <= bound or number - best_at > patience:
            break
        rows = changed(tasks, current, cycle, random)
        worst = max(history[0], cost(current))
        trial = timed(tasks, rows, current, below_ms=worst) if rows else None
        if trial is not None and (cost(trial) <= cost(current) or cost(trial) <= history[0]):
            current = trial
            cycle = critical_cycle(tasks, current)
            if cost(current) < cost(best):
                best, best_at = current, number
        history.popleft()
        history.append(cost(current))
    return merged(tasks, best, tries)


def merged(tasks: Tasks, order: TaskOrder, tries: float = math.inf) -> TaskOrder:
    """The order without the splits that its period does not need: undoes as many together as
    possible, and halves the set where that fails."""
    waiting = [[task for row in order.rows for task in row if tasks.kind(task) == INPUTS]]
    while waiting and tries > 0:
        some = waiting.pop()
        if not some:
            continue
        tries -= 1
        undone = [_whole(tasks, row, set(some)) for row in order.rows]
        rows = [row for row in undone if row is not None]
        merged_order = None
        if len(rows) == len(undone):
            merged_order = timed(tasks, rows, order, below_ms=order.period_ms + 1e-9)
        if merged_order is not None and merged_order.period_ms <= order.period_ms + 1e-9:
            order = merged_order
        elif len(some) > 1:
            half = len(some) // 2
            waiting += some[half:], some[:half]  # W is in the way of later whole backwards
    return order


def critical_cycle(tasks: Tasks, order: TaskOrder) -> list[tuple[int, int]]:
    """Rank and position of the tasks on one critical cycle, the last first."""
    end_ms, free_ms = order.steady.end_ms, order.steady.free_ms
    at = {
        task: (rank, position)
        for rank, row in enumerate(order.rows)
        for position, task in enumerate(row)
    }
    maker = {slot: tasks.place[t] for t in at for slot, _, _ in tasks.sends[t]}
    by_place = {tasks.place[t]: where for t, where in at.items()}
    path: list[tuple[int, int]] = []
    seen: dict[int, int] = {}
    rank = 0
    while rank not in seen:
        seen[rank] = len(path)
        position = len(order.rows[rank]) - 1
        while True:
            path.append((rank, position))
            task = order.rows[rank][position]
            start = end_ms[tasks.place[task]] - tasks.cost_ms[task]
            before = end_ms[tasks.place[order.rows[rank][position - 1]]] if position else None
            if (free_ms[rank] if before is None else before) >= start - 1e-9:
                if before is None:
                    break
                position -= 1
                continue
            need = max(tasks.needs[task], key=lambda need: end_ms[need])
            rank, position = by_place[maker.get(need, need)]
    return path[seen[rank] :]


def changed(
    tasks: Tasks, order: TaskOrder, cycle: list[tuple[int, int]], random: Random
) -> Rows | None:
    """The order after one random change on the cycle, or None if that change is impossible."""
    rank, position = random.choice(cycle)
    row = order.rows[rank]
    task = row[position]
    kind = tasks.kind(task)
    draw = random.random()
    if kind == WHOLE and draw < 0.3 and tasks.may_split:
        new = _split(tasks, row, position, random)
    elif kind == INPUTS and draw < 0.1:
        new = _whole(tasks, row, {task})
    elif kind == WEIGHTS or draw < 0.15:
        new = _moved(tasks, row, position, random.randrange(len(row)))
    elif draw < 0.75:
        new = _moved(tasks, row, position, max(0, position - random.choice((1, 1, 1, 2, 3, 5, 8))))
    else:
        new = _moved(tasks, row, position, position + random.choice((1, 1, 2, 3, 5, 8)))
    if new is None:
        return None
    rows = [*order.rows]
    rows[rank] = new
    return rows


def _moved(tasks: Tasks, row: list[int], position: int, to: int) -> list[int] | None:
    """The row with a task at another place; None if it cannot pass the tasks in between."""
    task = row[position]
    passed = row[to:position] if to < position else row[position + 1 : to + 1]
    if not passed or any(tasks.is_fixed(task, other) for other in passed):
        return None
    new = [*row]
    new.insert(to, new.pop(position))
    return new


def _split(tasks: Tasks, row: list[int], position: int, random: Random) -> list[int] | None:
    """The row with that backward split, and W delayed as long as possible, or less."""
    inputs, weights = row[position] + tasks.count, row[position] + 2 * tasks.count
    last = position + 1
    while last < len(row) and not tasks.is_fixed(weights, row[last]):
        last += 1
    to = last if random.random() < 0.5 else random.randrange(position + 1, last + 1)
    return [*row[:position], inputs, *row[position + 1 : to], weights, *row[to:]]


def _whole(tasks: Tasks, row: list[int], some: set[int]) -> list[int] | None:
    """The row with those backwards, named by their first parts, whole again; None if gradients
    would be summed in another order."""
    n = tasks.count
    put_off = {task + n for task in some}
    new = [task - n if task in some else task for task in row if task not in put_off]
    return new if tasks.is_ordered(new) else None


_STEPS = 2


@dataclass(frozen=True)
class Policy:
    """A policy of list scheduling."""

    group: int
    """The number of micro-batches that pass the stages of a rank together."""
    ahead: tuple[float, ...]
    """The most live activations of each rank."""
    forward_first: bool
    """Prefer forwards to backwards."""
    split: tuple[int, ...]
    """The number of backwards of each rank, counted from the last, that are split."""


def policies(tasks: Tasks) -> Iterator[Policy]:
    """The policies, the most promising first."""
    ranks, m = tasks.ranks, tasks.micro_batches
    chunks = max(map(len, tasks.of_rank))
    mean_weights = [sum(tasks.weights[j] for j in own) / len(own) for own in tasks.of_rank]
    tight = [(chunks - 1) * (ranks + 1) + 2 * (ranks - 1 - r) + 1 for r in range(ranks)]
    wide = [chunks * (ranks + 1) + 2 * (ranks - r) for r in range(ranks)]
    shares = (math.inf, 0, 2) if tasks.may_split else (0,)
    splits = [_split_counts(tasks, times) for times in shares]
    for forward_first, group in product((False, True), sorted({1, min(ranks, m), m})):
        for counts, split in product((wide, [2 * m * chunks] * ranks, tight), splits):
            ahead = tuple(
                count * weight for count, weight in zip(counts, mean_weights, strict=True)
            )
            yield Policy(group, ahead, forward_first, split)


def _split_counts(tasks: Tasks, times: float) -> tuple[int, ...]:
    """For each rank, the number of backwards whose W fill its gap `times` times."""
    counts = []
    for own, gap_ms in zip(tasks.of_rank, tasks.gap_ms, strict=True):
        weight_ms = sum(tasks.cost_ms[tasks.number(WEIGHTS, stage, 0)] for stage in own) / len(own)
        most = len(own) * tasks.micro_batches
        needed = times * gap_ms / weight_ms if times and weight_ms else 0.0
        counts.append(most if math.isinf(times) else min(most, math.ceil(needed)))
    return tuple(counts)


def orders(tasks: Tasks, policy: Policy) -> Iterator[Rows]:
    """The order of each of several consecutive steps."""
    free_ms = [0.0] * tasks.ranks
    for _ in range(_STEPS):
        rows = _Step(tasks, policy, free_ms).rows
        yield rows
        run = tasks.run(rows, free_ms, [0.0] * tasks.links)
        assert run is not None
        after, _ = run
        free_ms = [time - min(after) for time in after]


class _Step:
    """Builds one step, always continuing with the rank that can begin a task first."""

    def __init__(self, tasks: Tasks, policy: Policy, free_ms: Sequence[float]) -> None:
        self.rows: Rows = [[] for _ in range(tasks.ranks)]
        self._tasks, self._policy = tasks, policy
        self._now = list(free_ms)
        self._end = [math.inf] * tasks.places
        self._links = [0.0] * tasks.links
        self._next = [[0] * tasks.stages, [0] * tasks.stages]  # of F and B, by stage
        self._put_off: list[list[int]] = [[] for _ in range(tasks.ranks)]
        self._in_flight = [0.0] * tasks.ranks
        self._later = [
            sum(tasks.weights[k] for k in tasks.of_rank[rank] if k >= stage)
            for stage, rank in enumerate(tasks.rank_of_stage)
        ]
        limit = tasks.limit or [math.inf] * tasks.ranks
        self._room = [
            min(most, max(ahead, self._later[own[0]])) + 1e-9
            for most, ahead, own in zip(limit, policy.ahead, tasks.of_rank, strict=True)
        ]
        choices = [self._choose(rank) for rank in range(tasks.ranks)]
        while True:
            rank = min(range(tasks.ranks), key=lambda r: choices[r][0])
            start, task = choices[rank]
            if math.isinf(start):
                break
            for other in self._take(rank, task, start):
                choices[other] = self._choose(other)

    def _choose(self, rank: int) -> tuple[float, int]:
        """The task that the rank begins next, and when: the policy's choice of the tasks that are
        ready first."""
        tasks, now, end = self._tasks, self._now[rank], self._end
        needs, m = tasks.needs, tasks.micro_batches
        best: tuple[float, bool, int, int, int] = (math.inf, False, 0, 0, -1)
        forward_first, group = self._policy.forward_first, self._policy.group
        most = self._room[rank] - self._in_flight[rank]
        for stage in tasks.of_rank[rank]:
            for kind in (FORWARD, WHOLE):
                index = self._next[kind][stage]
                if index == m or (kind == FORWARD and self._later[stage] > most):
                    continue
                task = kind * tasks.count + stage * m + index
                ready = now
                for need in needs[task]:
                    if end[need] > ready:
                        ready = end[need]
                if ready > best[0]:
                    continue
                later = (kind == WHOLE) == forward_first
                deep = -stage if kind == FORWARD else stage
                best = min(best, (ready, later, index // group, deep, task))
        if self._put_off[rank] and best[0] > now:
            return now, self._put_off[rank][0]
        return best[0], best[-1]

    def _take(self, rank: int, task: int, start: float) -> set[int]:
        """Runs the task, and returns the ranks whose choices it affects."""
        tasks = self._tasks
        kind, stage = tasks.kind(task), tasks.stage(task)
        if kind == WEIGHTS:
            self._put_off[rank].pop(0)
        else:
            self._next[kind][stage] += 1
        if kind == WHOLE and self._is_split(rank):
            task += tasks.count
            self._put_off[rank].append(task + tasks.count)
        elif kind == FORWARD:
            self._in_flight[rank] += tasks.weights[stage]
        else:
            self._in_flight[rank] -= tasks.weights[stage]
        end = start + tasks.cost_ms[task]
        self.rows[rank].append(task)
        self._now[rank] = self._end[tasks.place[task]] = end
        for slot, link, transfer_ms in tasks.sends[task]:
            self._links[link] = self._end[slot] = max(end, self._links[link]) + transfer_ms
        return {rank, *tasks.readers[stage]} if kind != WEIGHTS else {rank}

    def _is_split(self, rank: int) -> bool:
        own = self._tasks.of_rank[rank]
        done = sum(self._next[WHOLE][stage] for stage in own)
        return done > len(own) * self._tasks.micro_batches - self._policy.split[rank]
