"""The parameters of a generated folder that tensor ranks share out, and those of each rank."""

from pathlib import Path

from asyncpipe.runtime.executor.loading import stage_builder
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.tensor_parallel import splits_of
from asyncpipe.runtime.tensor_parallel.threads import in_threads

RANKS = 2


def share_of(folder: Path, plan: Plan) -> float:
    """The share of the parameters of all stages that RANKS tensor ranks share out."""
    split = sum(size * RANKS for stage in _sizes(folder, plan, RANKS) for size in stage[True])
    whole = sum(size for stage in _sizes(folder, plan, 1) for size in stage[True] + stage[False])
    return split / max(1, whole)


def elements_of_ranks(folder: Path, plan: Plan, ranks: int) -> list[int]:
    """The elements of the parameters that a tensor rank of each stage holds."""
    return [sum(stage[True] + stage[False]) for stage in _sizes(folder, plan, ranks)]


def _sizes(folder: Path, plan: Plan, ranks: int) -> list[dict[bool, list[int]]]:
    """For each stage the sizes of the split parameters (True) and of the others on one rank."""

    def built() -> list[dict[bool, list[int]]]:
        found = []
        for spec in plan.stages:
            stage = stage_builder(folder, spec)()
            splits = splits_of(stage)
            sizes: dict[bool, list[int]] = {True: [], False: []}
            for name, parameter in stage.named_parameters():
                sizes[name in splits].append(parameter.numel())
            found.append(sizes)
        return found

    return in_threads(ranks, lambda _: built())[0]
