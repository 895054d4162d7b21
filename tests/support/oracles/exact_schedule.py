"""The shortest possible period, by a mixed-integer program: an oracle for small cases.

It shares only the costs with the scheduler. Every task has a start time, every backward a binary
variable for whether it is split, and every pair of tasks of a rank one for which comes first.
The tasks of a rank lie in a window of its own that is as long as the period; steps need no barrier.
"""

from itertools import combinations
from typing import Any

import highspy

from asyncpipe.runtime.schedule.simulate import ActionCosts


def exact_period_ms(
    costs: ActionCosts, rank_of_stage: list[int], micro_batches: int, *, may_split: bool
) -> float:
    """The shortest period of a chain of stages with free transfers, in ms."""
    stages = len(rank_of_stage)
    weight_ms = costs.weight_ms or tuple(ms / 2 for ms in costs.backward_ms)
    split_ms = costs.split_ms or (0.0,) * stages
    far = 2 * micro_batches * sum(costs.forward_ms + costs.backward_ms + split_ms + costs.step_ms)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    period = solver.addVariable(lb=0.0, ub=far)
    opens = [solver.addVariable(lb=0.0, ub=far) for _ in set(rank_of_stage)]
    starts, lasts = {}, {}
    for stage in range(stages):
        for index in range(micro_batches):
            parted = solver.addBinary() if may_split else 0.0
            lasts["F", stage, index] = costs.forward_ms[stage]
            put_off = weight_ms[stage] - split_ms[stage]
            lasts["B", stage, index] = costs.backward_ms[stage] - put_off * parted
            if may_split:
                lasts["W", stage, index] = weight_ms[stage] * parted
    for task in lasts:
        starts[task] = solver.addVariable(lb=0.0, ub=far)
    steps = [
        sum(ms for ms, at in zip(costs.step_ms, rank_of_stage, strict=True) if at == rank)
        for rank in range(len(opens))
    ]
    for (kind, stage, index), start in starts.items():
        rank, end = rank_of_stage[stage], start + lasts[kind, stage, index]
        solver.addConstr(start >= opens[rank])
        solver.addConstr(end + steps[rank] <= opens[rank] + period)
        after = {
            "F": [("F", stage + 1, index), ("B", stage, index)],
            "B": [("B", stage - 1, index), ("W", stage, index)],
        }.get(kind, [])
        if index + 1 < micro_batches and kind == "F":  # they are all alike
            after.append((kind, stage, index + 1))
        for other in after:
            if other in starts:
                solver.addConstr(starts[other] >= end)
    for one, other in combinations(starts, 2):
        if rank_of_stage[one[1]] == rank_of_stage[other[1]]:
            first = solver.addBinary()
            solver.addConstr(starts[other] >= starts[one] + lasts[one] - far * (1 - first))
            solver.addConstr(starts[one] >= starts[other] + lasts[other] - far * first)
    solver.minimize(period)
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    found: float = solver.getObjectiveValue()
    return found
