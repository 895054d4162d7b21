"""Tasks + a policy -> an order: each rank that is free takes the ready task that comes first.

List scheduling (Graham, 1969) for a line of steps: a rank goes on to the next step when its own is
over, so the order settles to one that fits the ranks' different beginnings. A policy says in which
order tasks come, how far a rank may run ahead, and which backwards are in two parts; their W is
taken when nothing else is ready.

A forward begins only where the activations of its micro-batch at the rank's later stages have room
too. So of the micro-batch that is furthest on none is ever missing, and no limit can make all ranks
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .tasks import FORWARD, WEIGHTS, WHOLE, Rows, Tasks

_STEPS = 2


@dataclass(frozen=True)
class Policy:
    """`group` micro-batches go through the stages of a rank together; at most `ahead` activations
    of a rank are live. `forward_first` prefers forwards to backwards; of each rank the last `split`
    backwards are in two parts."""

    group: int
    ahead: tuple[float, ...]
    forward_first: bool
    split: tuple[int, ...]


def policies(tasks: Tasks) -> Iterator[Policy]:
    """Those worth a try, the most promising first."""
    ranks, m = tasks.ranks, tasks.micro_batches
    chunks = max(map(len, tasks.of_rank))
    each = [sum(tasks.weights[j] for j in own) / len(own) for own in tasks.of_rank]
    tight = [(chunks - 1) * (ranks + 1) + 2 * (ranks - 1 - r) + 1 for r in range(ranks)]
    wide = [chunks * (ranks + 1) + 2 * (ranks - r) for r in range(ranks)]
    shares = (math.inf, 0, 2) if tasks.may_split else (0,)
    splits = [_split_counts(tasks, times) for times in shares]
    for forward_first, group in product((False, True), sorted({1, min(ranks, m), m})):
        for counts, split in product((wide, [2 * m * chunks] * ranks, tight), splits):
            ahead = tuple(count * weight for count, weight in zip(counts, each, strict=True))
            yield Policy(group, ahead, forward_first, split)


def _split_counts(tasks: Tasks, times: float) -> tuple[int, ...]:
    """As many backwards of each rank as fill its gap so many times with their W."""
    counts = []
    for own, gap_ms in zip(tasks.of_rank, tasks.gap_ms, strict=True):
        weight_ms = sum(tasks.cost_ms[tasks.number(WEIGHTS, stage, 0)] for stage in own) / len(own)
        most = len(own) * tasks.micro_batches
        needed = times * gap_ms / weight_ms if times and weight_ms else 0.0
        counts.append(most if math.isinf(times) else min(most, math.ceil(needed)))
    return tuple(counts)


def orders(tasks: Tasks, policy: Policy) -> Iterator[Rows]:
    """The order of every step of a line of them."""
    free_ms = [0.0] * tasks.ranks
    for _ in range(_STEPS):
        rows = _Step(tasks, policy, free_ms).rows
        yield rows
        found = tasks.run(rows, free_ms, [0.0] * tasks.links)
        assert found is not None
        after, _ = found
        free_ms = [time - min(after) for time in after]


class _Step:
    """Goes through one step, always with the rank that can begin something first."""

    def __init__(self, tasks: Tasks, policy: Policy, free_ms: Sequence[float]) -> None:
        self.rows: Rows = [[] for _ in range(tasks.ranks)]
        self._tasks, self._policy = tasks, policy
        self._now = list(free_ms)
        self._end = [math.inf] * tasks.places
        self._links = [0.0] * tasks.links
        self._next = [[0] * tasks.stages, [0] * tasks.stages]  # of F and B, by stage
        self._put_off: list[list[int]] = [[] for _ in range(tasks.ranks)]
        self._held = [0.0] * tasks.ranks
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
        """When the rank can begin what: of all that is ready first, what the policy prefers."""
        tasks, now, end = self._tasks, self._now[rank], self._end
        needs, m = tasks.needs, tasks.micro_batches
        best: tuple[float, bool, int, int, int] = (math.inf, False, 0, 0, -1)
        forward_first, group = self._policy.forward_first, self._policy.group
        most = self._room[rank] - self._held[rank]
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
        """Does it, and returns the ranks that it matters to."""
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
            self._held[rank] += tasks.weights[stage]
        else:
            self._held[rank] -= tasks.weights[stage]
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
