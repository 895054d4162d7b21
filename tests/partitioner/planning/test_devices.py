"""Plans on unlike devices and links: compared with all orders, cuts and replicas there are."""

import itertools
import math
from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement, evaluate
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.choose_devices import choose, shapes
from asyncpipe.partitioner.planning.cluster import Cluster, cluster_of_hosts
from asyncpipe.partitioner.planning.device_layouts import (
    Layout,
    crossings,
    free_bound_ms,
    layouts,
    lone_ranks,
    remote_edges,
)
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.placements import contiguous, problem_of

FAST, SLOW = Link(0.1, 2e6), Link(1.0, 2e5)


def layered(works: Sequence[float], num_bytes: float = 100.0, params: int = 0) -> nx.DiGraph:
    """A row of layers, each of which only the next one reads."""
    graph = nx.DiGraph(name="layers")
    for index, work_ms in enumerate(works):
        graph.add_node(index, forward_ms=work_ms / 3, backward_ms=work_ms * 2 / 3)
        graph.nodes[index].update(output_bytes=num_bytes, param_bytes=params, saved_bytes=10)
        if index:
            graph.add_edge(index - 1, index)
    return graph


def cluster_of(*devices: Device) -> Cluster:
    return Cluster(devices, {"*": FAST}, {("*", "*"): SLOW})


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    number = draw(st.integers(2, 4))
    speeds, hosts = st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from("ab")
    return cluster_of(
        *(
            Device(
                name=f"d{index}",
                speed=draw(speeds),
                host=draw(hosts),
                memory_bytes=draw(st.sampled_from([900.0, 2_000.0, math.inf])),
            )
            for index in range(number)
        )
    )


GRAPHS = st.builds(
    layered,
    st.lists(st.integers(1, 9), min_size=4, max_size=6),
    st.sampled_from([0.0, 100.0, 1_000.0]),
    st.sampled_from([0, 100]),
)


def columns_of(shape: Sequence[int], number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put devices on the stages of a shape; places in a column matter for links."""
    for order in itertools.permutations(range(number), sum(shape)):
        ends = list(itertools.accumulate(shape))
        yield tuple(order[end - size : end] for end, size in zip(ends, shape, strict=True))


def least_ms(graph: nx.DiGraph, cluster: Cluster, shape: Sequence[int]) -> float:
    """The least bottleneck over all layouts of a shape and all cuts; inf if none fits."""
    best = math.inf
    for columns in columns_of(shape, len(cluster.devices)):
        setting = cluster.setting(columns)
        problem = problem_of(graph, len(shape), cluster.slowest_link, setting)
        for stage_of in contiguous(len(graph), len(shape)):
            found = evaluate(problem, Placement(tuple(stage_of)))
            if found.fits:
                best = min(best, found.bottleneck_ms)
    return best


@settings(max_examples=20)
@given(GRAPHS, clusters())
def test_no_order_of_devices_and_no_cut_is_better(graph: nx.DiGraph, cluster: Cluster) -> None:
    stages = len(cluster.devices)
    least = least_ms(graph, cluster, (1,) * stages)
    if math.isinf(least):
        with pytest.raises(PlanError):
            choose(graph, cluster, stages=stages, prefer_modules=0.0)
        return
    solution = choose(graph, cluster, stages=stages, prefer_modules=0.0).solution
    assert solution.bottleneck_ms == pytest.approx(least)
    assert solution.lower_bound_ms <= least * (1 + 1e-9)
    assert solution.evaluation.fits


@settings(max_examples=12)
@given(GRAPHS, clusters())
def test_no_bound_is_above_what_some_plan_has(graph: nx.DiGraph, cluster: Cluster) -> None:
    least = {
        shape: least_ms(graph, cluster, shape)
        for shape in shapes(len(cluster.devices))
        if len(shape) <= len(graph)
    }
    assert free_bound_ms(graph, cluster) <= min(least.values()) * (1 + 1e-9)
    if math.isinf(min(least.values())):
        return
    choice = choose(graph, cluster, prefer_modules=0.0)
    assert choice.solution.lower_bound_ms <= least[choice.layout.shape] * (1 + 1e-9)


@settings(max_examples=20)
@given(GRAPHS, st.integers(2, 4), st.sampled_from([900.0, math.inf]))
def test_of_equal_devices_no_shape_is_better(
    graph: nx.DiGraph, number: int, memory_bytes: float
) -> None:
    cluster = cluster_of(*(Device(memory_bytes=memory_bytes),) * number)
    least = min(
        least_ms(graph, cluster, shape) for shape in shapes(number) if len(shape) <= len(graph)
    )
    if math.isinf(least):
        return
    choice = choose(graph, cluster, prefer_modules=0.0)
    assert least * (1 - 1e-9) <= choice.solution.bottleneck_ms <= least * 1.01


def test_times_of_a_shape_are_those_of_its_formula() -> None:
    """(work + talk) / R and a ring of 2 (R - 1) messages of params / R once per step."""
    graph = layered([3, 6, 9, 6], num_bytes=400.0, params=1_000)
    cluster = cluster_of(*(Device(speed=2.0, host="a"),) * 3, *(Device(speed=1.0, host="b"),) * 2)
    setting = cluster.setting([[0, 1, 2], [3, 4]], micro_batches=8)
    found = evaluate(problem_of(graph, 2, None, setting), Placement((0, 0, 1, 1)))
    talk_ms = 2 * (1.0 + 1e3 * 400 / 2e5)  # one tensor over the slow link, and its gradient back
    first_ms = (9 / 2 + talk_ms) / 3 + 2 * 2 * (0.1 + 1e3 * 2_000 / 3 / 2e6) / 8
    second_ms = (15 + talk_ms) / 2 + 2 * 1 * (0.1 + 1e3 * 2_000 / 2 / 2e6) / 8
    assert found.rank_ms == pytest.approx((first_ms, second_ms))
    assert found.stages[1].forward_ms == pytest.approx(5)
    solution = solve(graph, stages=2, setting=setting)
    assert solution.step_ms == pytest.approx(8 * solution.bottleneck_ms)
    # Three ranks before two: on each of the first 2 of 5 are in flight, of the second 1 of 2.
    assert [stage.in_flight for stage in found.stages] == [2, 1]


def test_a_synchronous_replica_has_its_share_of_the_micro_batches() -> None:
    graph = layered([6] * 4)
    cluster = Cluster((Device(),) * 4, {"*": Link()})
    choice = choose(graph, cluster, stages=2, schedule="1f1b", micro_batches=8)
    assert choice.layout.shape == (2, 2)
    # Two pipelines of 4 micro-batches each: (4 + 1) slots of 12 ms.
    assert choice.solution.step_ms == pytest.approx(5 * 12)


def test_memory_of_each_device_is_respected() -> None:
    """Only the last stage, with one micro-batch in flight, fits the small card."""
    graph = layered([1.0] * 6)
    for node in graph:
        graph.nodes[node]["saved_bytes"] = 100
    alike = choose(graph, cluster_of(Device(), Device()), stages=2, prefer_modules=0.0)
    first, last = (stage.peak_bytes for stage in alike.solution.loads)
    assert first > last
    small, large = Device("small", memory_bytes=last), Device("large", memory_bytes=first)
    choice = choose(graph, cluster_of(small, large), stages=2, prefer_modules=0.0)
    assert [device.name for device in choice.solution.setting.devices] == ["large", "small"]
    assert [stage.peak_bytes for stage in choice.solution.loads] == [first, last]
    smaller = Device("smaller", memory_bytes=last - 1)
    with pytest.raises(PlanError, match="finds no 2-stage plan"):
        choose(graph, cluster_of(smaller, smaller), stages=2)


def test_times_on_a_kind_of_device_hold_for_it() -> None:
    graph = layered([4.0] * 6, num_bytes=0.0)
    for node in graph:
        graph.nodes[node]["times_on"] = {"fast": (1.0, 1.0), "slow": (2.0, 2.0)}
    devices = cluster_of(Device("s", kind="slow"), Device("f", kind="fast"))
    choice = choose(graph, devices, stages=2, prefer_modules=0.0)
    assert choice.solution.bottleneck_ms == 8  # 4 layers of 2 ms, 2 of 4 ms
    assert sorted(np.bincount(choice.solution.placement.stage_of)) == [2, 4]
    with pytest.raises(PlanError, match="no times on fats") as raised:
        choose(graph, cluster_of(Device("x", kind="fats")), stages=1)
    assert "Did you mean fast?" in raised.value.cure


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="5 stages asked, but there are 4 devices"):
        choose(layered([1.0] * 8), cluster_of_hosts("a:4"), stages=5)


def test_where_messages_are_dear_nothing_is_pipelined() -> None:
    slow = Cluster((Device(host="a"), Device(host="b")), {}, {("*", "*"): Link(50.0, 1e3)})
    choice = choose(layered([3.0] * 4, params=1_000), slow)
    assert choice.layout.shape == (1,)


def test_where_parameters_are_few_and_tensors_large_the_data_is_split() -> None:
    graph = layered([3.0] * 4, num_bytes=1e6, params=10)
    assert choose(graph, cluster_of_hosts("a:4")).layout.shape == (4,)


# --------------------------------------------------------------------------- hosts and mapping


def ring_ms(split: str) -> float:
    """The slowest rank of a ring in which every rank sends one message and receives one."""
    cluster = cluster_of_hosts(split)
    number = len(cluster.devices)
    # The ring is a row that begins with its last rank and ends with its first.
    order = [number - 1, *range(number), 0]
    links = {True: Link(0.0, 1e6), False: Link(1.0, math.inf)}
    graph = nx.DiGraph()
    nx.add_path(graph, range(number + 2), tensors={"chunk": 1}, grads={})
    hosts = [cluster.devices[rank].host for rank in order]
    setting = cluster.setting([[rank] for rank in order])
    joined = tuple(links[left == right] for left, right in itertools.pairwise(hosts))
    problem = problem_of(graph, len(order), setting=type(setting)(setting.devices, joined))
    found = evaluate(problem, Placement(tuple(range(number + 2))))
    return max(found.rank_ms[1:-1])


def test_a_lone_rank_pays_for_both_ends_as_measured() -> None:
    """The published ring of 8 ranks on 3 nodes: 4-3-1 took 13% more than 4-2-2; of 6 ranks on 2
    nodes 5-1 took 20% more than 3-3. A model of links alone sees no difference."""
    assert ring_ms("a:4,b:2,c:2") == pytest.approx(1.0, abs=0.01)
    assert ring_ms("a:4,b:3,c:1") == pytest.approx(2.0, abs=0.01)
    assert ring_ms("a:3,b:3") == pytest.approx(1.0, abs=0.01)
    assert ring_ms("a:5,b:1") == pytest.approx(2.0, abs=0.01)


def test_a_lone_rank_is_not_put_into_the_middle() -> None:
    graph = layered([4.0] * 16, num_bytes=1e6)
    choice = choose(graph, cluster_of_hosts("a:4,c:1,b:3"), stages=8)
    order = choice.layout.devices
    assert lone_ranks(choice.cluster, order) in ((0,), (7,))
    assert crossings(choice.cluster, choice.layout) == (2, 0)
    assert choice.as_listed_ms is not None
    assert choice.as_listed_ms > choice.solution.bottleneck_ms * 1.05


def test_boundaries_between_hosts_are_named() -> None:
    cluster = cluster_of_hosts("a:2,b:1,c:1")
    assert remote_edges(cluster, range(4)) == (("a", "b"), ("b", "c"))
    assert lone_ranks(cluster, range(4)) == (2, 3)
    assert lone_ranks(cluster_of_hosts("a:1"), [0]) == ()


def test_hosts_that_are_alike_are_not_tried_twice() -> None:
    alike = cluster_of_hosts(",".join(f"h{index}:8" for index in range(8)))
    assert layouts(alike, (1,) * 64, 100)[0] == (Layout(tuple((rank,) for rank in range(64))),)
    found, are_all = layouts(cluster_of_hosts("a:1,b:1,c:2"), (1,) * 4, 100)
    assert are_all
    assert len(found) == 6  # 4! / 2 equal devices of c / 2 alike hosts


def test_many_devices_are_mapped_host_by_host_in_time() -> None:
    hosts = cluster_of_hosts(",".join(f"h{index}:{index % 3 + 2}" for index in range(6)))
    choice = choose(layered([2.0] * 40, num_bytes=1e5), hosts, stages=len(hosts.devices))
    assert len(remote_edges(hosts, choice.layout.devices)) == 5
