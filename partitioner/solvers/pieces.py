"""The rank of every group -> stages: as few pieces as found, no edge from a later to an earlier.

The groups are swept in topological order. A piece takes everything of one rank that can come now,
with what becomes ready by that; then it is the turn of the rank of which the largest share of what
is left can come, one that is thereby finished before all others. As an edge never leads back in
such a sweep, the stages have no cycle between them, whatever the ranks are; it is done from the
inputs on and from the outputs on, and the fewer pieces are taken.

Mixed-pipe (Eliad et al., "Fine-tuning giant neural networks on commodity hardware with automatic
pipeline model parallelism", USENIX ATC 2021) walks each connected part of a rank by itself and
cuts it at every path that leaves and comes back, which gives at least as many pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..problem import Placement, Problem


def staged(problem: Problem, rank_of: Sequence[int]) -> Placement:
    """The pieces of the ranks as stages. Where no rank differs from another, they are named in
    the order of their first stages; then a rank for every stage is a plain pipeline."""
    work_ms = problem.costs.work_ms.tolist()
    edges = problem.costs.edges
    forward = _sweep(edges, rank_of, work_ms)
    backward = _sweep([(target, source) for source, target in edges], rank_of, work_ms)[::-1]
    pieces = min(forward, backward, key=len)
    stage_of = np.zeros(len(rank_of), dtype=np.int64)
    for stage, piece in enumerate(pieces):
        stage_of[piece] = stage
    ranks = [rank_of[piece[0]] for piece in pieces]
    if is_uniform(problem):
        names: dict[int, int] = {}
        ranks = [names.setdefault(rank, len(names)) for rank in ranks]
    where = tuple(stage_of.tolist())
    if ranks == list(range(problem.stages)):
        return Placement(where)
    return Placement(where, ranks=tuple((rank,) for rank in ranks))


def is_uniform(problem: Problem) -> bool:
    """Whether it is the same which rank has what."""
    setting = problem.setting
    return len(set(setting.devices)) == 1 and len(set(setting.links or ())) <= 1


def _sweep(
    edges: Iterable[tuple[int, int]], rank_of: Sequence[int], work_ms: Sequence[float]
) -> list[list[int]]:
    waiting = [0] * len(rank_of)
    after: list[list[int]] = [[] for _ in rank_of]
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    left = {rank: 0.0 for rank in sorted(set(rank_of))}
    ready: dict[int, list[int]] = {rank: [] for rank in left}
    for group, rank in enumerate(rank_of):
        # A group without work counts for something too.
        left[rank] += work_ms[group] + 1e-9
        if not waiting[group]:
            ready[rank].append(group)
    pieces: list[list[int]] = []
    while any(ready.values()):
        found = {
            rank: _closure(rank, groups, waiting, after, rank_of)
            for rank, groups in ready.items()
            if groups
        }
        share = {
            rank: sum(work_ms[group] + 1e-9 for group in piece) / left[rank]
            for rank, piece in found.items()
        }
        rank = max(share, key=lambda rank: (round(share[rank], 9), -rank))
        piece = found[rank]
        pieces.append(sorted(piece))
        left[rank] -= sum(work_ms[group] + 1e-9 for group in piece)
        ready[rank] = []
        inside = set(piece)
        for group in piece:
            for target in after[group]:
                waiting[target] -= 1
                if not waiting[target] and target not in inside:
                    ready[rank_of[target]].append(target)
    return pieces


def _closure(
    rank: int,
    ready: Sequence[int],
    waiting: Sequence[int],
    after: Sequence[Sequence[int]],
    rank_of: Sequence[int],
) -> list[int]:
    """All groups of a rank that can come now, one after the other."""
    piece = list(ready)
    still = dict[int, int]()
    for group in piece:
        for target in after[group]:
            if rank_of[target] == rank:
                still[target] = still.get(target, waiting[target]) - 1
                if not still[target]:
                    piece.append(target)
    return piece
