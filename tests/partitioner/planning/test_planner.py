"""A model or a graph and a file of devices -> a plan with ranks, from Python and the command."""

import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.choose_devices import choose, sentences
from asyncpipe.partitioner.planning.cluster import Cluster, cluster_of_hosts
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.partitioner.planning.test_devices import layered

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "two_hosts.toml"


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers)


def planned(tmp_path: Path, **options: object) -> asyncpipe.Plan:
    return asyncpipe.partition(
        perceptron(),
        (torch.randn(8, 64),),
        output=tmp_path / "made",
        profile="analytic",
        **options,
    )


def test_a_model_is_planned_for_the_devices_of_a_file(tmp_path: Path) -> None:
    plan = planned(tmp_path, stages=4, devices=EXAMPLE)
    assert read_plan(tmp_path / "made") == plan
    names = {rank.device: (rank.memory_bytes, rank.host) for rank in plan.setting.ranks}
    assert names == {
        "RTX 3090": (24 * 2**30, "tower"),
        "RTX A4000": (16 * 2**30, "attic"),
    }
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,), (3,)]
    assert plan.device_of_stage == (0, 1, 2, 3)
    assert any("boundaries between hosts: 1 of 3" in note for note in plan.explanation)
    assert {"1 stage", "2 stages", "2 stages x 2 replicas"} <= {c.name for c in plan.candidates}


def test_costs_of_a_stage_are_those_on_its_device(tmp_path: Path) -> None:
    slow = Cluster((Device("slow", speed=0.25),), {"*": Link()})
    on_slow = planned(tmp_path / "slow", stages=1, devices=slow)
    here = planned(tmp_path / "here", stages=1)
    assert on_slow.stages[0].forward_ms == pytest.approx(4 * here.stages[0].forward_ms)
    assert on_slow.stages[0].backward_ms == pytest.approx(4 * here.stages[0].backward_ms)
    assert sum(part.forward_ms for part in on_slow.stages[0].parts) == pytest.approx(
        on_slow.stages[0].forward_ms
    )
    assert on_slow.bottleneck_ms == pytest.approx(4 * here.bottleneck_ms)


def test_devices_by_name_have_predicted_times(tmp_path: Path) -> None:
    path = tmp_path / "cards.toml"
    path.write_text('[[devices]]\nspec = "h100"\n[[devices]]\nspec = "t4"\n')
    plan = planned(tmp_path, stages=1, devices=path)
    assert plan.setting.ranks[0].device == "h100"
    assert plan.setting.ranks[0].memory_bytes == 80 * 2**30
    assert [c.name for c in plan.candidates if c.stages == 2] == ["2 stages"]


def test_without_stages_their_number_is_chosen(tmp_path: Path) -> None:
    plan = planned(tmp_path, devices=cluster_of_hosts("a:2"))
    assert any("chosen from" in note for note in plan.explanation)
    assert sorted({rank for stage in plan.stages for rank in stage.ranks}) == list(
        range(len(plan.setting.ranks))
    )


def test_plans_without_a_number_of_stages_or_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="neither stages nor devices"):
        asyncpipe.plan_graph(layered([1.0] * 4))
    with pytest.raises(PlanError, match="3 stages asked, but there are 2 devices"):
        asyncpipe.plan_graph(layered([1.0] * 4), 3, devices=cluster_of_hosts("a:2"))


def test_a_graph_is_planned_for_the_devices_of_a_file() -> None:
    plan = asyncpipe.plan_graph(layered([4.0] * 12, num_bytes=1e3), 4, devices=EXAMPLE)
    assert plan.ranks_of_stage == ((0,), (1,), (2,), (3,))
    layers = sorted(len(stage.groups) for stage in plan.stages)
    assert layers == [2, 2, 4, 4]
    assert json.loads(plan.to_json())["candidates"]


def test_replicas_have_ranks_of_their_own() -> None:
    graph = layered([3.0] * 4, num_bytes=1e6, params=10)
    plan = asyncpipe.plan_graph(graph, devices=cluster_of_hosts("a:4"))
    assert plan.ranks_of_stage == ((0, 1, 2, 3),)
    two = Cluster((Device(),) * 4, {"*": Link(0.001, 1e9)})
    pipelines = asyncpipe.plan_graph(layered([3.0] * 4, params=10**6), 2, devices=two)
    assert pipelines.ranks_of_stage == ((0, 2), (1, 3))


def said(graph: nx.DiGraph, cluster: Cluster, stages: int | None) -> list[str]:
    return list(sentences(choose(graph, cluster, stages=stages), stages))


def test_a_lone_rank_is_told_with_a_split_that_has_none() -> None:
    notes = said(layered([4.0] * 16, num_bytes=1e6), cluster_of_hosts("h1:4,h2:3,h3:1"), 8)
    assert any("boundaries between hosts: 2 of 7" in note for note in notes)
    (lone,) = [note for note in notes if "alone" in note]
    assert "on h3 is alone" in lone
    assert "--hosts h1:4,h2:2,h3:2 has no such rank" in lone


def test_an_order_that_is_better_than_the_list_is_told() -> None:
    notes = said(layered([4.0] * 16, num_bytes=1e6), cluster_of_hosts("h1:4,h3:1,h2:3"), 8)
    (order,) = [note for note in notes if "in the order" in note]
    assert "in the listed order the bottleneck stage would take 12.44 ms" in order


def test_fewer_stages_are_proposed_where_they_are_as_fast() -> None:
    """One layer has most of all work: a third stage changes nothing."""
    notes = said(layered([1.0, 1.0, 12.0], params=10**9), cluster_of_hosts("a:3"), 3)
    fewer = "2 stages would be as fast: 12.20 ms per micro-batch on 2 instead of 3 devices"
    assert notes[-1] == fewer


def test_no_pipeline_is_proposed_where_it_is_faster() -> None:
    notes = said(layered([3.0] * 4, num_bytes=1e7, params=10), cluster_of_hosts("a:4"), 4)
    assert "1 stage x 4 replicas (no pipeline) would be" in notes[-1]
