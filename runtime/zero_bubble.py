"""Backwards in two parts -> schedules that fill bubbles with the gradients of weights.

A backward is B, which the stage before waits for, and W, which nobody waits for but the optimizer.
With T_f, T_i and T_w of a rank's work on a micro-batch, and equal stages, a rank is idle

    zb-h1    (p-1) (T_f + T_i - T_w) of a step, with the activations of p micro-batches
    zb-h2    (p-1) (T_f + T_i - 2 T_w), with those of 2p-1
    zb-v     (p-1) (T_i - T_w), with those of p

from m = p, 2p-1 and 2p micro-batches on, where T_i is no less than T_w (for the last: and T_f not
above T_i), and no rank waits for another to step.

Sources: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2; "Pipeline parallelism
with controllable memory", NeurIPS 2024, appendix on the V schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat

from .schedule import Action, Kind, Schedule, one_step


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1f1b whose rank r puts a W off by r micro-batches, so that each holds p of them.

    >>> print(zb_h1(2, 3))
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0W0@v0 0F2@v0 0B1@v0 0W1@v0 0B2@v0 0W2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1W0@v0 1F2@v0 1B2@v0 1W1@v0 1W2@v0 1S1
    """
    rows = (_alternate(j, micro_batches, stages - 1 - j, j) for j in range(stages))
    return one_step("zb-h1", rows, range(stages))


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """The same with twice the warm-up, and twice as long put off.

    >>> print(zb_h2(2, 3))
    rank 0: 0F0@v0 0F1@v0 0F2@v0 0B0@v0 0W0@v0 0B1@v0 0W1@v0 0B2@v0 0W2@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1W0@v0 1W1@v0 1W2@v0 1S1
    """
    rows = (_alternate(j, micro_batches, 2 * (stages - 1 - j), 2 * j) for j in range(stages))
    return one_step("zb-h2", rows, range(stages))


def _alternate(stage: int, micro_batches: int, ahead: int, put_off: int) -> Iterator[Action]:
    for index in range(min(ahead, micro_batches)):
        yield Action(stage, "F", index)
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(stage, "F", index + ahead)
        yield Action(stage, "B", index)
        if index >= put_off:
            yield Action(stage, "W", index - put_off)
    for index in range(max(0, micro_batches - put_off), micro_batches):
        yield Action(stage, "W", index)


def zb_v(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """Rank r has stages r and 2p-1-r: a micro-batch goes down the ranks and up again.

    >>> print(zb_v(2, 2, ranks=1))
    rank 0: 0F0@v0 1F0@v0 1B0@v0 1W0@v0 0F1@v0 0B0@v0 0W0@v0 1F1@v0 1B1@v0 1W1@v0 0B1@v0 0W1@v0 0S1 1S1
    """  # noqa: E501
    rows = (
        [action for action in _v_row(rank, ranks, micro_batches) if action.index < micro_batches]
        for rank in range(ranks)
    )
    return one_step("zb-v", rows, [*range(ranks), *reversed(range(ranks))])


def _v_row(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The phases of the paper's figure; a lower case letter is of the rank's first stage.

    A schedule of few micro-batches is one of more without those that there are not.
    """
    whole = max(micro_batches, 2 * ranks)
    phases = [
        ("f", 2 * (ranks - rank) - 1),
        ("Ff", rank),
        ("FBW", ranks - rank),
        ("fbwFBW", whole - ranks),
        ("bB", rank),
        ("bw", ranks - rank),
        ("W", rank),
        ("w", rank),
    ]
    numbers = {letter: count() for letter in "fbwFBW"}
    for letters, times in phases:
        for letter in "".join(repeat(letters, times)):
            stage = rank if letter.islower() else 2 * ranks - 1 - rank
            kind: Kind = {"F": "F", "B": "B", "W": "W"}[letter.upper()]  # type: ignore[assignment]
            yield Action(stage, kind, next(numbers[letter]))
