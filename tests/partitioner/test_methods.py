"""Planning methods beside the exact one: valid, of their kind, in memory, the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.cost import StageSums, stage_sums
from asyncpipe.partitioner.evaluate import evaluate
from asyncpipe.partitioner.problem import Placement, Problem
from asyncpipe.partitioner.setting import Device, Setting
from asyncpipe.partitioner.solvers import METHODS
from asyncpipe.partitioner.solvers.coarse import on_units
from asyncpipe.partitioner.solvers.merging import Blocks
from asyncpipe.partitioner.solvers.parts import Parts
from asyncpipe.partitioner.solvers.pieces import staged
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.partitioner.placements import (
    LINKS,
    all_ordered,
    best_ms,
    contiguous,
    graphs,
    problem_of,
)

IN_ORDER = ("acyclic", "metis", "uniform", "chain", "auto")
SEVERAL_A_RANK = ("mpipe", "2dbin")
ROUNDING = 1e-6


def assert_valid(problem: Problem, placement: Placement) -> None:
    """No edge goes to an earlier stage, no stage is empty, every stage has ranks that exist."""
    stage_of = placement.stage_of
    assert len(stage_of) == len(problem.costs.groups)
    assert set(stage_of) == set(range(placement.stages))
    for source, target in problem.costs.edges:
        assert stage_of[source] <= stage_of[target]
    assert len(placement.ranks_of_stage) == placement.stages
    for ranks in placement.ranks_of_stage:
        assert ranks and len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(problem.stages))


def any_assignment(problem: Problem) -> Iterator[Placement]:
    """Every way to give groups to ranks, as stages if they can be or as one stage a rank."""
    for rank_of in itertools.product(range(problem.stages), repeat=len(problem.costs.groups)):
        yield staged(problem, rank_of)


def with_replicas(problem: Problem) -> Iterator[Placement]:
    """Every cut of the given order with every number of replicas of each stage."""
    num_groups = len(problem.costs.groups)
    for stages in range(1, problem.stages + 1):
        for stage_of in contiguous(num_groups, stages):
            for replicas in itertools.product(range(1, problem.stages + 1), repeat=stages):
                if sum(replicas) <= problem.stages:
                    firsts = np.cumsum([0, *replicas]).tolist()
                    ranks = tuple(
                        tuple(range(first, first + number))
                        for first, number in zip(firsts, replicas, strict=False)
                    )
                    yield Placement(tuple(stage_of), ranks=ranks)


def least_ms(problem: Problem, placements: Iterator[Placement]) -> float:
    """The least bottleneck of those that fit; inf if none does."""
    found = (evaluate(problem, placement) for placement in placements)
    return min((one.bottleneck_ms for one in found if one.fits), default=np.inf)


@st.composite
def settings_of(draw: st.DrawFn, stages: int) -> Setting:
    """Ranks alike or not, with memory that may be too little, with and without recomputation."""
    speeds = draw(st.sampled_from([(1.0,), (1.0, 2.0)]))
    memory = draw(st.sampled_from([np.inf, 400.0, 150.0, 60.0]))
    devices = tuple(
        Device(speed=draw(st.sampled_from(speeds)), memory_bytes=memory) for _ in range(stages)
    )
    return Setting(
        devices,
        recompute=draw(st.sampled_from(["none", "auto"])),
        overlap=draw(st.booleans()),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small graphs with parameters and saved tensors, of which some are shared."""
    graph = draw(graphs())
    for node in graph:
        names = draw(st.sets(st.sampled_from(["w", "v", f"own{node}"]), max_size=2))
        graph.nodes[node]["parameters"] = {name: 10 for name in names}
        graph.nodes[node]["saved"] = {name: 5 for name in names} | {f"x{node}": 5}
    stages = min(draw(st.integers(1, 3)), len(graph))
    return problem_of(graph, stages, draw(LINKS), draw(settings_of(stages)))


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(sorted(METHODS)))
def test_a_plan_is_valid_and_fits_or_none_is_given(problem, method):
    try:
        placement = METHODS[method](problem)
    except PlanError:
        assert problem.setting.is_limited
        return
    assert_valid(problem, placement)
    assert METHODS[method](problem) == placement
    if method != "uniform":  # it is what others are compared with, and counts no bytes
        assert evaluate(problem, placement).fits


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(2, 3), LINKS)
def test_plans_in_order_are_between_the_best_and_the_even_split(graph, stages, link):
    problem = problem_of(graph, stages, link)
    best = best_ms(problem, all_ordered(graph, stages))
    for method in IN_ORDER:
        found = evaluate(problem, METHODS[method](problem)).bottleneck_ms
        assert found >= best * (1 - ROUNDING), method
    chain_ms = evaluate(problem, METHODS["chain"](problem)).bottleneck_ms
    for method in ("acyclic", "mpipe", "pipedream"):
        found = evaluate(problem, METHODS[method](problem)).bottleneck_ms
        assert found <= chain_ms * (1 + ROUNDING), method


@settings(max_examples=25, deadline=None)
@given(graphs(), LINKS)
def test_several_stages_a_rank_are_never_better_than_the_best_assignment(graph, link):
    assume(len(graph) <= 7)
    problem = problem_of(graph, 2, link)
    best = least_ms(problem, any_assignment(problem))
    for method in SEVERAL_A_RANK:
        found = evaluate(problem, METHODS[method](problem)).bottleneck_ms
        assert found >= best * (1 - ROUNDING), method


@settings(max_examples=60, deadline=None)
@given(problems())
def test_pipedream_is_the_best_of_all_cuts_with_replicas(problem):
    assume(len({device.speed for device in problem.setting.devices}) == 1)
    best = least_ms(problem, with_replicas(problem))
    if best == np.inf:
        with pytest.raises(PlanError, match="with or without replicas"):
            METHODS["pipedream"](problem)
        return
    evaluation = evaluate(problem, METHODS["pipedream"](problem))
    assert evaluation.fits
    assert evaluation.bottleneck_ms == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_sums_of_parts_follow_the_evaluator_through_moves(problem, data):
    num_groups, count = len(problem.costs.groups), problem.stages
    part_of = data.draw(
        st.lists(st.integers(0, count - 1), min_size=num_groups, max_size=num_groups)
    )
    parts = Parts(problem, part_of)
    for _ in range(4):
        parts.move(data.draw(st.integers(0, num_groups - 1)), data.draw(st.integers(0, count - 1)))
    for part, seen in enumerate(problem.seen):
        expected = stage_sums(seen, parts.part_of, count)[part]
        found = parts.sums(part)
        for field in fields(StageSums):
            if field.name != "transient_bytes" or problem.setting.is_limited:
                value = getattr(found, field.name)
                assert value == pytest.approx(getattr(expected, field.name)), field.name


@settings(max_examples=60, deadline=None)
@given(graphs(), LINKS, st.data())
def test_units_cost_what_their_groups_do(graph, link, data):
    problem = problem_of(graph, 2, link)
    blocks = Blocks(problem.costs)
    for source, target in problem.costs.edges:
        if data.draw(st.booleans()) and source in blocks and target in blocks:
            if target in blocks.after[source] and blocks.may_merge(source, target):
                blocks.merge(source, target)
    unit_of = blocks.numbered()
    coarse = on_units(problem, unit_of)
    assert all(source < target for source, target in coarse.costs.edges)
    for cut in range(len(coarse.costs.groups) + 1):
        of_units = [int(unit >= cut) for unit in range(len(coarse.costs.groups))]
        of_groups = [of_units[unit] for unit in unit_of]
        found, expected = (
            stage_sums(costs, where, 2)
            for costs, where in ((coarse.costs, of_units), (problem.costs, of_groups))
        )
        for field in fields(StageSums):
            assert getattr(found, field.name) == pytest.approx(getattr(expected, field.name))
