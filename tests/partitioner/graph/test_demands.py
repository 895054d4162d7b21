"""Demands of a user on a plan: cuts by name, modules in one piece."""

from __future__ import annotations

import itertools
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.graph.build import build_graph, stage_of_nodes
from asyncpipe.partitioner.graph.constraints import find_demands, groups_to_cut_before
from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile.profiler import profile_analytic
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.partitioner.planning.test_solve import chain_graph
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.models.placements import best_ms, contiguous, graphs, problem_of
from asyncpipe.tests.support.oracles.captures import of_zoo


@cache
def example(name: str) -> tuple[Capture, dict[str, Tensor]]:
    makers = {"in place": in_place, "same line": same_line}
    if name not in makers:
        return of_zoo(name), of_zoo(name).arguments.tensors
    model, inputs = makers[name]()
    return capture(model, inputs, check=False), inputs


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = Change()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.count.add_(1)
        return self.second(self.act(y, self.count))


class Change(nn.Module):
    def forward(self, y: Tensor, count: Tensor) -> Tensor:
        count.mul_(2)
        return y.relu() * count


def in_place() -> tuple[nn.Module, dict[str, Tensor]]:
    return InPlace(), {"x": torch.randn(3, 4)}


class SameLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x)
        return x


def same_line() -> tuple[nn.Module, dict[str, Tensor]]:
    return SameLine(), {"x": torch.randn(3, 4)}


def stages(
    name: str, number: int, cut_at: tuple[str, ...] = (), keep_together: tuple[str, ...] = ()
) -> dict[str, int]:
    """The stage of every operation of the example, by name."""
    captured, inputs = example(name)
    demands = find_demands(captured, cut_at, keep_together, number)
    profile = profile_analytic(captured, inputs)
    together = [nodes for _, nodes in demands.together]
    again = Recomputation(captured, Prices.of(profile))
    graph = build_graph(captured, profile, again=again, together=together)
    solution = solve(graph, stages=number, cut_before=groups_to_cut_before(demands, graph))
    placed = stage_of_nodes(captured, graph, solution.stage_of, again)
    return {node.name: stage for node, stage in placed.items()}


def stages_of(name: str, path: str, placed: dict[str, int]) -> set[int]:
    captured, _ = example(name)
    return {
        placed[node.name]
        for node in captured.graph.nodes
        if node.name in placed and any(call.path == path for call in node.meta["calls"])
    }


def line_of(name: str, function: str) -> int:
    """The line of the first call of that function or method."""
    (*_, line) = next(
        node.meta["source"]
        for node in example(name)[0].graph.nodes
        if getattr(node.target, "__name__", node.target) == function
    )
    return int(line)


def test_a_cut_is_right_before_the_module_that_is_named() -> None:
    placed = stages("gpt2", 3, cut_at=("transformer.h.1", "transformer.ln_f"))
    assert stages_of("gpt2", "transformer.h.0", placed) == {0}
    assert stages_of("gpt2", "transformer.h.1", placed) == {1}
    assert placed["logits"] == 2


def test_a_cut_may_be_inside_a_block_and_at_an_operation() -> None:
    placed = stages("gpt2", 2, cut_at=("transformer.h.0.mlp.act",))
    assert stages_of("gpt2", "transformer.h.0", placed) == {0, 1}
    assert stages_of("gpt2", "transformer.h.0.mlp.act", placed) == {1}
    assert stages_of("gpt2", "transformer.h.0.mlp.c_fc", placed) == {0}
    assert set(stages("gpt2", 2, cut_at=("logits",)).values()) == {0, 1}
    assert stages("gpt2", 2, cut_at=("logits",))["logits"] == 1


def test_a_line_that_runs_once_names_a_cut() -> None:
    line = line_of("in place", "relu")
    placed = stages("in place", 2, cut_at=(f"test_demands.py:{line}",))
    assert placed == {"y": 0, "add_": 0, "count_1": 0, "relu": 1, "mul": 1, "second": 1}


@settings(max_examples=100)
@given(graphs(), st.integers(2, 4), st.data())
def test_the_other_cuts_are_the_best_beside_the_demanded_ones(graph, stages, data) -> None:
    stages = min(stages, len(graph))
    link = Link(0.25, 1e3)
    costs = costs_of(graph, link)
    places = st.integers(1, len(graph) - 1)
    demanded = data.draw(st.sets(places, min_size=1, max_size=stages - 1))
    solution = solve(
        graph,
        stages=stages,
        link=link,
        prefer_modules=0,
        cut_before=[costs.groups[place] for place in demanded],
    )
    allowed = [
        stage_of
        for stage_of in contiguous(len(graph), stages)
        if all(stage_of[place] != stage_of[place - 1] for place in demanded)
    ]
    best = best_ms(problem_of(graph, stages, link), iter(allowed))
    assert solution.bottleneck_ms == pytest.approx(best)
    assert solution.lower_bound_ms <= best * (1 + 1e-9)
    found = [solution.stage_of[group] for group in costs.groups]
    assert found in allowed


def test_all_cuts_demanded_fix_the_plan() -> None:
    graph = chain_graph(1, 1, 1, 1, 9, 1)
    for cuts in itertools.combinations(range(1, 6), 2):
        solution = solve(graph, stages=3, cut_before=[f"n{cut}" for cut in cuts])
        expected = np.searchsorted(cuts, np.arange(6), side="right").tolist()
        assert list(solution.stage_of.values()) == expected
    solution = solve(graph, stages=3, cut_before=["n1", "n2"])
    assert "the requested cuts cost 33%: without them the bottleneck stage would take 9.00 ms" in (
        solution.explanation
    )


def test_modules_kept_together_are_in_one_stage_each() -> None:
    free = stages("gpt2", 2, cut_at=("transformer.h.0.mlp",))
    assert len(stages_of("gpt2", "transformer.h.0", free)) == 2
    placed = stages("gpt2", 3, keep_together=("GPT2Block",))
    for block in ("transformer.h.0", "transformer.h.1"):
        assert len(stages_of("gpt2", block, placed)) == 1
    placed = stages("gpt2", 2, keep_together=("transformer",))
    assert stages_of("gpt2", "transformer", placed) == {0}


def test_modules_kept_together_are_not_glued_to_those_before_them() -> None:
    # A block of T5 begins with `hidden_states.to(torch.float32)`: a view of the block before.
    for name, kind in (("t5", "T5Block"), ("gpt2", "GPT2Block")):
        captured, inputs = example(name)
        demands = find_demands(captured, (), (kind,), 2)
        profile = profile_analytic(captured, inputs)
        together = [nodes for _, nodes in demands.together]
        graph = build_graph(captured, profile, together=together)
        of_block = [
            {group for group, names in graph.nodes(data="names") if not own.isdisjoint(names)}
            for own in ({node.name for node in nodes} for nodes in together)
        ]
        assert all(len(groups) == 1 for groups in of_block)
        assert len(set.union(*of_block)) == len(of_block) > 1


@pytest.mark.parametrize(
    ("model", "number", "cut_at", "keep_together", "message"),
    [
        ("gpt2", 3, ("transformer.h.7",), (), "has nothing of that name.\nDid you mean .*h.1"),
        ("gpt2", 3, ("lm_hed",), (), "Did you mean lm_head"),
        ("gpt2", 3, (), ("GPT2Blok",), "--keep-together GPT2Blok: .*\nDid you mean GPT2Block"),
        (
            "gpt2",
            2,
            ("transformer.h.0", "transformer.h.1"),
            (),
            r"2 cuts demanded \(transformer.h.0, transformer.h.1\), but with --stages 2 there",
        ),
        ("in place", 2, ("first",), (), "--cut-at first leaves stage 0 with nothing to compute"),
        (
            "in place",
            2,
            ("act",),
            (),
            r"\(\S+py:\d+\) and count_1 \(test_demands.py:\d+\) must stay together \(one ",
        ),
        (
            "gpt2",
            2,
            ("transformer.h.1.mlp",),
            ("transformer.h.1",),
            r"must stay together \(--keep-together transformer.h.1\)",
        ),
        ("same line", 2, ("layers.9",), (), "Did you mean layers"),
    ],
)
def test_a_demand_that_cannot_be_met_is_told(
    model: str, number: int, cut_at: tuple[str, ...], keep_together: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        stages(model, number, cut_at, keep_together)


def test_a_line_that_runs_at_several_places_is_told_with_their_names() -> None:
    line = line_of("same line", "relu")
    with pytest.raises(PlanError, match=rf"test_demands.py:{line} names 3 places"):
        stages("same line", 2, cut_at=(f"test_demands.py:{line}",))


def test_a_method_that_counts_blocks_refuses_demanded_cuts() -> None:
    with pytest.raises(PlanError, match="--method uniform chooses all cuts itself"):
        solve(chain_graph(1, 1, 1), stages=2, method="uniform", cut_before=["n1"])
    with pytest.raises(PlanError, match="no cut can be before n0"):
        solve(nx.DiGraph(chain_graph(1, 1, 1)), stages=2, cut_before=["n0"])


def test_a_partition_from_python_records_what_was_demanded(tmp_path) -> None:
    model, inputs = zoo.gpt2()
    plan = asyncpipe.partition(
        model,
        inputs,
        stages=2,
        output=tmp_path / "made",
        profile="analytic",
        cut_at=["transformer.h.1"],
        keep_together=["GPT2MLP"],
        code="flat",
    )
    assert "--cut-at transformer.h.1 --keep-together GPT2MLP --code flat" in plan.command
    assert "transformer.h.0" in plan.stages[0].modules
    assert plan.stages[1].modules[0] == "transformer.h.1-2"
    planned = asyncpipe.partition(
        model, inputs, stages=2, output=tmp_path / "not", profile="analytic", stop_after="plan"
    )
    assert planned.bottleneck_ms <= plan.bottleneck_ms
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(("share", "torn"), [(0.0, True), (1.0, False)])
def test_what_is_given_up_for_whole_blocks_is_the_users(share: float, torn: bool) -> None:
    model, inputs = zoo.gpt2()
    plan = asyncpipe.partition(
        model,
        inputs,
        stages=2,
        profile="analytic",
        prefer_modules=share,
        stop_after="plan",
    )
    assert f"--prefer-modules {share:g}" in plan.command
    assert any(".mlp" in name or ".attn" in name for name in plan.stages[1].modules) == torn
