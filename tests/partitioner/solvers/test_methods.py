"""Planning methods other than the exact one: valid, of their kind, within memory, repeatable."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.cost_graph import with_exchanges
from asyncpipe.partitioner.graph.costs import Link, StageSums, stage_sums
from asyncpipe.partitioner.graph.problem import Placement, Problem, evaluate
from asyncpipe.partitioner.graph.rank_model import Device, RankConfig
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.solvers import METHODS, SUPPORTS_CUTS
from asyncpipe.partitioner.solvers.baselines import clusters_of
from asyncpipe.partitioner.solvers.chain import interval_sums
from asyncpipe.partitioner.solvers.coarsening import BlockGraph
from asyncpipe.partitioner.solvers.local_search import GroupDivision
from asyncpipe.partitioner.solvers.mpipe import largest_first, staged
from asyncpipe.partitioner.solvers.multilevel import on_units
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.placements import (
    LINKS,
    SEARCHED,
    all_ordered,
    best_ms,
    contiguous,
    graphs,
    problem_of,
)

LARGEST = ("transient_bytes", "live_bytes", "largest_param_bytes")

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
    """Every way to give groups to ranks, as stages if they can be or as one stage per rank."""
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
def settings_of(draw: st.DrawFn, stages: int) -> RankConfig:
    """Ranks alike or not, with memory that may be too little, with and without recomputation."""
    speeds = draw(st.sampled_from([(1.0,), (1.0, 2.0)]))
    memory = draw(st.sampled_from([np.inf, 400.0, 150.0, 60.0]))
    devices = tuple(
        Device(speed=draw(st.sampled_from(speeds)), memory_bytes=memory) for _ in range(stages)
    )
    return RankConfig(
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
        graph.nodes[node]["frozen"] = {name: 7 for name in draw(st.sets(st.sampled_from("fg")))}
        graph.nodes[node]["saved"] = {name: 5 for name in names} | {f"x{node}": 5}
    stages = min(draw(st.integers(1, 3)), len(graph))
    return problem_of(graph, stages, draw(LINKS), draw(settings_of(stages)))


@settings(max_examples=60)
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


@settings(max_examples=12)
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


@settings(max_examples=25)
@given(graphs(), LINKS)
def test_several_stages_a_rank_are_never_better_than_the_best_assignment(graph, link):
    assume(len(graph) <= 7)
    problem = problem_of(graph, 2, link)
    best = least_ms(problem, any_assignment(problem))
    for method in SEVERAL_A_RANK:
        found = evaluate(problem, METHODS[method](problem)).bottleneck_ms
        assert found >= best * (1 - ROUNDING), method


@settings(max_examples=60)
@given(problems())
def test_pipedream_is_the_best_of_all_cuts_with_replicas(problem):
    assume(len({device.speed for device in problem.setting.devices}) == 1)
    assert_pipedream_is_best(problem)


def test_pipedream_counts_what_a_stage_is_sent():
    graph = nx.DiGraph(name="full")
    for node, backward_ms in enumerate((3, 0, 5)):
        graph.add_node(node, forward_ms=0, backward_ms=backward_ms, saved={f"x{node}": 5})
    graph.nodes[2].update(parameters={"w": 10}, saved={"w": 5, "x2": 5})
    graph.add_edge(0, 1, tensors={"x": 2}, grads={"x": 2})
    setting = RankConfig((Device(memory_bytes=60),) * 2, overlap=True)
    assert_pipedream_is_best(problem_of(graph, 2, Link(0.5, 1000.0), setting))


def assert_pipedream_is_best(problem):
    best = least_ms(problem, with_replicas(problem))
    if best == np.inf:
        with pytest.raises(PlanError, match="with or without replicas"):
            METHODS["pipedream"](problem)
        return
    evaluation = evaluate(problem, METHODS["pipedream"](problem))
    assert evaluation.fits
    assert evaluation.bottleneck_ms == pytest.approx(best)


@settings(max_examples=60)
@given(problems(), st.data())
def test_sums_of_parts_follow_the_evaluator_through_moves(problem, data):
    num_groups, count = len(problem.costs.groups), problem.stages
    part_of = data.draw(
        st.lists(st.integers(0, count - 1), min_size=num_groups, max_size=num_groups)
    )
    parts = GroupDivision(problem, part_of)
    for _ in range(4):
        parts.move(data.draw(st.integers(0, num_groups - 1)), data.draw(st.integers(0, count - 1)))
    for part, seen in enumerate(problem.seen):
        expected = stage_sums(seen, parts.part_of, count)[part]
        found = parts.sums(part)
        for field in SEARCHED:
            if field.name not in LARGEST or problem.setting.is_limited:
                value = getattr(found, field.name)
                assert value == pytest.approx(getattr(expected, field.name)), field.name


@settings(max_examples=60)
@given(graphs(), LINKS, st.data())
def test_units_cost_what_their_groups_do(graph, link, data):
    problem = problem_of(graph, 2, link)
    blocks = BlockGraph(problem.costs)
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


def line(*work_ms: float, num_bytes: int = 1) -> nx.DiGraph:
    graph = nx.DiGraph(name="line")
    for index, work in enumerate(work_ms):
        graph.add_node(f"n{index}", forward_ms=work, output_bytes=num_bytes)
    nx.add_path(graph, list(graph))
    return graph


def test_two_stages_on_a_rank_beat_any_single_cut():
    """3 + 3 on one rank and 4 on the other; with dear transfers the cut is better."""
    solution = solve(line(3, 4, 3), stages=2, method="mpipe")
    assert solution.placement.ranks == ((0,), (1,), (0,))
    assert solution.bottleneck_ms == 6
    assert solve(line(3, 4, 3), stages=2).bottleneck_ms == 7
    dear = Link(bytes_per_s=1e6)
    cut = solve(line(3, 4, 3, num_bytes=1000), stages=2, method="mpipe", link=dear)
    assert cut.placement.ranks is None and cut.bottleneck_ms == 8


def test_ranks_that_differ_keep_what_was_meant_for_them():
    setting = RankConfig((Device(speed=1.0), Device(speed=3.0)))
    for method in ("mpipe", "2dbin"):
        solution = solve(line(1, 3, 3, 3, 1), stages=2, method=method, setting=setting)
        of_rank = {0: 0.0, 1: 0.0}
        for stage, work in zip(solution.placement.stage_of, (1, 3, 3, 3, 1), strict=True):
            of_rank[solution.placement.ranks_of_stage[stage][0]] += work
        assert of_rank[1] > of_rank[0]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_block_goes_first_to_the_least_loaded_rank(sizes, ranks):
    """Graham's bound, which packing the smallest first breaks."""
    work_ms = np.array(sizes, dtype=float)[:, None].repeat(ranks, axis=1)
    nothing, room = np.zeros_like(work_ms), np.full(ranks, np.inf)
    done = np.bincount(largest_first(work_ms, nothing, room), weights=sizes, minlength=ranks)
    best = min(
        np.bincount(rank_of, weights=sizes, minlength=ranks).max()
        for rank_of in itertools.product(range(ranks), repeat=len(sizes))
    )
    assert done.max() <= (4 / 3 - 1 / (3 * ranks)) * best + ROUNDING


def test_packing_the_smallest_first_is_worse():
    """Negative control: the same rule on rising sizes, as if nothing had been sorted."""
    sizes = np.array([4.0, 1, 1, 1, 1])
    work_ms = sizes[:, None].repeat(2, axis=1)
    rank_of = largest_first(work_ms, np.zeros_like(work_ms), np.full(2, np.inf))
    assert np.bincount(rank_of, weights=sizes).tolist() == [4, 4]
    smallest_first = np.zeros(2)
    for size in sorted(sizes):
        smallest_first[smallest_first.argmin()] += size
    assert smallest_first.max() == 6


def test_packing_respects_memory():
    work_ms = np.ones((3, 2))
    num_bytes = np.array([[6.0, 6.0]] * 3)
    assert sorted(largest_first(work_ms, num_bytes, np.array([6.0, 12.0]))) == [0, 1, 1]


def test_clusters_are_of_like_times_the_largest_first():
    found = clusters_of(np.array([1.0, 10.2, 1.1, 10.0, 0.9]), 2)
    assert found.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b", "auto"])
def test_pipedream_plans_stages_that_recompute_for_every_schedule(schedule: str) -> None:
    graph = line(*[1.0] * 6)
    given = {"stages": 3, "method": "pipedream", "schedule": schedule, "prefer_modules": 0}
    plain, again = (solve(graph, recompute=recompute, **given) for recompute in ("none", "all"))
    assert again.step_ms >= plain.step_ms


def test_a_computed_schedule_takes_the_replicas_of_a_stage_for_one_rank() -> None:
    graph = line(4, 4, 3)
    graph.nodes["n2"]["param_bytes"] = 10_000_000  # its gradients would take long to sum
    given = {"method": "pipedream", "prefer_modules": 0, "link": Link(0.0, 1e6)}
    made = solve(graph, stages=3, schedule="auto", **given)
    assert made.placement.ranks_of_stage == ((0, 1), (2,))
    assert made.step_ms >= made.setting.micro_batches * made.bottleneck_ms * (1 - 1e-9)


def test_a_method_whose_plans_the_schedule_does_not_run_is_left_out() -> None:
    graph = line(*[1.0] * 8)
    made = solve(graph, stages=4, method="all", schedule="zb-h1", prefer_modules=0)
    refused = {one.name: one.note for one in made.candidates if not one.stages}
    assert list(refused) == ["mpipe"] and "zb-h1 has one stage on every rank" in refused["mpipe"]


def test_metis_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(PlanError, match="needs pymetis, which is not installed") as raised:
        solve(line(1, 1), stages=2, method="metis")
    assert raised.value.cure == "pip install 'pymetis>=2025'"
    compared = solve(line(1, 1), stages=2, method="all").candidates
    assert [one.note for one in compared if one.name == "metis"] == [raised.value.what]


def test_nothing_is_printed_by_metis(capfd):
    """It complains on stdout, in the middle of JSON, of parts that have but one group."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        graph = line(*generator.choice([0, 1, 900], size=generator.integers(4, 40)).tolist())
        solve(graph, stages=4, method="metis")
    assert capfd.readouterr().out == ""


def test_a_replicated_stage_pays_for_its_exchange():
    """Four equal ranks: with free links all share one stage, with slow ones they are a pipeline."""
    graph = line(4, 4, 4, 4)
    for node in graph:
        graph.nodes[node]["parameters"] = {node: 1_000_000}
    shared = solve(graph, stages=4, method="pipedream")
    assert shared.placement.ranks == ((0, 1, 2, 3),)
    assert shared.bottleneck_ms == 4
    slow = solve(graph, stages=4, method="pipedream", link=Link(bytes_per_s=1e6))
    assert not slow.placement.is_replicated


def test_replicas_stay_within_a_host_when_the_link_between_hosts_is_slow():
    """Two hosts of two: replicas in each, one boundary between them (PipeDream's levels)."""
    graph = line(4, 4, 4, 4)
    for node in graph:
        graph.nodes[node]["parameters"] = {node: 1_000_000}
    fast, slow = Link(bytes_per_s=1e12), Link(bytes_per_s=1e6)
    setting = RankConfig((Device(),) * 4, links=(fast, slow, fast))
    solution = solve(graph, stages=4, method="pipedream", setting=setting)
    assert solution.placement.ranks == ((0, 1), (2, 3))
    assert solution.placement.stage_of == (0, 0, 1, 1)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_demanded_cuts_are_heeded_or_refused(method):
    graph = line(1, 5, 1, 1, 5, 1)
    if METHODS[method] not in SUPPORTS_CUTS:
        with pytest.raises(PlanError, match="cannot use --cut-at"):
            solve(graph, stages=3, method=method, cut_before=["n1"])
        return
    stage_of = solve(graph, stages=3, method=method, cut_before=["n1"]).stage_of
    assert stage_of["n0"] != stage_of["n1"]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_method_tears_a_block_at_module_granularity(method):
    graph = nx.DiGraph(name="blocks")
    for block in range(5):
        for part in range(3):
            graph.add_node(
                f"{block}.{part}",
                forward_ms=1 + block * part,
                output_bytes=1,
                param_bytes=4 if part == 0 else 0,
                block=f"h.{block}",
                modules=(f"h.{block}",),
            )
    nx.add_path(graph, list(graph))
    solution = solve(graph, stages=3, method=method, granularity="module")
    for block in range(5):
        assert len({solution.stage_of[f"{block}.{part}"] for part in range(3)}) == 1


@settings(max_examples=15)
@given(graphs(), st.integers(2, 3), LINKS)
def test_all_takes_the_best_that_can_be_trained(graph, stages, link):
    compared = solve(graph, stages=stages, method="all", link=link, prefer_modules=0)
    auto = solve(graph, stages=stages, link=link, prefer_modules=0)
    assert compared.bottleneck_ms <= auto.bottleneck_ms * (1 + ROUNDING)
    assert not compared.placement.is_replicated
    (taken,) = (one for one in compared.candidates if one.name == compared.method)
    assert taken.bottleneck_ms == compared.bottleneck_ms
    assert {one.name for one in compared.candidates} >= {"uniform", "metis", "mpipe", "pipedream"}
    for one in compared.candidates:
        if not one.note:
            assert one.bottleneck_ms >= compared.bottleneck_ms * (1 - ROUNDING)
            assert one.gap >= -ROUNDING


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_fits_no_rank_is_refused(method):
    graph = line(1, 1, 1, 1)
    for node in graph:
        graph.nodes[node]["parameters"] = {node: 1000}
    setting = RankConfig((Device(memory_bytes=1000),) * 2)
    with pytest.raises(PlanError, match="fit"):
        solve(graph, stages=2, method=method, setting=setting)


def test_memory_decides_what_a_rank_gets():
    """Two large parameters cannot be on one rank, though the times would be best so."""
    graph = line(3, 4, 3)
    for node in ("n0", "n2"):
        graph.nodes[node]["parameters"] = {node: 100}
    setting = RankConfig((Device(memory_bytes=700),) * 2)
    for method in ("mpipe", "2dbin", "acyclic", "metis", "pipedream"):
        solution = solve(graph, stages=2, method=method, setting=setting)
        assert solution.bottleneck_ms == 7, method
        assert max(solution.evaluation.rank_bytes) <= 700


def test_a_block_that_others_lie_between_is_not_merged():
    blocks = BlockGraph(problem_of(nx.DiGraph([("a", "b"), ("b", "c"), ("a", "c")]), 1).costs)
    assert not blocks.may_merge(0, 2)
    assert blocks.may_merge(0, 1)
    blocks.merge(0, 1)
    assert blocks.may_merge(0, 2)
    assert blocks.numbered() == [0, 0, 1]


def test_all_takes_no_step_that_nobody_simulated():
    """Two stages of a rank wait for each other under a synchronous schedule: 6 ms is too little."""
    asynchronous = solve(line(3, 4, 3), stages=2, method="all")
    synchronous = solve(line(3, 4, 3), stages=2, method="all", schedule="1f1b")
    assert asynchronous.method == "mpipe" and asynchronous.placement.ranks is not None
    assert synchronous.placement.ranks is None
    (mpipe,) = (one for one in synchronous.candidates if one.name == "mpipe")
    assert mpipe.step_ms < synchronous.step_ms and "waiting time not included" in mpipe.note


def test_an_exchange_between_tied_groups_has_no_direction():
    """In an order that turns two holders of a parameter round, the exchange costs the same."""
    graph = nx.DiGraph(name="tied")
    for node in "abc":
        graph.add_node(node, forward_ms=1, parameters={"w": 1_000_000} if node != "c" else {})
    graph.add_edges_from([("a", "c"), ("b", "c")])
    link = Link(bytes_per_s=1e8)
    costs = with_exchanges(problem_of(graph, 2, link).costs, 4, link)
    problem = replace(problem_of(graph, 2, link), costs=costs)
    turned = on_units(problem, [1, 0, 2])
    assert stage_sums(turned.costs, [0, 1, 1], 2).receive_ms[0] == pytest.approx(5)
    assert stage_sums(costs, [1, 0, 1], 2).receive_ms[0] == pytest.approx(5)
    for end, sums in interval_sums(turned.costs):
        for start in range(end):
            where = [int(start <= group < end) for group in range(3)]
            expected = stage_sums(turned.costs, where, 2)
            assert sums.talk_ms[start] == pytest.approx(expected.talk_ms[1])
