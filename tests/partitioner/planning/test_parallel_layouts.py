"""The fastest layout over stages, tensor ranks, replicas, shards of the optimizer and schedules."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import asyncpipe
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.graph.tensor_sums import with_sums
from asyncpipe.partitioner.planning.choose_devices import choose, sentences, shapes
from asyncpipe.partitioner.planning.cluster import ANY_HOST, Cluster, cluster_of_hosts
from asyncpipe.partitioner.planning.parallel_layouts import (
    TIE,
    Axes,
    LayoutChoice,
    by_devices,
    choose_layout,
)
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.runtime.errors import PlanError

MEGABYTE = 10**6
FAST, SLOW = Link(bytes_per_s=1e11), Link(latency_ms=0.1, bytes_per_s=1e9)
LATE = Link(latency_ms=5.0, bytes_per_s=1e11)


def layers(times_ms: list[float], ranks: int, link: Link = FAST) -> nx.DiGraph:
    """A chain of which `ranks` share out the work and the parameters of every layer."""
    graph = nx.DiGraph(name=f"chain of {len(times_ms)}")
    for index, time_ms in enumerate(times_ms):
        graph.add_node(
            index,
            forward_ms=time_ms / ranks,
            backward_ms=2 * time_ms / ranks,
            output_bytes=MEGABYTE,
            param_bytes=int(10 * MEGABYTE * time_ms) // ranks,
            forward_sums=1,
            forward_sum_bytes=MEGABYTE,
            backward_sums=1,
            backward_sum_bytes=MEGABYTE,
        )
        if index:
            graph.add_edge(index - 1, index)
    return with_sums(graph, ranks, link)


def cluster(number: int, link: Link, memory_bytes: float = math.inf, hosts: int = 1) -> Cluster:
    devices = (
        Device(memory_bytes=memory_bytes, host=f"h{index * hosts // number}")
        for index in range(number)
    )
    return Cluster(tuple(devices), {ANY_HOST: link}, {(ANY_HOST, ANY_HOST): SLOW})


def chosen(times_ms: list[float], on: Cluster, link: Link, **axes: Any) -> LayoutChoice:
    graphs = {size: layers(times_ms, size, link) for size in on.group_sizes}
    axes = {"schedules": ("1f1b",), **axes}
    return choose_layout(graphs, on, Axes(**axes), dict.fromkeys(graphs, {"micro_batches": 4}))


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=5),
    st.sampled_from([FAST, SLOW]),
    st.sampled_from([math.inf, 500.0 * MEGABYTE]),
)
def test_no_layout_is_faster_and_none_is_below_the_bound(
    times_ms: list[float], link: Link, memory_bytes: float
) -> None:
    on = cluster(4, link, memory_bytes)
    steps = []
    for size in on.group_sizes:
        grouped = on.in_groups(size)
        for shape in shapes(len(grouped.devices), unequal=False):
            columns = [
                [stage + len(shape) * replica for replica in range(shape[0])]
                for stage in range(len(shape))
            ]
            setting = grouped.setting(columns, schedule="1f1b", micro_batches=4, recompute="auto")
            try:
                solution = solve(
                    layers(times_ms, size, link),
                    stages=len(shape),
                    method="exact",
                    link=grouped.slowest_link,
                    setting=setting,
                )
            except PlanError:
                continue
            steps.append(solution.step_ms)
    if not steps:
        with pytest.raises(PlanError):
            chosen(times_ms, on, link)
        return
    choice = chosen(times_ms, on, link)
    assert choice.best.step_ms <= min(steps) / (1 - TIE) * (1 + 1e-9)
    assert choice.bound_ms <= min(steps) * (1 + 1e-9)
    assert choice.bound_ms <= choice.best.step_ms * (1 + 1e-9)


def test_one_tensor_rank_is_chosen_where_sums_take_longer_than_they_save() -> None:
    choice = chosen([4.0] * 4, cluster(4, LATE), LATE)
    assert choice.best.tensor_parallel == 1
    assert choice.why.startswith("with 2 tensor ranks")


def test_a_layer_that_is_too_wide_for_a_device_is_shared_out() -> None:
    on = cluster(4, FAST, 250.0 * MEGABYTE)
    choice = chosen([10.0, 1.0], on, FAST)  # 100 MB of parameters, gradients and two states
    assert choice.best.tensor_parallel > 1
    assert 1 in choice.refused and choice.why == "without tensor ranks it does not fit"


def test_shards_are_chosen_only_where_whole_optimizer_states_do_not_fit() -> None:
    times_ms = [2.0] * 4  # 80 MB of parameters, 320 MB with gradients and states
    one_host = cluster(2, FAST)
    assert chosen(times_ms, one_host, FAST, zeros=(0, 1, 2), stages=1).best.zero == 0
    tight = cluster(2, SLOW, 300.0 * MEGABYTE)
    tried = chosen(times_ms, tight, SLOW, zeros=(0, 1, 2), stages=1)
    assert tried.found[1].shape == (2,) and tried.found[1].zero == 1


def test_tensor_ranks_are_on_one_host() -> None:
    on = cluster(8, FAST, hosts=2)
    assert on.group_sizes == (1, 2, 4)
    assert [on.devices[index].host for index in on.groups(4)[1]] == ["h1"] * 4
    choice = chosen([8.0] * 4, on, FAST)
    specs = choice.devices("auto")
    places = [place for index in specs.layout.devices for place in specs.cluster.places(index)]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_devices_that_are_left_over_on_a_host_are_named() -> None:
    on = cluster_of_hosts("a:3,b:2").in_groups(2)
    choice = choose(layers([4.0] * 4, 2), on, stages=2, schedule="1f1b", micro_batches=4)
    assert sentences(choice, 2)[0] == (
        "1 device of a stays idle: 2 tensor ranks of a stage are on one host"
    )


def test_more_devices_are_never_slower() -> None:
    on = cluster(8, FAST, hosts=2)
    graphs = {size: layers([4.0] * 4, size) for size in on.group_sizes}
    axes, options = Axes(("1f1b",)), dict.fromkeys(graphs, {"micro_batches": 8})
    rows = by_devices(graphs, on, axes, options, choose_layout(graphs, on, axes, options))
    assert [row.devices for row in rows] == [1, 2, 4, 8]
    steps = [row.step_ms for row in rows]
    assert steps == sorted(steps, reverse=True)
    assert all(row.step_bound_ms <= row.step_ms for row in rows)


def test_schedules_are_compared() -> None:
    choice = chosen([4.0] * 4, cluster(4, SLOW), SLOW, schedules=("gpipe", "zb-h1"), stages=4)
    assert choice.best.schedule == "zb-h1"


def test_gradients_are_not_shared_out_where_single_stages_have_replicas() -> None:
    def layout(memory_mb: float, *zeros: int) -> LayoutChoice:
        on = cluster(3, FAST, memory_mb * MEGABYTE)
        how: dict[str, Any] = {"schedules": ("async-1f1b",), "zeros": zeros, "stages": 2}
        return chosen([1.0] * 9, on, FAST, **how)

    assert [layout(memory, 0, 1, 2).found[1].zero for memory in (300, 180)] == [0, 1]
    assert len(set(layout(180, 0, 1, 2).found[1].shape)) == 2
    assert layout(300, 2).found[1].shape == (1, 1)


def test_layouts_of_a_model_keep_the_options_that_are_given() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
    plan = asyncpipe.partition(
        nn.Sequential(*layers),
        torch.randn(4, 16),
        ranks=4,
        stages=2,
        cut_at=["4"],
        tensor_parallel="auto",
        zero=1,
        schedule="1f1b",
        loss="mse",
        profile="analytic",
        stop_after="plan",
    )
    assert [row.devices for row in plan.layouts] == [2, 4]
    assert all(row.layout.startswith("2 stages") for row in plan.layouts)
    assert [stage.modules for stage in plan.stages] == [("0-3",), ("4-7",)]
    notes = {other.name: other.note for other in plan.candidates if not other.stages}
    assert notes["4 tensor ranks"] == "2 stages asked, but there is 1 device."
    assert notes["2 tensor ranks"].startswith("--cut-at 4 is not possible")
