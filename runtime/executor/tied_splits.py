"""Tied parameters of several stages: all stages must divide them alike over the tensor ranks.

Their gradients are summed over the stages on each tensor rank, so that the ranks of all stages must
hold the same part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import PlanError
from ..plan.plan import Plan
from ..tensor_parallel.ranks import Split, TensorRanks, in_blocks, splits_of, using
from .loading import SkipRandomInit, load_stage_class


def verify_tied_alike(
    folder: str | Path,
    plan: Plan,
    stages: Collection[int],
    ranks: TensorRanks,
    code: Mapping[str, str] | None = None,
) -> None:
    """Raises PlanError if a parameter of some `stages` is divided otherwise in another stage. Reads
    the code of all stages that hold it, without weights."""
    tied = [shared.stages for shared in plan.shared if len(shared.stages) > 1]
    holders = {stage for each in tied if set(stages) & set(each) for stage in each}
    if ranks.size == 1 or not holders:
        return
    splits = {}
    for stage in sorted(holders):
        with SkipRandomInit(), using(ranks):
            splits[stage] = splits_of(load_stage_class(folder, plan.stages[stage], code)())
    verify_splits_alike(plan, splits)


def verify_splits_alike(plan: Plan, splits: Mapping[int, Mapping[str, Split]]) -> None:
    """Raises PlanError if a tied parameter is divided in two ways. `splits` are those of the
    stages, by the names of their parameters."""
    for shared in plan.shared:
        holders = [(stage, name) for stage, name in shared.holders if stage in splits]
        ways = [splits[stage].get(name) for stage, name in holders]
        for (stage, name), way in zip(holders[1:], ways[1:], strict=True):
            if way != ways[0]:
                first, own = holders[0]
                raise PlanError(
                    f"{own} of stage {first} and {name} of stage {stage} are one tied parameter, "
                    f"but over the tensor ranks the first is {_described(ways[0])} and the second "
                    f"{_described(way)}.",
                    "Divide it alike in the code of both stages, or partition the model again.",
                )


def _described(split: Split | None) -> str:
    if split is None:
        return "whole"
    uneven = " in unequal parts" if split.length is not None else ""
    return f"divided along dimension {split.dim}{in_blocks(split.groups)}{uneven}"
