"""A schedule's name and numbers -> its actions, and the weight versions that are in flight."""

from __future__ import annotations

from functools import lru_cache

from ..runtime.schedule import Schedule
from ..runtime.scheduler.tasks import Tasks
from ..runtime.schedules import AUTO, computed, make_schedule
from ..runtime.simulate import Costs


@lru_cache
def scheduled(
    name: str, stages: int, micro_batches: int, rank_of_stage: tuple[int, ...] = ()
) -> Schedule:
    """A synchronous schedule over one step, with the rank of every stage where it has several; of
    `auto` one of those with a name that suits equal costs, until they are known."""
    if name == AUTO:
        at = rank_of_stage or tuple(range(stages))
        tasks = Tasks(Costs.equal(stages), at, micro_batches, may_split=False)
        return computed(tasks, effort=0).schedule
    ranks = len(set(rank_of_stage)) or stages
    return make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)


@lru_cache
def stashed_versions(ahead: int, step_every: int) -> int:
    """The most versions that a stash holds at once: of the micro-batches t to t + ahead in flight,
    those that see a step between forward and backward. It is at most ceil(ahead / step_every) + 1.

    >>> [stashed_versions(ahead, 2) for ahead in range(5)]
    [0, 1, 2, 3, 3]
    """

    def forward_version(micro_batch: int) -> int:
        return max(0, micro_batch - ahead) // step_every

    return max(
        len(
            {
                forward_version(i)
                for i in range(t, t + ahead + 1)
                if i // step_every > forward_version(i)
            }
        )
        for t in range(2 * step_every + ahead + 1)
    )
