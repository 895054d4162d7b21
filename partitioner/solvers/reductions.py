"""A problem -> a smaller one with the same optimum, and the item that each group is part of.

Every reduction preserves the optimum and is recorded:

- If all groups together fit into every rank's memory, memory decides nothing and becomes unlimited
  (`without_memory`).
- If sending a value costs its owner more than the limit, or receiving it costs a reader more, with
  only the work of the owner or reader itself added, no cut of a plan within the limit separates
  them: they become one item, with all groups between them.
- A group without work and with a single neighbor joins it: on another stage it would only cost
  transfers. The only plans that this loses have a stage of nothing but such groups;
  `Reduced.joined_idle` reports that the caller has to check them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from ..graph.costs import Costs, Floats, Ints, SharedBytes, StageSums, Value
from ..graph.problem import Problem, Rules

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Reduced:
    """The smaller problem, the item of each group of the larger one, and the reductions made."""

    problem: Problem
    item_of: Ints
    joined_idle: int = 0
    joined_dear: int = 0

    def stage_of(self, stages: Sequence[Ints]) -> tuple[int, ...]:
        """The stage of every group of the larger problem, from the items of each stage."""
        at = np.zeros(int(self.item_of.max()) + 1, dtype=np.int64)
        for stage, items in enumerate(stages):
            at[items] = stage
        return tuple(at[self.item_of].tolist())


def reduce(problem: Problem, limit_ms: float, *, join_idle: bool = True) -> Reduced:
    """Reductions that keep every plan whose score is within the limit, or one as good."""
    least_ms = problem.least_work_ms
    setting = problem.setting
    join_idle = join_idle and not setting.is_limited and not setting.replicas
    items = nx.DiGraph()
    items.add_nodes_from(range(len(least_ms)))
    items.add_edges_from(problem.costs.edges)
    item_of = np.arange(len(least_ms))
    idle = dear = 0
    while True:
        size = len(items)
        items, item_of = _fused(items, item_of, _dear_pairs(problem, item_of, limit_ms))
        dear += size - len(items)
        joined = 0
        if join_idle:
            joined = _join_idle(items, item_of, problem)
            idle += joined
        if not joined or len(items) == size:
            break
    if len(items) < problem.stages:
        return Reduced(problem, np.arange(len(least_ms)))
    order = _order(items, item_of)
    item_of = order[item_of]
    smaller = contracted(problem.costs, item_of)
    rules = Rules(np.ones(len(smaller.groups) + 1, dtype=bool))
    return Reduced(Problem(smaller, problem.setting, rules), item_of, idle, dear)


def contracted(costs: Costs, item_of: Ints) -> Costs:
    """The costs of items instead of groups; items are numbered in a topological order."""
    count = int(item_of.max()) + 1
    first = np.full(count, len(item_of), dtype=np.int64)
    np.minimum.at(first, item_of, np.arange(len(item_of)))
    values, crossing = [], []
    for index, value in enumerate(costs.values):
        owner, readers = _ends(value, item_of)
        if readers:
            values.append(replace(value, owner=owner, readers=readers))
            crossing.append(index)
    edges = {(int(item_of[a]), int(item_of[b])) for a, b in costs.edges}
    parameters = np.zeros(count, dtype=bool)
    np.logical_or.at(parameters, item_of, costs.has_params)

    def total(amounts: Floats) -> Floats:
        return np.bincount(item_of, weights=amounts, minlength=count).astype(np.float64)

    def largest(amounts: Floats) -> Floats:
        maxima = np.zeros(count)
        np.maximum.at(maxima, item_of, amounts)
        return maxima

    return replace(
        costs,
        groups=tuple(costs.groups[group] for group in first),
        labels=tuple(costs.labels[group] for group in first),
        forward_ms=total(costs.forward_ms),
        backward_ms=total(costs.backward_ms),
        weight_ms=total(costs.weight_ms),
        edges=tuple(sorted((a, b) for a, b in edges if a != b)),
        values=tuple(values),
        send_ms=costs.send_ms[crossing],
        receive_ms=costs.receive_ms[crossing],
        parameters=_merged_bytes(costs.parameters, item_of),
        saved=_merged_bytes(costs.saved, item_of),
        frozen=_merged_bytes(costs.frozen, item_of),
        buffer_bytes=total(costs.buffer_bytes),
        transient_bytes=largest(costs.transient_bytes),
        live_bytes=largest(costs.live_bytes),
        modules=tuple(costs.modules[group] for group in first),
        blocks=tuple(costs.blocks[group] for group in first),
        has_params=parameters,
        times_on={kind: (total(f), total(b)) for kind, (f, b) in costs.times_on.items()},
        update_ms=total(costs.update_ms),
        sums_ms=np.stack([total(row) for row in costs.sums_ms]),
    )


def _ends(value: Value, item_of: Ints) -> tuple[int, tuple[int, ...]]:
    """The item that has a value and the others that read it. An exchange has no direction, and no
    edge orders its ends.
    """
    owner = int(item_of[value.owner])
    readers = {int(item_of[reader]) for reader in value.readers} - {owner}
    if value.is_exchange:
        owner, *others = sorted({owner, *readers})
        return owner, tuple(others)
    return owner, tuple(sorted(readers))


def _merged_bytes(shared_bytes: Iterable[SharedBytes], item_of: Ints) -> tuple[SharedBytes, ...]:
    return tuple(
        SharedBytes(
            tuple(sorted({int(item_of[group]) for group in shared.groups})), shared.num_bytes
        )
        for shared in shared_bytes
    )


def without_memory(problem: Problem) -> Problem:
    """The problem without memory limits, if one stage with all groups would be within each of
    them.
    """
    costs, setting = problem.costs, problem.setting
    if not setting.is_limited:
        return problem
    everything = StageSums(
        forward_ms=np.zeros(1),
        backward_ms=np.zeros(1),
        send_ms=np.zeros(1),
        receive_ms=np.zeros(1),
        param_bytes=np.array([sum(shared.num_bytes for shared in costs.parameters)]),
        buffer_bytes=np.array([costs.buffer_bytes.sum()]),
        saved_bytes=np.array([sum(shared.num_bytes for shared in costs.saved)]),
        received_bytes=np.array([costs.value_bytes.sum()]),
        transient_bytes=np.array([costs.transient_bytes.max()]),
        sent_bytes=np.array([costs.value_bytes.sum()]),
        root_bytes=np.array([costs.root_bytes.sum()]),
        tied_bytes=np.array([cautious(problem).costs.tied_bytes.sum()]),
        frozen_bytes=np.array([sum(shared.num_bytes for shared in costs.frozen)]),
        live_bytes=np.array([costs.live_bytes.max()]),
        largest_param_bytes=np.array([costs.largest_param_bytes.max()]),
    )
    for position, device in enumerate(setting.devices):
        for recompute in {False, setting.recompute == "all"}:
            if setting.memory_bytes(position, everything, recompute=recompute)[0] > (
                device.memory_bytes
            ):
                return problem
    devices = tuple(replace(device, memory_bytes=math.inf) for device in setting.devices)
    return replace(problem, setting=replace(setting, devices=devices))


def cautious(problem: Problem) -> Problem:
    """The problem in which as many stages exchange the gradient of a parameter as could hold it, a
    number that a search over single stages cannot know. A plan that fits here also fits in the
    original problem.
    """
    values = (
        replace(
            value, tied_bytes=value.exchanged_bytes(min(problem.stages, 1 + len(value.readers)))
        )
        for value in problem.costs.values
    )
    return replace(problem, costs=replace(problem.costs, values=tuple(values)))


def _dear_pairs(problem: Problem, item_of: Ints, limit_ms: float) -> list[tuple[int, int]]:
    """Pairs (owner, reader) of items that no plan within the limit can separate."""
    setting, distinct = problem.setting, {id(seen): seen for seen in problem.seen}
    pays = all(device.pays_transfers for device in setting.devices)
    if not pays or (setting.overlap and not setting.is_asynchronous):
        return []
    most_ms = limit_ms / setting.rounds * (1 + _ROUNDING)
    count = int(item_of.max()) + 1
    sending = np.min([seen.send_ms for seen in distinct.values()], axis=0)
    receiving = np.min([seen.receive_ms for seen in distinct.values()], axis=0)
    least = np.zeros(count)
    if not setting.overlap:
        least = np.bincount(item_of, problem.least_work_ms, minlength=count).astype(np.float64)
    pairs = []
    for index, value in enumerate(problem.costs.values):
        owner = int(item_of[value.owner])
        stays = least[owner] + sending[index] > most_ms
        for group in value.readers:
            reader = int(item_of[group])
            if reader != owner and (stays or least[reader] + receiving[index] > most_ms):
                pairs.append((owner, reader))
    return pairs


def _fused(
    items: nx.DiGraph, item_of: Ints, pairs: list[tuple[int, int]]
) -> tuple[nx.DiGraph, Ints]:
    """The items with each pair merged, together with all items between them."""
    if not pairs:
        return items, item_of
    tied = items.copy()
    for group, other in pairs:
        tied.add_edges_from([(group, other), (other, group)])
    fused = nx.condensation(tied)
    number = np.zeros(int(item_of.max()) + 1, dtype=np.int64)
    for item, component in fused.graph["mapping"].items():
        number[item] = component
    smaller = nx.DiGraph()
    smaller.add_nodes_from(fused)
    smaller.add_edges_from(fused.edges)
    return smaller, number[item_of]


def _join_idle(items: nx.DiGraph, item_of: Ints, problem: Problem) -> int:
    """Joins items without work to their only neighbor, in place; returns the number of joined
    items.
    """
    most_ms = np.maximum.reduce([seen.work_ms for seen in problem.seen])
    count = int(item_of.max()) + 1
    busy = np.bincount(item_of, most_ms, minlength=count) > 0
    waiting = [item for item in items if not busy[item]]
    home = np.arange(count)
    joined = 0
    while waiting:
        item = waiting.pop()
        neighbours = set(items.pred[item]) | set(items.succ[item]) if item in items else set()
        if len(neighbours) != 1:
            continue
        (other,) = neighbours
        items.remove_node(item)
        home[item] = other
        joined += 1
        if not busy[other]:
            waiting.append(other)
    for item in range(count):
        while home[item] != home[home[item]]:
            home[item] = home[home[item]]
    item_of[:] = home[item_of]
    return joined


def _order(items: nx.DiGraph, item_of: Ints) -> Ints:
    """The new number of each item: its position in the topological order closest to the given
    one.
    """
    count = int(item_of.max()) + 1
    first = np.full(count, len(item_of), dtype=np.int64)
    np.minimum.at(first, item_of, np.arange(len(item_of)))
    number = np.zeros(count, dtype=np.int64)
    ordered = nx.lexicographical_topological_sort(items, key=lambda item: first[item])
    for place, item in enumerate(ordered):
        number[item] = place
    return number
