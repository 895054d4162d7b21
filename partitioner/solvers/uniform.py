"""Costs -> an even split by counting: what one would write by hand, for comparison.

With B blocks, stage s of k gets blocks floor(B s / k) to floor(B (s + 1) / k); what stands
before the first block goes with it, and what stands after a block stays with that block. A model
with fewer blocks than stages is split by counting its groups with parameters, or else all groups.
"""

from __future__ import annotations

import numpy as np

from ..cost import Costs
from ..problem import Placement, Problem
from .coarse import by_pieces


@by_pieces
def place(problem: Problem) -> Placement:
    """An even split of the pieces; takes no costs into account."""
    costs, stages = problem.costs, problem.stages
    for starts in (_block_starts(costs), np.flatnonzero(costs.has_params)):
        if len(starts) >= stages:
            break
    else:
        starts = np.arange(len(costs.groups))
    first_pieces = np.arange(1, stages) * len(starts) // stages
    return Placement(tuple(_stages_between(starts[first_pieces], len(costs.groups))))


def _block_starts(costs: Costs) -> np.ndarray:
    first: dict[str, int] = {}
    for position, block in enumerate(costs.blocks):
        if block:
            first.setdefault(block, position)
    return np.array(list(first.values()), dtype=np.int64)


def _stages_between(cuts: np.ndarray, num_groups: int) -> list[int]:
    stages: list[int] = np.searchsorted(cuts, np.arange(num_groups), side="right").tolist()
    return stages
