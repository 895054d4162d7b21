"""Plans of several stages per rank: brute force, other plans, memory, and their reports."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement
from asyncpipe.partitioner.planning.cluster import make_setting
from asyncpipe.partitioner.planning.interleaved import on_ranks, rank_of_stage_in
from asyncpipe.partitioner.planning.makespan import with_borders_moved
from asyncpipe.partitioner.planning.planner import choose_stages, other_ways, plan_graph
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.planning.step_time import (
    LITTLE,
    CriticalPath,
    StepTimer,
    schedule_of,
    step_of,
)
from asyncpipe.partitioner.solvers import METHODS
from asyncpipe.runtime.config.segments import make_segment
from asyncpipe.runtime.errors import AsyncPipeError, PlanError
from asyncpipe.runtime.plan.forecast import compared_schedules, forecast_one_step, forecast_step
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.schedule.builders import AUTO, SYNCHRONOUS, VIRTUAL, make_schedule
from asyncpipe.runtime.schedule.schedule import Action, one_step
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.models.placements import LINKS, contiguous, problem_of
from asyncpipe.tests.support.models.small_schedules import ranks_for
from asyncpipe.tests.support.run_configs import run_config

SEVERAL = ["interleaved", "looped-bfs", "zb-v"]
MS = st.integers(1, 9)


def row(*pairs_ms: tuple[float, float], **each: float) -> nx.DiGraph:
    """Groups one after the other with these forward and backward times."""
    graph = nx.DiGraph(name="row")
    for index, (forward_ms, backward_ms) in enumerate(pairs_ms):
        costs = {"forward_ms": forward_ms, "backward_ms": backward_ms, "output_bytes": 100}
        graph.add_node(index, **costs, **each)
    nx.add_path(graph, range(len(pairs_ms)))
    return graph


def headed_row(groups: int, seed: int = 0) -> nx.DiGraph:
    """A row whose last group is heavy, as the head of a language model is."""
    times_ms = np.random.default_rng(seed).uniform(0.5, 2, groups)
    times_ms[-1] = times_ms.sum() / 4
    return row(*((ms, 2 * ms) for ms in times_ms.tolist()))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *VIRTUAL])
def test_one_pass_over_the_actions_finds_what_the_simulator_does(name: str) -> None:
    rng = np.random.default_rng(3)
    for stages in range(1, 6):
        edges = {(j, j + 1) for j in range(stages - 1)} | (
            {(0, stages - 1)} if stages > 2 else set()
        )
        shared = [(0, stages - 1)] if stages > 1 else []
        for ranks in ranks_for(name, stages):
            made = make_schedule(name, stages=stages, micro_batches=5, ranks=ranks)
            path = CriticalPath(made, edges, edges, shared)
            for _ in range(3):
                forward, backward, step = (tuple(rng.uniform(1, 9, stages)) for _ in range(3))
                costs = ActionCosts(
                    forward, backward, step, dict.fromkeys(edges, rng.uniform(0, 3)),
                    tuple(np.array(backward) * rng.uniform(0, 1)),
                )  # fmt: skip
                timeline = simulate(made, costs, edges, grad_edges=edges, shared_stages=shared)
                assert path.end_ms(costs) == pytest.approx(timeline.makespan_ms)
                assert path.period_ms(costs) <= timeline.makespan_ms * (1 + 1e-9)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(MS, MS), min_size=5, max_size=7),
    LINKS,
    st.sampled_from(SEVERAL),
    st.integers(1, 6),
)
def test_no_cut_steps_faster_than_the_plan_nor_any_than_the_bound(
    pairs_ms: list[tuple[int, int]], link: Link, schedule: str, micro_batches: int
) -> None:
    graph = row(*pairs_ms)
    running = {"schedule": schedule, "ranks": 2, "micro_batches": micro_batches}
    solution = solve(graph, stages=4, link=link, prefer_modules=0, **running)
    setting = make_setting(4, overlap=link.overlap, **running)
    problem = problem_of(graph, 4, link, setting)
    at = rank_of_stage_in(problem, 4)
    steps_ms = [
        step_of(problem, on_ranks(Placement(tuple(stage_of)), at)).step_ms
        for stage_of in contiguous(len(graph), 4)
    ]
    assert solution.step_ms == pytest.approx(min(steps_ms))
    assert solution.step_bound_ms <= min(steps_ms) * (1 + 1e-9)
    assert [ranks[0] for ranks in solution.ranks_of_stage] == list(at)


@pytest.mark.parametrize("schedule", [*SEVERAL, AUTO])
def test_a_plan_is_never_worse_than_those_it_begins_with(schedule: str) -> None:
    graph = headed_row(40)
    running = {"schedule": schedule, "ranks": 2, "micro_batches": 6}
    made = solve(graph, stages=4, prefer_modules=0, **running)
    problem = problem_of(graph, 4, None, make_setting(4, **running))
    at = rank_of_stage_in(problem, 4)
    unfolded = replace(problem, setting=problem.setting.at(at))
    for method in ("uniform", "chain"):
        other = step_of(problem, on_ranks(METHODS[method](unfolded), at))
        assert made.step_ms <= other.step_ms * (1 + 1e-9)
    halves = solve(graph, stages=2, schedule="1f1b", micro_batches=6, prefer_modules=0)
    assert made.step_ms < halves.step_ms  # the bubble is smaller
    assert made.step_ms >= made.step_bound_ms


def test_a_heavy_stage_is_made_up_for_by_light_ones_of_its_rank() -> None:
    made = solve(headed_row(40), stages=4, schedule="interleaved", ranks=2, prefer_modules=0)
    even = max(made.even_split.rank_ms) / min(made.even_split.rank_ms)
    assert max(made.evaluation.rank_ms) / min(made.evaluation.rank_ms) < even


def test_more_cuts_than_ranks_may_be_demanded() -> None:
    graph = headed_row(12)
    demanded = [str(list(graph)[at]) for at in (3, 5, 8)]
    made = solve(
        graph, stages=6, schedule="interleaved", ranks=2, prefer_modules=0, cut_before=demanded
    )
    at = list(made.stage_of.values())
    assert all(at[cut] == at[cut - 1] + 1 for cut in (3, 5, 8))


def test_a_computed_schedule_is_planned_at_least_as_well_as_one_with_a_name() -> None:
    graph = headed_row(30, seed=2)
    steps = {
        name: solve(
            graph, stages=4, schedule=name, ranks=2, micro_batches=5, prefer_modules=0
        ).step_ms
        for name in ("interleaved", AUTO)
    }
    assert steps[AUTO] <= steps["interleaved"] * (1 + 1e-9)


def test_moved_borders_are_timed_as_they_are_evaluated() -> None:
    """The quick sums of the search, and those of the evaluator, with and without recomputation."""
    for recompute in ("none", "all"):
        running = {"schedule": "interleaved", "ranks": 2, "recompute": recompute}
        problem = problem_of(headed_row(24), 4, Link(0.1, 1e5), make_setting(4, **running))
        at = rank_of_stage_in(problem, 4)
        unfolded = replace(problem, setting=problem.setting.at(at))
        placement = on_ranks(METHODS["uniform"](unfolded), at)
        timer = StepTimer(problem, schedule_of(problem, step_of(problem, placement)))
        exact = timer.step(placement)
        assert exact.step_ms == pytest.approx(step_of(problem, placement).step_ms)
        assert timer.shorter(placement, exact.step_ms * (1 - 1e-6)) is None
        assert timer.shorter(placement, exact.step_ms * (1 + 1e-6)) == exact
        moved = with_borders_moved(timer, exact)
        assert moved.step_ms < exact.step_ms
        assert moved.step_ms == pytest.approx(step_of(problem, moved.placement).step_ms)


def fat_row() -> nx.DiGraph:
    return row(*[(1.0, 2.0)] * 8, saved_bytes=1_000, param_bytes=100)


def test_the_stages_of_a_rank_share_its_memory() -> None:
    running = {"schedule": "interleaved", "ranks": 2, "micro_batches": 4, "optimizer": "sgd"}
    free = solve(fat_row(), stages=4, recompute="none", **running)
    made = make_schedule("interleaved", stages=4, micro_batches=4, ranks=2)
    assert tuple(load.in_flight for load in free.loads) == made.in_flight
    for rank in (0, 1):
        own = [load for stage, load in enumerate(free.loads) if stage % 2 == rank]
        stored = sum(load.peak_bytes - load.transient_bytes for load in own)
        beside = max(load.transient_bytes for load in own)
        assert free.evaluation.rank_bytes[rank] == stored + beside
    most = max(free.evaluation.rank_bytes)
    assert most > max(load.peak_bytes for load in free.loads)
    tight = {**running, "memory_limit": int(0.6 * most)}
    with pytest.raises(PlanError):
        solve(fat_row(), stages=4, recompute="none", **tight)
    squeezed = solve(fat_row(), stages=4, recompute="auto", **tight)
    assert any(load.recomputes for load in squeezed.loads)
    assert max(squeezed.evaluation.rank_bytes) <= 0.6 * most


def test_only_placements_that_fit_and_are_shorter_are_taken_where_memory_is_scarce() -> None:
    running = {"schedule": "1f1b", "micro_batches": 4, "optimizer": "sgd", "recompute": "auto"}
    problem = problem_of(fat_row(), 3, None, make_setting(3, **running, memory_limit=8_000))
    placements = [Placement(tuple(stage_of)) for stage_of in contiguous(8, 3)]
    timer = StepTimer(problem, schedule_of(problem, step_of(problem, placements[0])))
    steps = [timer.step(placement) for placement in placements]
    assert {step.evaluation.fits for step in steps} == {True, False}
    assert {step.evaluation.stages[0].recomputes for step in steps} == {True, False}
    for limit_ms in {step.step_ms for step in steps}:
        for placement, step in zip(placements, steps, strict=True):
            is_taken = step.evaluation.fits and step.step_ms < limit_ms
            assert timer.shorter(placement, limit_ms) == (step if is_taken else None)


def test_what_does_not_fit_on_the_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="4 stages on 2 ranks"):
        solve(fat_row(), stages=4, schedule="interleaved", ranks=2, memory_limit=2_000)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ranks": 2}, "async-1f1b has one stage per rank"),
        ({"ranks": 2, "schedule": "1f1b"}, "1f1b has one stage on every rank"),
        ({"ranks": 3, "schedule": "interleaved"}, "equally many stages on every rank"),
        ({"ranks": 8, "schedule": AUTO}, "4 stages cannot be on 8 ranks"),
        ({"ranks": 0, "schedule": "interleaved"}, "--ranks 0 is not a whole number"),
        ({"ranks": 2, "schedule": AUTO, "method": "mpipe"}, "cannot use --ranks"),
    ],
)
def test_ranks_that_cannot_be_are_told_in_one_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(AsyncPipeError, match=sentence) as raised:
        solve(headed_row(12), stages=4, **options)
    assert raised.value.cure


def test_a_schedule_of_several_stages_has_its_own_number_of_ranks() -> None:
    plan = plan_graph(headed_row(16), 4, schedule="zb-v")
    assert plan.device_of_stage == (0, 1, 1, 0)


def test_the_number_of_stages_is_chosen_for_the_ranks() -> None:
    many = row(*[(5.0, 10.0)] * 32)
    options = {"schedule": "interleaved", "ranks": 4, "micro_batches": 4}
    number = choose_stages(many, options)
    assert number > 4  # few micro-batches: the bubble is worth more than what actions take
    tiny = row(*[(0.005, 0.01)] * 32)
    assert choose_stages(tiny, options) == 4
    assert choose_stages(many, {**options, "schedule": "1f1b"}) == 4


def test_a_better_number_of_stages_a_rank_is_told() -> None:
    graph = row(*[(5.0, 10.0)] * 32)
    options = {"schedule": "1f1b", "micro_batches": 4}
    solution = solve(graph, stages=4, **options)
    (sentence,), candidates = other_ways(graph, solution, options)
    assert sentence.startswith("interleaved with 2 stages per rank would be ")
    assert [one.stages for one in candidates] == [8]
    assert candidates[0].step_ms < solution.step_ms


@pytest.mark.parametrize("schedule", [*SEVERAL, "zb-h1", AUTO])
def test_the_step_of_a_written_plan_is_the_one_that_the_runtime_foresees(schedule, tmp_path):
    ranks = 4 if schedule == "zb-h1" else 2
    folder = cut(CASES["mlp"], 4, tmp_path / "4p", schedule=schedule, micro_batches=4, ranks=ranks)
    plan = read_plan(folder)
    assert plan.setting.step_ms == pytest.approx(forecast_step(plan, schedule, 4).step_ms)
    assert len(set(plan.device_of_stage)) == len(plan.setting.ranks) == ranks
    for stage in plan.stages:
        assert stage.weight_ms <= stage.backward_ms * (1 + 1e-9)
    assert sum(stage.weight_ms for stage in plan.stages) > 0
    assert schedule in compared_schedules(plan)
    for name in compared_schedules(plan):
        assert 0 <= forecast_one_step(plan, name, 4).idle_share < 1


def test_what_is_put_off_counts_in_a_forecast(tmp_path) -> None:
    folder = cut(CASES["mlp"], 3, tmp_path / "3p", schedule="zb-h1", micro_batches=6)
    plan = read_plan(folder)
    nothing = replace(plan, stages=tuple(replace(stage, weight_ms=0.0) for stage in plan.stages))
    assert forecast_step(plan, "zb-h1", 6).step_ms < forecast_step(nothing, "zb-h1", 6).step_ms
    assert forecast_step(plan, "1f1b", 6).step_ms == forecast_step(nothing, "1f1b", 6).step_ms


def test_one_stage_a_rank_may_be_planned_for_a_schedule_of_several(tmp_path) -> None:
    folder = cut(CASES["mlp"], 2, tmp_path / "2p", schedule="interleaved", ranks=2)
    plan = read_plan(folder)
    assert forecast_step(plan, "interleaved", 8).timeline.ranks == 2
    assert make_segment(
        plan, run_config(schedule="interleaved", micro_batches=8), steps=1
    ).rank_of_stage == (0, 1)
    assert forecast_step(plan, "looped-bfs", 8).timeline.ranks == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_more_stages_a_rank_are_never_worse_than_fewer(seed: int) -> None:
    """Also where the best there is has fewer: they are then cut further on their ranks."""
    graph = headed_row(20, seed)
    steps_ms = [
        solve(graph, stages=stages, schedule=AUTO, ranks=2, micro_batches=3).step_ms
        for stages in (2, 4, 8)
    ]
    assert steps_ms[1] <= steps_ms[0] * (1 + 1e-9)
    assert steps_ms[2] <= steps_ms[1] * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_cut_and_no_ranks_step_much_faster_than_the_plan_for_a_computed_schedule(
    seed: int,
) -> None:
    graph = headed_row(7, seed)
    running = {"schedule": AUTO, "ranks": 2, "micro_batches": 2}
    found = solve(graph, stages=4, prefer_modules=0, **running)
    problem = problem_of(graph, 4, None, make_setting(4, **running))
    best_ms = min(
        step_of(problem, on_ranks(Placement(tuple(stage_of)), at), effort=LITTLE).step_ms
        for stage_of in contiguous(len(graph), 4)
        for at in product((0, 1), repeat=4)
        if len(set(at)) == 2
    )
    assert found.step_bound_ms <= found.step_ms * (1 + 1e-9)
    assert found.step_ms <= best_ms * 1.02


def test_a_schedule_in_which_ranks_wait_for_each_other_times_no_placement() -> None:
    problem = problem_of(headed_row(6), 2, None, make_setting(2, schedule=AUTO, micro_batches=1))
    row_of = {kind: Action(1, kind, 0) for kind in ("F", "B")}
    stuck = one_step(
        AUTO, [[Action(0, "F", 0), Action(0, "B", 0)], [row_of["B"], row_of["F"]]], [0, 1]
    )
    timer = StepTimer(problem, stuck)
    placement = Placement((0, 0, 0, 1, 1, 1))
    assert timer.step(placement).step_ms == math.inf
    assert timer.shorter(placement, 1e9) is None
