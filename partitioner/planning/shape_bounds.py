"""A model and a number of stages and replicas -> a bound of the step, before any cut is chosen.

With p stages, m micro-batches for each replica, w_j the work of one micro-batch in stage j, W that
of all stages, and S the all-reduce of all gradients over the replicas,

    step >= (m + p - 1) / p W        for 1f1b with m > p, and for gpipe

which equal stages reach. For the first micro-batch has to pass the stages before stage j, and the
last one has to go back through them. In 1f1b, stage j runs n = p - 1 - j further forwards between
its first forward and its first backward, while the first micro-batch passes the stages after it and
comes back; and as many further backwards between its last forward and its last backward, while the
last one does. With m > p, the first of these times is over before the second one begins. The rest
of both is a wait, so for each stage

    step >= before_j + m w_j + (after_j - n forward_j) + (after_j - n backward_j)
          = before_j + (m - n) w_j + 2 after_j

where before_j and after_j are the work of the stages before and after it. The mean of these bounds
with weights l_j, of which l_(j+1) = l_j (m - n - 2) / (m - n), has the same factor for the work of
each stage, so it is the same for every division of the work: that of equal stages. In gpipe all
forwards come before all backwards, so step >= before_j + m w_j + after_j = W + (m - 1) w_j, and the
largest w_j is at least W / p.

With fewer micro-batches, and for `seq`, only before_j + m w_j counts: with q = 1 - 1 / m the
weights q^(p-1-j) give step >= W / (1 - q^p). A schedule that postpones weight gradients fills the
waits. For every schedule a rank takes m w_j and the sum of its gradients, so step >= (m W + S) / p,
and the heaviest group is on one rank.

A stage with nothing but parallel branches of the model need not wait for the one before it. If a
such stages have as much as they can (`most_beside_ms`), the p - a others have the remaining work
and wait for one another as above. In 1f1b they run forwards and backwards for the a stages too,
which takes a off m.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from ..graph.cost_graph import costs_of
from ..graph.costs import Bools, Floats, Link
from ..graph.problem import Problem, Rules
from ..graph.rank_model import RankConfig
from .cluster import Cluster
from .transfers import forward_share

_Edge = tuple[int, int]


@dataclass(frozen=True)
class Totals:
    """A model on the device that is fastest for each of its groups.

    work_ms, heaviest_ms: milliseconds of a micro-batch in all groups, and in the one with the most
    beside_ms: the most of a stage that need not wait for the one before it
    param_bytes: the bytes of its gradients
    """

    work_ms: float
    heaviest_ms: float
    beside_ms: float
    param_bytes: float

    @classmethod
    def of(cls, graph: nx.DiGraph, cluster: Cluster) -> Totals:
        costs = costs_of(graph)
        setting = RankConfig(tuple(dict.fromkeys(cluster.devices)))
        problem = Problem(costs, setting, Rules(np.ones(1, dtype=bool)))
        work_ms = problem.least_work_ms
        held = costs.parameter_index.num_bytes
        return cls(
            float(work_ms.sum()),
            float(work_ms.max(initial=0.0)),
            most_beside_ms(problem),
            float(held.sum()),
        )

    def least_ms(self, setting: RankConfig, shape: Sequence[int], link: Link) -> float:
        """The bound of a shape over links that are at most as fast as `link`.
        Asynchronous replicas share every micro-batch.
        """
        if setting.is_asynchronous:
            shared_ms = max(self.work_ms / sum(shape), self.heaviest_ms / max(shape))
            return setting.micro_batches * shared_ms
        stages, replicas, count = len(shape), shape[0], setting.shared_micro_batches
        sums = replace(link, latency_ms=0.0).all_reduce_ms(np.asarray(self.param_bytes), replicas)
        summing_ms = float(sums) if replicas > 1 else 0.0
        steps = StepBounds(setting.schedule, stages, count)
        return max(
            (count * self.work_ms + summing_ms) / stages,
            min(
                steps.factor() * self.work_ms,
                steps.beside_ms(self.work_ms, self.beside_ms),
            ),
            count * self.heaviest_ms,
        )


@dataclass(frozen=True)
class StepBounds:
    """Bounds of the step of a synchronous schedule."""

    schedule: str
    stages: int
    micro_batches: int

    def factor(self, beside: int = 0) -> float:
        """The least step as a multiple of the work of one micro-batch in all stages that wait for
        one another. `beside` is the number of the other stages.
        """
        waiting, count = self.stages - beside, self.micro_batches
        if self.schedule == "gpipe":
            return (count + waiting - 1) / waiting
        if self.schedule not in ("1f1b", "seq"):
            return count / self.stages
        one_backward = 1 / (1 - (1 - 1 / count) ** waiting)
        if self.schedule == "1f1b" and count > self.stages:
            return max(one_backward, (count - beside + waiting - 1) / waiting)
        return one_backward

    def beside_ms(self, work_ms: float, most_ms: float) -> float:
        """The bound for plans in which some stages need not wait, of at most `most_ms` each."""
        if not most_ms:
            return math.inf
        return min(
            (
                self.factor(number) * max(0.0, work_ms - number * most_ms)
                for number in range(1, self.stages)
            ),
            default=math.inf,
        )


def most_beside_ms(problem: Problem) -> float:
    """The most work of a stage that needs not wait for the one before it.

    Such a stage has no group that stands at the same place in every order: of what leads to the
    last group it has no more than a stretch between two of these; and it may have any group that
    leads nowhere, as a view does that each reader makes again. The same holds of the way back,
    along gradients; a stage without them may have any group that has none.
    """
    costs, least_ms = problem.costs, problem.least_work_ms
    values = [value for value in costs.values if not value.is_exchange]
    forwards = [(v.owner, reader) for v in values for reader in v.readers if v.owner < reader]
    backwards = [
        (min(value.owner, reader), max(value.owner, reader))
        for value in values
        if forward_share(value, problem) < 1
        for reader in value.readers
    ]
    trained = costs.backward_ms > 0
    return max(
        _beside_ms(least_ms, np.ones_like(trained), forwards),
        _beside_ms(least_ms, trained, backwards),
    )


def _beside_ms(work_ms: Floats, members: Bools, pairs: Sequence[_Edge]) -> float:
    """The most work of a stage without a member for which all others wait: a stretch of those that
    lead to the last one, and every group that leads nowhere or is not a member.
    """
    leading = np.zeros_like(members)
    if members.any():
        leading[np.flatnonzero(members)[-1]] = True
    for source, target in sorted(pairs, reverse=True):
        leading[source] |= leading[target] and members[source]
    return _longest_stretch_ms(work_ms, leading, pairs) + float(work_ms[~leading].sum())


def _longest_stretch_ms(work_ms: Floats, members: Bools, pairs: Iterable[_Edge]) -> float:
    """The most work between two adjacent members that are ancestors or descendants of every other
    member along `pairs`.
    """
    positions = np.flatnonzero(members)
    index = {int(position): number for number, position in enumerate(positions)}
    count = len(positions)
    first_reader, last_source = np.full(count, count), np.full(count, -1)
    for source, target in pairs:
        if source in index and target in index:
            a, b = index[source], index[target]
            first_reader[a] = min(first_reader[a], b)
            last_source[b] = max(last_source[b], a)
    longest_ms = stretch_ms = 0.0
    # All groups before v are its ancestors if each of them has a reader that is not after v.
    reached = np.concatenate([[-1], np.maximum.accumulate(first_reader)[:-1]])
    reaching = np.concatenate([np.minimum.accumulate(last_source[::-1])[::-1][1:], [count]])
    for v, position in enumerate(positions):
        is_fixed = reached[v] <= v <= reaching[v]
        stretch_ms = 0.0 if is_fixed else stretch_ms + float(work_ms[position])
        longest_ms = max(longest_ms, stretch_ms)
    return longest_ms
