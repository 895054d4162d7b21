"""A problem whose devices may come in any order, or stay unused -> the order and the placement.

It is the search of `search.py` with another state: how many devices of each kind are used by the
first stages. So all orders of k devices of q kinds are searched at once with at most
(k / q + 1)^q states, and the answer is the optimum over them; no order is tried by itself. This
is the setting of Tarnawski et al. (NeurIPS 2020): k accelerators and a CPU anywhere.
"""

from __future__ import annotations

import numpy as np

from ...runtime.errors import PlanError
from ..problem import Placement, Problem
from . import chain
from .bounds import more_than_any_ms, simple_bound_ms
from .downsets import find_downsets
from .exact import MOST_DOWNSETS, rising_search
from .reduce import reduce, without_memory
from .search import Walk, in_any_order, windows


def place_unordered(problem: Problem) -> tuple[tuple[int, ...], Placement]:
    """The device of each stage, an index in `setting.devices`, and the stage of every group.

    `bound_ms` of the placement holds for every order and every choice of the devices. The links
    between all devices must be the same; the rules of the problem are not asked.
    Raises PlanError where links differ, nothing fits, or the graph has too many downsets.
    """
    setting = problem.setting
    if setting.replicas or len(set(setting.links or ())) > 1:
        raise PlanError(
            "devices in any order need one rank each and the same link between all of them.",
            "Give the devices in their order.",
        )
    problem = without_memory(problem)
    limit_ms = min(chain.optimum(problem), more_than_any_ms(problem))
    # A stage of idle groups alone is a device that might stay unused, unless their number counts.
    reduced = reduce(problem, limit_ms, join_idle=problem.is_simple)
    smaller = reduced.problem
    kinds = _kinds(smaller)
    walks = _walks(smaller, kinds)
    floor_ms = simple_bound_ms(smaller)
    downsets = find_downsets(
        smaller.costs,
        smaller.least_work_ms,
        windows(smaller, walks[-1], limit_ms),
        most=MOST_DOWNSETS,
    )
    if downsets is None:
        raise PlanError(
            f"{problem.costs.name} has too many parallel branches for devices in any order.",
            "Give the devices in their order.",
        )
    best: tuple[tuple[int, ...], Placement] | None = None
    best_ms = np.inf
    for walk in walks:
        found, _ = rising_search(smaller, walk, downsets, floor_ms, limit_ms)
        if found is None or found.score_ms >= best_ms:
            continue
        best_ms = limit_ms = found.score_ms
        left = [list(positions) for positions in kinds]
        longest = len(walk.stages) // len(kinds)
        order = tuple(left[index // longest].pop(0) for index, _ in found.stages)
        stage_of = reduced.stage_of([items for _, items in found.stages])
        best = order, Placement(stage_of, bound_ms=best_ms, order_optimum_ms=best_ms)
    if best is None:
        raise PlanError("no plan fits into the memory of the devices, in whatever order.")
    return best


def _kinds(problem: Problem) -> list[list[int]]:
    """The positions of devices that are alike, in the order of the first of each kind."""
    kinds: dict[object, list[int]] = {}
    for position, (device, seen) in enumerate(
        zip(problem.setting.devices, problem.seen, strict=True)
    ):
        key = id(seen), device.memory_bytes, device.pays_transfers
        kinds.setdefault(key, []).append(position)
    return list(kinds.values())


def _walks(problem: Problem, kinds: list[list[int]]) -> list[Walk]:
    """One search for all numbers of stages, or one for each where scores depend on it."""
    if problem.is_simple:
        return [in_any_order(problem, kinds, None)]
    return [in_any_order(problem, kinds, length) for length in range(1, problem.stages + 1)]
