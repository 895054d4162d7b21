"""Plans with single stages on several ranks: what their step takes, and when they are taken."""

from __future__ import annotations

import networkx as nx
import pytest

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.planning.solve import Solution, solve
from asyncpipe.runtime.schedule.interleaved import replicated
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate

FORWARD_MS = (1.0, 8.0, 1.0, 5.0)
LAST_BYTES = int(4e8)


def planned(method: str, schedule: str = "1f1b") -> Solution:
    """Four operations, of which the last has nearly all weights: too many to be summed often."""
    graph = nx.DiGraph(name="four operations")
    for index, forward_ms in enumerate(FORWARD_MS):
        graph.add_node(
            str(index),
            forward_ms=forward_ms,
            backward_ms=2 * forward_ms,
            output_bytes=1e4,
            param_bytes=LAST_BYTES if index == 3 else 100_000,
        )
        if index:
            graph.add_edge(str(index - 1), str(index))
    return solve(
        graph,
        stages=3,
        method=method,
        schedule=schedule,
        micro_batches=8,
        link=Link(bytes_per_s=2e9),
    )


def test_the_step_of_replicas_is_that_of_their_schedule_with_the_sum_of_gradients() -> None:
    plan = planned("pipedream")
    assert plan.ranks_of_stage == ((0, 1), (2,))
    front = sum(FORWARD_MS[:3])
    each_way_ms = 1e4 / 2e9 * 1e3
    costs = ActionCosts(
        (front + each_way_ms, FORWARD_MS[3] + each_way_ms),
        (2 * front + each_way_ms, 2 * FORWARD_MS[3] + each_way_ms),
        (2 * 3e5 / 2 / 2e9 * 1e3, 0.0),
    )
    foreseen = simulate(replicated("1f1b", 8, [[0, 1], [2]]), costs)
    assert plan.step_ms == pytest.approx(foreseen.makespan_ms)
    assert plan.step_bound_ms == pytest.approx(8 * 3 * sum(FORWARD_MS) / 3)
    assert [load.in_flight for load in plan.loads] == [2, 1]


def test_all_methods_together_take_replicas_where_the_schedule_trains_them() -> None:
    assert planned("all").ranks_of_stage == ((0, 1), (2,))
    assert planned("all").step_ms < planned("auto").step_ms
    found = planned("all", "async-1f1b")
    assert found.ranks_of_stage == ((0,), (1,), (2,))
    (shown,) = (one for one in found.candidates if one.name == "pipedream")
    assert shown.note == "ranks per stage: 2, 1"
