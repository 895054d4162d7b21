"""Explanations: the cost given for another plan is the cost of that plan when it is made."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement, evaluate
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.explain import (
    explain_bound,
    explain_changes,
    explain_micro_batches,
)
from asyncpipe.partitioner.planning.explain_cuts import explain_cuts, moved_to, moves
from asyncpipe.partitioner.planning.solve import Solution, solve
from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.formatting import write_bytes, write_ms, write_share
from asyncpipe.runtime.plan.findings import Finding
from asyncpipe.runtime.plan.forecast import forecast_one_step
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.models.placements import LINKS, graphs, problem_of

LINK = Link(latency_ms=0.1, bytes_per_s=1e4)


def blocks(*works: tuple[float, ...], size: int = 10) -> nx.DiGraph:
    """A chain of blocks; the numbers are the forward times of their operations."""
    graph = nx.DiGraph(name="blocks")
    names = []
    for block, work in enumerate(works):
        for part, forward_ms in enumerate(work):
            names.append(f"{block}.{part}")
            graph.add_node(
                names[-1],
                forward_ms=forward_ms,
                backward_ms=2 * forward_ms,
                output_bytes=size,
                saved_bytes=100,
                param_bytes=4,
                block=f"block {block}",
                modules=[f"block {block}"],
            )
    nx.add_path(graph, names)
    return graph


def changes(graph: nx.DiGraph, solution: Solution, link: Link = LINK) -> dict[str, Finding]:
    found = explain_changes(graph, solution, link, partial(solve, prefer_modules=0.0))
    return {finding.about: finding for finding in found}


ABOUT = "number of micro-batches with"
TOY = blocks((2, 1), (3, 1), (1, 2), (4,), (1, 1))


def toy(stages: int = 3, **setting: object) -> Solution:
    chosen = RankConfig((Device(),) * stages, **setting)  # type: ignore[arg-type]
    return solve(TOY, stages=stages, link=LINK, setting=chosen, prefer_modules=0.0)


@settings(max_examples=60)
@given(graphs(), st.integers(1, 3), LINKS)
def test_stated_plans_of_more_and_fewer_devices_are_those_that_solve_finds(graph, stages, link):
    stages = min(stages, len(graph))
    solution = solve(graph, stages=stages, link=link, prefer_modules=0.0)
    found = changes(graph, solution, link)
    for other, about in (
        (stages + 1, f"one more device ({stages + 1})"),
        (stages - 1, f"one stage fewer ({stages - 1} stage{'s' if stages != 2 else ''})"),
    ):
        if other > len(graph):
            assert found[about].text.startswith("not possible: ")
        elif other:
            setting = RankConfig((Device(),) * other, overlap=link.overlap)
            best = solve(graph, stages=other, link=link, setting=setting, prefer_modules=0.0)
            assert found[about].bottleneck_ms == pytest.approx(best.bottleneck_ms, abs=1e-6)
            assert write_ms(best.bottleneck_ms) in found[about].text
        else:
            assert about not in found


@pytest.mark.parametrize("factor", [2, 10])
def test_stated_plans_of_faster_links_are_those_that_solve_finds(factor):
    faster = Link(LINK.latency_ms, LINK.bytes_per_s * factor)
    best = solve(TOY, stages=3, link=faster, prefer_modules=0.0)
    found = changes(TOY, toy())[f"{factor}× faster links"]
    assert found.bottleneck_ms == pytest.approx(best.bottleneck_ms)
    assert best.bottleneck_ms < toy().bottleneck_ms


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_ranks_of_several_stages_have_as_many_in_other_settings(schedule: str) -> None:
    def best(stages: int, ranks: int, link: Link = LINK) -> float:
        running = {"schedule": schedule, "ranks": ranks, "micro_batches": 6}
        return solve(graph, stages=stages, link=link, prefer_modules=0.0, **running).step_ms

    graph = blocks((2, 1), (3, 1), (1, 2), (4, 1), (1, 1))
    running = {"schedule": schedule, "ranks": 2, "micro_batches": 6}
    solution = solve(graph, stages=4, link=LINK, prefer_modules=0.0, **running)
    _, bound, proof = explain_bound(solution)
    assert "no plan on 2 ranks can be faster" in bound.text and "bottleneck rank" in proof.text
    found = changes(graph, solution)
    faster = Link(LINK.latency_ms, 10 * LINK.bytes_per_s)
    for about, step_ms in {
        "3 devices with 6 stages": best(6, 3),
        "1 device with 2 stages": best(2, 1),
        "10× faster links": best(4, 2, faster),
    }.items():
        assert f"{write_ms(solution.step_ms)} → {write_ms(step_ms)}" in found[about].text
        assert found[about].text.startswith("bottleneck rank")


def test_a_plan_that_was_the_best_of_all_methods_changes_by_its_own_method() -> None:
    solution = toy()
    asked = []

    def resolve(graph: nx.DiGraph, **given: Any) -> Solution:
        asked.append(given["method"])
        return solve(graph, prefer_modules=0.0, **given)

    explain_changes(TOY, replace(solution, method="uniform"), LINK, resolve)
    assert set(asked) == {"uniform"}


def test_a_schedule_that_does_not_run_on_other_numbers_of_ranks_is_told_to_be_impossible() -> None:
    def resolve(graph: nx.DiGraph, **given: Any) -> Solution:
        raise ScheduleError("zb-v has two stages on every rank.", "Partition again.")

    found = explain_changes(TOY, toy(), LINK, resolve)
    assert {one.text for one in found} == {"not possible: zb-v has two stages on every rank."}


def test_links_of_a_device_file_become_faster_too():
    links = (Link(0.1, 1e3), Link(0.1, 1e4))
    faster = tuple(Link(link.latency_ms, 2 * link.bytes_per_s) for link in links)
    found = changes(TOY, toy(links=links))["2× faster links"]
    assert found.bottleneck_ms == pytest.approx(toy(links=faster).bottleneck_ms)


def test_known_transfer_times_are_divided_where_links_become_faster():
    graph = nx.DiGraph()
    graph.add_node("a", forward_ms=4.0)
    graph.add_node("b", forward_ms=4.0)
    graph.add_edge("a", "b", tensors={"x": 8}, grads={}, transfer_ms={"x": 2.0})
    found = changes(graph, solve(graph, stages=2))
    assert found["2× faster links"].bottleneck_ms == pytest.approx(5.0)
    assert found["10× faster links"].bottleneck_ms == pytest.approx(4.2)
    assert graph.edges["a", "b"]["transfer_ms"] == {"x": 2.0}


def test_recomputation_is_said_to_save_the_memory_and_cost_the_time_that_it_does():
    solution, again = toy(), toy(recompute="all")
    found = changes(TOY, solution)[
        "recomputation in every stage with several micro-batches in flight"
    ]
    peaks = [max(one.evaluation.rank_bytes) for one in (solution, again)]
    assert peaks[1] < peaks[0] and again.bottleneck_ms > solution.bottleneck_ms
    assert found.bottleneck_ms == pytest.approx(again.bottleneck_ms)
    assert f"{write_bytes(peaks[0])} → {write_bytes(peaks[1])}" in found.text
    assert "no recomputation" in changes(TOY, again)


@settings(max_examples=80)
@given(graphs(), st.integers(2, 4), LINKS)
def test_moved_cuts_are_legal_and_cost_what_is_said(graph, stages, link):
    stages = min(stages, len(graph))
    solution = solve(graph, stages=stages, link=link, prefer_modules=0.0)
    problem = problem_of(graph, stages, link)
    said = [finding for finding in explain_cuts(solution) if finding.bottleneck_ms]
    costed = []
    for stage in range(stages - 1):
        for _, groups, target in moves(problem.costs, solution.placement, stage):
            moved = moved_to(solution.placement, groups, target)
            if moved is not None:
                at = moved.stage_of
                assert all(at[source] <= at[reader] for source, reader in problem.costs.edges)
                assert set(at) == set(range(stages))
                costed.append(evaluate(problem, moved).bottleneck_ms)
    assert [finding.bottleneck_ms for finding in said] == pytest.approx(
        [cost for cost in costed if cost], abs=1e-6
    )


def test_a_cut_is_explained_by_both_neighbours_the_bytes_and_the_block_that_would_be_torn():
    graph = blocks((2, 2), (2, 2), size=1000)
    solution = solve(graph, stages=2, link=Link(bytes_per_s=1e6), prefer_modules=0.0)
    found = explain_cuts(solution)
    assert [finding.text for finding in found] == [
        "after 0.1, before 1.0: 1 tensor crosses: 1,000 bytes forward, 1,000 bytes backward, "
        "2.00 ms.",
        "one operation earlier (moves 0.1 to stage 1): stage 0 14.00 ms → 8.00 ms; stage 1 14.00 "
        "ms → 20.00 ms; the bottleneck stage takes 6.00 ms more (43%), splits block 0.",
        "one operation later (moves 1.0 to stage 0): stage 0 14.00 ms → 20.00 ms; stage 1 14.00 "
        "ms → 8.00 ms; the bottleneck stage takes 6.00 ms more (43%), splits block 1.",
    ]


def test_more_bytes_and_a_lack_of_memory_are_named():
    graph = blocks((3,), (4,), (1,), (6.5,), size=10)
    graph.nodes["2.0"]["output_bytes"] = 4000
    free = solve(graph, stages=2, link=LINK, prefer_modules=0.0)
    room = max(free.evaluation.rank_bytes)
    tight = RankConfig((Device(memory_bytes=room),) * 2)
    solution = solve(graph, stages=2, link=LINK, setting=tight, prefer_modules=0.0)
    found = explain_cuts(solution)
    later = next(finding for finding in found if "one operation later" in finding.text)
    assert "sends 7.8 KiB both ways instead of 20 bytes" in later.text
    assert "does not fit into memory" in later.text


def bound_of(*works: float, stages: int) -> str:
    graph = blocks(*((work,) for work in works), size=0)
    solution = solve(graph, stages=stages, prefer_modules=0.0)
    return explain_bound(solution)[1].text


def test_the_bound_that_decides_is_named():
    assert "limited by the equal share" in bound_of(1, 1, 1, 1, stages=2)
    assert "limited by 2.0: one operation is never split" in bound_of(1, 1, 5, stages=3)
    assert "limited by grouping constraints" in bound_of(2, 3, 2, stages=2)
    assert "one stage does all the work" in bound_of(1, 2, stages=1)
    assert "no plan with 3 stages can be faster than 15.00 ms" in bound_of(1, 1, 5, stages=3)


def test_the_slowest_rank_is_explained_with_all_its_stages():
    graph = blocks((1,), (1,), (5,))
    problem = problem_of(graph, 2)
    solution = solve(graph, stages=2, prefer_modules=0.0)
    placement = Placement((0, 1, 2), ranks=((0,), (1,), (0,)))
    shared = replace(solution, placement=placement, evaluation=evaluate(problem, placement))
    text = explain_bound(shared)[0].text
    assert text.startswith("rank 0 with stages 0 and 2 takes 18.00 ms per micro-batch: 18.00 ms")
    assert "Its largest parts are 2.0 15.00 ms, 0.0 3.00 ms" in text


def test_stated_steps_are_those_that_the_simulator_finds():
    plan = chain(3).plan
    found = {finding.about: finding.text for finding in explain_micro_batches(plan)}
    assert set(found) == {f"{ABOUT} {name}" for name in ("gpipe", "1f1b", "async-1f1b")}
    for schedule in ("gpipe", "1f1b", "async-1f1b"):
        numbers = [int(number) for number in re.findall(r"(\d+): ", found[f"{ABOUT} {schedule}"])]
        assert numbers == [8, 9, 16]
        for number in numbers:
            step = forecast_one_step(plan, schedule, number)
            stated = f"{number}: {write_ms(step.step_ms)} per step"
            assert stated in found[f"{ABOUT} {schedule}"]
            assert f"{write_share(step.idle_share)} idle" in found[f"{ABOUT} {schedule}"]


def test_no_costs_are_changed_by_explaining():
    before = costs_of(TOY, LINK)
    changes(TOY, toy())
    after = costs_of(TOY, LINK)
    assert (before.work_ms == after.work_ms).all() and (before.send_ms == after.send_ms).all()
