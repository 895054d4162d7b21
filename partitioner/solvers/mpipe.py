"""Mixed-pipe: several stages on a device, where that balances better than one run of the model.

    coarsen    to L blocks without cycles (`coarsening.py`)
    assign     blocks to ranks, the largest first, under the memory of each (`packing.py`)
    refine     the blocks, and then the groups at the borders of what a rank has, by chains of
               moves, and exchanges where there are few, judged by the load of the evaluator
    stages     the pieces of every rank in which no edge leads back (`pieces.py`)

for every L in a list and a few seeds; the best plan by the evaluator is taken, of plans that are
about equal (`Rules.prefer_modules`) the one with the fewest stages. The optimum of the given order
with one stage a rank is a start too, so that the answer is never worse than that. It follows Eliad
et al., "Fine-tuning giant neural networks on commodity hardware with automatic pipeline model
parallelism" (USENIX ATC 2021). It proves no bound.

Not taken over from FTPipe: blocks packed smallest first, a memory of 11 GB whatever the device,
refinement without the times of what is received, a random coarsening that differs from run to run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..evaluate import Evaluation, crossing_bytes, evaluate
from ..problem import DoesNotFit, Placement, Problem
from . import chain
from .coarse import by_pieces, on_units
from .coarsening import blocks_of
from .moves import Budget, chains, descend, swap
from .packing import demands, largest_first
from .parts import Parts
from .pieces import staged

BLOCKS_PER_RANK = (1, 2, 3, 4, 6, 8)
SEEDS = 2
TRIALS = 8_000
_TIGHTER = (1.0, 0.85, 0.7)
_ROUNDING = 1e-9
_FEW = 64
_STAGE_TRIALS = 200


@by_pieces
def place(problem: Problem) -> Placement:
    """The best of the plans found for several numbers of blocks.

    Raises DoesNotFit when none of them fits into the memory of the devices.
    """
    for share in _TIGHTER:
        # How many stages there will be, and so what is in flight, is not known while searching.
        found = [
            (evaluation, placement)
            for rank_of in _assignments(_with_memory(problem, share))
            if (evaluation := evaluate(problem, placement := staged(problem, rank_of))).fits
        ]
        if found:
            return _with_fewer_stages(problem, *_preferred(problem, found))
    raise DoesNotFit(
        f"no plan with several stages on each of {problem.stages} ranks that was found fits into "
        "the memory of the devices."
    )


def _preferred(
    problem: Problem, found: Sequence[tuple[Evaluation, Placement]]
) -> tuple[Placement, float]:
    """Of the plans that are about as good as the best, that with the fewest stages and then
    bytes, and the score that counts as about as good."""
    best_ms = min(evaluation.score_ms for evaluation, _ in found)
    limit_ms = best_ms * (1 + problem.rules.prefer_modules) * (1 + _ROUNDING)
    near = [one for one in found if one[0].score_ms <= limit_ms]
    _, placement = min(
        near,
        key=lambda one: (
            one[1].stages,
            crossing_bytes(problem.costs, one[1]),
            one[0].score_ms,
            one[1].stage_of,
        ),
    )
    return placement, limit_ms


def _with_fewer_stages(problem: Problem, placement: Placement, limit_ms: float) -> Placement:
    """Small stages go to the rank of another, while there are fewer stages then and the score
    stays within the limit."""
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
    """The placement with all groups of one stage on another rank, the smallest stages first."""
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
    parts, budget = Parts(problem, rank_of), Budget(TRIALS)
    descend(parts, _around, budget)
    chains(parts, _around, budget)
    if len(rank_of) <= _FEW:
        swap(parts, budget)
        chains(parts, _around, budget)
    return parts.part_of


def _around(parts: Parts, group: int) -> Iterable[int]:
    """The ranks of what a group exchanges values with."""
    return sorted(
        {parts.part_of[other] for other in parts.neighbours[group]} - {parts.part_of[group]}
    )
