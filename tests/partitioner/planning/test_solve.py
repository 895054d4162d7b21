"""Planning of cost graphs: the optimum, the bound, the preference among near-equals."""

from __future__ import annotations

import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.cost_graph import costs_of, with_exchanges
from asyncpipe.partitioner.graph.costs import Link, stage_sums
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.planner import plan_graph
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.solvers.chain import interval_sums
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.placements import (
    LINKS,
    SEARCHED,
    all_ordered,
    best_ms,
    contiguous,
    evaluated,
    graphs,
    problem_of,
)


def chain_graph(*work_ms: float, sizes: tuple[int, ...] = ()) -> nx.DiGraph:
    graph = nx.DiGraph(name="toy")
    for index, work in enumerate(work_ms):
        size = sizes[index] if sizes else 1
        graph.add_node(f"n{index}", forward_ms=work, output_bytes=size)
    nx.add_path(graph, [f"n{index}" for index in range(len(work_ms))])
    return graph


@settings(max_examples=150)
@given(graphs(), st.integers(1, 4), LINKS)
def test_chain_equals_brute_force(graph, stages, link):
    stages = min(stages, len(graph))
    best = best_ms(problem_of(graph, stages, link), contiguous(len(graph), stages))
    solution = solve(graph, stages=stages, method="chain", link=link, prefer_modules=0)
    assert solution.bottleneck_ms == pytest.approx(best)
    assert set(solution.stage_of.values()) == set(range(stages))


@settings(max_examples=60)
@given(graphs(), st.integers(2, 3), LINKS)
def test_bound_is_never_above_the_best_of_all_placements(graph, stages, link):
    best = best_ms(problem_of(graph, stages, link), all_ordered(graph, stages))
    solution = solve(graph, stages=stages, link=link, prefer_modules=0)
    assert solution.lower_bound_ms <= best * (1 + 1e-9)
    if solution.optimal:
        assert solution.bottleneck_ms == pytest.approx(best)


@settings(max_examples=40)
@given(graphs(), st.integers(2, 3), LINKS, st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_so_it_is_with_one_micro_batch_of_a_synchronous_step(graph, stages, link, schedule):
    """Whose score is the whole step, not the slowest stage."""
    best = best_ms(problem_of(graph, stages, link), all_ordered(graph, stages))
    solution = solve(
        graph, stages=stages, link=link, prefer_modules=0, schedule=schedule, micro_batches=1
    )
    assert solution.lower_bound_ms <= best * (1 + 1e-9)


@settings(max_examples=100)
@given(graphs(), LINKS, st.booleans())
def test_columns_of_the_recurrence_equal_the_evaluator(graph, link, is_tied):
    for node in list(graph)[::2] if is_tied else ():
        graph.nodes[node].update(parameters={"tied": 100}, frozen={"still": 7, str(node): 2})
    costs = with_exchanges(costs_of(graph, link), 8, link)
    num_groups = len(costs.groups)
    for end, sums in interval_sums(costs):
        for start in range(end):
            where = [0 if i < start else 1 if i < end else 2 for i in range(num_groups)]
            expected = stage_sums(costs, where, 3)[1]
            for field in SEARCHED:
                found, wanted = (getattr(of, field.name) for of in (sums[start], expected))
                if field.name == "tied_bytes" and wanted > 100:  # an interval knows of two holders
                    wanted = 100
                assert found == pytest.approx(wanted), field.name


@settings(max_examples=60)
@given(graphs(), st.integers(1, 4), LINKS)
def test_even_split_is_never_better_than_chain(graph, stages, link):
    stages = min(stages, len(graph))
    chain = solve(graph, stages=stages, method="chain", link=link, prefer_modules=0)
    even = solve(graph, stages=stages, method="uniform", link=link)
    assert even.bottleneck_ms >= chain.bottleneck_ms * (1 - 1e-12)
    assert chain.even_split_ms == pytest.approx(even.bottleneck_ms)


def test_evaluator_pays_a_value_once_a_stage():
    graph = chain_graph(1, 1, 1, 1, sizes=(1000, 10, 10, 10))
    graph.add_edge("n0", "n2")
    graph.add_edge("n0", "n3")
    problem = problem_of(graph, 3, Link(bytes_per_s=1e6))
    first, second, third = evaluated(problem, [0, 1, 2, 2]).stages
    assert first.send_ms == pytest.approx(1.0)  # n0, once for both readers
    assert second.receive_ms == pytest.approx(1.0)
    assert third.receive_ms == pytest.approx(1.0 + 0.01)  # n0 once, n1
    assert third.load_ms == pytest.approx(3.01)


def test_evaluator_that_forgets_transfers_would_choose_another_cut():
    """Negative control: with free transfers the balanced cut wins, with real ones it loses."""
    graph = chain_graph(4, 3, 3, 2, sizes=(1, 10_000, 1, 1))
    free = solve(graph, stages=2, prefer_modules=0)
    real = solve(graph, stages=2, link=Link(bytes_per_s=1e6), prefer_modules=0)
    assert list(free.stage_of.values()) == [0, 0, 1, 1]
    assert list(real.stage_of.values()) == [0, 1, 1, 1]
    assert real.bottleneck_ms == pytest.approx(8.001)


def test_one_order_has_a_proved_optimum():
    solution = solve(chain_graph(5, 3, 4, 4), stages=2)
    assert (solution.bottleneck_ms, solution.lower_bound_ms, solution.optimal) == (8, 8, True)
    assert solution.gap == 0


def blocks_graph(*work_ms: tuple[float, float]) -> nx.DiGraph:
    """Blocks of two groups each, which a cut may tear."""
    graph = nx.DiGraph(name="blocks")
    for block, pair in enumerate(work_ms):
        for part, work in enumerate(pair):
            graph.add_node(
                f"{block}.{part}",
                forward_ms=work,
                output_bytes=1,
                param_bytes=4,
                block=f"h.{block}",
                modules=(f"h.{block}",),
            )
    nx.add_path(graph, list(graph))
    return graph


def test_cuts_fall_between_blocks_when_that_is_cheap():
    graph = blocks_graph((10, 10), (10, 10.3), (10, 10))
    torn = solve(graph, stages=2, prefer_modules=0)
    assert torn.stage_of["1.0"] != torn.stage_of["1.1"]
    cheap = blocks_graph((10, 10), (10, 10.3), (0.1, 0.2), (10, 10), (10, 10))
    best = solve(cheap, stages=2, prefer_modules=0)
    tidy = solve(cheap, stages=2, prefer_modules=0.02)
    assert tidy.bottleneck_ms == pytest.approx(40.3)
    assert tidy.bottleneck_ms <= best.bottleneck_ms * 1.02
    assert tidy.stage_of["1.1"] == 0 and tidy.stage_of["2.0"] == 1


def test_module_granularity_never_tears_a_block():
    graph = blocks_graph((10, 10), (10, 10), (10, 10))
    solution = solve(graph, stages=2, granularity="module")
    assert solution.bottleneck_ms == 40
    assert solve(graph, stages=2, prefer_modules=0).bottleneck_ms == 30
    assert solution.lower_bound_ms <= 30


def test_even_split_counts_blocks_and_keeps_the_rest_with_them():
    graph = nx.DiGraph(name="gpt")
    graph.add_node("wte", forward_ms=1)
    for block in range(12):
        graph.add_node(f"h.{block}", forward_ms=1, block=f"h.{block}")
    graph.add_node("lm_head", forward_ms=20)
    nx.add_path(graph, list(graph))
    where = solve(graph, stages=4, method="uniform").stage_of
    assert [list(where.values()).count(stage) for stage in range(4)] == [4, 3, 3, 4]
    assert where["lm_head"] == 3
    assert solve(graph, stages=4).bottleneck_ms == 20


def test_more_stages_than_pieces_says_what_is_possible():
    with pytest.raises(PlanError, match="5 stages asked, but toy has 3 places to cut") as raised:
        solve(chain_graph(1, 1, 1, 1), stages=5)
    assert raised.value.cure == "At most 4 stages: --stages 4"
    with pytest.raises(PlanError, match="3 stages asked, but blocks has 1 place to cut") as raised:
        solve(blocks_graph((1, 1), (1, 1)), stages=3, granularity="module")
    assert raised.value.cure == "At most 2 stages, or --granularity op (4 operators)."


def test_a_wrong_method_gets_the_near_one():
    with pytest.raises(PlanError, match="Did you mean --method chain"):
        solve(chain_graph(1, 1), stages=2, method="chian")


@pytest.mark.parametrize("share", [-0.1, 2.0, float("nan")])
def test_a_share_to_give_up_is_between_nothing_and_all(share: float):
    with pytest.raises(PlanError, match="is not a number from 0 to 1"):
        solve(chain_graph(1, 1), stages=2, prefer_modules=share)


def test_a_cycle_is_named():
    graph = nx.DiGraph([("a", "b"), ("b", "a")])
    with pytest.raises(PlanError, match="cycle: a -> b"):
        solve(graph, stages=1)


def test_a_negative_time_is_refused():
    with pytest.raises(PlanError, match="forward_ms = -1"):
        solve(chain_graph(1, -1), stages=1)


def test_graph_plan_names_what_crosses_and_what_it_keeps():
    graph = chain_graph(1, 1, 1)
    graph.add_edge("n0", "n2")
    graph.nodes["n0"].update(parameters={"w": 100}, saved={"x": 7}, backward_ms=2)
    graph.nodes["n2"].update(parameters={"w": 100}, saved={"x": 7, "y": 1})
    plan = plan_graph(graph, stages=3)
    assert [crossing.name for crossing in plan.stages[0].sends] == ["n0"]
    assert plan.stages[0].sends[0].targets == (1, 2)
    assert plan.stages[2].activation_bytes == 8
    # 3 micro-batches in flight save 7 each and what they send, and their gradients are waited for;
    # one is done at a step, and an operation needs 1.
    in_flight = 3 * (7 + 1 + 1)
    assert plan.stages[0].peak_bytes == int(4 * 100 + 3 * 100 + in_flight * 2 / 3)
    assert plan.device_of_stage == (0, 1, 2)
    assert plan.bottleneck_ms == 3 and plan.optimal


def test_memory_counts_what_two_groups_share_once():
    graph = chain_graph(1, 1)
    for node in graph:
        graph.nodes[node].update(parameters={"w": 100}, saved={"x": 10}, transient_bytes=3)
    sums = stage_sums(costs_of(graph), [0, 0], 1)[0]
    setting = RankConfig((Device(),) * 2, optimizer="momentum")
    assert setting.memory_bytes(0, sums, recompute=False) == 3 * 100 + 2 * 10 + 3


def test_two_thousand_groups_are_planned_in_seconds():
    rng = np.random.default_rng(0)
    graph = chain_graph(*rng.uniform(0.1, 1, 2000))
    for index in range(0, 1990, 3):
        graph.add_edge(f"n{index}", f"n{index + 7}")
    start_s = time.process_time()  # of this process: other tests run beside it
    solution = solve(graph, stages=8, link=Link(0.01, 1e6))
    assert time.process_time() - start_s < 10
    assert solution.bottleneck_ms < 1.05 * solution.lower_bound_ms


def layers(*work: float) -> nx.DiGraph:
    """A chain of layers with parameters, each followed by an activation without any."""
    graph = chain_graph(*(ms for each in work for ms in (each, 0.5)))
    for index in range(0, len(graph), 2):
        graph.nodes[f"n{index}"]["param_bytes"] = 4
    return graph


@pytest.mark.parametrize("schedule", ["async-1f1b", "1f1b"])
def test_among_equal_plans_every_stage_has_parameters(schedule: str) -> None:
    for work in ((30, 3, 2, 1), (1, 2, 3, 30), (2, 30, 1, 3)):
        solution = solve(layers(*work), stages=4, schedule=schedule)
        stages = [solution.stage_of[f"n{index}"] for index in (0, 2, 4, 6)]
        assert stages == [0, 1, 2, 3], (work, solution.stage_of)
        assert solution.bottleneck_ms <= 30.5


def test_a_better_plan_keeps_its_stage_without_parameters() -> None:
    graph = chain_graph(5, 5, 5, 5)
    graph.nodes["n0"]["param_bytes"] = graph.nodes["n1"]["param_bytes"] = 4
    graph.nodes["n3"]["param_bytes"] = 4
    solution = solve(graph, stages=4)
    assert solution.bottleneck_ms == 5 and solution.optimal
