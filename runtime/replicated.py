"""The ranks of each stage -> a schedule in which single stages have replicas.

PipeDream (Narayanan et al., SOSP 2019, section 3.2) deals the micro-batches of a stage out to its r
replicas in turn: replica i mod r makes forward and backward of micro-batch i. How far each runs
ahead follows from Little's law: where every rank is busy for T with a micro-batch of its share, a
stage of r replicas lets one pass every T / r of its time, so from its forward at stage j to its
backward there a micro-batch is under way for T * R_j, with R_j = r_j + ... + r_{p-1}, and so many
are in flight in a stage that takes one every T. A replica of stage j holds

    c_j = ceil(R_j / r_j)

of them: ceil(ranks / replicas of the input stage) at the first one, PipeDream's NOAM, and p - j
where no stage is replicated. Such a schedule never waits in a circle. A replica makes F(j, i) when
B(j, i - c_j r_j) is over, and B(j, i) when F(j, i + (c_j - 1) r_j) is. So before B(s, i) comes, of
a later stage t, F(t, i + (c_t - 1) r_t), and before that B(s, i + (c_t - 1) r_t - c_s r_s), where

    (c_t - 1) r_t < R_t < R_s <= c_s r_s:

every backward waits for earlier ones alone. `gpipe` makes all its forwards first.
"""

from __future__ import annotations

from collections.abc import Sequence

from .alternating import alternate
from .errors import ScheduleError
from .schedule import Action, Schedule, one_step

REPLICATED: tuple[str, ...] = ("gpipe", "1f1b")
"""The schedules whose single stages may have replicas."""


def replicated(name: str, micro_batches: int, replicas: Sequence[Sequence[int]]) -> Schedule:
    """The schedule of that name for stages on the given ranks. Raises ScheduleError for another
    name than those of REPLICATED, and where a replica would have no micro-batch.

    >>> print(replicated("1f1b", 3, [[0, 1], [2]]))
    rank 0: 0F0@v0 0F2@v0 0B0@v0 0B2@v0 0S1
    rank 1: 0F1@v0 0B1@v0 0S1
    rank 2: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1F2@v0 1B2@v0 1S1
    """
    if name not in REPLICATED:
        raise ScheduleError(
            f"single stages have no replicas under {name}.",
            f"--schedule {' or '.join(REPLICATED)}",
        )
    most = max(map(len, replicas))
    if micro_batches < most:
        raise ScheduleError(
            f"{micro_batches} micro-batches are too few for a stage with {most} replicas: one has "
            "none.",
            f"--micro-batches {most}",
        )
    depths = in_flight(name, micro_batches, [len(ranks) for ranks in replicas])
    rows: dict[int, list[Action]] = {}
    for stage, ranks in enumerate(replicas):
        for first, rank in enumerate(ranks):
            own = range(first, micro_batches, len(ranks))
            rows[rank] = [
                action._replace(index=own[action.index])
                for action in alternate(stage, len(own), depths[stage] - 1, len(own))
                if action.kind != "S"
            ]
    in_order = [rows[rank] for rank in sorted(rows)]
    return one_step(name, in_order, [ranks[0] for ranks in replicas], replicas)


def in_flight(name: str, micro_batches: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches that a replica of each stage holds, by the replicas of each.

    >>> in_flight("1f1b", 8, (2, 1, 1)), in_flight("1f1b", 8, (1, 3)), in_flight("gpipe", 8, (1, 3))
    ((2, 2, 1), (4, 1), (8, 3))
    """
    own = [-(-micro_batches // count) for count in shape]
    if name == "gpipe":
        return tuple(own)
    ranks = [sum(shape[stage:]) for stage in range(len(shape))]
    return tuple(
        min(most, -(-left // count)) for most, left, count in zip(own, ranks, shape, strict=True)
    )
