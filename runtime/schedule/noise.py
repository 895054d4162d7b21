"""Orders of tasks under noise: the expected time of a step when actions vary.

Measured actions of one kind differ from one micro-batch to the next, and more on a busy machine. An
order that is the shortest for exact costs may have no slack: a late action then makes other ranks
wait. So the time of each task is drawn anew in every step (`varied`), and all orders are compared
on the same draws (common random numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .simulate import varied
from .tasks import Rows, Tasks

_SETTLING, _STEPS = 2, 24


@dataclass(frozen=True)
class Noise:
    """The factor of every task in each of some steps."""

    factors: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, tasks: Tasks, spread: float) -> Noise:
        """The draws for a standard deviation of `spread`, as a share of a task's time; always the
        same ones."""
        random = Random(0)
        steps = range(_SETTLING + _STEPS)
        return cls(tuple(tuple(varied(random, spread) for _ in tasks.cost_ms) for _ in steps))

    def expected_ms(self, tasks: Tasks, rows: Rows) -> float:
        """The mean time of a step of this order, of steps that follow one another; infinite if the
        order never ends."""
        free_ms, links_ms = [0.0] * tasks.ranks, [0.0] * tasks.links
        begin_ms = 0.0
        for step, factors in enumerate(self.factors):
            if step == _SETTLING:
                begin_ms = sum(free_ms)
            cost_ms = [ms * factor for ms, factor in zip(tasks.cost_ms, factors, strict=True)]
            run = tasks.run(rows, free_ms, links_ms, cost_ms)
            if run is None:
                return float("inf")
            free_ms = run[0]
        return (sum(free_ms) - begin_ms) / (_STEPS * tasks.ranks)
