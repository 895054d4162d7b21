"""Stages that compute at the same time -> the usual times of each.

`together` runs them in threads, as ranks that share the cores of a machine run. `usual_times` makes
one of the times of a stage: other load only ever adds to a time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from .cache import threads_set
from .profiler import WholeTimes

CALM = 0.05
"""The spread of the times of a calm machine."""
_QUARTILES_APART = 1.349  # of a normal distribution, in standard deviations
_LEAST, _MOST = 2, 24  # micro-batches


def together(
    runs: Sequence[Iterator[WholeTimes]], enough_ms: float, threads: int | None, turn: int = 0
) -> list[list[WholeTimes]]:
    """The times of each of several endless runs, until `enough_ms` have passed, at least two.

    The runs execute at the same time, each in its own thread and on the next core, with each `turn`
    on the one after it; those that are done continue until all are. The first time of a run is that
    of a warm-up, and counts only if it is hardly longer than the second.
    """
    unfinished = set(range(len(runs)))

    def timed(number: int) -> list[WholeTimes]:
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[(number + turn) % len(cores)]})  # only of this thread
        return times_of(number)

    def times_of(number: int) -> list[WholeTimes]:
        samples: list[WholeTimes] = []
        try:
            with threads_set(threads):  # each thread sets its own number
                first = next(runs[number])
                while unfinished:
                    time = next(runs[number])
                    if number not in unfinished:
                        continue
                    is_warm = not samples and _ms(first) <= (1 + CALM) * _ms(time)
                    samples += [first, time] if is_warm else [time]
                    spent_ms = sum(map(_ms, samples))
                    if len(samples) >= _MOST or len(samples) >= _LEAST and spent_ms > enough_ms:
                        unfinished.discard(number)
        except BaseException:
            unfinished.clear()
            raise
        return samples

    if len(runs) == 1:
        return [times_of(0)]
    contexts = [copy_context() for _ in runs]
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(lambda place: contexts[place].run(timed, place), range(len(runs))))


def _ms(time: WholeTimes) -> float:
    return time.forward_ms + time.backward_ms


def usual_times(times: Sequence[WholeTimes]) -> WholeTimes:
    """The median of the forward times, and of the backward times, but no more than the one that a
    calm machine would have with this first quartile; and their spread, by the distance of the
    quartiles."""
    forward, backward = zip(*((time.forward_ms, time.backward_ms) for time in times), strict=True)
    of_both = [statistics.quantiles(ms, n=4, method="inclusive") for ms in (forward, backward)]
    spreads = [
        (third - first) / (_QUARTILES_APART * middle) for first, middle, third in of_both if middle
    ]
    forward_ms, backward_ms = (
        min(middle, first * (1 + CALM * _QUARTILES_APART / 2)) for first, middle, _ in of_both
    )
    return WholeTimes(forward_ms, backward_ms, statistics.fmean(spreads or [0.0]))
