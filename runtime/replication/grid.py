"""The processes of a run -> whose replica each is, and which rank of its pipeline.

    process         0      1      2      3          replicas 2, ranks 2
    replica         0      0      1      1
    pipeline rank   0      1      0      1

Ranks of a pipeline are neighbours, so that a launcher that fills one host after the other keeps a
pipeline on one host where it can: boundary tensors travel at every micro-batch, gradients once a
step.

Where single stages have replicas there is one pipeline, whose ranks are the processes:

    process         0      1      2          stage 0 on ranks 0 and 1, stage 1 on rank 2
    copy            0      1      0          of its stage
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..schedule import Schedule

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Grid:
    """`replicas` pipelines of `ranks` each, or one with the `ranks_of_stage` of stages of which
    some are on several.

    >>> grid = Grid(ranks=4, replicas=2)
    >>> grid.replica_of(5), grid.rank_of(5)
    (1, 1)
    >>> grid.pipeline_of(5), grid.copies_of(5)
    ((4, 5, 6, 7), (1, 5))
    >>> grid = Grid(ranks=3, ranks_of_stage=((0, 1), (2,)))
    >>> grid.copies_of(1), grid.copy_of(1), grid.share_of(1, "abcde")
    ((0, 1), 1, 'bd')
    """

    ranks: int
    replicas: int = 1
    ranks_of_stage: tuple[tuple[int, ...], ...] = ()

    @property
    def processes(self) -> int:
        return self.ranks * self.replicas

    def replica_of(self, process: int) -> int:
        return process // self.ranks

    def rank_of(self, process: int) -> int:
        """The rank within the process's pipeline."""
        return process % self.ranks

    def first_of(self, replica: int) -> int:
        """The first process of a replica."""
        return replica * self.ranks

    def pipeline_of(self, process: int) -> tuple[int, ...]:
        """The processes of the same replica."""
        first = self.first_of(self.replica_of(process))
        return tuple(range(first, first + self.ranks))

    def copies_of(self, process: int) -> tuple[int, ...]:
        """The processes that have the same stages, one a replica."""
        for ranks in self.ranks_of_stage:
            if process in ranks:
                return ranks
        return tuple(range(self.rank_of(process), self.processes, self.ranks))

    def copy_of(self, process: int) -> int:
        """Which of those it is."""
        return self.copies_of(process).index(process)

    @property
    def most_copies(self) -> int:
        """The most processes that have the same stages."""
        return max(map(len, self.ranks_of_stage), default=self.replicas)

    def holders_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The processes of some stages of which some are on several ranks."""
        return tuple(sorted(rank for stage in stages for rank in self.ranks_of_stage[stage]))

    def share_of(self, process: int, of_pipeline: Sequence[Item]) -> Sequence[Item]:
        """Of what a pipeline has for each micro-batch, that for those of a process's stage."""
        if not self.ranks_of_stage:
            return of_pipeline
        return of_pipeline[self.copy_of(process) :: len(self.copies_of(process))]

    def stages_of(self, process: int, schedule: Schedule) -> tuple[int, ...]:
        """The stages of a process."""
        return schedule.stages_of(self.rank_of(process))

    def whose(self, process: int) -> str:
        """The replica of a process, to be put behind its stages: ` of replica 1`, or nothing."""
        return f" of replica {self.copy_of(process)}" if len(self.copies_of(process)) > 1 else ""


def grid_of(schedule: Schedule, replicas: int | None) -> Grid:
    """The grid of a pipeline's schedule and its replicas (by default one)."""
    return Grid(len(schedule.ranks), replicas or 1, schedule.replicas)
