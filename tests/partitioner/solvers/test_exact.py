"""The exact planner: equal to brute force in every setting, with a bound that holds."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.cost_graph import with_exchanges
from asyncpipe.partitioner.graph.costs import Link, stage_sums
from asyncpipe.partitioner.graph.problem import Placement, Problem, evaluate
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.solvers import METHODS, exact, milp
from asyncpipe.partitioner.solvers.bounds import (
    bound_around_ms,
    more_than_any_ms,
    other_orders,
    simple_bound_ms,
)
from asyncpipe.partitioner.solvers.downset_search import in_order, search
from asyncpipe.partitioner.solvers.exact import place_unordered
from asyncpipe.partitioner.solvers.interval_sums import PairSums, WorkWindows, find_downsets
from asyncpipe.partitioner.solvers.reductions import reduce, without_memory
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.placements import (
    LINKS,
    SEARCHED,
    all_ordered,
    graphs,
    problem_of,
)

EVERYWHERE = WorkWindows(np.array([-np.inf]), np.array([np.inf]))


@st.composite
def problems(
    draw: st.DrawFn,
    schedules: tuple[str, ...] = ("async-1f1b",),
    drawn: st.SearchStrategy[nx.DiGraph] | None = None,
) -> tuple:
    """A small graph and ranks that are unlike in speed, memory, links and what they pay."""
    graph = draw(graphs() if drawn is None else drawn)
    shared = draw(st.booleans())
    for node in graph:
        names = draw(st.sets(st.sampled_from("vw"), max_size=1)) if shared else {str(node)}
        graph.nodes[node].update(
            parameters=dict.fromkeys(sorted(names), 4),
            frozen={name: 7 for name in draw(st.sets(st.sampled_from("fg"), max_size=2))},
            saved={name: 3 for name in draw(st.sets(st.sampled_from("stu"), max_size=2))},
            transient_bytes=draw(st.integers(0, 5)),
            live_bytes=draw(st.integers(0, 12)),
            buffer_bytes=draw(st.integers(0, 3)),
            times_on={
                "slow": graph.nodes[node].get("slow_ms")
                or (draw(st.integers(0, 9)), draw(st.integers(0, 9)))
            },
        )
    most = 4 if len(graph) < 6 else 3 if len(graph) < 8 else 2  # or brute force takes seconds
    stages = draw(st.integers(1, min(len(graph), most)))
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
    setting = RankConfig(
        devices,
        links=links,
        schedule=draw(st.sampled_from(schedules)),
        micro_batches=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(["none", "none", "auto", "all"])),
        staleness=draw(st.sampled_from(["none", "stash"])),
        overlap=link.overlap,
    )
    problem = problem_of(graph, stages, link, setting)
    if shared and draw(st.booleans()):
        problem = replace(problem, costs=with_exchanges(problem.costs, 8, link))
    return graph, problem


def least_score_ms(graph: nx.DiGraph, problem: Problem) -> float:
    found = (evaluate(problem, Placement(one)) for one in all_ordered(graph, problem.stages))
    return min((one.score_ms for one in found if one.fits), default=np.inf)


def is_seen_stage_by_stage(problem: Problem) -> bool:
    """True if a stage's memory is independent of the number of other holders of its parameters."""
    many = any(one.is_exchange and len(one.readers) > 1 for one in problem.costs.values)
    return not (many and problem.setting.is_limited)


def check(graph: nx.DiGraph, problem: Problem) -> None:
    best = least_score_ms(graph, problem)
    if best == np.inf:
        with pytest.raises(PlanError, match="memory"):
            exact.place(problem)
        return
    placement = exact.place(problem)
    assert placement.bound_ms <= best * (1 + 1e-9)
    if is_seen_stage_by_stage(problem):
        assert evaluate(problem, placement).score_ms == pytest.approx(best)
        assert placement.bound_ms == pytest.approx(best)


@settings(max_examples=80)
@given(problems())
def test_the_optimum_is_that_of_brute_force_and_proved(case):
    check(*case)


@settings(max_examples=60)
@given(problems(("gpipe", "1f1b")))
def test_so_it_is_for_synchronous_schedules(case):
    check(*case)


@settings(max_examples=60)
@given(problems(("async-1f1b", "1f1b")))
def test_what_surrounds_a_heavy_group_bounds_every_plan(case):
    graph, problem = case
    best = least_score_ms(graph, problem)
    for limit_ms in (best, 2 * best, math.inf):
        assert bound_around_ms(problem, 0.0, limit_ms) <= best * (1 + 1e-9) + 1e-6


@st.composite
def graphs_with_freedom(draw: st.DrawFn) -> nx.DiGraph:
    """A path whose groups read masks, and like groups that all read the first group."""
    graph = nx.DiGraph(name="keys and masks")
    times, sizes = st.integers(0, 9), st.sampled_from([1, 1, 5])
    path = [f"path {index}" for index in range(draw(st.integers(2, 4)))]
    masks = [f"mask {index}" for index in range(draw(st.integers(0, 1)))]
    readers = draw(st.lists(st.sampled_from(path[1:]), min_size=2, max_size=3))
    keys = [f"key {index}" for index in range(len(readers))]
    for group in (path[0], *masks, *keys, *path[1:]):
        graph.add_node(group, forward_ms=draw(times), backward_ms=draw(times))
    like = {"forward_ms": draw(times), "backward_ms": draw(times)}
    slow_ms = draw(times), draw(times)
    for mask in masks:
        graph.add_edge(mask, draw(st.sampled_from(path[1:])), tensors={}, grads={})
    for before, group in itertools.pairwise(path):
        graph.add_edge(before, group, tensors={"x": 2}, grads={"x": 2})
    for key, reader in zip(keys, readers, strict=True):
        graph.nodes[key].update(**like, slow_ms=slow_ms)
        sent = {"k": draw(sizes)}
        graph.add_edge(path[0], key, tensors={"x": 2}, grads={"x": 2})
        graph.add_edge(key, reader, tensors=sent, grads=sent)
    return graph


@settings(max_examples=60)
@given(problems(("async-1f1b", "1f1b", "zb-h1"), graphs_with_freedom()))
def test_a_relaxation_bounds_every_plan(case):
    graph, problem = case
    best = least_score_ms(graph, problem)
    for limit_ms in (best, 1.5 * best):
        if 0 < limit_ms < np.inf:
            bound_ms = exact._relaxed_bound_ms(problem, 0.0, limit_ms)
            assert bound_ms <= best * (1 + 1e-9)


def keys(work_ms: dict[str, float], edges: list[tuple[str, str]]) -> nx.DiGraph:
    """Groups whose values cost nothing to send, but for those of keys, which take 1 ms."""
    graph = nx.DiGraph(name="keys")
    for group, forward_ms in work_ms.items():
        graph.add_node(group, forward_ms=forward_ms)
    for source, target in edges:
        graph.add_edge(source, target, tensors={"x": int(source.startswith("key"))}, grads={})
    return graph


def test_a_later_key_may_be_computed_before_an_earlier_one():
    work_ms = {"first": 4.0, "key 1": 2.0, "key 2": 2.0, "second": 4.0, "third": 6.0}
    path = [("first", "second"), ("second", "third")]
    read = [("key 1", "second"), ("key 2", "third")]
    graph = keys(work_ms, [("first", "key 1"), ("first", "key 2"), *path, *read])
    problem = problem_of(graph, 3, Link(bytes_per_s=1e3))
    # Key 2 from the first stage to the third; in the order of the keys it would be 8.
    assert least_score_ms(graph, problem) == pytest.approx(7)
    assert exact._relaxed_bound_ms(problem, 0.0, 8.0) <= 7 * (1 + 1e-9)


def test_the_first_stage_may_be_the_empty_one():
    graph = nx.DiGraph(name="slow first")
    for group in ("first", "second"):
        graph.add_node(group, forward_ms=1.0)
    nx.add_path(graph, graph)
    devices = Device(speed=0.1), Device(speed=1.0)
    problem = problem_of(graph, 2, setting=RankConfig(devices))
    downsets = find_downsets(problem.costs, problem.least_work_ms, EVERYWHERE, most=9)
    walk = in_order(problem)
    assert search(problem, walk, downsets, 99.0).score_ms == pytest.approx(10)
    assert search(problem, walk, downsets, 99.0, may_be_empty=True).score_ms == 2


def test_keys_of_parallel_readers_have_no_order():
    work_ms = {"first": 5.0, "key 1": 3.0, "key 2": 3.0, "long": 6.0, "short": 1.0}
    read = [("key 1", "long"), ("key 2", "short")]
    graph = keys(work_ms, [("first", "key 1"), ("first", "key 2"), *read])
    problem = problem_of(graph, 2, Link(bytes_per_s=1e3))
    # Key 2 is on the first stage and key 1 on the second.
    assert least_score_ms(graph, problem) == pytest.approx(9)
    assert exact._relaxed_bound_ms(problem, 0.0, 10.0) <= 9 * (1 + 1e-9)


def test_a_plan_with_three_holders_of_a_parameter_fits():
    graph = nx.DiGraph(name="three holders")
    for node in range(5):
        graph.add_node(node, forward_ms=1.0 + 4 * (node == 2), output_bytes=1)
        graph.nodes[node]["parameters"] = {"tied": 30} if node in (0, 2, 4) else {}
    nx.add_path(graph, range(5))
    scores = []
    for room in range(180, 320, 4):
        setting = RankConfig((Device(memory_bytes=float(room)),) * 3, optimizer="sgd")
        problem = problem_of(graph, 3, setting=setting)
        problem = replace(problem, costs=with_exchanges(problem.costs, 8, Link()))
        try:
            scores.append(evaluate(problem, exact.place(problem)).score_ms)
        except PlanError:
            assert not scores  # What has less room fits less.
    assert scores and max(scores) < np.inf
    assert min(scores) == scores[-1] == 5.0


def test_one_is_found_where_the_best_for_two_holders_does_not_fit_three():
    graph = nx.DiGraph(name="three of six")
    for node, forward_ms in enumerate((4.0, 7.0, 1.0, 9.0, 6.0, 5.0)):
        graph.add_node(node, forward_ms=forward_ms, output_bytes=1)
        graph.nodes[node]["parameters"] = {"tied": 30} if node in (1, 2, 4) else {}
    nx.add_path(graph, range(6))
    devices = (Device(), Device(memory_bytes=200.0), Device())
    problem = problem_of(graph, 3, setting=RankConfig(devices, optimizer="sgd"))
    problem = replace(problem, costs=with_exchanges(problem.costs, 8, Link()))
    placement = exact.place(problem)
    assert evaluate(problem, placement).score_ms == least_score_ms(graph, problem) == 12.0
    assert placement.bound_ms <= 12.0


def test_a_heavy_group_is_bounded_with_its_transfers():
    graph = nx.DiGraph(name="heavy in the middle")
    for node, work_ms in (("before", 3.0), ("heavy", 10.0), ("after", 3.0)):
        graph.add_node(node, forward_ms=work_ms, output_bytes=1000)
    nx.add_path(graph, ["before", "heavy", "after"])
    apart = problem_of(graph, 3, Link(bytes_per_s=1e6))
    assert bound_around_ms(apart, 0.0, math.inf) == pytest.approx(10 + 1 + 1)
    slow = problem_of(graph, 3, Link(bytes_per_s=1e5))
    assert bound_around_ms(slow, 0.0, math.inf) == pytest.approx(3 + 10 + 3)
    assert bound_around_ms(slow, 0.0, 16.0) == pytest.approx(3 + 10 + 3)
    assert bound_around_ms(slow, 0.0, 12.0) == pytest.approx(10 + 10 + 10)


def test_a_plan_that_the_program_leaves_out_of_balance_is_mended_by_moves(monkeypatch):
    graph = nx.DiGraph(name="branches")
    for branch in range(6):
        nx.add_path(graph, ["first", *(f"{branch} {step}" for step in range(4)), "last"])
    for node in graph:
        graph.nodes[node].update(forward_ms=1.0, output_bytes=0)
    problem = problem_of(graph, 2, Link())
    position = {group: index for index, group in enumerate(problem.costs.groups)}
    lopsided = [0] * len(position)
    lopsided[position["last"]] = 1

    def without_time(*_, **__):
        return milp.Improved(tuple(lopsided), 0.0)

    monkeypatch.setattr(milp, "improve", without_time)
    monkeypatch.setattr(exact, "_best_of_order", lambda *_: None)
    stage_of, _ = exact._by_program(problem, lopsided, 25.0, 1.0)
    assert exact._score_ms(problem, lopsided) == 25
    assert exact._score_ms(problem, stage_of) == 13


def without_time(problem, stage_of, limit_ms, **_):
    """The program, which has no time to find a plan or a bound."""
    return milp.Improved(tuple(stage_of), 0.0)


def test_the_order_that_moves_lead_to_is_cut_again(monkeypatch):
    monkeypatch.setattr(milp, "FEW_VARIABLES", 0)
    monkeypatch.setattr(milp, "improve", without_time)
    problem = problem_of(branches(3, 3, whole=5), 4, Link(0.01, 1e6))
    given = exact._best_of_order(problem)
    cuts = [given, *(exact._best_of_order(problem, order) for order in other_orders(problem.costs))]
    best = min(cuts, key=lambda stage_of: exact._score_ms(problem, stage_of))
    assert exact._score_ms(problem, exact._moved(problem, best)) == pytest.approx(11.04)
    stage_of, _ = exact._by_program(problem, given, exact._score_ms(problem, given), 1.0)
    assert exact._score_ms(problem, stage_of) == pytest.approx(10.03)


def encoder_and_decoder(layers: int) -> nx.DiGraph:
    """A decoder with a mask, a key and a value in every layer; the latter read the encoder."""
    graph = nx.DiGraph(name="encoder and decoder")
    graph.add_node("output", forward_ms=4.0, output_bytes=100)
    last = "output"
    for layer in range(layers):
        attention = f"{layer} attention"
        graph.add_node(f"{layer} mask", forward_ms=0.01)
        for name in ("key", "value"):
            graph.add_node(f"{layer} {name}", forward_ms=1.0, output_bytes=100)
            graph.add_edge("output", f"{layer} {name}")
            graph.add_edge(f"{layer} {name}", attention)
        graph.add_node(attention, forward_ms=5.0, output_bytes=100)
        graph.add_edge(f"{layer} mask", attention, tensors={}, grads={})
        graph.add_edge(last, attention)
        last = attention
    return graph


def test_groups_that_may_be_almost_anywhere_are_counted_in_a_bound(monkeypatch):
    monkeypatch.setattr(milp, "FEW_VARIABLES", 0)
    monkeypatch.setattr(milp, "improve", without_time)
    problem = problem_of(encoder_and_decoder(16), 4, Link(bytes_per_s=1e6))
    assert find_downsets(problem.costs, problem.least_work_ms, EVERYWHERE, most=10**5) is None
    placement = exact.place(problem)
    score_ms = evaluate(problem, placement).score_ms
    assert placement.bound_ms <= score_ms
    assert simple_bound_ms(problem) * 1.02 < score_ms < placement.bound_ms * 1.02


@settings(max_examples=30)
@given(problems())
def test_downsets_are_found_up_to_the_given_number_of_them(case):
    costs = case[1].costs
    count = len(find_downsets(costs, costs.work_ms, EVERYWHERE, most=10**5))
    assert len(find_downsets(costs, costs.work_ms, EVERYWHERE, most=count)) == count
    assert find_downsets(costs, costs.work_ms, EVERYWHERE, most=count - 1) is None


@settings(max_examples=60)
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
        expected = replace(expected, tied_bytes=tied_to_one(costs, where)[1])
        if costs.duplex == 1:  # then only their sum counts
            talk_ms = expected.talk_ms
            expected = replace(expected, send_ms=np.float64(0), receive_ms=talk_ms)
        for field in SEARCHED:
            sums = np.broadcast_to(getattr(found, field.name), (len(rows), len(rows)))
            assert sums[row, column] == pytest.approx(getattr(expected, field.name)), field.name
    for row, column in np.argwhere(~pairs.legal(rows, columns)):
        assert row == column or (members[:, column] & ~members[:, row]).any()


def tied_to_one(costs, where):
    """What each stage exchanges, with one other holder each time: a pair knows of no third."""
    tied = np.zeros(3)
    for value in costs.values:
        holders = {where[group] for group in (value.owner, *value.readers)}
        if len(holders) > 1:
            tied[list(holders)] += value.exchanged_bytes(2)
    return tied


@settings(max_examples=40)
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
    assert wide.score_ms == pytest.approx(narrow.score_ms)
    assert wide.score_ms <= best * (1 + 1e-9)
    if not is_seen_stage_by_stage(problem):
        return
    assert wide.score_ms == pytest.approx(best)
    if best > 0:
        assert search(problem, walk, everything, best * (1 - 1e-6)).score_ms == np.inf


@settings(max_examples=20)
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


@settings(max_examples=25)
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
    problem = problem_of(graph, len(devices), link, RankConfig(tuple(devices)))
    best = np.inf
    for used in range(1, len(devices) + 1):
        for order in set(itertools.permutations(devices, used)):
            best = min(
                best, least_score_ms(graph, problem_of(graph, used, link, RankConfig(order)))
            )
    if best == np.inf:
        with pytest.raises(PlanError, match="in whatever order"):
            place_unordered(problem)
        return
    order, placement = place_unordered(problem)
    ours = problem_of(graph, len(order), link, RankConfig(tuple(devices[one] for one in order)))
    assert len(set(order)) == len(order)
    assert evaluate(ours, placement).score_ms == pytest.approx(best)
    assert placement.bound_ms == pytest.approx(best)


@settings(max_examples=40)
@given(problems(("async-1f1b", "1f1b")))
def test_the_program_gives_what_the_search_gives(case):
    graph, problem = case
    if problem.stages == 1 or problem.setting.is_limited or problem.setting.replicas:
        return
    best = least_score_ms(graph, problem)
    found = milp.improve(problem, None, more_than_any_ms(problem), seconds=60.0, gap=0.0)
    assert found.bound_ms <= best * (1 + 1e-6)
    if problem.setting.is_asynchronous and problem.setting.recompute != "all":
        assert evaluate(problem, Placement(found.stage_of)).score_ms == pytest.approx(best, 1e-5)
        assert found.bound_ms == pytest.approx(best, 1e-5, 1e-5)


def test_a_program_without_time_keeps_the_plan_and_has_a_bound():
    problem = problem_of(branches(4, 4), 4, Link(0.01, 1e6))
    known = METHODS["uniform"](problem)
    limit_ms = evaluate(problem, known).score_ms
    found = milp.improve(problem, known.stage_of, limit_ms, seconds=0.0)
    assert 0 <= found.bound_ms <= exact.place(problem).order_optimum_ms
    assert evaluate(problem, Placement(found.stage_of)).score_ms <= limit_ms


def branches(number: int, length: int, whole: int = 0) -> nx.DiGraph:
    """A model that forks into chains of unlike work, which join again; the work is in whole
    milliseconds below `whole`, if that is given.
    """
    rng = np.random.default_rng(number * length)
    graph = nx.DiGraph(name="branches")
    graph.add_node("in", forward_ms=1.0, output_bytes=1000)
    for branch in range(number):
        for part in range(length):
            work_ms = float(rng.integers(1, whole) if whole else rng.uniform(0.5, 2.0))
            graph.add_node(f"{branch}.{part}", forward_ms=work_ms, output_bytes=1000)
            graph.add_edge(f"{branch}.{part - 1}" if part else "in", f"{branch}.{part}")
    graph.add_node("out", forward_ms=1.0)
    graph.add_edges_from((f"{branch}.{length - 1}", "out") for branch in range(number))
    return graph


def test_too_many_downsets_leave_a_plan_that_is_proved(monkeypatch):
    problem = problem_of(branches(4, 4), 3, Link(0.01, 1e6))
    by_search = exact.place(problem)
    monkeypatch.setattr(exact, "MOST_DOWNSETS", 20)
    by_program = exact.place(problem)
    assert by_program.order_optimum_ms == pytest.approx(by_search.order_optimum_ms, 2e-4)
    assert by_program.bound_ms == pytest.approx(by_search.order_optimum_ms, 2e-4)
    assert by_program.bound_ms <= by_search.order_optimum_ms


def test_more_branches_than_could_be_searched_are_planned_near_the_bound(monkeypatch):
    monkeypatch.setattr(milp, "SECONDS", 3.0)
    graph = branches(10, 4)
    solution = solve(graph, stages=4, prefer_modules=0)
    assert solution.gap < 0.01
    chain = solve(graph, stages=4, method="chain", prefer_modules=0)
    assert solution.bottleneck_ms < chain.bottleneck_ms


def test_names_of_nodes_do_not_matter():
    graph = branches(3, 5)
    names = list(graph)
    order = np.random.default_rng(1).permutation(len(names))
    renamed = nx.relabel_nodes(graph, {name: f"n{order[i]}" for i, name in enumerate(names)})
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from(sorted(renamed.nodes(data=True)))
    shuffled.add_edges_from(renamed.edges(data=True))
    link = Link(0.05, 1e6)
    one, other = (solve(each, stages=4, link=link, prefer_modules=0) for each in (graph, shuffled))
    assert one.bottleneck_ms == pytest.approx(other.bottleneck_ms)
    assert one.optimal and other.optimal


def test_a_fault_in_the_sums_of_pairs_is_seen(monkeypatch):
    """Negative control: with what crosses forgotten, the search claims a bound that is wrong."""
    graph = branches(3, 4)
    problem = problem_of(graph, 3, Link(0.5, 1e5))
    honest = exact.place(problem)
    monkeypatch.setattr(
        PairSums,
        "_crossing",
        lambda self, rows, columns: np.zeros((1, 1, len(rows), len(columns))) - 5.0,
    )
    faulty = exact.place(problem)
    assert (faulty.bound_ms, faulty.stage_of) != (honest.bound_ms, honest.stage_of)


def test_idle_and_dear_groups_are_joined_and_each_step_is_recorded():
    graph = nx.DiGraph(name="toy")
    for node, work_ms, size in (
        ("w", 0, 1),
        ("a", 3, 10**6),
        ("b", 3, 1),
        ("c", 3, 1),
        ("d", 3, 1),
    ):
        graph.add_node(node, forward_ms=work_ms, output_bytes=size)
    graph.add_edges_from([("w", "b"), ("a", "b"), ("b", "c"), ("c", "d")])
    problem = problem_of(graph, 2, Link(0.0, 1e6))
    reduced = reduce(problem, 9.5)
    assert reduced.item_of.tolist() == [0, 0, 0, 1, 2]
    assert (reduced.joined_idle, reduced.joined_dear) == (1, 1)
    assert exact.place(problem).stage_of == (0, 0, 0, 1, 1)


def test_memory_that_everything_fits_into_decides_nothing():
    graph = branches(2, 3)
    for node in graph:
        graph.nodes[node].update(param_bytes=10, saved_bytes=1)
    roomy, tight = (
        problem_of(graph, 2, setting=RankConfig((Device(memory_bytes=size),) * 2))
        for size in (1e6, 300.0)
    )
    assert not without_memory(roomy).setting.is_limited
    assert without_memory(tight) is tight


def test_cuts_stay_between_blocks_of_one_order_where_the_optimum_is_in_another():
    graph = branches(2, 4)
    for index, node in enumerate(list(graph)):
        graph.nodes[node].update(block=f"h.{index // 2}", modules=(f"h.{index // 2}",))
    free = solve(graph, stages=3, prefer_modules=0)
    tidy = solve(graph, stages=3, prefer_modules=0.02)
    assert tidy.lower_bound_ms == pytest.approx(free.bottleneck_ms)
    assert tidy.bottleneck_ms <= free.bottleneck_ms * 1.02 * (1 + 1e-9)


def test_a_graph_of_a_deep_model_is_planned_and_proved_in_seconds():
    """A transformer's shape: a residual stream with two branches a block, 6,000 groups."""
    graph = nx.DiGraph(name="deep")
    graph.add_node("wte", forward_ms=0.5, output_bytes=4000)
    stream = "wte"
    for block in range(600):
        parts = ["ln", "q", "k", "v", "sdpa", "proj", "add", "up", "down", "out"]
        names = {part: f"{block}.{part}" for part in parts}
        for index, name in enumerate(names.values()):
            times = 0.05 + 0.01 * ((block * 7 + index) % 5)
            graph.add_node(name, forward_ms=times, backward_ms=2 * times, output_bytes=4000)
        edges = ["ln q", "ln k", "ln v", "q sdpa", "k sdpa", "v sdpa", "sdpa proj", "proj add"]
        edges += ["add up", "up down", "down out", "add out"]
        graph.add_edges_from(tuple(names[part] for part in edge.split()) for edge in edges)
        graph.add_edges_from([(stream, names["ln"]), (stream, names["add"])])
        stream = names["out"]
    start_s = time.process_time()  # of this process: other tests run beside it
    solution = solve(graph, stages=8, link=Link(0.01, 1e8), prefer_modules=0)
    assert time.process_time() - start_s < 15
    assert solution.optimal and not math.isinf(solution.lower_bound_ms)


def test_the_solver_of_integer_programs_prints_nothing_itself() -> None:
    """A line of its own in standard output would break `--json`; it may be printed once a
    process."""
    command = [sys.executable, "-c", "import highspy; highspy.Highs()"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""
