"""A plan on some devices of a cluster -> a better order of the devices along the pipeline.

Up to `MOST_EXACT` devices, order and cuts are optimized together (`_exact`). With U a set of
devices, v its last one in the pipeline, w the next one, and b a place between two groups,

    best[U, v, w][b] = the smallest largest score of the stages on U, v last, that hold everything
                       before b, if w comes next
                     = min over u in U - v and places a of
                       max(best[U - v, u, v][a], score of a..b on v between u and w)

because the score of a stage depends on its device, on its number and on the links to its two
neighbors only. Where there are more than `_MOST_PLACES` places to cut, the groups between the
cheapest ones of equal shares of the work are one piece.

With more devices, two of them change places as long as that helps the given cuts (`_exchanged`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations

import numpy as np

from ..graph.costs import Costs, Floats, Ints, Link, StageSums, seen_over
from ..graph.problem import Placement, Problem, Rules, evaluate
from ..graph.rank_model import RankConfig
from ..solvers.chain import interval_sums
from ..solvers.reductions import contracted
from .cluster import Cluster
from .device_orders import Order

MOST_EXACT = 8
_MOST_PLACES = 64
_MOST_EXCHANGES = 4_000
_BETTER = 1 - 1e-9
_FREE = Link()


def searched_order(
    problem: Problem,
    placement: Placement,
    order: Order,
    cluster: Cluster,
    setting_of: Callable[[Order], RankConfig],
) -> Order:
    """An order of as many of the devices as `order` has: the best one if there are few devices,
    otherwise one that no exchange of two devices improves.

    problem, placement: a plan on the devices in this order
    setting_of: the ranks of an order
    """
    if len(cluster.devices) <= MOST_EXACT:
        return _exact(problem, cluster, len(order)) or order
    return _exchanged(problem, placement, order, cluster, setting_of)


def _exchanged(
    problem: Problem,
    placement: Placement,
    order: Order,
    cluster: Cluster,
    setting_of: Callable[[Order], RankConfig],
) -> Order:
    """Exchanges two devices, used or idle, as long as that lowers the score of the placement."""
    stages = Placement(tuple(range(placement.stages)))
    costs = contracted(problem.costs, np.asarray(placement.stage_of))
    rules = Rules(np.ones(len(costs.groups) + 1, dtype=bool))
    kinds, used = cluster.kinds, len(order)

    def score_ms(devices: list[int]) -> float:
        setting = setting_of(tuple(devices[:used]))
        return evaluate(Problem(costs, setting, rules), stages).score_ms

    devices = [*order, *sorted(set(range(len(cluster.devices))) - set(order))]
    best_ms, left = score_ms(devices), _MOST_EXCHANGES
    moved = True
    while moved and left > 0:
        moved = False
        for first, second in combinations(range(len(devices)), 2):
            if first >= used or kinds[devices[first]] == kinds[devices[second]]:
                continue
            other, left = list(devices), left - 1
            other[first], other[second] = other[second], other[first]
            other_ms = score_ms(other)
            if other_ms < best_ms * _BETTER:
                devices, best_ms, moved = other, other_ms, True
            if left <= 0:
                break
    return tuple(devices[:used])


_State = tuple[int, int, int]  # the used devices as bits, the last one, and the one after it
_NONE = -1  # no device: before the first stage and after the last one


@dataclass(frozen=True, slots=True)
class _Row:
    """best[U, v, w] for all places, with the u and the a of the minimum."""

    score_ms: Floats
    before: Ints
    start: Ints

    def improved_by(self, other: _Row) -> _Row:
        better = other.score_ms < self.score_ms
        return _Row(
            np.where(better, other.score_ms, self.score_ms),
            np.where(better, other.before, self.before),
            np.where(better, other.start, self.start),
        )


def _exact(problem: Problem, cluster: Cluster, count: int) -> Order | None:
    """The order of `count` devices with the smallest largest score; None if nothing fits."""
    scores = _Scores(_in_pieces(problem), cluster, count)
    everyone = range(len(cluster.devices))
    begin = np.full(scores.pieces + 1, np.inf)
    begin[0] = 0.0
    none = np.zeros(len(begin), dtype=np.int64)
    table: dict[_State, _Row] = {(0, _NONE, w): _Row(begin, none, none) for w in everyone}
    states = list(table)
    for stage in range(count):
        ended: dict[_State, None] = {}
        for used, last, device in states:
            so_far, now_used = table[used, last, device].score_ms, used | 1 << device
            following = [other for other in everyone if not now_used >> other & 1]
            for other in following if stage < count - 1 else [_NONE]:
                ends_ms = np.maximum(so_far[:, None], scores.between(stage, last, device, other))
                start = ends_ms.argmin(axis=0)
                score_ms = ends_ms[start, np.arange(len(start))]
                row = _Row(score_ms, np.full(len(start), last), start)
                state = now_used, device, other
                table[state] = table[state].improved_by(row) if state in ended else row
                ended[state] = None
        states = list(ended)
    state = min(states, key=lambda state: float(table[state].score_ms[-1]))
    if table[state].score_ms[-1] == np.inf:
        return None
    order, place = [], -1
    while state[1] != _NONE:
        used, device, _ = state
        row = table[state]
        order.append(device)
        state = used ^ 1 << device, int(row.before[place]), device
        place = int(row.start[place])
    return tuple(reversed(order))


def _in_pieces(problem: Problem) -> Problem:
    """The problem with at most `_MOST_PLACES` places to cut."""
    costs, count = problem.costs, len(problem.costs.groups)
    places = np.flatnonzero(problem.rules.may_cut[1:-1]) + 1
    if len(places) > _MOST_PLACES:
        done = np.cumsum(problem.least_work_ms)[places - 1]
        shares = np.floor(done / (done[-1] or 1.0) * (_MOST_PLACES - 1)).astype(np.int64)
        by_price = np.lexsort((places, costs.cut_bytes[places], shares))
        places = np.sort(places[by_price][np.unique(shares[by_price], return_index=True)[1]])
    piece_of = np.searchsorted(places, np.arange(count), side="right")
    pieces = contracted(costs, piece_of)
    return replace(problem, costs=pieces, rules=Rules(np.ones(len(pieces.groups) + 1, dtype=bool)))


class _Scores:
    """The scores of all stages on every device between any two others."""

    def __init__(self, problem: Problem, cluster: Cluster, count: int) -> None:
        self.pieces = len(problem.costs.groups)
        self._costs, self._cluster = problem.costs, cluster
        setting = replace(problem.setting, links=None, exchange=None, replicas=())
        self._settings = [replace(setting, devices=(device,) * count) for device in cluster.devices]
        seen = [setting.seen_at(problem.costs, 0) for setting in self._settings]
        by_kind = {
            (device.kind, device.speed): costs
            for device, costs in zip(cluster.devices, seen, strict=True)
        }
        sums = {kind: _all_sums(costs) for kind, costs in by_kind.items()}
        self._sums = [sums[device.kind, device.speed] for device in cluster.devices]
        least_ms = np.minimum.reduce([costs.work_ms for costs in by_kind.values()])
        done = np.concatenate([[0.0], np.cumsum(least_ms)])
        self._before_ms, self._after_ms = done[:, None], done[-1] - done[None, :]
        self._talk: dict[tuple[Link, Link], tuple[Floats, Floats]] = {}
        self._known: dict[object, Floats] = {}

    def between(self, stage: int, left: int, device: int, right: int) -> Floats:
        """The scores of the stage by start and end, inf where there is none."""
        near = [other for other in (left, right) if other != _NONE]
        links = [self._cluster.link(device, other) for other in near] or [_FREE]
        key = stage, self._cluster.devices[device], links[0], links[-1]
        if key not in self._known:
            send_ms, receive_ms = self._talk_ms(links[0], links[-1])
            sums = replace(
                self._sums[device],
                send_ms=send_ms,
                receive_ms=receive_ms,
                duplex=min(link.duplex for link in links),
            )
            score_ms = self._settings[device].score_ms(stage, sums, self._before_ms, self._after_ms)
            legal = np.triu(np.ones(score_ms.shape, dtype=bool), k=1)
            self._known[key] = np.where(legal, score_ms, np.inf)
        return self._known[key]

    def _talk_ms(self, left: Link, right: Link) -> tuple[Floats, Floats]:
        """Milliseconds of sending and of receiving over these links: the costs over each of them
        alone, both of which include the costs that are the same for all links.
        """
        if left == right or _FREE in (left, right):
            if (left, right) not in self._talk:
                sums = _all_sums(seen_over(self._costs, left, right))
                self._talk[left, right] = sums.send_ms, sums.receive_ms
            return self._talk[left, right]
        parts = [self._talk_ms(*ends) for ends in ((left, _FREE), (_FREE, right), (_FREE, _FREE))]
        (send_ms, receive_ms), (sent_ms, received_ms), (known_send_ms, known_receive_ms) = parts
        return send_ms + sent_ms - known_send_ms, receive_ms + received_ms - known_receive_ms


def _all_sums(costs: Costs) -> StageSums:
    """The sums of the stages from every place (rows) to every place (columns)."""
    size = len(costs.groups) + 1
    names = [field.name for field in fields(StageSums) if field.name != "duplex"]
    amounts = {name: np.zeros((size, size)) for name in names}
    for end, sums in interval_sums(costs):
        for name, table in amounts.items():
            table[:end, end] = getattr(sums, name)
    return StageSums(**amounts, duplex=costs.duplex)
