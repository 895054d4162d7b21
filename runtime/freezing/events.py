"""The steps after which blocks may freeze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EPOCH = "epoch"
"""The value of `--freeze-every` for an event at the end of each epoch."""


@dataclass(frozen=True)
class Events:
    """The events of a run, each after a step.

    every: the distance between two events, in units of `position`
    position: the place of a run after so many steps: the steps themselves, or the samples so far
    """

    every: int
    position: Callable[[int], int] = lambda step: step

    def number(self, step: int) -> int:
        """The number of the last event up to a step.

        >>> events = Events(10, lambda step: 4 * step)
        >>> [events.number(step) for step in (2, 3, 4, 5, 8)], events.next(3), events.next(5)
        ([0, 1, 1, 2, 3], 5, 8)
        """
        return self.position(step) // self.every

    def next(self, step: int) -> int:
        """The first step after `step` with an event."""
        missing = (self.number(step) + 1) * self.every - self.position(step)
        return step - (-missing // (self.position(step + 1) - self.position(step)))
