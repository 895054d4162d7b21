"""Measured costs and their spread -> the few schedules that are worth trying, and which to keep.

A computed schedule is the best for the costs that it is given; costs that a run has measured in a
few steps are off by some percent, most of all those of a split backward. So the schedules that come
close under noise (`noise.py`) alternate for some steps, and the one with the shortest measured
steps is kept: the computed one with and without split backwards, and the named ones of the same
placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .builders import computed, named_for
from .noise import Noise
from .schedule import Schedule
from .tasks import Tasks

_MOST = 4
_NEAR = 1.1
_TIED = 1.003
_ROUNDS, _BLOCK = 3, 3


def finalists(tasks: Tasks, spread: float) -> list[Schedule]:
    """At most four schedules by their expected step, the shortest first.

    None of them holds more activations on a rank than the computed ones, so that trying them needs
    no more memory. `spread` is the standard deviation of an action's time, as a share of it.
    """
    made = [computed(tasks, spread=spread).schedule]
    if made[0].split:
        made.append(computed(tasks.whole, spread=spread).schedule)
    most = [
        max(peaks) for peaks in zip(*(tasks.peaks(tasks.rows_of(s)) for s in made), strict=True)
    ]
    named = named_for(tasks.rank_of_stage, tasks.micro_batches)
    noise = Noise.of(tasks, spread)
    expected_ms: dict[tuple[tuple[int, ...], ...], tuple[float, Schedule]] = {}
    for schedule in (*made, *named):
        rows = tasks.rows_of(schedule)
        if not all(map(tasks.is_ordered, rows)) or not tasks.fits(rows):
            continue
        if any(peak > limit for peak, limit in zip(tasks.peaks(rows), most, strict=True)):
            continue
        key = tuple(map(tuple, rows))
        expected_ms.setdefault(key, (noise.expected_ms(tasks, rows), schedule))
    ordered = sorted(expected_ms.values(), key=lambda each: each[0])
    return [s for ms, s in ordered if ms <= _NEAR * ordered[0][0]][:_MOST]


@dataclass(frozen=True)
class Trial:
    """Steps in which some schedules alternate.

    Each runs for three steps in a row, of which the first does not count: it still waits for the
    schedule before it. The order turns round from round to round, so that a load that grows hits
    all alike.
    """

    count: int
    rounds: int

    @classmethod
    def within(cls, count: int, steps: int) -> Trial:
        """The trial of so many schedules in a run of so many more steps, of which it takes a third
        at most; without rounds if that is too few."""
        return cls(count, min(_ROUNDS, steps // (3 * _BLOCK * count)) if count > 1 else 0)

    @property
    def steps(self) -> int:
        return self.count * self.rounds * _BLOCK

    def tried_in(self, step: int) -> int:
        """The schedule that the step (from 0) runs."""
        turn, place = divmod(step // _BLOCK, self.count)
        return place if turn % 2 == 0 else self.count - 1 - place

    def medians_ms(self, step_ms: Sequence[float]) -> list[float]:
        """The median step of each schedule."""
        counted = [step for step in range(self.steps) if step % _BLOCK]
        return [
            median(step_ms[step] for step in counted if self.tried_in(step) == schedule)
            for schedule in range(self.count)
        ]

    def best(self, medians_ms: Sequence[float]) -> int:
        """The schedule to keep: the one with the shortest steps, or one expected to be shorter that
        is as short to 0.3%."""
        limit = _TIED * min(medians_ms)
        return next(number for number, ms in enumerate(medians_ms) if ms <= limit)
