"""A model and a number of stages and replicas -> a bound of the step, before any cut is chosen.

With p stages, m micro-batches for each replica, w_j the work of one micro-batch in stage j, W that
of all stages, and S the all-reduce of all gradients over the replicas,

    step >= (m + p - 1) / p W        for 1f1b with m > p, and for gpipe

which equal stages reach. For the first micro-batch has to pass the stages before stage j, and the
last one has to go back through them. In 1f1b, stage j runs n = p - 1 - j further forwards between
its first forward and its first backward, while the first micro-batch passes the stages after it and
comes back; and as many further backwards between its last forward and its last backward, while the
last one does. With m > p, the first of these times is over before the second one begins. What is
left of both is a wait, so for each stage

    step >= before_j + m w_j + (after_j - n forward_j) + (after_j - n backward_j)
          = before_j + (m - n) w_j + 2 after_j

where before_j and after_j are the work of the stages before and after it. The mean of these bounds
with weights l_j, of which l_(j+1) = l_j (m - n - 2) / (m - n), has the same factor for the work of
each stage, so it is the same for every division of the work: that of equal stages. In gpipe all
forwards come before all backwards, so step >= before_j + m w_j + after_j = W + (m - 1) w_j, and the
largest w_j is at least W / p.

With fewer micro-batches, and for `seq`, only before_j + m w_j counts: with q = 1 - 1 / m the
weights q^(p-1-j) give step >= W / (1 - q^p). A schedule that postpones weight gradients fills the
waits. A stage with a parallel branch of the model need not wait (`side_by_side_ms`). For every
schedule a rank takes m w_j and the sum of its gradients, so step >= (m W + S) / p, and the heaviest
group is on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from ..graph.cost_graph import costs_of
from ..graph.costs import Link
from ..graph.problem import Problem, Rules
from ..graph.rank_model import RankConfig
from .cluster import Cluster
from .makespan import beside_ms, side_by_side_ms


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
            beside_ms(problem),
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
        return max(
            (count * self.work_ms + summing_ms) / stages,
            min(
                _with_waits(setting.schedule, stages, count) * self.work_ms,
                side_by_side_ms(self.work_ms, self.beside_ms, stages, count),
            ),
            count * self.heaviest_ms,
        )


def _with_waits(schedule: str, stages: int, micro_batches: int) -> float:
    """The least step of a schedule as a multiple of the work of one micro-batch in all stages."""
    if schedule == "gpipe" or (schedule == "1f1b" and micro_batches > stages):
        return (micro_batches + stages - 1) / stages
    if schedule in ("1f1b", "seq"):
        return 1 / (1 - (1 - 1 / micro_batches) ** stages)
    return micro_batches / stages
