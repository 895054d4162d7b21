"""The best cut of the given order into stages that may be replicated, by dynamic programming.

    A[b][m] = min over a < b, r <= m of max(A[a][m - r], load(a, b) / r + exchange(a, b, r))

is the least time of the first b groups on the first m ranks, where the last stage holds groups a
to b - 1 on r ranks, which share its micro-batches and sum their gradients once a step. This is
the recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1) over a flat row of ranks,
with the load of `setting.py` in place of its own: transfers of skips and of both directions are
in it, and the memory of a stage with as many stages behind it as there are. Ranks that share a
stage have to be alike. A plan may have fewer stages than ranks, and may leave ranks idle.

Where ranks are on several hosts or behind unlike links, the exchange goes over the slowest link
between replicas; PipeDream's levels (replicas inside a server first) are the plans of this that
replicate only inside a host. It is the optimum of all contiguous plans of that order with
replicas: O(n^2 k^2), times k where memory or recomputation depends on the stages behind.

FTPipe's planner of this name has replication switched off, a fixed memory of 10 GB, and takes the
transfers of a stage at its last node alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...runtime.errors import PlanError
from ..cost import Floats, StageSums
from ..problem import Placement, Problem
from .chain import demanded_starts, interval_sums

_IDLE = -1


def place(problem: Problem) -> Placement:
    """The optimum over the cuts that the rules allow and over the replicas of each stage.

    Raises PlanError when no such plan fits into the memory of the devices.
    """
    table = _Table(problem)
    stages = table.best_stages()
    starts = [start for start, _, _ in stages[1:]]
    where = np.searchsorted(starts, np.arange(len(problem.costs.groups)), side="right")
    ranks = tuple(tuple(range(first, first + number)) for _, first, number in stages)
    if ranks == tuple((rank,) for rank in range(problem.stages)):
        return Placement(tuple(where.tolist()))
    return Placement(tuple(where.tolist()), ranks=ranks)
