"""The best cut of one topological order, by dynamic programming in O(k n w).

    best[s][b] = min over a < b of max(best[s - 1][a], load_s(a, b))

where load_s(a, b) is the load of stage s if it holds positions a to b - 1, and w is the number of
positions that fit into one stage; where a cut is demanded, a stage ends at the latest: a is at or
after the last demanded cut before b. It is PipeDream's recurrence (Narayanan et al., SOSP 2019,
section 3.1) without replication and with transfers and memory in the load. For one b the sums of
all a form a column; the column of b + 1 follows from it by adding what begins or ends there.

Then, among all cuts whose bottleneck is at most (1 + prefer_modules) of the optimum, the one that
tears the fewest modules is taken, of those the one with the fewest bytes crossing, and of those
the most even: with the least sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..cost import Costs, Floats, Held, Ints, StageSums
from ..evaluate import evaluate
from ..problem import DoesNotFit, Placement, Problem
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
    """For each end b = 1..n, the sums of the stages that hold positions a to b - 1, with a from
    `first[b]` (rising; or else 0) to b - 1."""
    num_groups = len(costs.groups)
    starts = np.zeros(num_groups + 1, dtype=np.int64) if first is None else first
    forward, backward, buffers, updates = (
        np.concatenate([[0.0], np.cumsum(each)])
        for each in (costs.forward_ms, costs.backward_ms, costs.buffer_bytes, costs.update_ms)
    )
    changing = {
        "send_ms": _send_changes(costs, costs.send_ms),
        "sent_bytes": _send_changes(costs, costs.value_bytes),
        "root_bytes": _send_changes(costs, costs.root_bytes),
        "receive_ms": _receive_changes(costs, costs.receive_ms),
        "received_bytes": _receive_changes(costs, costs.value_bytes),
        "param_bytes": _held_changes(costs.parameters, num_groups),
        "frozen_bytes": _held_changes(costs.frozen, num_groups),
        "saved_bytes": _held_changes(costs.saved, num_groups),
        "tied_bytes": [
            sent + received
            for sent, received in zip(
                _send_changes(costs, costs.tied_bytes),
                _receive_changes(costs, costs.tied_bytes),
                strict=True,
            )
        ],
    }
    now = {name: np.zeros(num_groups) for name in changing}
    transient = np.zeros(num_groups)
    for end, start in enumerate(starts[1:].tolist(), start=1):
        for name, changes in changing.items():
            for earliest, last, amount in changes[end - 1]:
                # No later column looks before this window.
                now[name][max(earliest, start) : last + 1] += amount
        window = slice(start, end)
        np.maximum(transient[window], costs.transient_bytes[end - 1], out=transient[window])
        yield (
            end,
            StageSums(
                forward_ms=forward[end] - forward[window],
                backward_ms=backward[end] - backward[window],
                buffer_bytes=buffers[end] - buffers[window],
                transient_bytes=transient[window],
                update_ms=updates[end] - updates[window],
                **{name: amounts[window] for name, amounts in now.items()},
            ),
        )


_Changes = list[list[tuple[int, int, float]]]  # by position: starts first..last change by amount


def _send_changes(costs: Costs, amounts: Floats) -> _Changes:
    """What is sent by stages with starts first..last, once they reach a position, of each value
    by that amount."""
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
    """The same for what is received, of each value by that amount."""
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


def _held_changes(held: Iterable[Held], num_groups: int) -> _Changes:
    """The same for what a stage has from the first group on that names it."""
    changes: _Changes = [[] for _ in range(num_groups)]
    for item in held:
        for earlier, group in zip((-1, *item.groups), item.groups, strict=False):
            changes[group].append((earlier + 1, group, item.num_bytes))
    return changes


def _interval_scores(
    problem: Problem, first: Ints, limit_ms: float
) -> Iterator[tuple[int, slice, Floats]]:
    """For each end at which some stages may end within the limit, these stages, and their scores
    (rows) for every start in the window (columns)."""
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
    """The least score of the cuts that the rules allow, inf if none fits."""
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
    """The stages of the tidiest cut whose score is within the limit; None if there is none."""
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
    """Price of a cut before each position; sums compare torn modules first, bytes second."""
    num_bytes = np.rint(costs.cut_bytes).astype(np.int64)
    price = costs.cut_depth * (stages * int(num_bytes.max()) + 1) + num_bytes
    price[0] = 0
    return price


def _first_fit(problem: Problem, limit_ms: float) -> Ints:
    """For each end, the first start whose work alone is within the limit on the fastest rank and
    after which no cut is demanded: the pair window."""
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
    """For each end, the first and the last stage that may end there: those up to it hold what
    comes before, and those after it what is left, if each is filled to the limit."""
    reach = np.cumsum(ratios(problem)) * limit_ms / problem.setting.rounds * (1 + _ROUNDING)
    done = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
    blur = _ROUNDING * done[-1]
    earliest = np.searchsorted(reach, done - blur, side="left")
    latest = np.searchsorted(reach, reach[-1] - (done[-1] - done) + blur, side="right") - 1
    return earliest, np.minimum(latest, problem.stages - 1)


def _reachable_ms(problem: Problem) -> float:
    """The bottleneck of one legal cut, the demanded places and some near equal shares of the
    work: an upper bound, infinite where that cut does not fit."""
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
