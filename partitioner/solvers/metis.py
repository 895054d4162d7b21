"""METIS k-way cuts as a coarsener, with the acyclicity that they lack repaired by a chain DP.

METIS (Karypis, Kumar: "A Fast and High Quality Multilevel Scheme for Partitioning Irregular
Graphs", SISC 1998) balances work and cuts few bytes, but knows no direction: on the published
operator graphs its parts form a cycle in nine runs of ten. So a cut by METIS is not taken as it
is. Its parts are put in the order of their mean topological position, the groups into the
topological order that keeps to that of their parts as far as edges allow, and this order is cut
anew by chain DP; then groups move between neighbouring stages as in `acyclic.py`. The order is
where METIS's cut remains: what it kept together stands together. Several seeds and numbers of
parts are tried and the best plan by the evaluator is taken. It proves no bound.

FTPipe asks METIS up to ten times for parts without a cycle and gives up then. Lifting every group
to the stages of its predecessors instead removes the cycles and the balance with them: 1.0 to 4.2
times the optimum on the same graphs.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ...runtime.errors import PlanError
from ..cost import Costs, Floats
from ..problem import DoesNotFit, Placement, Problem
from . import chain
from .coarse import by_pieces, expanded, on_units, topological
from .moves import Budget, Order, chains, descend
from .parts import Parts

SEEDS = 4
FINENESS = (1, 2, 4)  # parts for every stage
TRIALS = 10_000
_MOST = 10_000  # the largest weight given to METIS, whose weights are whole numbers


@by_pieces
def place(problem: Problem) -> Placement:
    """The best of the cuts in the orders that METIS's parts suggest, refined.

    Raises PlanError when pymetis is missing, DoesNotFit when no cut fits into the memory of the
    devices.
    """
    pymetis = _pymetis()
    found = []
    for fineness in FINENESS:
        for seed in range(SEEDS):
            part_of = _cut(pymetis, problem.costs, fineness * problem.stages, seed)
            places = _order(problem.costs, part_of)
            try:
                ordered = chain.place(on_units(problem, places))
            except DoesNotFit:
                continue
            parts = Parts(problem, expanded(ordered, places).stage_of)
            found.append((parts.score, tuple(parts.part_of)))
    if not found:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    parts = Parts(problem, min(found)[1])
    budget, order = Budget(TRIALS), Order(problem.costs)
    descend(parts, order.advanced, budget)
    chains(parts, order.advanced, budget)
    return Placement(tuple(parts.part_of))


def _pymetis() -> ModuleType:
    try:
        import pymetis
    except ImportError as error:
        raise PlanError(
            "--method metis needs pymetis, which is not installed.",
            'pip install "asyncpipe[metis]"',
        ) from error
    found: ModuleType = pymetis
    return found


def _cut(pymetis: ModuleType, costs: Costs, parts: int, seed: int) -> list[int]:
    """The part of every group, by its work and by the bytes between groups."""
    weight = _crossing(costs)
    around: list[list[int]] = [[] for _ in costs.groups]
    for source, target in sorted(weight):
        around[source].append(target)
        around[target].append(source)
    starts = np.cumsum([0, *map(len, around)]).tolist()
    scale = _MOST / (max(weight.values(), default=0.0) or 1.0)
    edge_weights = [
        1 + round(scale * weight[min(group, other), max(group, other)])
        for group, others in enumerate(around)
        for other in others
    ]
    # METIS prints complaints if parts may be of a single group, and the order needs no such parts.
    parts = min(parts, len(costs.groups) // 4)
    if parts < 2:
        return [0] * len(costs.groups)
    work_ms = _at_most_half_a_part(costs.work_ms, parts)
    heaviest = float(work_ms.max()) or 1.0
    _, membership = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(starts, [other for others in around for other in others]),
        vweights=[1 + round(_MOST * work / heaviest) for work in work_ms.tolist()],
        eweights=edge_weights,
        options=pymetis.Options(seed=seed),
    )
    return list(membership)


def _at_most_half_a_part(work_ms: Floats, parts: int) -> Floats:
    """The work of every group, of the heaviest only as much as half of an even share of it all."""
    while True:
        most_ms = work_ms.sum() / (2 * parts)
        if work_ms.max() <= most_ms * 1.01:
            return work_ms
        work_ms = np.minimum(work_ms, most_ms)


def _crossing(costs: Costs) -> dict[tuple[int, int], float]:
    """What is paid if two groups are apart: bytes, or times where the graph has only those."""
    in_bytes = any(value.forward_bytes + value.backward_bytes for value in costs.values)
    weight = {edge: 0.0 for edge in costs.edges}
    for value, time_ms in zip(costs.values, costs.send_ms.tolist(), strict=True):
        amount = value.forward_bytes + value.backward_bytes if in_bytes else time_ms
        for reader in value.readers:
            pair = min(value.owner, reader), max(value.owner, reader)
            weight[pair] = weight.get(pair, 0.0) + amount
    return weight


def _order(costs: Costs, part_of: list[int]) -> list[int]:
    """The place of every group: parts by their mean position, as far as edges allow."""
    positions: dict[int, list[int]] = {}
    for group, part in enumerate(part_of):
        positions.setdefault(part, []).append(group)
    mean = {part: sum(groups) / len(groups) for part, groups in positions.items()}
    return topological(len(part_of), costs.edges, lambda group: (mean[part_of[group]], group))
