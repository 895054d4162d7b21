"""The best cut of the given order into stages that may be replicated, by dynamic programming.

    A[b][m] = min over a < b, r <= m of max(A[a][m - r], load(a, b) / r + exchange(a, b, r))

is the least time of the first b groups on the first m ranks, where the last stage holds groups a
to b - 1 on r ranks, which share its micro-batches, sum their gradients once a step and make all of
the optimizer's. This is the recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1) over
a flat row of ranks, with the load of `setting.py` in place of its own: transfers of skips and of
both directions are in it, and the memory of a stage with as many stages behind it as there are.
Ranks that share a stage have to be alike. A plan may have fewer stages than ranks, and may leave
ranks idle.

Where ranks are on several hosts or behind unlike links, the exchange goes over the slowest link
between replicas; PipeDream's levels (replicas inside a server first) are the plans of this that
replicate only inside a host. It is the optimum of all contiguous plans of that order with
replicas: O(n^2 k^2), times k where memory or recomputation depends on the stages behind.

FTPipe's planner of this name has replication switched off, a fixed memory of 10 GB, and takes the
transfers of a stage at its last node alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..cost import Floats, Ints, StageSums
from ..evaluate import evaluate
from ..problem import DoesNotFit, Placement, Problem
from ..setting import Device
from . import chain
from .chain import interval_sums

_ROUNDING = 1e-9


def place(problem: Problem) -> Placement:
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
    """The table of the recurrence; `behind` is how many stages follow.

    It has one layer for each number of stages behind where the load depends on it, which are then
    those behind the last stage so far, or else a single layer.
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
        # Of equal plans the one with the fewest ranks.
        ranks = int(np.flatnonzero(final <= final.min() * (1 + _ROUNDING))[0])
        layer, end = 0, len(self._problem.costs.groups)
        found = []
        while end:
            number = int(self._replicas[layer, ranks, end])
            end, ranks = int(self._start[layer, ranks, end]), ranks - number
            found.append((end, range(ranks, ranks + number)))
            layer = self._before[layer]
        return found[::-1]

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
        """For each end, by layer, first rank and replicas: the first start worth a look, and the
        time of the stages from there on."""
        problem, rules = self._problem, self._problem.rules
        windows = self._windows()
        sharing = list(self._sharing())
        distinct = {id(seen): seen for seen in (problem.seen_by(ranks) for ranks in sharing)}
        for column in zip(*map(interval_sums, distinct.values()), strict=True):
            end = column[0][0]
            if not (rules.may_cut[end] or end == len(problem.costs.groups)):
                continue
            sums = dict(zip(distinct, (found for _, found in column), strict=True))
            loads_ms = {}
            for ranks in sharing:
                start = int(windows[len(ranks) - 1, end])
                of_stage = sums[id(problem.seen_by(ranks))][start:]
                for layer in self._layers:
                    key = layer, ranks[0], len(ranks)
                    loads_ms[key] = start, self._load_ms(layer, ranks, of_stage)
            yield end, loads_ms

    def _load_ms(self, behind: int, ranks: range, sums: StageSums) -> Floats:
        """Time of one micro-batch of stages on those ranks, inf where they do not fit."""
        setting = self._problem.setting
        # With a stage before it, whose messages it holds; the first one is sent none.
        alone = setting.at([ranks[0]] * (behind + 2))
        exchange_ms = setting.exchange_ms(
            self._problem.link_among(ranks), sums.param_bytes, len(ranks)
        )
        own_ms = (1 - 1 / len(ranks)) * np.asarray(sums.update_ms)
        return alone.load_ms(1, sums) / len(ranks) + own_ms + exchange_ms

    def _sharing(self) -> Iterator[range]:
        """Ranks in a row that may share a stage: one, or several that are alike."""
        devices = [_kind(device) for device in self._problem.setting.devices]
        for first in range(len(devices)):
            for last in range(first, len(devices)):
                if devices[last] != devices[first]:
                    break
                yield range(first, last + 1)

    def _windows(self) -> Ints:
        """For each number of replicas (rows) and each end, the first start worth a look: after it
        no cut is demanded, and the work is no more than in a plan that is known."""
        problem, rules = self._problem, self._problem.rules
        try:
            known_ms = evaluate(problem, chain.place(problem)).bottleneck_ms
        except DoesNotFit:
            known_ms = np.inf
        done_ms = np.concatenate([[0.0], np.cumsum(problem.least_work_ms)])
        most_ms = known_ms * (1 + _ROUNDING) * np.arange(1, problem.stages + 1)[:, None]
        starts = np.searchsorted(done_ms, (done_ms - most_ms - _ROUNDING).ravel())
        ends = np.arange(len(done_ms))
        starts = np.minimum(starts.reshape(most_ms.shape[0], -1), np.maximum(ends - 1, 0))
        demanded = np.array([0, *rules.must_cut])
        last_demanded = demanded[np.maximum(np.searchsorted(demanded, ends) - 1, 0)]
        windows: Ints = np.maximum(starts, last_demanded)
        return windows


def _kind(device: Device) -> Device:
    """What of a device decides whether its work can be shared equally with another."""
    return replace(device, name="", host="")
