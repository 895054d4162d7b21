"""The sums over tensor ranks are counted, priced, and part of the predicted times."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import LOCALHOST, Link
from asyncpipe.partitioner.graph.formats import read_graph, write_graph
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.graph.tensor_sums import with_sums
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.cluster import NETWORK, cluster_of_hosts
from asyncpipe.partitioner.planning.tensor_groups import (
    SHARED_MEMORY,
    check_tensor_groups,
    link_of_sums,
)
from asyncpipe.partitioner.tensor_parallel import split_over_ranks
from asyncpipe.partitioner.tensor_parallel.sums import sums_of
from asyncpipe.runtime.errors import PlanError

WIDTH, SAMPLES, LAYERS = 64, 25, 2
SUM_BYTES = 4 * SAMPLES * WIDTH


def test_a_sum_costs_a_ring_over_its_ranks() -> None:
    graph = nx.DiGraph(name="two")
    graph.add_node("plain", forward_ms=1.0, backward_ms=2.0, times_on={"gpu": (0.5, 1.0)})
    graph.add_node(
        "split",
        forward_ms=1.0,
        backward_ms=2.0,
        forward_sums=2,
        forward_sum_bytes=8e6,
        backward_sums=1,
        backward_sum_bytes=4e6,
        times_on={"gpu": (0.5, 0.75)},
    )
    graph.add_edge("plain", "split")
    link = Link(latency_ms=0.25, bytes_per_s=1e9)
    timed = with_sums(graph, 4, link).nodes
    once_ms = 2 * 3 * (0.25 + 1e3 * 1e6 / 1e9)
    assert timed["plain"] == graph.nodes["plain"]
    assert timed["split"]["sums_ms"] == pytest.approx((2 * once_ms, once_ms))
    assert timed["split"]["forward_ms"] == pytest.approx(1.0 + 2 * once_ms)
    assert timed["split"]["backward_ms"] == pytest.approx(2.0 + once_ms)
    assert timed["split"]["times_on"]["gpu"] == pytest.approx((0.5 + 2 * once_ms, 0.75 + once_ms))
    slow = RankConfig((Device(speed=0.5),)).seen_at(costs_of(with_sums(graph, 4, link)), 0)
    assert slow.forward_ms == pytest.approx([2.0, 2.0 + 2 * once_ms])
    assert slow.backward_ms == pytest.approx([4.0, 4.0 + once_ms])
    assert with_sums(graph, 1, link).nodes["split"]["forward_ms"] == 1.0
    assert graph.nodes["split"]["forward_ms"] == 1.0, "the graph itself is left as it is"


def test_sums_are_read_from_a_file(tmp_path: Path) -> None:
    graph = nx.DiGraph(name="one")
    graph.add_node("a", forward_ms=1.0, forward_sums=1, forward_sum_bytes=1e6)
    write_graph(graph, tmp_path / "g.json")
    again = read_graph(tmp_path / "g.json")
    assert again.nodes["a"] == graph.nodes["a"]
    plan = asyncpipe.plan_graph(with_sums(again, 2, Link(bytes_per_s=1e9)), stages=1)
    assert plan.stages[0].forward_ms == pytest.approx(2.0)


def test_each_block_sums_once_forward_and_once_back() -> None:
    source = load_model("examples/residual_mlp.py:build", model_args={"depth": LAYERS})
    captured = capture(source.model, source.example_inputs)
    split = split_over_ranks(captured, source.example_inputs, 2, 1)
    sums = sums_of(split.of_rank, source.example_inputs, 2)
    samples = len(source.example_inputs["x"])
    for part in ("forward", "backward"):
        of_part = [getattr(each, part) for each in sums.values()]
        assert sum(each.number for each in of_part) == LAYERS
        assert sum(each.num_bytes for each in of_part) == LAYERS * 4 * samples * WIDTH


class Heads(nn.Module):
    """A product in parts, a norm over each part's last dimension, and a result in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.up(x).view(-1, 4, 4))
        return self.down(torch.relu(heads).flatten(1))


def test_a_capture_is_split_for_several_numbers_of_ranks() -> None:
    # fx would rename an input called `input`.
    model = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), relu=nn.ReLU(), down=nn.Linear(16, 8)))
    inputs = {"input": torch.randn(6, 8)}
    captured = capture(model, inputs)
    digest, graph = captured.sha256, str(captured.graph)
    splits = [split_over_ranks(captured, inputs, ranks, 1) for ranks in (2, 4, 2)]
    assert (captured.sha256, str(captured.graph)) == (digest, graph)
    assert len({split.capture.sha256 for split in splits}) == 1
    of_rank = [split.of_rank.model.up.weight.shape for split in splits]
    assert of_rank == [(8, 8), (4, 8), (8, 8)]
    assert [spec.name for spec in splits[0].capture.inputs] == ["input"]


def test_gradients_of_whole_parameters_between_parts_are_summed() -> None:
    model, inputs = Heads(), {"x": torch.randn(6, 8)}
    split = split_over_ranks(capture(model, inputs), inputs, 2, 1)
    assert split.of_rank.shared == {"norm"}
    sums = sums_of(split.of_rank, inputs, 2)
    (norm,) = (each for name, each in sums.items() if name.startswith("heads"))
    assert (norm.backward.number, norm.backward.num_bytes) == (2, 2 * 4 * 4)


def test_predicted_times_have_the_sums(tmp_path: Path) -> None:
    source = load_model("examples/residual_mlp.py:build", model_args={"depth": LAYERS})
    plan = asyncpipe.partition(
        source.model,
        source.example_inputs,
        stages=1,
        tensor_parallel=2,
        loss="cross_entropy",
        profile="analytic",
        schedule="1f1b",
        stop_after="plan",
    )
    (stage,) = plan.stages
    samples = len(source.example_inputs["x"])
    once_ms = 2 * SHARED_MEMORY.transfer_ms(4 * samples * WIDTH / 2)
    assert stage.tensor_sums_ms == pytest.approx(2 * LAYERS * once_ms)
    assert sum(part.forward_ms for part in stage.parts) == pytest.approx(stage.forward_ms)
    assert stage.load_ms == pytest.approx(stage.forward_ms + stage.backward_ms)
    assert any("sums over 2 tensor ranks take" in line for line in plan.explanation)


def test_tensor_ranks_on_several_hosts_are_refused_with_their_cost() -> None:
    graph = nx.DiGraph()
    sums = {"forward_sums": 1, "forward_sum_bytes": 1.1e9}
    graph.add_node("a", forward_ms=400.0, backward_ms=600.0, **sums)
    cluster = cluster_of_hosts("a:2,b:2")
    link = link_of_sums(cluster, 4)
    assert link.bytes_per_s == NETWORK.bytes_per_s
    with pytest.raises(PlanError) as error:
        check_tensor_groups(with_sums(graph, 4, link), cluster, 4)
    assert "the most are 2 devices" in str(error.value)
    assert "sums would take 1,501 ms of the 2,501 ms of a micro-batch" in str(error.value)
    assert "--tensor-parallel 2" in str(error.value)
    check_tensor_groups(graph, cluster, 2)
    assert link_of_sums(cluster, 2).bytes_per_s == LOCALHOST.bytes_per_s
