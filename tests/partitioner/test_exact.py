"""The exact planner: equal to brute force in every setting, with a bound that holds."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.cost import Link, StageSums, stage_sums
from asyncpipe.partitioner.evaluate import evaluate
from asyncpipe.partitioner.problem import Placement, Problem
from asyncpipe.partitioner.setting import Device, Setting
from asyncpipe.partitioner.solvers import METHODS, exact
from asyncpipe.partitioner.solvers.downsets import Windows, find_downsets
from asyncpipe.partitioner.solvers.pairs import PairSums
from asyncpipe.partitioner.solvers.search import in_order, search
from asyncpipe.partitioner.solvers.unordered import place_unordered
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.partitioner.placements import LINKS, all_ordered, graphs, problem_of

EVERYWHERE = Windows(np.array([-np.inf]), np.array([np.inf]))


@st.composite
def problems(draw: st.DrawFn, schedules: tuple[str, ...] = ("async-1f1b",)) -> tuple:
    """A small graph and ranks that are unlike in speed, memory, links and what they pay."""
    graph = draw(graphs())
    shared = draw(st.booleans())
    for node in graph:
        names = draw(st.sets(st.sampled_from("vw"), max_size=1)) if shared else {str(node)}
        graph.nodes[node].update(
            parameters=dict.fromkeys(sorted(names), 4),
            saved={name: 3 for name in draw(st.sets(st.sampled_from("stu"), max_size=2))},
            transient_bytes=draw(st.integers(0, 5)),
            buffer_bytes=draw(st.integers(0, 3)),
            times_on={"slow": (draw(st.integers(0, 9)), draw(st.integers(0, 9)))},
        )
    stages = draw(st.integers(1, min(len(graph), 4 if len(graph) < 6 else 3)))
    alike = draw(st.booleans())
    room = st.sampled_from([np.inf, np.inf, 150.0, 80.0])
    devices = tuple(
        Device()
        if alike
        else Device(
            speed=draw(st.sampled_from([1.0, 0.5, 2.0])),
            memory_bytes=draw(room),
            kind=draw(st.sampled_from([None, None, "slow"])),
            pays_transfers=draw(st.sampled_from([True, True, False])),
        )
        for _ in range(stages)
    )
    link = draw(LINKS)
    links = None
    if not alike and draw(st.booleans()):
        links = tuple(draw(LINKS) for _ in range(stages - 1))
    setting = Setting(
        devices,
        links=links,
        schedule=draw(st.sampled_from(schedules)),
        micro_batches=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(["none", "none", "auto", "all"])),
        stash=draw(st.booleans()),
        overlap=link.overlap,
    )
    return graph, problem_of(graph, stages, link, setting)


def least_score_ms(graph: nx.DiGraph, problem: Problem) -> float:
    found = (evaluate(problem, Placement(one)) for one in all_ordered(graph, problem.stages))
    return min((one.score_ms for one in found if one.fits), default=np.inf)


def check(graph: nx.DiGraph, problem: Problem) -> None:
    best = least_score_ms(graph, problem)
    if best == np.inf:
        with pytest.raises(PlanError, match="memory"):
            exact.place(problem)
        return
    placement = exact.place(problem)
    assert evaluate(problem, placement).score_ms == pytest.approx(best)
    assert placement.bound_ms <= best * (1 + 1e-9)
    assert placement.bound_ms == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_optimum_is_that_of_brute_force_and_proved(case):
    check(*case)


@settings(max_examples=60, deadline=None)
@given(problems(("gpipe", "1f1b")))
def test_so_it_is_for_synchronous_schedules(case):
    check(*case)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 10**6))
def test_sums_of_pairs_equal_the_evaluators(case, seed):
    graph, problem = case
    costs = problem.seen[-1]
    downsets = find_downsets(costs, problem.least_work_ms, EVERYWHERE, most=10**5)
    rows = columns = np.arange(len(downsets))
    pairs = PairSums([costs], downsets, memory=True)
    (found,) = pairs.sums(rows, columns)
    legal = np.argwhere(pairs.legal(rows, columns))
    members = np.stack([downsets.has(group) for group in range(len(graph))])
    chosen = np.random.default_rng(seed).permutation(len(legal))[:40]
    for row, column in legal[chosen]:
        assert members[:, column].sum() < members[:, row].sum()
        where = 2 - members[:, row].astype(int) - members[:, column]
        expected = stage_sums(costs, where, 3)[1]
        expected = replace(expected, send_ms=expected.talk_ms, receive_ms=np.float64(0))
        for field in fields(StageSums):
            sums = np.broadcast_to(getattr(found, field.name), (len(rows), len(rows)))
            assert sums[row, column] == pytest.approx(getattr(expected, field.name)), field.name
    for row, column in np.argwhere(~pairs.legal(rows, columns)):
        assert row == column or (members[:, column] & ~members[:, row]).any()


@settings(max_examples=40, deadline=None)
@given(problems())
def test_windows_lose_no_optimum(case):
    graph, problem = case
    best = least_score_ms(graph, problem)
    if best == np.inf:
        return
    walk = in_order(problem)
    everything = find_downsets(problem.costs, problem.least_work_ms, EVERYWHERE, most=10**5)
    wide = search(problem, walk, everything, 10 * best + 100)
    narrow = search(problem, walk, everything, best)
    assert wide.score_ms == pytest.approx(narrow.score_ms) == pytest.approx(best)
    if best > 0:
        assert search(problem, walk, everything, best * (1 - 1e-6)).score_ms == np.inf


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_other_method_is_better(case):
    _, problem = case
    try:
        ours = evaluate(problem, exact.place(problem)).score_ms
    except PlanError:
        return
    for name in METHODS:
        try:
            placement = METHODS[name](problem)
        except PlanError:
            continue
        other = evaluate(problem, placement)
        if placement.ranks is None and other.fits:
            assert ours <= other.score_ms * (1 + 1e-9), name


@settings(max_examples=40, deadline=None)
@given(graphs(), st.data())
def test_devices_in_any_order_are_ordered_as_brute_force_does(graph, data):
    kinds = [
        Device("fast"),
        Device("slow", speed=0.5, memory_bytes=data.draw(st.sampled_from([np.inf, 90.0]))),
        Device("host", speed=0.25, pays_transfers=False),
    ]
    for node in graph:
        graph.nodes[node].update(param_bytes=4, saved_bytes=data.draw(st.integers(0, 6)))
    devices = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    link = data.draw(st.sampled_from([Link(), Link(0.5, 1e3)]))
    problem = problem_of(graph, len(devices), link, Setting(tuple(devices)))
    best = np.inf
    for used in range(1, len(devices) + 1):
        for order in set(itertools.permutations(devices, used)):
            best = min(best, least_score_ms(graph, problem_of(graph, used, link, Setting(order))))
    if best == np.inf:
        with pytest.raises(PlanError, match="in whatever order"):
            place_unordered(problem)
        return
    order, placement = place_unordered(problem)
    ours = problem_of(graph, len(order), link, Setting(tuple(devices[one] for one in order)))
    assert len(set(order)) == len(order)
    assert evaluate(ours, placement).score_ms == pytest.approx(best)
    assert placement.bound_ms == pytest.approx(best)
