"""Measured costs and their spread -> the few schedules that are worth trying, and which to keep.

A computed schedule is the best for the costs that it is given; costs that a run has measured in a
few steps are off by some percent, most of all those of a split backward, and more where ranks
share cores. So the schedules that come close under noise (`noise.py`), and the best one with whole
backwards, alternate for some steps, the two fastest of them for more, and the one with the shortest
measured steps is kept. They are the computed schedule with and without split backwards, and the
named ones of the same placement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .builders import computed, named_for
from .noise import Noise
from .schedule import Schedule
from .tasks import Tasks

_MOST = 4
_NEAR = 1.1
_TIED = 1.003
_BLOCK = 3
_ROUNDS, _LAST_ROUNDS = 5, 18


def finalists(tasks: Tasks, spread: float) -> list[Schedule]:
    """At most four schedules by their expected step, the shortest first; among them always the best
    one with whole backwards.

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
    near = [s for ms, s in ordered if ms <= _NEAR * ordered[0][0]][:_MOST]
    whole = next((schedule for _, schedule in ordered if not schedule.split), None)
    return near if whole is None or whole in near else [*near[: _MOST - 1], whole]


@dataclass(frozen=True)
class Trial:
    """Steps in which some schedules alternate: at first all of them, then the two fastest.

    Each runs for three steps in a row, of which the first does not count: it still waits for the
    schedule before it. The order turns round from round to round, so that a load that grows hits
    all alike.

    entrants: the schedules, by number; a single one is kept for the rest of the run.
    rounds: how often each of them runs.
    begin: the steps of the trial before this one.
    most: the steps that all trials may take.
    """

    entrants: tuple[int, ...] = (0,)
    rounds: int = 0
    begin: int = 0
    most: int = 0

    @classmethod
    def first(cls, count: int, steps: int) -> Trial:
        """The trial of so many schedules in a run of so many more steps, of which all trials take a
        third at most, and this one a third of these; only the first schedule if that is too few."""
        trial = cls(tuple(range(count)), most=steps // 3)
        rounds = min(_ROUNDS, -(-trial._possible // 3)) if count > 1 else 0
        return replace(trial, rounds=rounds) if rounds else cls()

    def next(self, medians_ms: Mapping[int, float]) -> Trial:
        """The trial of its two fastest, or the fastest alone, by the median step of each: as fast
        as another to 0.3% counts one that was expected to be faster."""
        ranked = sorted(self.entrants, key=lambda number: (medians_ms[number], number))
        trial = replace(self, entrants=tuple(sorted(ranked[:2])), begin=self.end)
        if not self.begin and (rounds := min(_LAST_ROUNDS, trial._possible)):
            return replace(trial, rounds=rounds)
        limit = _TIED * medians_ms[ranked[0]]
        best = min(number for number in self.entrants if medians_ms[number] <= limit)
        return replace(trial, entrants=(best,), rounds=0)

    @property
    def _possible(self) -> int:
        """The rounds for which steps are left."""
        return (self.most - self.begin) // (_BLOCK * len(self.entrants))

    @property
    def end(self) -> int:
        """The steps until its end."""
        return self.begin + len(self.entrants) * self.rounds * _BLOCK

    def tried_in(self, step: int) -> int:
        """The schedule that the step runs; steps count from 0, at the beginning of the first
        trial."""
        turn, place = divmod((step - self.begin) // _BLOCK, len(self.entrants))
        return self.entrants[place if turn % 2 == 0 else -1 - place]

    def times_ms(self, step_ms: Sequence[float]) -> dict[int, list[float]]:
        """The steps of each schedule that count, of all steps since the first trial began."""
        times: dict[int, list[float]] = {number: [] for number in self.entrants}
        for step in range(self.begin, self.end):
            if (step - self.begin) % _BLOCK:
                times[self.tried_in(step)].append(step_ms[step])
        return times


def medians_of(trials: Iterable[Trial], step_ms: Sequence[float]) -> dict[int, float]:
    """The median step of each schedule over these trials."""
    times: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        for number, own in trial.times_ms(step_ms).items():
            times[number] += own
    return {number: median(own) for number, own in sorted(times.items())}
