"""A problem -> a relaxation with far fewer downsets; its optimum is a bound of the problem's.

There are too many downsets where groups may come almost anywhere. In an encoder-decoder model these
are the masks, and the keys and values of cross-attention, which fit on any stage between the
encoder and their layer. Two steps remove this freedom, and neither makes the score of any plan
larger:

- Groups that neither make nor read a value that another stage may need are left out.
- Interchangeable groups come in one order: groups that take the same time on every rank, have the
  same predecessors and read the same values, and where every successor of a group is a descendant
  of the group before it. In any plan the stages of such groups can be dealt out to them again in
  rising order. No edge then leads backwards: a successor of the j-th group descends from
  the first j groups, so it is on or after the stages of all of them, the last of which is at least
  the j-th smallest stage. As many of the groups as before are on each stage, which therefore
  computes and receives the same.

Only the values of these groups may cross other cuts than before. If the groups have like values for
the same readers, nothing changes. Otherwise the values are left out, which is worth it only for
groups with much freedom: between the first and the last one lies a good part of a stage's work.

The relaxation has no memory limits. It needs scores that do not fall with more work or transfers,
and is not made for other scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..graph.costs import Bools, Costs, Floats
from ..graph.problem import Problem, Rules
from .reductions import contracted

_FAR = 0.5  # of the largest work of a stage


def relaxed(problem: Problem, limit_ms: float) -> Problem | None:
    """The relaxation; `limit_ms` is the score of some plan. None where scores may fall with more
    transfers, where they depend on the bytes of a stage because replicas exchange gradients or all
    stages that save anything recompute, and where nothing would be left.
    """
    setting = problem.setting
    if setting.replicas or setting.recompute == "all" or not setting.score_is_load:
        return None
    devices = tuple(replace(device, memory_bytes=math.inf) for device in setting.devices)
    with_transfers = _with_transfers(problem.costs)
    if not with_transfers.any():
        return None
    costs = _kept(problem.costs, with_transfers)
    rules = Rules(np.ones(len(costs.groups) + 1, dtype=bool))
    problem = Problem(costs, replace(setting, devices=devices), rules)
    return replace(problem, costs=_ordered(problem, limit_ms / setting.rounds))


def _with_transfers(costs: Costs) -> Bools:
    """The groups that have or read a value, as a mask."""
    chosen = np.zeros(len(costs.groups), dtype=bool)
    for value in costs.values:
        chosen[[value.owner, *value.readers]] = True
    return chosen


def _kept(costs: Costs, chosen: Bools) -> Costs:
    """The costs without the work and the edges of the other groups, which join the first item."""
    item_of = np.maximum(np.cumsum(chosen) - 1, 0)
    item_of[~chosen] = 0
    only = replace(
        costs,
        forward_ms=costs.forward_ms * chosen,
        backward_ms=costs.backward_ms * chosen,
        weight_ms=costs.weight_ms * chosen,
        update_ms=costs.update_ms * chosen,
        sums_ms=costs.sums_ms * chosen,
        times_on={kind: (f * chosen, b * chosen) for kind, (f, b) in costs.times_on.items()},
        edges=tuple((a, b) for a, b in costs.edges if chosen[a] and chosen[b]),
    )
    return contracted(only, item_of)


def _ordered(problem: Problem, stage_ms: float) -> Costs:
    """The costs with interchangeable groups in one order, where a stage has at most `stage_ms`."""
    costs = problem.costs
    after, descendants = _descendants(costs)
    to_end_ms = _longest_ms(after, problem.least_work_ms)
    owned = _owned(costs)
    edges, freed = list(costs.edges), set()
    for run in _runs(problem, after, descendants):
        pieces = [list(alike) for _, alike in itertools.groupby(run, key=owned.__getitem__)]
        if len(pieces) > 1 and to_end_ms[run[0]] - to_end_ms[run[-1]] >= _FAR * stage_ms:
            freed.update(run)
            pieces = [run]
        for piece in pieces:
            edges += itertools.pairwise(piece)
    staying = [index for index, value in enumerate(costs.values) if value.owner not in freed]
    return replace(
        costs,
        edges=tuple(sorted(set(edges))),
        values=tuple(costs.values[index] for index in staying),
        send_ms=costs.send_ms[staying],
        receive_ms=costs.receive_ms[staying],
    )


def _descendants(costs: Costs) -> tuple[list[set[int]], list[int]]:
    """The successors of each group, and all its descendants as bits."""
    after: list[set[int]] = [set() for _ in costs.groups]
    for source, target in costs.edges:
        after[source].add(target)
    descendants = [0] * len(after)
    for group in reversed(range(len(after))):
        for target in after[group]:
            descendants[group] |= descendants[target] | 1 << target
    return after, descendants


def _longest_ms(after: Sequence[set[int]], least_ms: Floats) -> list[float]:
    """For each group the most work on a path that begins with it."""
    longest: list[float] = least_ms.tolist()
    for group in reversed(range(len(longest))):
        longest[group] += max((longest[target] for target in after[group]), default=0.0)
    return longest


def _owned(costs: Costs) -> list[list[tuple[object, ...]]]:
    """For each group what distinguishes the values that it has from those of another group."""
    owned: list[list[tuple[object, ...]]] = [[] for _ in costs.groups]
    for index, value in enumerate(costs.values):
        unnamed = replace(value, name="", owner=0)
        owned[value.owner].append((unnamed, costs.send_ms[index], costs.receive_ms[index]))
    return owned


def _runs(
    problem: Problem, after: Sequence[set[int]], descendants: Sequence[int]
) -> Iterator[list[int]]:
    """Interchangeable groups, two or more, in their order."""
    costs = problem.costs
    before: list[list[int]] = [[] for _ in costs.groups]
    reads: list[list[int]] = [[] for _ in costs.groups]
    for source, target in sorted(set(costs.edges)):
        before[target].append(source)
    for index, value in enumerate(costs.values):
        for reader in value.readers:
            reads[reader].append(index)
    distinct = {id(seen): seen for seen in problem.seen}.values()
    alike: dict[tuple[object, ...], list[int]] = {}
    for group in range(len(costs.groups)):
        times = tuple((seen.forward_ms[group], seen.backward_ms[group]) for seen in distinct)
        key = times, tuple(before[group]), tuple(reads[group])
        alike.setdefault(key, []).append(group)
    for members in alike.values():
        run = members[:1]
        for group in members[1:]:
            if any(not descendants[run[-1]] >> target & 1 for target in after[group]):
                if len(run) > 1:
                    yield run
                run = []
            run.append(group)
        if len(run) > 1:
            yield run
