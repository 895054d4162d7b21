"""Schedules without a flush: which stage runs how far ahead, and when it steps.

Stage j runs W_j forwards ahead, then a forward and a backward in turn, and steps after every k-th
backward while others go on. So W_j and k alone say how stale its weights are (`delays.py`):

    async-1f1b             W_j = p-1-j, or what `--ahead` says
    virtual-stages-1f1b    W_j = max(0, min(p-1, S k) - j): no delay above S
    2bw                    as async-1f1b, with k >= p: no delay above 1

Sources: Narayanan et al., PipeDream, SOSP 2019; "Memory-efficient pipeline-parallel DNN training"
(PipeDream-2BW), ICML 2021; Eliad et al., FTPipe, ATC 2021, whose virtual stages are one stage of
the pipeline short of the delay that they allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from .alternating import alternating
from .errors import ScheduleError
from .schedule import Schedule

DEFAULT_CAP = 1
"""The largest delay under virtual-stages-1f1b when nobody says."""


def async_1f1b(
    stages: int,
    micro_batches: int,
    step_every: int,
    warmup: Sequence[int] | None = None,
    *,
    name: str = "async-1f1b",
) -> Schedule:
    """1f1b without a flush: every stage steps after each `step_every`-th backward and goes on.

    `micro_batches` are those of the whole segment, which is drained at its end. `warmup` gives
    the forwards that each stage runs ahead, by default p-1-j; deeper hides slow links and makes
    the weights staler, shallower the reverse. PipeDream (SOSP 2019) is `step_every` 1 with
    stashed weights.

    >>> print(async_1f1b(2, 4, step_every=2))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0F2@v0 0B1@v0 0S1 0F3@v1 0B2@v1 0B3@v1 0S2
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1 1F2@v1 1B2@v1 1F3@v1 1B3@v1 1S2
    """
    ahead = list(depths(stages) if warmup is None else warmup)
    if len(ahead) != stages or sorted(ahead, reverse=True) != ahead or min(ahead) < 0:
        raise ScheduleError(
            f"warmup {ahead} does not fit {stages} stages: it needs one number for each, "
            "and no stage can run further ahead than the one before it.",
            "--ahead 2x, --ahead 1, or a number for each stage: --ahead 3,2,1,0",
        )
    if micro_batches % step_every:
        raise ScheduleError(
            f"a segment of {micro_batches} micro-batches cannot have a step every {step_every}: "
            f"the last {micro_batches % step_every} would be lost.",
            f"Use {micro_batches - micro_batches % step_every + step_every} micro-batches.",
        )
    return alternating(name, micro_batches, ahead=ahead, step_every=step_every)


def virtual_stages_1f1b(
    stages: int, micro_batches: int, step_every: int, warmup: Sequence[int] | None = None
) -> Schedule:
    """async_1f1b in which no weights are staler than they may be: `warmup` is by default that
    `capped` at DEFAULT_CAP.

    The last p - W_0 stages then have one micro-batch at a time, as if they were one stage: all
    ranks are idle for 1 - 1/(p - W_0) of the time.

    >>> virtual_stages_1f1b(4, 4, step_every=1).in_flight
    (2, 1, 1, 1)
    """
    if warmup is None:
        warmup = capped(depths(stages), step_every, DEFAULT_CAP)
    return async_1f1b(stages, micro_batches, step_every, warmup, name="virtual-stages-1f1b")


def two_bw(
    stages: int, micro_batches: int, step_every: int, warmup: Sequence[int] | None = None
) -> Schedule:
    """async_1f1b whose steps have so many micro-batches that two versions of the weights are
    enough for every stage (PipeDream-2BW, section 3.1). Raises ScheduleError where they have
    fewer.

    >>> two_bw(2, 4, step_every=2).name
    '2bw'
    """
    furthest = max(warmup or depths(stages))
    if step_every < max(stages, furthest):
        needs = f"{stages} stages" if stages >= furthest else f"{furthest} forwards ahead"
        raise ScheduleError(
            f"2bw keeps two versions of the weights, which are enough for {needs} when a step has "
            f"{max(stages, furthest)} micro-batches or more, not {step_every}.",
            f"--micro-batches {max(stages, furthest)}, or --schedule async-1f1b --staleness stash",
        )
    return async_1f1b(stages, micro_batches, step_every, warmup, name="2bw")


ASYNCHRONOUS: Mapping[str, Callable[..., Schedule]] = {
    "async-1f1b": async_1f1b,
    "virtual-stages-1f1b": virtual_stages_1f1b,
    "2bw": two_bw,
}
"""Of stages, micro-batches, micro-batches of a step, and the forwards that each stage runs ahead
if not as usual."""


def depths(stages: int, ahead: str | None = None) -> tuple[int, ...]:
    """The forwards that each stage runs ahead: p-1-j at stage j, or what `ahead` makes of that.

    `2x` is so many times the usual, which leaves a link the time of a forward and a backward for
    each time more; `1` is the usual, but no more than that; `5,3,1,0` has a number a stage. Raises
    ScheduleError for another text, or where a stage would run further ahead than the one before.

    >>> depths(4), depths(4, "2x"), depths(4, "1"), depths(4, "5,3,1,0")
    ((3, 2, 1, 0), (6, 4, 2, 0), (1, 1, 1, 0), (5, 3, 1, 0))
    """
    usual = tuple(range(stages - 1, -1, -1))
    if ahead is None:
        return usual
    text = ahead.replace(" ", "")
    if times := re.fullmatch(r"(\d{1,6})x", text):
        return tuple(int(times[1]) * forwards for forwards in usual)
    if re.fullmatch(r"\d{1,9}", text):
        return tuple(min(int(text), forwards) for forwards in usual)
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})+", text):
        raise ScheduleError(
            f"--ahead {ahead} says for no stage how many forwards it runs ahead.",
            "--ahead 2x doubles them, --ahead 1 allows 1 at most, "
            f"--ahead {','.join(map(str, usual))} is what {stages} stages have anyway.",
        )
    given = tuple(map(int, text.split(",")))
    if len(given) != stages:
        raise ScheduleError(
            f"--ahead {ahead} has {len(given)} numbers for {stages} stages.",
            f"--ahead {','.join(map(str, usual))} is what they have anyway.",
        )
    for stage, (before, forwards) in enumerate(zip(given, given[1:], strict=False)):
        if forwards > before:
            raise ScheduleError(
                f"--ahead {ahead}: stage {stage + 1} would run {forwards} forwards ahead, but "
                f"stage {stage} before it gives it no more than {before}.",
                "Let the numbers fall from stage to stage.",
            )
    return given


def capped(ahead: Sequence[int], step_every: int, cap: int) -> tuple[int, ...]:
    """Each stage so many forwards less ahead that no delay is above `cap` steps, and the first
    stage's is just that, if it was above.

    Stages after it could be allowed as many forwards as the first: they would be staler, hold more,
    and be no faster, since it is the first that lets micro-batches in.

    >>> capped((7, 6, 5, 4, 3, 2, 1, 0), step_every=2, cap=2)
    (4, 3, 2, 1, 0, 0, 0, 0)
    """
    excess = max(0, ahead[0] - cap * step_every)
    return tuple(max(0, forwards - excess) for forwards in ahead)
