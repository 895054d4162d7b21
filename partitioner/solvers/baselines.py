"""Costs -> plans of simple methods for comparison: even split, two-dimensional bin packing, METIS.

None of them proves a bound. The last two try several parameters and return the best plan according
to the evaluator.

Even split by counting (`place_uniform`), as one would write it by hand. With B blocks, stage s of k
gets blocks floor(B s / k) to floor(B (s + 1) / k). Groups before the first block join it, and
groups after a block stay with that block. A model with fewer blocks than stages is split by
counting its groups with parameters, or else all groups.

Two-dimensional bin packing (`place_two_d_bin`): every device gets its share of each kind of group.

    cluster    groups by their times, with 1-D k-means
    runs       split each cluster, in topological order, into as many runs as there are ranks
    bins       in the cluster with the largest times, run i goes to rank i; each run of the other
               clusters goes to the rank where it fits best, the largest run first
    stages     the pieces of every rank in which no edge leads back (`mpipe.py`)

It is the first planner of FTPipe, for models whose halves differ (encoder and decoder), where one
run of the model on each device balances only one half. Differences from FTPipe: gluing groups of
almost no time to a neighbor never creates a cycle, the memory limits hold, and the number of
clusters is not asked for on stdin.

METIS k-way cuts as a coarsener (`place_metis`); a chain DP makes the result acyclic. METIS
(Karypis, Kumar: "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", SISC
1998) balances work and cuts few bytes, but ignores directions: on the published operator graphs its
parts form a cycle in nine runs of ten. So the parts only give an order: parts are sorted by their
mean topological position, and groups follow the topological order that respects the order of their
parts as far as edges allow. Chain DP cuts this order again, and groups then move between
neighboring stages as in `multilevel.py`. The order preserves METIS's cut, because groups of one
part are adjacent in it.

FTPipe instead asks METIS up to ten times for parts without a cycle and then gives up. Lifting every
group to the stages of its predecessors removes the cycles, but also the balance: 1.0 to 4.2 times
the optimum on the same graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from ...runtime.errors import PlanError
from ...runtime.extras import install
from ..graph.costs import Costs, Floats, Ints
from ..graph.problem import DoesNotFit, Placement, Problem, evaluate
from . import chain
from .coarsening import without_little_ones
from .local_search import Budget, GroupDivision, NeighbourOrder, chains, descend
from .mpipe import demands, largest_first, staged
from .multilevel import by_pieces, expanded, on_units, topological


@by_pieces
def place_uniform(problem: Problem) -> Placement:
    """An even split of the pieces; ignores costs."""
    costs, stages = problem.costs, problem.stages
    for starts in (_block_starts(costs), np.flatnonzero(costs.has_params)):
        if len(starts) >= stages:
            break
    else:
        starts = np.arange(len(costs.groups))
    first_pieces = np.arange(1, stages) * len(starts) // stages
    return Placement(tuple(_stages_between(starts[first_pieces], len(costs.groups))))


def _block_starts(costs: Costs) -> np.ndarray:
    first: dict[str, int] = {}
    for position, block in enumerate(costs.blocks):
        if block:
            first.setdefault(block, position)
    return np.array(list(first.values()), dtype=np.int64)


def _stages_between(cuts: np.ndarray, num_groups: int) -> list[int]:
    stages: list[int] = np.searchsorted(cuts, np.arange(num_groups), side="right").tolist()
    return stages


CLUSTERS = range(1, 9)
# Groups below this share of a rank's work are glued to a neighbor.
LITTLE = 0.002
_ITERATIONS = 100


@by_pieces
def place_two_d_bin(problem: Problem) -> Placement:
    """The best plan over several numbers of clusters.

    Raises DoesNotFit when no plan fits into the memory of the devices.
    """
    unit_of = without_little_ones(problem, LITTLE)
    coarse = on_units(problem, unit_of)
    candidates = []
    for clusters in CLUSTERS:
        rank_of = _bins(coarse, clusters)
        placement = staged(problem, [rank_of[unit] for unit in unit_of])
        evaluation = evaluate(problem, placement)
        if evaluation.fits:
            candidates.append((evaluation.score_ms, placement.stages, clusters, placement))
    if not candidates:
        raise DoesNotFit(
            f"no plan of --method 2dbin fits into the memory of {problem.stages} devices.",
            "--method auto searches all cuts.",
        )
    return min(candidates, key=lambda candidate: candidate[:3])[-1]


def clusters_of(times_ms: Floats, number: int) -> Ints:
    """The cluster of every time, the one with the largest times first: Lloyd's iterations that
    start from equal shares of the sorted times.
    """
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
    """Consecutive positions with about equal shares of the time; some runs are empty if there are
    few positions.
    """
    middle = np.cumsum(times_ms) - times_ms / 2
    total = float(times_ms.sum())
    share = middle / total if total else np.arange(len(times_ms)) / len(times_ms)
    of_run = np.minimum((share * number).astype(np.int64), number - 1)
    return [np.flatnonzero(of_run == index) for index in range(number)]


SEEDS = 4
FINENESS = (1, 2, 4)  # METIS parts per stage
TRIALS = 10_000
_MOST = 10_000  # the largest weight given to METIS, which accepts only integers


@by_pieces
def place_metis(problem: Problem) -> Placement:
    """The best of the cuts in the orders that METIS's parts suggest, refined.

    Raises PlanError when pymetis is missing, DoesNotFit when no cut fits into the memory of the
    devices.
    """
    pymetis = _pymetis()
    candidates = []
    for fineness in FINENESS:
        for seed in range(SEEDS):
            part_of = _cut(pymetis, problem.costs, fineness * problem.stages, seed)
            places = _order(problem.costs, part_of)
            try:
                ordered = chain.place(on_units(problem, places))
            except DoesNotFit:
                continue
            parts = GroupDivision(problem, expanded(ordered, places).stage_of)
            candidates.append((parts.score, tuple(parts.part_of)))
    if not candidates:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    parts = GroupDivision(problem, min(candidates)[1])
    budget, order = Budget(TRIALS), NeighbourOrder(problem.costs)
    descend(parts, order.advanced, budget)
    chains(parts, order.advanced, budget)
    return Placement(tuple(parts.part_of))


def _pymetis() -> ModuleType:
    try:
        import pymetis
    except ImportError as error:
        raise PlanError(
            "--method metis needs pymetis, which is not installed.",
            install("metis"),
        ) from error
    module: ModuleType = pymetis
    return module


def _cut(pymetis: ModuleType, costs: Costs, parts: int, seed: int) -> list[int]:
    """The part of every group; METIS balances work and cuts few bytes."""
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
    # METIS prints warnings for parts of a single group, and the order does not need such parts.
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
    """The work of every group, limited to half of an even share of the total."""
    while True:
        most_ms = work_ms.sum() / (2 * parts)
        if work_ms.max() <= most_ms * 1.01:
            return work_ms
        work_ms = np.minimum(work_ms, most_ms)


def _crossing(costs: Costs) -> dict[tuple[int, int], float]:
    """The cost of separating two groups: bytes, or times where the graph has only times."""
    in_bytes = any(value.forward_bytes + value.backward_bytes for value in costs.values)
    weight = {edge: 0.0 for edge in costs.edges}
    for value, time_ms in zip(costs.values, costs.send_ms.tolist(), strict=True):
        amount = value.forward_bytes + value.backward_bytes if in_bytes else time_ms
        for reader in value.readers:
            pair = min(value.owner, reader), max(value.owner, reader)
            weight[pair] = weight.get(pair, 0.0) + amount
    return weight


def _order(costs: Costs, part_of: list[int]) -> list[int]:
    """The position of every group: parts by their mean position, as far as edges allow."""
    positions: dict[int, list[int]] = {}
    for group, part in enumerate(part_of):
        positions.setdefault(part, []).append(group)
    mean = {part: sum(groups) / len(groups) for part, groups in positions.items()}
    return topological(len(part_of), costs.edges, lambda group: (mean[part_of[group]], group))
