"""Stages next to each other on one rank -> one stage of them all, and its schedule -> theirs.

What a block of such stages does one after the other takes what one stage of them takes, and what it
sends leaves no later. So a schedule computed for the blocks, with fewer tasks to put in order, is
one for the stages that is no longer, to begin a search from: cutting a stage further, on its rank,
makes no step longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ..dependencies import Edge
from ..schedule import Schedule, one_step
from ..simulate import Costs
from .tasks import Tasks


@dataclass(frozen=True)
class Blocks:
    """The blocks as stages, and the stages of each."""

    tasks: Tasks
    stages: tuple[tuple[int, ...], ...]

    def expanded(self, schedule: Schedule) -> Schedule:
        """The schedule of the stages that do what their blocks do."""
        rows = (
            [
                action._replace(stage=stage)
                for action in row
                if action.kind != "S"
                for stage in self.stages[action.stage][:: 1 if action.kind == "F" else -1]
            ]
            for row in schedule.ranks
        )
        at = schedule.rank_of_stage
        return one_step(
            schedule.name, rows, [at[block] for block, own in enumerate(self.stages) for _ in own]
        )


def blocks_of(tasks: Tasks) -> Blocks | None:
    """None where no two stages next to each other are on one rank."""
    at, rule = tasks.rank_of_stage, tasks.rule
    blocks = tuple(tuple(own) for _, own in groupby(range(len(at)), key=at.__getitem__))
    if len(blocks) == len(at):
        return None
    block_of = {stage: block for block, own in enumerate(blocks) for stage in own}

    def between(edges: Iterable[Edge]) -> set[Edge]:
        pairs = ((block_of[source], block_of[target]) for source, target in edges)
        return {(source, target) for source, target in pairs if source != target}

    shared = {tuple(sorted({block_of[stage] for stage in group})) for group in tasks.shared_stages}
    merged = Tasks(
        _summed(tasks.costs, blocks, block_of),
        [at[own[0]] for own in blocks],
        tasks.micro_batches,
        edges=between(rule.edges),
        grad_edges=between(rule.grad_edges),
        shared_stages=sorted(group for group in shared if len(group) > 1),
        limit=tasks.limit,
        weights=_sums(tasks.weights, blocks),
        may_split=tasks.may_split,
    )
    return Blocks(merged, blocks)


def _summed(costs: Costs, blocks: tuple[tuple[int, ...], ...], block_of: dict[int, int]) -> Costs:
    transfer_ms: dict[Edge, float] = defaultdict(float)
    for (source, target), time_ms in costs.transfer_ms.items():
        if block_of[source] != block_of[target]:
            transfer_ms[block_of[source], block_of[target]] += time_ms
    return Costs(
        forward_ms=_sums(costs.forward_ms, blocks),
        backward_ms=_sums(costs.backward_ms, blocks),
        step_ms=_sums(costs.step_ms, blocks),
        transfer_ms=dict(transfer_ms),
        weight_ms=_sums(costs.weight_ms, blocks),
        split_ms=_sums(costs.split_ms, blocks),
    )


def _sums(amounts: tuple[float, ...], blocks: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    return tuple(sum(amounts[stage] for stage in own) for own in blocks) if amounts else ()
