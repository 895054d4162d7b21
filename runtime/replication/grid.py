"""The processes of a run -> whose replica each is, and which rank of its pipeline.

    process         0      1      2      3          replicas 2, ranks 2
    replica         0      0      1      1
    pipeline rank   0      1      0      1

Ranks of a pipeline are neighbours, so that a launcher that fills one host after the other keeps a
pipeline on one host where it can: boundary tensors travel at every micro-batch, gradients once a
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schedule import Schedule


@dataclass(frozen=True, slots=True)
class Grid:
    """`replicas` pipelines of `ranks` each.

    >>> grid = Grid(ranks=4, replicas=2)
    >>> grid.replica_of(5), grid.rank_of(5)
    (1, 1)
    >>> grid.pipeline_of(5), grid.copies_of(5)
    ((4, 5, 6, 7), (1, 5))
    """

    ranks: int
    replicas: int = 1

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
        return tuple(range(self.rank_of(process), self.processes, self.ranks))

    def stages_of(self, process: int, rank_of_stage: Sequence[int]) -> tuple[int, ...]:
        """The stages of a process, by their ranks in the pipeline."""
        own = self.rank_of(process)
        return tuple(stage for stage, rank in enumerate(rank_of_stage) if rank == own)


def grid_of(schedule: Schedule, replicas: int | None) -> Grid:
    """The grid of a pipeline's schedule and its replicas (by default one)."""
    return Grid(len(schedule.ranks), replicas or 1)
