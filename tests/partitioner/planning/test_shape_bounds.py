"""The bound of a number of stages and replicas, before any cut is chosen."""

from __future__ import annotations

import math

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.cluster import Cluster
from asyncpipe.partitioner.planning.shape_bounds import Totals
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.planning.step_time import step_of
from asyncpipe.partitioner.solvers.relaxed_order import relaxed_order_ms
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.placements import all_ordered, graphs, problem_of

LINK = Link(latency_ms=0.0, bytes_per_s=1e3)


def totals(graph: nx.DiGraph, ranks: int) -> Totals:
    return Totals.of(graph, Cluster((Device(),) * ranks))


@settings(max_examples=30)
@given(
    graphs(),
    st.integers(1, 4),
    st.sampled_from(["gpipe", "1f1b", "seq", "zb-h1"]),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=8, max_size=8),
    st.sampled_from([math.inf, 90.0, 150.0]),
)
def test_no_plan_of_a_shape_steps_faster_than_its_bounds(
    graph, stages, schedule, micro_batches, replicas, sizes, memory_bytes
):
    stages = min(stages, len(graph))
    for node, (param_bytes, saved_bytes) in zip(graph.nodes.values(), sizes, strict=False):
        node.update(param_bytes=param_bytes, saved_bytes=saved_bytes)
    setting = RankConfig(
        (Device(memory_bytes=memory_bytes),) * stages,
        schedule=schedule,
        micro_batches=replicas * micro_batches,
        replicas=(replicas,) * stages,
        exchange=(LINK,) * stages,
        recompute="auto",
    )
    problem = problem_of(graph, stages, LINK, setting)
    steps = [step_of(problem, Placement(stage_of)) for stage_of in all_ordered(graph, stages)]
    fitting_ms = [step.step_ms for step in steps if step.evaluation.fits]
    if not fitting_ms:
        return
    most_ms = min(fitting_ms) * (1 + 1e-9)
    assert totals(graph, stages).least_ms(setting, (replicas,) * stages, LINK) <= most_ms
    assert relaxed_order_ms(problem, math.inf) < math.inf
    try:
        solution = solve(graph, stages=stages, method="chain", link=LINK, setting=setting)
    except PlanError:  # another order of the groups may fit
        return
    assert solution.step_bound_ms <= most_ms


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 5), ("1f1b", 16), ("gpipe", 2)])
def test_equal_stages_reach_the_bound(schedule: str, micro_batches: int) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(4), forward_ms=1.0, backward_ms=2.0, output_bytes=1)
    nx.add_path(graph, range(4))
    setting = RankConfig((Device(),) * 4, schedule=schedule, micro_batches=micro_batches)
    link = Link(bytes_per_s=1e12)
    step = step_of(problem_of(graph, 4, link, setting), Placement((0, 1, 2, 3)))
    bound_ms = totals(graph, 4).least_ms(setting, (1, 1, 1, 1), link)
    assert bound_ms == pytest.approx(step.step_ms) == pytest.approx(3 * (micro_batches + 3))


def test_a_sum_of_gradients_overlaps_with_the_backwards_of_earlier_stages() -> None:
    graph = nx.DiGraph()
    graph.add_node(0, forward_ms=1.0, backward_ms=9.0, output_bytes=1)
    graph.add_node(1, forward_ms=1.0, backward_ms=1.0, param_bytes=20)
    graph.add_edge(0, 1)
    setting = RankConfig(
        (Device(),) * 2,
        schedule="1f1b",
        micro_batches=4,
        replicas=(2, 2),
        exchange=(LINK, LINK),
    )
    fast = Link(bytes_per_s=1e12)
    solution = solve(graph, stages=2, link=fast, setting=setting)
    assert solution.loads[1].summing_ms == pytest.approx(20.0)
    assert solution.step_ms == pytest.approx(25.0)
    assert solution.step_bound_ms <= solution.step_ms


def test_a_bound_counts_what_memory_makes_stages_recompute() -> None:
    graph = nx.DiGraph()
    costs = {"forward_ms": 1.0, "backward_ms": 2.0, "output_bytes": 1, "saved_bytes": 10}
    graph.add_nodes_from(["first", "left", "right", *range(5)], **costs)
    graph.add_edges_from([("first", "left"), ("first", "right"), ("left", 0), ("right", 0)])
    nx.add_path(graph, range(5))

    def bound_ms(memory_bytes: float) -> tuple[float, float]:
        devices = (Device(memory_bytes=memory_bytes),) * 2
        setting = RankConfig(devices, schedule="1f1b", micro_batches=8, recompute="auto")
        fast = Link(bytes_per_s=1e12)
        solution = solve(graph, stages=2, method="chain", link=fast, setting=setting)
        return solution.step_bound_ms, solution.step_ms

    assert bound_ms(math.inf) == pytest.approx((108.0, 108.0))
    least_ms, step_ms = bound_ms(70.0)
    assert 115.0 < least_ms <= step_ms
