"""A problem and the placement of its groups -> the reason for each cut.

A cut elsewhere is evaluated in the same way as the plan (`makespan.py`): one operation or one block
moves to the neighbor, with all groups of its stage that cannot be separated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ...runtime.formatting import counted, write_bytes, write_change, write_ms, write_share
from ...runtime.plan.findings import Finding
from ..graph.costs import Costs
from ..graph.problem import Placement, Problem
from .solve import Solution
from .step_time import Step, step_of


def explain_cuts(solution: Solution) -> list[Finding]:
    """For every two neighboring stages the values that cross between them, and the plan with the
    cut one group or one block earlier or later.
    """
    return [
        finding
        for stage in range(solution.placement.stages - 1)
        for finding in _explain_cut(solution, stage)
    ]


def _explain_cut(solution: Solution, stage: int) -> list[Finding]:
    problem, placement = solution.problem, solution.placement
    costs = problem.costs
    about = f"between stages {stage} and {stage + 1}"
    at = placement.stage_of
    last = max(group for group, where in enumerate(at) if where == stage)
    first = min(group for group, where in enumerate(at) if where == stage + 1)
    where = f"after {costs.labels[last]}, before {costs.labels[first]}"
    findings = [Finding("cut", about, f"{where}: {_crossing(problem, placement, stage)}.")]
    for words, groups, target in moves(costs, placement, stage):
        moved = moved_to(placement, groups, target)
        if moved is not None:
            findings.append(_moved(solution, stage, about, words, moved))
    return findings


@dataclass(frozen=True, slots=True)
class _Crossing:
    """The transfers over one cut for a micro-batch, values for later stages included."""

    count: int
    forward_bytes: float
    backward_bytes: float
    time_ms: float

    @property
    def num_bytes(self) -> float:
        return self.forward_bytes + self.backward_bytes

    def __str__(self) -> str:
        if not self.count:
            return "nothing crosses"
        return (
            f"{counted(self.count, 'tensor')} cross{'es' if self.count == 1 else ''}: "
            f"{write_bytes(self.forward_bytes)} forward, {write_bytes(self.backward_bytes)} "
            f"backward, {write_ms(self.time_ms)}"
        )


def _crossing(problem: Problem, placement: Placement, stage: int) -> _Crossing:
    costs = problem.seen_by(placement.ranks_of_stage[stage])
    at = placement.stage_of
    crossing = [
        index
        for index, value in enumerate(costs.values)
        if not value.is_exchange
        and len({at[group] <= stage for group in (value.owner, *value.readers)}) == 2
    ]
    return _Crossing(
        count=len(crossing),
        forward_bytes=sum(costs.values[index].forward_bytes for index in crossing),
        backward_bytes=sum(costs.values[index].backward_bytes for index in crossing),
        time_ms=float(costs.send_ms[crossing].sum()),
    )


def moves(
    costs: Costs, placement: Placement, stage: int
) -> Iterable[tuple[str, frozenset[int], int]]:
    """The cut after `stage` moved by one group and by one block in each direction: a description,
    the groups that change sides, and their new stage.
    """
    readers, sources = _neighbours(costs)
    at = np.asarray(placement.stage_of)
    sides: tuple[tuple[str, int, int, Callable[[Iterable[int]], int], list[set[int]]], ...] = (
        ("earlier", stage, stage + 1, max, readers),
        ("later", stage + 1, stage, min, sources),
    )
    for way, source, target, nearest, follow in sides:
        inside = set(np.flatnonzero(at == source).tolist())
        working = [group for group in inside if costs.work_ms[group] > 0]
        if not working:
            continue
        group = nearest(working)
        moved = _with_all(follow, {group}, inside)
        yield f"one operation {way} (moves {costs.labels[group]} to stage {target})", moved, target
        block = costs.blocks[group]
        of_block = {other for other in inside if costs.blocks[other] == block}
        whole = _with_all(follow, of_block, inside) if block else moved
        if whole != moved:
            yield f"one block {way} (moves {block} to stage {target})", whole, target


def _neighbours(costs: Costs) -> tuple[list[set[int]], list[set[int]]]:
    """The readers and the sources of every group."""
    readers: list[set[int]] = [set() for _ in costs.groups]
    sources: list[set[int]] = [set() for _ in costs.groups]
    for source, target in costs.edges:
        readers[source].add(target)
        sources[target].add(source)
    return readers, sources


def _with_all(follow: list[set[int]], groups: set[int], inside: set[int]) -> frozenset[int]:
    """The groups and all their successors inside a stage: they have to move with them."""
    moved, rest = set(groups), list(groups)
    while rest:
        new = (follow[rest.pop()] & inside) - moved
        moved |= new
        rest += new
    return frozenset(moved)


def moved_to(placement: Placement, groups: frozenset[int], target: int) -> Placement | None:
    """The placement with `groups` in stage `target`; None if a stage would be empty."""
    moved = tuple(
        target if group in groups else stage for group, stage in enumerate(placement.stage_of)
    )
    is_whole = len(set(moved)) == placement.stages
    return replace(placement, stage_of=moved) if is_whole else None


def _moved(solution: Solution, stage: int, about: str, words: str, moved: Placement) -> Finding:
    problem, now, then = solution.problem, solution.evaluation, step_of(solution.problem, moved)
    before_ms, after_ms = (
        [load.load_ms for load in evaluation.stages] for evaluation in (now, then.evaluation)
    )
    loads = "; ".join(
        f"stage {near} {write_change(before_ms[near], after_ms[near])}"
        for near in (stage, stage + 1)
    )
    beside = [_verdict(solution, then)]
    before, after = (_crossing(problem, plan, stage) for plan in (solution.placement, moved))
    if after.num_bytes != before.num_bytes:
        beside.append(
            f"sends {write_bytes(after.num_bytes)} both ways instead of "
            f"{write_bytes(before.num_bytes)}"
        )
    torn = _torn(problem.costs, moved, stage) - _torn(problem.costs, solution.placement, stage)
    if torn:
        beside.append(f"splits {' and '.join(sorted(torn))}")
    text = f"{words}: {loads}; {', '.join(beside)}."
    return Finding("cut", about, text, round(then.evaluation.bottleneck_ms, 6))


def _torn(costs: Costs, placement: Placement, stage: int) -> set[str]:
    """The blocks that lie on both sides of the cut after `stage`."""
    sides: list[set[str]] = [set(), set()]
    for block, where in zip(costs.blocks, placement.stage_of, strict=True):
        sides[where > stage].add(block)
    return (sides[0] & sides[1]) - {""}


def _verdict(solution: Solution, then: Step) -> str:
    """The change of the plan's objective: the slowest stage, or the step."""
    if solution.evaluation.fits and not then.evaluation.fits:
        return "does not fit into memory"
    if solution.setting.is_asynchronous:
        name, before_ms = "the bottleneck stage", solution.bottleneck_ms
        after_ms = then.evaluation.bottleneck_ms
    else:
        name, before_ms = f"the {solution.setting.schedule} step", solution.step_ms
        after_ms = then.step_ms
    grown_ms = after_ms - before_ms
    if abs(grown_ms) < 0.005:
        return f"{name} takes as long"
    return (
        f"{name} takes {write_ms(abs(grown_ms))} {'more' if grown_ms > 0 else 'less'} "
        f"({write_share(abs(grown_ms) / before_ms)})"
    )
