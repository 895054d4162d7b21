"""The time of the optimizer's step on a rank, when other ranks run on without waiting for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import asyncpipe
from asyncpipe.partitioner.graph.cost_graph import costs_of, with_exchanges
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile import profiler
from asyncpipe.partitioner.profile.profiler import CPU_CORE, Profile, update_ms_per_byte
from asyncpipe.partitioner.profile.roofline import device_spec
from asyncpipe.runtime.optimizers.facts import PLANNED
from asyncpipe.tests.support.models.placements import all_ordered, evaluated, graphs, problem_of

RATE = 0.25  # ms for a byte of parameters


@settings(max_examples=60)
@given(graphs(), st.data())
def test_a_plan_with_updates_is_the_best_of_all_plans(
    graph: nx.DiGraph, data: st.DataObject
) -> None:
    """Beside a rank's load it steps once every parameter that its stage has, tied ones too."""
    micro_batches = data.draw(st.sampled_from([1, 2, 8]))
    link = data.draw(st.sampled_from([Link(), Link(0.5, 1e3)]))
    for node in graph:
        graph.nodes[node]["parameters"] = {f"own {node}": data.draw(st.integers(0, 40))}
    for name in ("tied", "shared"):
        for node in data.draw(st.permutations(list(graph)))[:2]:
            graph.nodes[node]["parameters"][name] = 24
    costs = with_exchanges(costs_of(graph, link), micro_batches, link)
    problem = replace(problem_of(graph, 2, link), costs=costs)

    def slowest_ms(stage_of: tuple[int, ...]) -> float:
        loads = evaluated(problem, stage_of).stages
        held = [
            {
                name: size
                for node, at in zip(graph, stage_of, strict=True)
                if at == stage
                for name, size in graph.nodes[node]["parameters"].items()
            }
            for stage in range(2)
        ]
        return max(
            load.load_ms + RATE * sum(of_stage.values()) / micro_batches
            for load, of_stage in zip(loads, held, strict=True)
        )

    best_ms = min(map(slowest_ms, all_ordered(graph, 2)))
    graph.graph["update_ms_per_byte"] = RATE
    found = solve(graph, stages=2, link=link, micro_batches=micro_batches, prefer_modules=0)
    assert found.bottleneck_ms == pytest.approx(slowest_ms(found.placement.stage_of))
    assert found.bottleneck_ms == pytest.approx(best_ms)
    assert found.lower_bound_ms <= best_ms * (1 + 1e-9)


def row(**attributes: float) -> nx.DiGraph:
    """Six operations in a row, the first with all weights."""
    graph = nx.DiGraph(name="row", **attributes)
    for node in range(6):
        graph.add_node(node, forward_ms=1.0, backward_ms=2.0, param_bytes=0 if node else 24)
    nx.add_path(graph, range(6))
    return graph


def test_the_more_often_a_rank_steps_the_less_it_computes_beside_its_weights() -> None:
    graph = row(update_ms_per_byte=RATE)
    cuts = [
        list(solve(graph, stages=2, micro_batches=count).stage_of.values()).index(1)
        for count in (8, 1)
    ]
    assert cuts == [3, 2]
    first = solve(graph, stages=2, micro_batches=1).loads[0]
    assert (first.backward_ms, first.update_ms, first.load_ms) == (4.0, 6.0, 12.0)


def test_replicas_of_a_stage_do_not_share_a_step() -> None:
    graph = row(update_ms_per_byte=RATE)
    graph.nodes[3].update(forward_ms=8.0, backward_ms=16.0, param_bytes=8)
    found = solve(graph, stages=3, micro_batches=2, method="pipedream", link=Link(bytes_per_s=1e9))
    (shared,) = (stage for stage, ranks in enumerate(found.ranks_of_stage) if len(ranks) == 2)
    load = found.loads[shared]
    members = [node for node in graph if found.stage_of[str(node)] == shared]
    own_ms = sum(graph.nodes[node]["param_bytes"] for node in members) * RATE / 2
    assert own_ms >= 1.0
    assert load.load_ms == pytest.approx(load.work_ms / 2 + own_ms, rel=1e-3)


def test_a_slower_device_takes_as_much_longer_for_its_step() -> None:
    graph = row(update_ms_per_byte=RATE)
    for node in graph.nodes.values():
        node["times_on"] = {"slow": (3.0, 6.0)}
    for device in (Device(kind="slow"), Device(speed=1 / 3)):
        setting = RankConfig((device, Device()), micro_batches=2)
        load = solve(graph, stages=2, setting=setting, cut_before=["2"]).loads[0]
        assert load.backward_ms == pytest.approx(2 * 6) and load.update_ms == pytest.approx(3 * 3)
        assert load.load_ms == pytest.approx(2 * 9 + 3 * 3)


def test_a_synchronous_plan_is_of_the_pipeline_alone() -> None:
    plain, priced = (
        solve(graph, stages=2, schedule="1f1b") for graph in (row(), row(update_ms_per_byte=RATE))
    )
    assert priced.step_ms == plain.step_ms and priced.stage_of == plain.stage_of


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.table(x))))
        return hidden.sum(-1)


def test_the_plan_tells_what_of_a_load_is_the_optimizer(tmp_path: Path) -> None:
    plan = asyncpipe.partition(
        Words(), {"x": torch.randint(500, (2, 3))}, stages=2, name="words", profile="analytic",
        micro_batches=4, optimizer="nadam", output=tmp_path / "words",
    )  # fmt: skip
    for stage in plan.stages:
        talk_ms = stage.forward_talk_ms + stage.backward_talk_ms
        rest_ms = stage.forward_ms + stage.backward_ms + talk_ms
        assert stage.update_ms == pytest.approx(7e3 * stage.param_bytes / CPU_CORE.bandwidth)
        assert stage.load_ms == pytest.approx(rest_ms + stage.update_ms / 4)


def of_device(bandwidth: float | None) -> Profile:
    return Profile(
        nodes={}, kind="", device="cpu", threads=1, sizes={}, distinct=0, forward_scale=1.0,
        backward_scale=1.0, unmeasured=(), seconds=0.0, bandwidth=bandwidth,
    )  # fmt: skip


def test_a_predicted_step_moves_what_it_reads_and_writes() -> None:
    bandwidth = device_spec("a100-80g").bandwidth
    adamw, sgd = (update_ms_per_byte(of_device(bandwidth), name) for name in ("adamw", "sgd"))
    assert adamw == pytest.approx(1e3 * 7 / bandwidth) and sgd == pytest.approx(3 / 7 * adamw)


@pytest.mark.parametrize("optimizer", sorted(PLANNED))
def test_a_step_is_measured_once(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(profiler, "_UPDATED_SHAPE", (64, 64))
    found = update_ms_per_byte(of_device(None), optimizer)
    assert 0 < found < 1
    monkeypatch.setattr(profiler, "_measured_update", None)
    assert update_ms_per_byte(of_device(None), optimizer) == found
