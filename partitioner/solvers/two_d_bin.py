"""Two-dimensional bin packing: every device gets its share of each kind of group.

    cluster    groups by their times, with 1-D k-means
    runs       each cluster, in topological order, in as many runs as there are ranks
    bins       of the cluster with the largest times, run i goes to rank i; of the others each run
               goes to the rank where it fits best, the largest run first
    stages     the pieces of every rank in which no edge leads back (`pieces.py`)

FTPipe has it as its first planner for models of unlike halves (encoder and decoder), where one
run of the model a device is balanced only in one half. Several numbers of clusters are tried and
the best plan by the evaluator is taken. It proves no bound.

Not taken over: groups of hardly any time are glued to a neighbour, but here never so that a cycle
comes about; memory is respected; and no question is asked on stdin about the number of clusters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost import Floats, Ints
from ..evaluate import evaluate
from ..problem import DoesNotFit, Placement, Problem
from .coarse import by_pieces, on_units
from .coarsening import without_little_ones
from .packing import demands, largest_first
from .pieces import staged

CLUSTERS = range(1, 9)
# Groups below this share of a rank's work are glued to a neighbour.
LITTLE = 0.002
_ITERATIONS = 100


@by_pieces
def place(problem: Problem) -> Placement:
    """The best of the plans found for several numbers of clusters.

    Raises DoesNotFit when none of them fits into the memory of the devices.
    """
    unit_of = without_little_ones(problem, LITTLE)
    coarse = on_units(problem, unit_of)
    found = []
    for clusters in CLUSTERS:
        rank_of = _bins(coarse, clusters)
        placement = staged(problem, [rank_of[unit] for unit in unit_of])
        evaluation = evaluate(problem, placement)
        if evaluation.fits:
            found.append((evaluation.score_ms, placement.stages, clusters, placement))
    if not found:
        raise DoesNotFit(
            f"no plan of --method 2dbin fits into the memory of {problem.stages} devices.",
            "--method auto searches all cuts.",
        )
    return min(found, key=lambda one: one[:3])[-1]


def clusters_of(times_ms: Floats, number: int) -> Ints:
    """The cluster of every time, the one with the largest times first: Lloyd's iterations from
    equal shares of the sorted times on."""
    distinct = np.unique(times_ms)
    centres = np.array([part.mean() for part in np.array_split(distinct, number) if part.size])
    for _ in range(_ITERATIONS):
        nearest = np.abs(times_ms[:, None] - centres[None, :]).argmin(axis=1)
        means = [times_ms[nearest == index] for index in range(len(centres))]
        moved = np.array(
            [own.mean() if own.size else old for own, old in zip(means, centres, strict=True)]
        )
        if np.array_equal(moved, centres):
            break
        centres = moved
    _, cluster = np.unique(-centres[nearest], return_inverse=True)
    return np.asarray(cluster, dtype=np.int64)


def _bins(problem: Problem, number: int) -> list[int]:
    """The rank of every group."""
    ranks = problem.stages
    work_ms, num_bytes, room_bytes = demands(problem)
    cluster = clusters_of(work_ms.min(axis=1), number)
    rank_of = np.zeros(len(cluster), dtype=np.int64)
    done_ms = np.zeros(ranks)
    for index in range(int(cluster.max()) + 1):
        members = np.flatnonzero(cluster == index)
        runs = _runs(work_ms[members].min(axis=1), ranks)
        of_run = np.array([work_ms[members[run]].sum(axis=0) for run in runs])
        bytes_of_run = np.array([num_bytes[members[run]].sum(axis=0) for run in runs])
        if index == 0:
            chosen: Sequence[int] = range(ranks)
        else:
            chosen = largest_first(of_run, bytes_of_run, room_bytes, done_ms)
        for run, rank in zip(runs, chosen, strict=True):
            rank_of[members[run]] = rank
            done_ms[rank] += work_ms[members[run], rank].sum()
            room_bytes = room_bytes.copy()
            room_bytes[rank] -= num_bytes[members[run], rank].sum()
    return rank_of.tolist()


def _runs(times_ms: Floats, number: int) -> list[Ints]:
    """Positions in a row with about equal shares of the time; some are empty if there are few."""
    middle = np.cumsum(times_ms) - times_ms / 2
    total = float(times_ms.sum())
    share = middle / total if total else np.arange(len(times_ms)) / len(times_ms)
    of_run = np.minimum((share * number).astype(np.int64), number - 1)
    return [np.flatnonzero(of_run == index) for index in range(number)]
