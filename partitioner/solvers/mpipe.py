"""Mixed-pipe: several stages on a device, where that balances better than one run of the model.

    coarsen    to L blocks without cycles (`coarsening.py`)
    assign     blocks to ranks, the largest first, within the memory of each (`largest_first`)
    refine     the blocks, and then the groups at the borders of a rank's part, by chains of
               moves, and by exchanges if there are few groups, with the evaluator's load
    stages     the pieces of every rank in which no edge leads back (`staged`)

for every L in a list and a few seeds. The method returns the best plan according to the evaluator,
and among plans that are about equal (`Rules.prefer_modules`) the one with the fewest stages. The
optimum of the given order with one stage per rank is another start, so the result is never worse.
It follows Eliad et al., "Fine-tuning giant neural networks on commodity hardware with automatic
pipeline model parallelism" (USENIX ATC 2021). It proves no bound.

Differences from FTPipe, which packs the smallest blocks first, assumes a memory of 11 GB on every
device, refines without the times of received values, and coarsens at random, differently in every
run.

`staged` turns the rank of every group into stages: few pieces, with no edge from a later to an
earlier one. It sweeps the groups in topological order. A piece takes every group of one rank that
can come now, including groups that become ready by it; the next rank is the one of which the
largest share of the remaining groups can come, where a rank that is thereby finished precedes all
others. An edge never leads back in such a sweep, so the stages have no cycle, for any ranks. The
sweep runs from the inputs and from the outputs, and the result has the fewer pieces. Mixed-pipe
instead iterates over the connected parts of each rank and cuts each at every path that leaves and
returns, which gives at least as many pieces.

`largest_first` assigns blocks to ranks, the largest first, each to the rank that finishes it first.
This is LPT (Graham: "Bounds on Multiprocessing Timing Anomalies", 1969): on k equal ranks without
transfers at most 4/3 - 1/(3 k) of the optimum. Smallest first, as in FTPipe, which pops the wrong
end of its sorted list, has no such bound and is 16 to 30% worse on average.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..graph.costs import Floats, stage_sums
from ..graph.problem import DoesNotFit, Evaluation, Placement, Problem, crossing_bytes, evaluate
from . import chain
from .coarsening import blocks_of
from .local_search import Budget, GroupDivision, chains, descend, swap
from .multilevel import by_pieces, on_units


def staged(problem: Problem, rank_of: Sequence[int]) -> Placement:
    """The pieces of the ranks as stages. If all ranks are equal, they are numbered in the order of
    their first stages; then one rank per stage is a plain pipeline.
    """
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
    """Ranks are interchangeable: a permutation of their parts does not change the cost."""
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
        # A group without work also has a positive weight.
        left[rank] += work_ms[group] + 1e-9
        if not waiting[group]:
            ready[rank].append(group)
    pieces: list[list[int]] = []
    while any(ready.values()):
        pieces_of_rank = {
            rank: _closure(rank, groups, waiting, after, rank_of)
            for rank, groups in ready.items()
            if groups
        }
        share = {
            rank: sum(work_ms[group] + 1e-9 for group in piece) / left[rank]
            for rank, piece in pieces_of_rank.items()
        }
        rank = max(share, key=lambda rank: (round(share[rank], 9), -rank))
        piece = pieces_of_rank[rank]
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


def largest_first(
    work_ms: Floats, num_bytes: Floats, room_bytes: Floats, done_ms: Floats | None = None
) -> list[int]:
    """The rank of every block (rows) among ranks (columns), within memory as far as possible.

    `work_ms` and `num_bytes` give each block's cost on each rank, `done_ms` the work that each rank
    already has. A block for which no rank has room goes to the rank with the most memory left.
    """
    blocks, ranks = work_ms.shape
    busy_ms = np.zeros(ranks) if done_ms is None else done_ms.copy()
    left_bytes = room_bytes.copy()
    rank_of = [0] * blocks
    for block in sorted(range(blocks), key=lambda block: (-work_ms[block].min(), block)):
        fits = num_bytes[block] <= left_bytes
        if fits.any():
            rank = int(np.where(fits, busy_ms + work_ms[block], np.inf).argmin())
        else:
            rank = int((left_bytes - num_bytes[block]).argmax())
        rank_of[block] = rank
        busy_ms[rank] += work_ms[block, rank]
        left_bytes[rank] -= num_bytes[block, rank]
    return rank_of


def demands(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Milliseconds and bytes of every group on every rank, and the bytes of the ranks."""
    costs, setting = problem.costs, problem.setting
    num_groups = len(costs.groups)
    alone = stage_sums(costs, range(num_groups), num_groups)
    recompute = setting.recompute != "none"
    num_bytes = [
        setting.memory_bytes(rank, alone, recompute=recompute) for rank in range(problem.stages)
    ]
    return (
        np.stack([seen.work_ms for seen in problem.seen], axis=1),
        np.stack(num_bytes, axis=1),
        np.array([device.memory_bytes for device in setting.devices]),
    )


BLOCKS_PER_RANK = (1, 2, 3, 4, 6, 8)
SEEDS = 2
TRIALS = 8_000
_TIGHTER = (1.0, 0.85, 0.7)
_ROUNDING = 1e-9
_FEW = 64
_STAGE_TRIALS = 200


@by_pieces
def place(problem: Problem) -> Placement:
    """The best plan over several numbers of blocks.

    Raises DoesNotFit when no plan fits into the memory of the devices.
    """
    for share in _TIGHTER:
        # The search does not know the number of stages, and so not the micro-batches in flight.
        candidates = [
            (evaluation, placement)
            for rank_of in _assignments(_with_memory(problem, share))
            if (evaluation := evaluate(problem, placement := staged(problem, rank_of))).fits
        ]
        if candidates:
            return _with_fewer_stages(problem, *_preferred(problem, candidates))
    raise DoesNotFit(
        f"no plan with several stages on each of {problem.stages} ranks that was found fits into "
        "the memory of the devices."
    )


def _preferred(
    problem: Problem, candidates: Sequence[tuple[Evaluation, Placement]]
) -> tuple[Placement, float]:
    """Among the plans that are about as good as the best, the one with the fewest stages and then
    bytes, and the largest score that counts as about as good.
    """
    best_ms = min(evaluation.score_ms for evaluation, _ in candidates)
    limit_ms = best_ms * (1 + problem.rules.prefer_modules) * (1 + _ROUNDING)
    near = [candidate for candidate in candidates if candidate[0].score_ms <= limit_ms]
    _, placement = min(
        near,
        key=lambda candidate: (
            candidate[1].stages,
            crossing_bytes(problem.costs, candidate[1]),
            candidate[0].score_ms,
            candidate[1].stage_of,
        ),
    )
    return placement, limit_ms


def _with_fewer_stages(problem: Problem, placement: Placement, limit_ms: float) -> Placement:
    """Moves small stages to the rank of another stage, while the number of stages falls and the
    score stays within the limit.
    """
    trials = _STAGE_TRIALS
    while placement.ranks is not None:
        for trial in _with_a_stage_elsewhere(problem, placement):
            trials -= 1
            evaluation = evaluate(problem, trial)
            fewer = trial.stages < placement.stages
            if fewer and evaluation.fits and evaluation.score_ms <= limit_ms:
                placement = trial
                break
            if trials < 0:
                return placement
        else:
            return placement
    return placement


def _with_a_stage_elsewhere(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """The placements with all groups of one stage on another rank, the smallest stages first."""
    work_ms = np.bincount(placement.stage_of, weights=problem.least_work_ms)
    ranks = [of_stage[0] for of_stage in placement.ranks_of_stage]
    for moved in np.argsort(work_ms, kind="stable").tolist():
        for rank in sorted(set(ranks) - {ranks[moved]}):
            yield staged(
                problem,
                [rank if stage == moved else ranks[stage] for stage in placement.stage_of],
            )


def _with_memory(problem: Problem, share: float) -> Problem:
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes * share)
        for device in problem.setting.devices
    )
    return replace(problem, setting=replace(problem.setting, devices=devices))


def _assignments(problem: Problem) -> Iterator[list[int]]:
    """The rank of every group, from several starts."""
    try:
        contiguous = list(chain.place(problem).stage_of)
    except DoesNotFit:
        pass
    else:
        yield contiguous
        yield _refined(problem, contiguous)
    for number in sorted({factor * problem.stages for factor in BLOCKS_PER_RANK}):
        if number > len(problem.costs.groups):
            break
        for seed in range(SEEDS):
            unit_of = blocks_of(problem, number, random.Random(seed))
            coarse = on_units(problem, unit_of)
            rank_of = _refined(coarse, largest_first(*demands(coarse)))
            yield _refined(problem, [rank_of[unit] for unit in unit_of])


def _refined(problem: Problem, rank_of: Sequence[int]) -> list[int]:
    parts, budget = GroupDivision(problem, rank_of), Budget(TRIALS)
    descend(parts, _around, budget)
    chains(parts, _around, budget)
    if len(rank_of) <= _FEW:
        swap(parts, budget)
        chains(parts, _around, budget)
    return parts.part_of


def _around(parts: GroupDivision, group: int) -> Iterable[int]:
    """The ranks of the groups with which a group exchanges values."""
    return sorted(
        {parts.part_of[other] for other in parts.neighbours[group]} - {parts.part_of[group]}
    )
