"""One topological order of the groups -> its optimal cut, with or without replicated stages, by DP.

Without replicas (`place`), in O(k n w):

    best[s][b] = min over a < b of max(best[s - 1][a], load_s(a, b))

where load_s(a, b) is the load of stage s if it holds positions a to b - 1, and w is the number of
positions that fit into one stage. A stage ends at the latest at a demanded cut: a is at or after
the last demanded cut before b. This is the recurrence of PipeDream (Narayanan et al., SOSP 2019,
section 3.1) without replication and with transfers and memory in the load. The sums of all a for
one b form a column; the column of b + 1 follows from it by adding the changes at that position.

Among all cuts whose bottleneck is at most (1 + prefer_modules) of the optimum, the method returns
the one that tears the fewest modules, then the one with the fewest crossing bytes, then the most
even one: with the smallest sum of squares.

With replicas (`place_pipedream`):

    A[b][m] = min over a < b, r <= m of max(A[a][m - r], load(a, b) / r + exchange(a, b, r))

is the smallest time of the first b groups on the first m ranks, where the last stage holds groups a
to b - 1 on r ranks. These share its micro-batches, sum their gradients once per step, and each
compute the whole optimizer step. This is the same recurrence of PipeDream over a flat row of ranks,
with the load of `partitioner/graph/rank_model.py` in place of its own: the load includes the
transfers of skip connections and of both directions, and the memory of a stage depends on the
number of later stages. Ranks that share a stage have to be alike. A plan may have fewer stages than
ranks, and may leave ranks idle.

Where ranks are on several hosts or have unequal links, the exchange uses the slowest link between
replicas; PipeDream's levels (replicas inside a server first) are those plans that replicate only
inside a host. The result is the optimum of all contiguous plans of that order with replicas, in
O(n^2 k^2), times k where memory or recomputation depends on the number of later stages.

FTPipe's planner of this name has replication switched off, assumes a memory of 10 GB, and counts
the transfers of a stage at its last node only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..graph.costs import Costs, Floats, Ints, SharedBytes, StageSums
from ..graph.problem import DoesNotFit, Placement, Problem, evaluate
from ..graph.rank_model import Device
from .bounds import more_than_any_ms, ratios

_ROUNDING = 1e-9


def place(problem: Problem) -> Placement:
    """The optimum over the cuts that the rules allow, of the groups in their given order.

    Raises DoesNotFit when no such cut fits into the memory of the devices.
    """
    optimum_ms = optimum(problem)
    limit_ms = optimum_ms * (1 + problem.rules.prefer_modules) * (1 + _ROUNDING)
    stage_of = tidiest(problem, limit_ms) if optimum_ms < np.inf else None
    if stage_of is None:
        raise DoesNotFit(f"no {problem.stages}-stage plan fits into the memory of the devices.")
    return Placement(stage_of, order_optimum_ms=optimum_ms)


def interval_sums(costs: Costs, first: Ints | None = None) -> Iterator[tuple[int, StageSums]]:
    """For each end b = 1..n, the sums of the stages that hold positions a to b - 1, for a from
    `first[b]` (rising; default 0) to b - 1.
    """
    num_groups = len(costs.groups)
    starts = np.zeros(num_groups + 1, dtype=np.int64) if first is None else first
    forward, backward, buffers, updates = (
        np.concatenate([[0.0], np.cumsum(group_amounts)])
        for group_amounts in (
            costs.forward_ms,
            costs.backward_ms,
            costs.buffer_bytes,
            costs.update_ms,
        )
    )
    changing = {
        "send_ms": _send_changes(costs, np.where(costs.is_exchange, 0.0, costs.send_ms)),
        "sent_bytes": _send_changes(costs, costs.value_bytes),
        "root_bytes": _send_changes(costs, costs.root_bytes),
        "receive_ms": _joined(
            _receive_changes(costs, costs.receive_ms),
            _send_changes(costs, np.where(costs.is_exchange, costs.send_ms, 0.0)),
        ),
        "received_bytes": _receive_changes(costs, costs.value_bytes),
        "param_bytes": _shared_changes(costs.parameters, num_groups),
        "frozen_bytes": _shared_changes(costs.frozen, num_groups),
        "saved_bytes": _shared_changes(costs.saved, num_groups),
        "tied_bytes": _joined(
            _send_changes(costs, costs.tied_bytes), _receive_changes(costs, costs.tied_bytes)
        ),
    }
    now = {name: np.zeros(num_groups) for name in changing}
    of_largest = ("transient_bytes", "live_bytes", "largest_param_bytes")
    largest = {name: np.zeros(num_groups) for name in of_largest}
    for end, start in enumerate(starts[1:].tolist(), start=1):
        for name, changes in changing.items():
            for earliest, last, amount in changes[end - 1]:
                # No later column looks before this window.
                now[name][max(earliest, start) : last + 1] += amount
        window = slice(start, end)
        for name, amounts in largest.items():
            np.maximum(amounts[window], getattr(costs, name)[end - 1], out=amounts[window])
        yield (
            end,
            StageSums(
                forward_ms=forward[end] - forward[window],
                backward_ms=backward[end] - backward[window],
                buffer_bytes=buffers[end] - buffers[window],
                update_ms=updates[end] - updates[window],
                duplex=costs.duplex,
                **{name: amounts[window] for name, amounts in {**now, **largest}.items()},
            ),
        )


_Changes = list[list[tuple[int, int, float]]]  # by position: (first, last, change)


def _joined(first: _Changes, second: _Changes) -> _Changes:
    return [of_first + of_second for of_first, of_second in zip(first, second, strict=True)]


def _send_changes(costs: Costs, amounts: Floats) -> _Changes:
    """The changes of the sent amount, by value and position, for stages with starts first..last
    that reach the position.
    """
    changes: _Changes = [[] for _ in costs.groups]
    for value, amount in zip(costs.values, amounts.tolist(), strict=True):
        owner, readers = value.owner, value.readers
        if not amount:
            continue
        if owner < readers[0]:
            # By every stage that has the owner, until the last reader is in it too.
            changes[owner].append((0, owner, amount))
            changes[readers[-1]].append((0, owner, -amount))
        else:
            # By a stage with the owner that begins after the first reader.
            changes[owner].append((readers[0] + 1, owner, amount))
    return changes


def _receive_changes(costs: Costs, amounts: Floats) -> _Changes:
    """The same for the received amount of each value."""
    changes: _Changes = [[] for _ in costs.groups]
    for value, amount in zip(costs.values, amounts.tolist(), strict=True):
        owner, readers = value.owner, value.readers
        if not amount:
            continue
        forwards = owner < readers[0]
        # By a stage from its first reader on, if the owner is not in it.
        before = (owner, *readers) if forwards else (-1, *readers)
        for earlier, reader in zip(before, readers, strict=False):
            changes[reader].append((earlier + 1, reader, amount))
        if not forwards:
            changes[owner].append((0, readers[-1], -amount))
    return changes


def _shared_changes(shared_bytes: Iterable[SharedBytes], num_groups: int) -> _Changes:
    """The same for the amount that a stage holds from the first group that names it."""
    changes: _Changes = [[] for _ in range(num_groups)]
    for item in shared_bytes:
        for earlier, group in zip((-1, *item.groups), item.groups, strict=False):
            changes[group].append((earlier + 1, group, item.num_bytes))
    return changes


def _interval_scores(
    problem: Problem, first: Ints, limit_ms: float
) -> Iterator[tuple[int, slice, Floats]]:
    """For each end at which some stages may end within the limit: these stages and their scores
    (rows) for every start in the window (columns).
    """
    earliest, latest = _slack(problem, limit_ms)
    done_ms = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
    distinct = {id(seen): seen for seen in problem.seen}
    like = problem.like
    columns = zip(*(interval_sums(seen, first) for seen in distinct.values()), strict=True)
    for column in columns:
        end = column[0][0]
        if earliest[end] > latest[end]:
            continue
        ending = slice(int(earliest[end]), int(latest[end]) + 1)
        sums = dict(zip(distinct, (sums for _, sums in column), strict=True))
        before_ms, after_ms = done_ms[first[end] : end], done_ms[-1] - done_ms[end]
        scores = {
            position: problem.setting.score_ms(
                position, sums[id(problem.seen[position])], before_ms, after_ms
            )
            for position in set(like[ending])
        }
        yield end, ending, np.stack([scores[position] for position in like[ending]])


def optimum(problem: Problem) -> float:
    """The smallest score of the cuts that the rules allow, inf if none fits."""
    num_groups, stages = len(problem.costs.groups), problem.stages
    limit_ms = min(_reachable_ms(problem), more_than_any_ms(problem))
    first_fit = _first_fit(problem, limit_ms)
    best = np.full((stages + 1, num_groups + 1), np.inf)
    best[0, 0] = 0.0
    for end, stage, scores in _interval_scores(problem, first_fit, limit_ms):
        if problem.rules.may_cut[end] or end == num_groups:
            before = best[stage, first_fit[end] : end]
            best[stage.start + 1 : stage.stop + 1, end] = np.maximum(before, scores).min(axis=1)
    return float(best[stages, num_groups])


def tidiest(problem: Problem, limit_ms: float) -> tuple[int, ...] | None:
    """The stages of the tidiest cut whose score is within the limit; None if no cut is."""
    num_groups, stages = len(problem.costs.groups), problem.stages
    first_fit = _first_fit(problem, limit_ms)
    untidy = _untidiness(problem.costs, stages)
    never = np.iinfo(np.int64).max // 2
    price = np.full((stages + 1, num_groups + 1), never, dtype=np.int64)
    squares = np.full((stages + 1, num_groups + 1), np.inf)
    previous = np.zeros((stages + 1, num_groups + 1), dtype=np.int64)
    price[0, 0], squares[0, 0] = 0, 0.0
    for end, stage, scores in _interval_scores(problem, first_fit, limit_ms):
        if not (problem.rules.may_cut[end] or end == num_groups):
            continue
        start = first_fit[end]
        prices = np.where(scores <= limit_ms, price[stage, start:end] + untidy[start:end], never)
        uneven = squares[stage, start:end] + scores**2
        uneven[prices > prices.min(axis=1, keepdims=True)] = np.inf
        chosen = uneven.argmin(axis=1)
        rows = np.arange(len(chosen))
        ended = slice(stage.start + 1, stage.stop + 1)
        price[ended, end] = np.minimum(prices[rows, chosen], never)
        squares[ended, end] = uneven[rows, chosen]
        previous[ended, end] = start + chosen
    if price[stages, num_groups] >= never:
        return None
    cuts = [num_groups]
    for number in range(stages, 0, -1):
        cuts.append(int(previous[number, cuts[-1]]))
    where = np.searchsorted(cuts[-2:0:-1], np.arange(num_groups), side="right")
    return tuple(where.tolist())


def _untidiness(costs: Costs, stages: int) -> Ints:
    """The price of a cut before each position; sums compare torn modules first, bytes second."""
    num_bytes = np.rint(costs.cut_bytes).astype(np.int64)
    price = costs.cut_depth * (stages * int(num_bytes.max()) + 1) + num_bytes
    price[0] = 0
    return price


def _first_fit(problem: Problem, limit_ms: float) -> Ints:
    """For each end, the first start whose work alone is within the limit on the fastest rank and
    after which no cut is demanded: the pair window.
    """
    rules = problem.rules
    done = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
    most_ms = limit_ms / problem.setting.rounds
    starts = np.searchsorted(done, done - most_ms * (1 + _ROUNDING), side="left")
    # Costs of zero and rounding must not close the window: one group always fits.
    starts = np.minimum(starts, np.maximum(np.arange(len(done)) - 1, 0))
    demanded = np.array([0, *rules.must_cut])
    before = np.searchsorted(demanded, np.arange(len(done)), side="left") - 1
    windows: Ints = np.maximum(starts, demanded[np.maximum(before, 0)])
    return windows


def _slack(problem: Problem, limit_ms: float) -> tuple[Ints, Ints]:
    """For each end, the first and the last stage that may end there: if every stage is filled to
    the limit, the stages up to it hold everything before, and the later stages the rest.
    """
    reach = np.cumsum(ratios(problem)) * limit_ms / problem.setting.rounds * (1 + _ROUNDING)
    done = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
    blur = _ROUNDING * done[-1]
    earliest = np.searchsorted(reach, done - blur, side="left")
    latest = np.searchsorted(reach, reach[-1] - (done[-1] - done) + blur, side="right") - 1
    return earliest, np.minimum(latest, problem.stages - 1)


def _reachable_ms(problem: Problem) -> float:
    """The bottleneck of one legal cut, at the demanded places and near equal shares of the work: an
    upper bound, infinite where that cut does not fit.
    """
    costs, rules, stages = problem.costs, problem.rules, problem.stages
    places = np.setdiff1d(np.flatnonzero(rules.may_cut[1:-1]) + 1, rules.must_cut)
    number = stages - 1 - len(rules.must_cut)
    done = np.concatenate([[0.0], np.cumsum(costs.work_ms)])
    shares = done[-1] * np.arange(1, number + 1) / (number + 1)
    nearest = np.searchsorted(done[places], shares)
    # The i-th of n cuts needs i places before it and n - 1 - i after it.
    index = np.arange(number)
    picks = np.maximum.accumulate(np.minimum(nearest, len(places) - number + index) - index)
    cuts = sorted([*places[picks + index].tolist(), *rules.must_cut])
    where = np.searchsorted(cuts, np.arange(len(costs.groups)), side="right").tolist()
    evaluation = evaluate(problem, Placement(tuple(where)))
    return evaluation.score_ms if evaluation.fits else np.inf


_REPLICA_ROUNDING = 1e-9


def place_pipedream(problem: Problem) -> Placement:
    """The optimum over the cuts that the rules allow and over the replicas of each stage.

    Raises DoesNotFit when no such plan fits into the memory of the devices.
    """
    stages = _Search(problem).stages()
    starts = [start for start, _ in stages[1:]]
    where = np.searchsorted(starts, np.arange(len(problem.costs.groups)), side="right")
    ranks = tuple(tuple(ranks) for _, ranks in stages)
    if all(len(of_stage) == 1 for of_stage in ranks) and len(ranks) == problem.stages:
        return Placement(tuple(where.tolist()))
    return Placement(tuple(where.tolist()), ranks=ranks)


class _Search:
    """The table of the recurrence; `behind` is the number of later stages.

    Where the load depends on the number of later stages, the table has one layer for each number of
    stages after the last stage so far; otherwise it has a single layer.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        setting = problem.setting
        ranks, num_groups = problem.stages, len(problem.costs.groups)
        by_depth = setting.is_limited or setting.recompute != "none"
        self._layers = range(ranks if by_depth else 1)
        self._before = [layer + 1 if by_depth else 0 for layer in self._layers]
        shape = (max(self._before) + 1, ranks + 1, num_groups + 1)
        self._best = np.full(shape, np.inf)
        self._best[:, 0, 0] = 0.0
        self._start: Ints = np.zeros(shape, dtype=np.int64)
        self._replicas: Ints = np.zeros(shape, dtype=np.int64)

    def stages(self) -> list[tuple[int, range]]:
        """The first group and the ranks of every stage of the best plan."""
        for end, loads_ms in self._loads():
            self._extend(end, loads_ms)
        final = self._best[0, :, -1]
        if final.min() == np.inf:
            raise DoesNotFit(
                f"no plan of {self._problem.stages} ranks, with or without replicas, fits into "
                "the memory of the devices."
            )
        # Among equal plans, the one with the fewest ranks.
        ranks = int(np.flatnonzero(final <= final.min() * (1 + _REPLICA_ROUNDING))[0])
        layer, end = 0, len(self._problem.costs.groups)
        stages = []
        while end:
            number = int(self._replicas[layer, ranks, end])
            end, ranks = int(self._start[layer, ranks, end]), ranks - number
            stages.append((end, range(ranks, ranks + number)))
            layer = self._before[layer]
        return stages[::-1]

    def _extend(self, end: int, loads_ms: dict[tuple[int, int, int], tuple[int, Floats]]) -> None:
        """Enters the best last stage that ends there, for every number of ranks."""
        for (layer, first, replicas), (start, load_ms) in loads_ms.items():
            peaks = np.maximum(self._best[self._before[layer], first, start:end], load_ms)
            chosen = int(peaks.argmin())
            state = layer, first + replicas, end
            if peaks[chosen] < self._best[state]:
                self._best[state] = peaks[chosen]
                self._start[state] = start + chosen
                self._replicas[state] = replicas

    def _loads(self) -> Iterator[tuple[int, dict[tuple[int, int, int], tuple[int, Floats]]]]:
        """For each end, by layer, first rank and replicas: the first useful start, and the time of
        the stages from there on.
        """
        problem, rules = self._problem, self._problem.rules
        windows = self._windows()
        sharing = list(self._sharing())
        distinct = {id(seen): seen for seen in (problem.seen_by(ranks) for ranks in sharing)}
        for column in zip(*map(interval_sums, distinct.values()), strict=True):
            end = column[0][0]
            if not (rules.may_cut[end] or end == len(problem.costs.groups)):
                continue
            sums = dict(zip(distinct, (column_sums for _, column_sums in column), strict=True))
            loads_ms = {}
            for ranks in sharing:
                start = int(windows[len(ranks) - 1, end])
                of_stage = sums[id(problem.seen_by(ranks))][start:]
                for layer in self._layers:
                    key = layer, ranks[0], len(ranks)
                    loads_ms[key] = start, self._load_ms(layer, ranks, of_stage)
            yield end, loads_ms

    def _load_ms(self, behind: int, ranks: range, sums: StageSums) -> Floats:
        """The time of one micro-batch of stages on those ranks, inf where they do not fit."""
        setting = self._problem.setting
        # A stage with a predecessor holds its messages; the first stage receives none.
        alone = replace(setting.at([ranks[0]] * (behind + 2)), rank_of_stage=())
        exchange_ms = setting.exchange_ms(
            self._problem.link_among(ranks), sums.param_bytes, len(ranks)
        )
        own_ms = (1 - 1 / len(ranks)) * np.asarray(sums.update_ms)
        return alone.load_ms(1, sums) / len(ranks) + own_ms + exchange_ms

    def _sharing(self) -> Iterator[range]:
        """Consecutive ranks that may share a stage: one rank, or several ranks that are alike."""
        devices = [_kind(device) for device in self._problem.setting.devices]
        for first in range(len(devices)):
            for last in range(first, len(devices)):
                if devices[last] != devices[first]:
                    break
                yield range(first, last + 1)

    def _windows(self) -> Ints:
        """For each number of replicas (rows) and each end, the first useful start: after it no cut
        is demanded, and the work is at most that of a known plan.
        """
        problem, rules = self._problem, self._problem.rules
        try:
            known_ms = evaluate(problem, place(problem)).bottleneck_ms
        except DoesNotFit:
            known_ms = np.inf
        done_ms = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
        most_ms = known_ms * (1 + _REPLICA_ROUNDING) * np.arange(1, problem.stages + 1)[:, None]
        starts = np.searchsorted(done_ms, (done_ms - most_ms - _REPLICA_ROUNDING).ravel())
        ends = np.arange(len(done_ms))
        starts = np.minimum(starts.reshape(most_ms.shape[0], -1), np.maximum(ends - 1, 0))
        demanded = np.array([0, *rules.must_cut])
        last_demanded = demanded[np.maximum(np.searchsorted(demanded, ends) - 1, 0)]
        windows: Ints = np.maximum(starts, last_demanded)
        return windows


def _kind(device: Device) -> Device:
    """The properties of a device that decide whether it can share work equally with another
    device.
    """
    return replace(device, name="", host="")
