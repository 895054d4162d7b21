"""Costs -> the best cut of one topological order, by dynamic programming in O(k n w).

    best[s][b] = min over a < b of max(best[s - 1][a], load(a, b))

where load(a, b) is the load of a stage that holds positions a to b - 1, and w is the number of
positions that fit into one stage; where a cut is demanded, a stage ends at the latest: a is at or
after the last demanded cut before b. It is PipeDream's recurrence (Narayanan et al., SOSP 2019,
section 3.1) without replication and with transfers in the load. For one b the loads of all a form
a column; the column of b + 1 follows from it by adding the values that end or begin there.

Then, among all cuts whose bottleneck is at most (1 + prefer_modules) of the optimum, the one that
tears the fewest modules is taken, of those the one with the fewest bytes crossing, and of those
the one with the smallest bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..cost import Costs, Floats, Ints
from .method import Placement, Rules

_ROUNDING = 1e-9


def place(costs: Costs, stages: int, rules: Rules) -> Placement:
    """The optimum over the cuts that `rules` allow, of the groups in their given order."""
    optimum_ms = _optimum_ms(costs, stages, rules)
    limit_ms = optimum_ms * (1 + rules.prefer_modules) * (1 + _ROUNDING)
    cuts = _tidiest_cuts(costs, stages, rules, limit_ms)
    where = np.searchsorted(cuts, np.arange(len(costs.groups)), side="right")
    return Placement(tuple(where.tolist()), optimum_ms)


def interval_loads(costs: Costs) -> Iterator[tuple[int, Floats]]:
    """For each end b = 1..n, the loads of the stages that hold positions a to b - 1, a = 0..b-1."""
    num_groups = len(costs.groups)
    done = np.concatenate([[0.0], np.cumsum(costs.work_ms)])
    changes = _talk_changes(costs)
    talk = np.zeros(num_groups)
    for end in range(1, num_groups + 1):
        for first, last, cost_ms in changes[end - 1]:
            talk[first : last + 1] += cost_ms
        work = done[end] - done[:end]
        yield end, np.maximum(work, talk[:end]) if costs.link.overlap else work + talk[:end]


def _talk_changes(costs: Costs) -> list[list[tuple[int, int, float]]]:
    """For each position, what changes in talk(a, .) for a = first..last once a stage reaches it."""
    changes: list[list[tuple[int, int, float]]] = [[] for _ in costs.groups]
    for value in costs.values:
        cost_ms, owner, readers = value.transfer_ms, value.owner, value.readers
        if not cost_ms:
            continue
        if owner < readers[0]:
            # Sent by every stage that has the owner, until the last reader is in it too;
            # received by a stage from its first reader on.
            changes[owner].append((0, owner, cost_ms))
            for before, reader in zip((owner, *readers), readers, strict=False):
                changes[reader].append((before + 1, reader, cost_ms))
            changes[readers[-1]].append((0, owner, -cost_ms))
        else:
            for before, reader in zip((-1, *readers), readers, strict=False):
                changes[reader].append((before + 1, reader, cost_ms))
            changes[owner].append((0, readers[0], -cost_ms))
            changes[owner].append((readers[-1] + 1, owner, cost_ms))
    return changes


def _optimum_ms(costs: Costs, stages: int, rules: Rules) -> float:
    num_groups = len(costs.groups)
    first_fit = _first_fit(costs, _reachable_ms(costs, stages, rules), rules)
    best = np.full((stages + 1, num_groups + 1), np.inf)
    best[0, 0] = 0.0
    for end, loads in interval_loads(costs):
        if rules.may_cut[end] or end == num_groups:
            start = first_fit[end]
            best[1:, end] = np.maximum(best[:-1, start:end], loads[start:]).min(axis=1)
    return float(best[stages, num_groups])


def _tidiest_cuts(costs: Costs, stages: int, rules: Rules, limit_ms: float) -> list[int]:
    num_groups = len(costs.groups)
    first_fit = _first_fit(costs, limit_ms, rules)
    untidy = _untidiness(costs, stages)
    never = np.iinfo(np.int64).max // 2
    price = np.full((stages + 1, num_groups + 1), never, dtype=np.int64)
    bottleneck = np.full((stages + 1, num_groups + 1), np.inf)
    previous = np.zeros((stages + 1, num_groups + 1), dtype=np.int64)
    price[0, 0], bottleneck[0, 0] = 0, 0.0
    for end, loads in interval_loads(costs):
        if not (rules.may_cut[end] or end == num_groups):
            continue
        start = first_fit[end]
        reached = loads[start:] <= limit_ms
        prices = np.where(reached, price[:-1, start:end] + untidy[start:end], never)
        peaks = np.maximum(bottleneck[:-1, start:end], loads[start:])
        peaks[prices > prices.min(axis=1, keepdims=True)] = np.inf
        chosen = peaks.argmin(axis=1)
        rows = np.arange(stages)
        price[1:, end] = np.minimum(prices[rows, chosen], never)
        bottleneck[1:, end] = peaks[rows, chosen]
        previous[1:, end] = start + chosen
    cuts = [num_groups]
    for stage in range(stages, 0, -1):
        cuts.append(int(previous[stage, cuts[-1]]))
    return cuts[-2:0:-1]


def _untidiness(costs: Costs, stages: int) -> Ints:
    """Price of a cut before each position; sums compare torn modules first, bytes second."""
    num_bytes = np.rint(costs.cut_bytes).astype(np.int64)
    price = costs.cut_depth * (stages * int(num_bytes.max()) + 1) + num_bytes
    price[0] = 0
    return price


def _first_fit(costs: Costs, limit_ms: float, rules: Rules) -> Ints:
    """For each end, the first start whose work alone is within the limit and after which no cut
    is demanded: the pair window."""
    done = np.concatenate([[0.0], np.cumsum(costs.work_ms)])
    starts = np.searchsorted(done, done - limit_ms * (1 + _ROUNDING), side="left")
    # Costs of zero and rounding must not close the window: one group always fits.
    starts = np.minimum(starts, np.maximum(np.arange(len(done)) - 1, 0))
    demanded = np.array([0, *rules.must_cut])
    before = np.searchsorted(demanded, np.arange(len(done)), side="left") - 1
    windows: Ints = np.maximum(starts, demanded[np.maximum(before, 0)])
    return windows


def _reachable_ms(costs: Costs, stages: int, rules: Rules) -> float:
    """The bottleneck of one legal cut, the demanded places and some near equal shares of the
    work: an upper bound."""
    places = np.setdiff1d(np.flatnonzero(rules.may_cut[1:-1]) + 1, rules.must_cut)
    number = stages - 1 - len(rules.must_cut)
    done = np.concatenate([[0.0], np.cumsum(costs.work_ms)])
    shares = done[-1] * np.arange(1, number + 1) / (number + 1)
    nearest = np.searchsorted(done[places], shares)
    # The i-th of n cuts needs i places before it and n - 1 - i after it.
    index = np.arange(number)
    picks = np.maximum.accumulate(np.minimum(nearest, len(places) - number + index) - index)
    chosen = sorted([*places[picks + index].tolist(), *rules.must_cut])
    cuts = [0, *chosen, len(costs.groups)]
    starts = dict(zip(cuts[1:], cuts[:-1], strict=True))
    return max(float(loads[starts[end]]) for end, loads in interval_loads(costs) if end in starts)
