"""Synchronous plans: the step of the simulator, its bound, and what a search makes of both."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.cluster import make_setting
from asyncpipe.partitioner.planning.planner import plan_graph
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.planning.step_time import step_of
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.models.placements import (
    LINKS,
    all_ordered,
    contiguous,
    graphs,
    problem_of,
)

SYNCHRONOUS = st.sampled_from(["gpipe", "1f1b", "seq"])


def chain(*pairs_ms: tuple[float, float]) -> nx.DiGraph:
    """Groups in a row with these forward and backward times; all cuts carry the same."""
    graph = nx.DiGraph(name="chain")
    for index, (forward_ms, backward_ms) in enumerate(pairs_ms):
        graph.add_node(index, forward_ms=forward_ms, backward_ms=backward_ms, output_bytes=100)
    nx.add_path(graph, range(len(pairs_ms)))
    return graph


@pytest.mark.parametrize("prefer_modules", [0.0, 0.02])
def test_of_plans_with_equal_steps_the_one_with_the_smallest_bottleneck_is_taken(
    prefer_modules: float,
) -> None:
    """With 4 micro-batches stages of 3, 2, 2 and 1 groups are as fast as even ones."""
    graph = chain(*[(1.0, 2.0)] * 8)
    plan = solve(graph, stages=4, schedule="1f1b", micro_batches=4, prefer_modules=prefer_modules)
    assert (plan.step_ms, plan.bottleneck_ms) == (42.0, 6.0)


def test_even_stages_may_cost_a_quarter_of_what_tidy_cuts_may() -> None:
    later = [(6.5, 12.9), (6.5, 12.9), (6.3, 13.4), (6.1, 13.9), (6.8, 12.9)]
    graph = chain((7.1, 12.9), (6.7, 12.9), (6.8, 12.9), *later)
    exact, level = (
        solve(graph, stages=4, schedule="1f1b", micro_batches=4, prefer_modules=share)
        for share in (0.0, 0.02)
    )
    assert exact.step_ms < level.step_ms <= 1.005 * exact.step_ms
    assert level.bottleneck_ms < 0.7 * exact.bottleneck_ms


@settings(max_examples=40)
@given(graphs(most=5), st.integers(1, 4), LINKS, SYNCHRONOUS, st.integers(1, 8))
def test_no_plan_steps_faster_than_the_bound_and_no_cut_of_the_order_than_the_plan(
    graph, stages, link, schedule, micro_batches
):
    stages = min(stages, len(graph))
    setting = make_setting(
        stages, overlap=link.overlap, schedule=schedule, micro_batches=micro_batches
    )
    problem = problem_of(graph, stages, link, setting)
    solution = solve(graph, stages=stages, link=link, setting=setting, prefer_modules=0)
    steps_ms = [
        step_of(problem, Placement(stage_of)).step_ms for stage_of in all_ordered(graph, stages)
    ]
    assert solution.step_bound_ms <= min(steps_ms) * (1 + 1e-9)
    in_order_ms = min(
        step_of(problem, Placement(tuple(stage_of))).step_ms
        for stage_of in contiguous(len(graph), stages)
    )
    assert solution.step_ms <= in_order_ms * (1 + 1e-9)
    if solution.optimal:
        assert solution.step_ms == pytest.approx(min(steps_ms))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=7),
    st.integers(2, 4),
    LINKS,
    SYNCHRONOUS,
    st.integers(1, 8),
)
def test_in_a_row_the_score_of_every_cut_is_at_most_its_simulated_step(
    pairs_ms, stages, link, schedule, micro_batches
):
    setting = make_setting(
        stages, overlap=link.overlap, schedule=schedule, micro_batches=micro_batches
    )
    graph = chain(*pairs_ms)
    problem = problem_of(graph, stages, link, setting)
    for stage_of in contiguous(len(graph), stages):
        step = step_of(problem, Placement(tuple(stage_of)))
        assert step.evaluation.score_ms <= step.step_ms * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "seq"])
def test_a_plan_for_a_schedule_is_never_slower_than_the_asynchronous_plan(schedule):
    rng = np.random.default_rng(1)
    gains = []
    for _ in range(6):
        graph = chain(*zip(rng.uniform(1, 9, 40), rng.uniform(1, 19, 40), strict=True))
        running = {"schedule": schedule, "micro_batches": 4}
        link = Link(0.1, 1e6)
        free = solve(graph, stages=4, link=link, prefer_modules=0)
        problem = problem_of(graph, 4, link, make_setting(4, **running))
        of_free_ms = step_of(problem, free.placement).step_ms
        made = solve(graph, stages=4, link=link, prefer_modules=0, **running)
        assert made.step_ms <= of_free_ms * (1 + 1e-12)
        assert made.step_ms >= made.step_bound_ms
        gains.append(of_free_ms / made.step_ms)
    assert max(gains) > 1.0005 or schedule == "seq"


def test_equal_stages_in_a_row_are_proved_optimal_for_gpipe_and_1f1b():
    for schedule in ("gpipe", "1f1b"):
        plan = plan_graph(chain(*[(1.0, 2.0)] * 8), 4, schedule=schedule, micro_batches=8)
        assert plan.step_ms == pytest.approx((8 + 4 - 1) * 6)
        assert plan.optimal and plan.gap == pytest.approx(0)
        assert plan.step_bound_ms == pytest.approx(plan.step_ms)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_leads_nowhere_leaves_the_proof_as_it_is(schedule):
    """Views that each reader makes again are read by nobody."""
    graph = chain(*[(1.0, 2.0)] * 8)
    for index in range(8):
        graph.add_node(f"view {index}", forward_ms=0.01, backward_ms=0.0)
        graph.add_edge(index, f"view {index}")
    plan = plan_graph(graph, 4, schedule=schedule, micro_batches=8, prefer_modules=0)
    assert plan.gap == pytest.approx(0, abs=0.02)


def test_stages_side_by_side_are_within_the_bound():
    """Two branches that need not wait for each other: fewer steps to fill than stages."""
    graph = nx.DiGraph(name="fork")
    for name in "sabt":
        graph.add_node(name, forward_ms=4.0, backward_ms=8.0, output_bytes=1)
    graph.add_edges_from([("s", "a"), ("s", "b"), ("a", "t"), ("b", "t")])
    plan = plan_graph(graph, 4, schedule="gpipe", micro_batches=2)
    assert plan.step_ms == pytest.approx(12 * (3 + 1))  # not 12 * (4 + 1)
    assert plan.step_bound_ms <= plan.step_ms


def test_a_bound_that_takes_branches_for_a_row_would_be_wrong():
    """Negative control: the score alone is above the step of the fork."""
    graph = nx.DiGraph(name="fork")
    for name in "sabt":
        graph.add_node(name, forward_ms=4.0, backward_ms=8.0, output_bytes=1)
    graph.add_edges_from([("s", "a"), ("s", "b"), ("a", "t"), ("b", "t")])
    problem = problem_of(graph, 4, setting=make_setting(4, schedule="gpipe", micro_batches=2))
    step = step_of(problem, Placement((0, 1, 2, 3)))
    assert step.evaluation.score_ms > step.step_ms


def tied_graph(tied_bytes: int) -> nx.DiGraph:
    """An embedding and a head of one parameter at the two ends of a row of blocks."""
    graph = chain(*[(2.0, 4.0)] * 6)
    for end in (0, 5):
        graph.nodes[end]["parameters"] = {"wte": tied_bytes}
    return graph


def test_a_tied_parameter_is_exchanged_once_a_step():
    link = Link(bytes_per_s=1e6)
    problem = problem_of(tied_graph(0), 2, link)
    untied = solve(tied_graph(0), stages=2, link=link, micro_batches=8)
    tied = solve(tied_graph(8_000), stages=2, link=link, micro_batches=8)
    more_ms = tied.bottleneck_ms - untied.bottleneck_ms
    assert problem.costs.link == link
    assert more_ms == pytest.approx(2 * 8.0 / 8)  # 8 ms there and back, shared by 8
    step = solve(tied_graph(8_000), stages=2, link=link, schedule="gpipe", micro_batches=8)
    without = solve(tied_graph(0), stages=2, link=link, schedule="gpipe", micro_batches=8)
    assert step.step_ms == pytest.approx(without.step_ms + 2 * 8.0)


@pytest.mark.parametrize("running", [{}, {"schedule": "1f1b"}, {"schedule": "gpipe"}])
def test_over_a_slow_link_one_stage_holds_both_ends_of_a_tie(running):
    """The head reads the embedding's parameter; a stage with both also has the block between."""
    graph = nx.DiGraph(name="tied")
    for name in ("embed", "block", "head", "other"):
        graph.add_node(name, forward_ms=2.0, backward_ms=4.0, output_bytes=10)
    graph.add_edge("embed", "block")
    graph.add_edge("block", "head")
    graph.add_edge("head", "other")
    for name in ("embed", "head"):
        graph.nodes[name]["parameters"] = {"w": 100_000}
    slow, fast = Link(bytes_per_s=1e5), Link(bytes_per_s=1e12)
    over_fast = solve(graph, stages=2, link=fast, prefer_modules=0, **running).stage_of
    over_slow = solve(graph, stages=2, link=slow, prefer_modules=0, **running).stage_of
    assert over_fast["embed"] != over_fast["head"]
    assert over_slow["embed"] == over_slow["head"]


def test_several_micro_batches_change_where_a_synchronous_plan_is_cut():
    """With one micro-batch every cut steps equally fast; with many the slowest stage counts."""
    graph = chain((1, 1), (5, 5), (1, 1), (1, 1))
    steps = {
        micro_batches: plan_graph(graph, 2, schedule="gpipe", micro_batches=micro_batches).step_ms
        for micro_batches in (1, 8)
    }
    assert steps[1] == pytest.approx(16)
    assert steps[8] == pytest.approx(16 + 7 * 12)


def test_a_demanded_cut_is_kept_by_the_search_for_a_short_step():
    graph = chain(*[(1.0, 2.0)] * 6)
    solution = solve(graph, stages=2, schedule="1f1b", cut_before=["5"], prefer_modules=0)
    assert list(solution.stage_of.values()) == [0, 0, 0, 0, 0, 1]
    assert solution.step_bound_ms < solution.step_ms


def test_replicas_share_the_micro_batches_of_a_simulated_step():
    graph = chain((2, 2), (2, 2))
    setting = RankConfig((Device(),) * 3, schedule="gpipe", micro_batches=8)
    problem = replace(problem_of(graph, 3, setting=setting))
    alone = step_of(problem, Placement((0, 1), ranks=((0,), (1,)))).step_ms
    shared = step_of(problem, Placement((0, 1), ranks=((0,), (1, 2)))).step_ms
    assert shared < alone


def test_single_has_nothing_to_balance():
    with pytest.raises(PlanError, match="single runs all 2 stages in one process") as raised:
        make_setting(2, schedule="single")
    assert "1f1b" in raised.value.cure


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_step_that_a_plan_has_is_the_one_that_the_runtime_foresees(schedule, tmp_path):
    folder = cut(CASES["mlp"], 3, tmp_path / "3p", schedule=schedule, micro_batches=6)
    plan = read_plan(folder)
    foreseen = forecast_step(plan, schedule, 6)
    assert plan.setting.step_ms == pytest.approx(foreseen.step_ms)
    assert plan.gap == pytest.approx(plan.setting.step_ms / plan.setting.step_bound_ms - 1)
    talk_ms = sum(stage.forward_talk_ms + stage.backward_talk_ms for stage in plan.stages)
    assert talk_ms > 0
