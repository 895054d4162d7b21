"""The processes of a run -> their pipelines, replicas and tensor ranks.

    process         0      1      2      3      4      5      6      7
    replica         0      0      0      0      1      1      1      1
    pipeline rank   0      0      1      1      0      0      1      1
    tensor rank     0      1      0      1      0      1      0      1

Tensor ranks are neighbors, because they exchange tensors in every layer; the ranks of a replica
come next, because boundary tensors travel at every micro-batch, and gradients once a step. So a
launcher that fills one host after the other keeps tensor ranks, and where possible a replica, on
one host. The ranks of a replica with one tensor rank are a pipeline: they exchange tensors with
each other alone, as if no other tensor ranks existed.

Where single stages have replicas, there is one pipeline, whose ranks are the processes:

    process         0      1      2          stage 0 on ranks 0 and 1, stage 1 on rank 2
    copy            0      1      0          of its stage
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..schedule.schedule import Schedule

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Grid:
    """The processes of a run as pipelines and ranks.

    ranks: ranks per pipeline.
    replicas: the number of replicas of the whole pipeline.
    tensor_ranks: the processes that share out the layers of each stage.
    ranks_of_stage: where single stages have replicas, the ranks of each stage of the one pipeline.

    >>> grid = Grid(ranks=2, replicas=2, tensor_ranks=2)
    >>> grid.replica_of(6), grid.rank_of(6), grid.tensor_rank_of(6)
    (1, 1, 0)
    >>> grid.pipeline_of(6), grid.copies_of(6), grid.tensor_group_of(6)
    ((4, 6), (2, 6), (6, 7))
    >>> grid = Grid(ranks=3, ranks_of_stage=((0, 1), (2,)))
    >>> grid.copies_of(1), grid.copy_of(1), grid.share_of(1, "abcde")
    ((0, 1), 1, 'bd')
    """

    ranks: int
    replicas: int = 1
    tensor_ranks: int = 1
    ranks_of_stage: tuple[tuple[int, ...], ...] = ()

    @property
    def in_replica(self) -> int:
        """The processes of a replica."""
        return self.ranks * self.tensor_ranks

    @property
    def processes(self) -> int:
        return self.in_replica * self.replicas

    def replica_of(self, process: int) -> int:
        return process // self.in_replica

    def rank_of(self, process: int) -> int:
        """The rank within the process's pipeline."""
        return process % self.in_replica // self.tensor_ranks

    def tensor_rank_of(self, process: int) -> int:
        """The rank among those that share out the layers of the same stages."""
        return process % self.tensor_ranks

    def pipeline_of(self, process: int) -> tuple[int, ...]:
        """The processes of the same replica and tensor rank."""
        first = self.replica_of(process) * self.in_replica + self.tensor_rank_of(process)
        return tuple(range(first, first + self.in_replica, self.tensor_ranks))

    def tensor_group_of(self, process: int) -> tuple[int, ...]:
        """The processes that share out the layers of the same stages."""
        first = process - self.tensor_rank_of(process)
        return tuple(range(first, first + self.tensor_ranks))

    def copies_of(self, process: int) -> tuple[int, ...]:
        """The processes that have the same parts of the same stages, one per replica."""
        for ranks in self.ranks_of_stage:
            if process in ranks:
                return ranks
        return tuple(range(process % self.in_replica, self.processes, self.in_replica))

    def copy_of(self, process: int) -> int:
        """The index of a process in its `copies_of`."""
        return self.copies_of(process).index(process)

    @property
    def most_copies(self) -> int:
        """The largest number of processes that have the same stages."""
        return max(map(len, self.ranks_of_stage), default=self.replicas)

    def holders_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The processes of the given stages, where single stages have replicas."""
        return tuple(sorted(rank for stage in stages for rank in self.ranks_of_stage[stage]))

    def share_of(self, process: int, of_pipeline: Sequence[Item]) -> Sequence[Item]:
        """The items of the micro-batches that a process runs, out of one item per micro-batch."""
        if not self.ranks_of_stage:
            return of_pipeline
        return of_pipeline[self.copy_of(process) :: len(self.copies_of(process))]

    def stages_of(self, process: int, schedule: Schedule) -> tuple[int, ...]:
        """The stages of a process."""
        return schedule.stages_of(self.rank_of(process))

    def whose(self, process: int) -> str:
        """The tensor rank and replica of a process, as a suffix to its stages: `, tensor rank 0 of
        replica 1`, or "" if there is one of each."""
        has_part, has_copies = self.tensor_ranks > 1, len(self.copies_of(process)) > 1
        part = f", tensor rank {self.tensor_rank_of(process)}" if has_part else ""
        return f"{part} of replica {self.copy_of(process)}" if has_copies else part


def grid_of(schedule: Schedule, replicas: int = 1, tensor_ranks: int = 1) -> Grid:
    """The grid of a pipeline's schedule."""
    return Grid(len(schedule.ranks), replicas, tensor_ranks, schedule.replicas)
