"""An order -> a better one, by small changes where it matters.

The period of an order is the length of a critical cycle: tasks of which each waits for the one
before it, on its rank or for its tensors, across as many steps as it goes through. Only a change on
that cycle can shorten it (Van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated
annealing", 1992): an earlier place for a task that holds up another, a backward in two parts with
its W put off, or a W moved to where its rank waits; where that leaves every sum of gradients in the
order of micro-batches (`Tasks.is_fixed`). Worse orders are taken for a while (late
acceptance, Burke and Bykov, 2017), the best is kept. Random numbers come from a fixed seed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from random import Random

from .tasks import INPUTS, WEIGHTS, WHOLE, Rows, Steady, Tasks

_HISTORY = 5
_PATIENCE = 4  # a search without splits ends when so great a part of its tries brought nothing
_NEAR = 1e-6
_TIED = 1e-7  # of the bound, for every backward in two parts


@dataclass(frozen=True)
class Order:
    """An order and what it takes; of two with one period that with fewer split backwards is
    better."""

    rows: Rows
    steady: Steady
    splits: int

    @property
    def period_ms(self) -> float:
        return self.steady.period_ms


def timed(
    tasks: Tasks, rows: Rows, near: Order | None = None, *, below_ms: float = math.inf
) -> Order | None:
    """None for an order that never ends or holds too much, or whose period is above that."""
    if not tasks.fits(rows):
        return None
    steady = tasks.steady(rows, near.steady.free_ms if near else None, below_ms=below_ms)
    if steady is None:
        return None
    return Order(rows, steady, sum(task >= 3 * tasks.count for row in rows for task in row))


def improve(tasks: Tasks, order: Order, tries: int) -> Order:
    """The best order seen in so many tries from this one, or fewer where they lead nowhere."""
    random = Random(0)
    bound = tasks.bound_ms * (1 + _NEAR)
    tie = _TIED * tasks.bound_ms

    def cost(one: Order) -> float:
        return one.period_ms + tie * one.splits

    best = current = order
    history = deque([cost(order)] * _HISTORY)
    cycle = critical_cycle(tasks, current)
    patience = tries if tasks.may_split else tries // _PATIENCE
    found_at = 0
    for number in range(tries):
        if best.period_ms <= bound or number - found_at > patience:
            break
        rows = changed(tasks, current, cycle, random)
        worst = max(history[0], cost(current))
        found = timed(tasks, rows, current, below_ms=worst) if rows else None
        if found is not None and (cost(found) <= cost(current) or cost(found) <= history[0]):
            current = found
            cycle = critical_cycle(tasks, current)
            if cost(current) < cost(best):
                best, found_at = current, number
        history.popleft()
        history.append(cost(current))
    return merged(tasks, best, tries)


def merged(tasks: Tasks, order: Order, tries: float = math.inf) -> Order:
    """The order with the splits undone that its period does not need: as many at once as can be,
    in halves where they cannot."""
    waiting = [[task for row in order.rows for task in row if tasks.kind(task) == INPUTS]]
    while waiting and tries > 0:
        some = waiting.pop()
        if not some:
            continue
        tries -= 1
        undone = [_whole(tasks, row, set(some)) for row in order.rows]
        rows = [row for row in undone if row is not None]
        found = None
        if len(rows) == len(undone):
            found = timed(tasks, rows, order, below_ms=order.period_ms + 1e-9)
        if found is not None and found.period_ms <= order.period_ms + 1e-9:
            order = found
        elif len(some) > 1:
            half = len(some) // 2
            waiting += some[half:], some[:half]  # W is in the way of later whole backwards
    return order


def critical_cycle(tasks: Tasks, order: Order) -> list[tuple[int, int]]:
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
    tasks: Tasks, order: Order, cycle: list[tuple[int, int]], random: Random
) -> Rows | None:
    """The order after one random change on the cycle, or None where there is nothing to do."""
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
    """The row with a task at another place; None if it cannot pass what lies between."""
    task = row[position]
    passed = row[to:position] if to < position else row[position + 1 : to + 1]
    if not passed or any(tasks.is_fixed(task, other) for other in passed):
        return None
    new = [*row]
    new.insert(to, new.pop(position))
    return new


def _split(tasks: Tasks, row: list[int], position: int, random: Random) -> list[int] | None:
    """The row with that backward in two parts, and W put off as long as it may be, or less."""
    inputs, weights = row[position] + tasks.count, row[position] + 2 * tasks.count
    last = position + 1
    while last < len(row) and not tasks.is_fixed(weights, row[last]):
        last += 1
    to = last if random.random() < 0.5 else random.randrange(position + 1, last + 1)
    return [*row[:position], inputs, *row[position + 1 : to], weights, *row[to:]]


def _whole(tasks: Tasks, row: list[int], some: set[int]) -> list[int] | None:
    """The row where those backwards, each named by its first part, are whole; None if gradients
    would be summed in another order."""
    n = tasks.count
    put_off = {task + n for task in some}
    new = [task - n if task in some else task for task in row if task not in put_off]
    return new if tasks.is_ordered(new) else None
