"""A limit of memory is kept by every method; where nothing fits the error says what would."""

from __future__ import annotations

import re
import shlex
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.graph.problem import Placement, evaluate
from asyncpipe.partitioner.planning.cluster import make_setting
from asyncpipe.partitioner.planning.infeasible import explained, least_memory
from asyncpipe.partitioner.planning.options import check_options
from asyncpipe.partitioner.planning.planner import plan_graph
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.solvers import METHODS
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.limits import bytes_of
from asyncpipe.tests.support.models.placements import all_ordered, contiguous, graphs, problem_of

MIB = 2**20


def blocks(number: int = 12, **graph_facts: Any) -> nx.DiGraph:
    """Equal blocks: 100 MiB of parameters, 200 MiB kept for backward, 5 MiB sent."""
    graph = nx.DiGraph(name="blocks", **graph_facts)
    for index in range(number):
        graph.add_node(
            index,
            forward_ms=1.0,
            backward_ms=2.0,
            param_bytes=100 * MIB,
            saved={f"saved {index}": 200 * MIB},
            output_bytes=5 * MIB,
            transient_bytes=20 * MIB,
        )
    nx.add_path(graph, range(number))
    return graph


@st.composite
def graphs_with_memory(draw: st.DrawFn) -> nx.DiGraph:
    graph = draw(graphs())
    sizes = st.integers(0, 20)
    for _, data in graph.nodes(data=True):
        data.update(
            param_bytes=draw(sizes),
            saved_bytes=draw(sizes),
            transient_bytes=draw(st.integers(0, 5)),
            live_bytes=draw(st.integers(0, 60)),
        )
    return graph


RUNNING = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["async-1f1b", "1f1b", "gpipe"]),
        "micro_batches": st.integers(1, 5),
        "recompute": st.sampled_from(["none", "auto", "all"]),
        "optimizer": st.sampled_from(["adamw", "sgd"]),
    }
)


@settings(max_examples=60)
@given(graphs_with_memory(), st.integers(2, 3), RUNNING, st.floats(0.9, 1.4), st.data())
def test_every_method_keeps_the_limit_or_says_that_it_cannot(graph, stages, running, room, data):
    setting = make_setting(stages, memory_limit=10**9, **running)
    problem = problem_of(graph, stages, setting=setting)
    least = evaluate(problem, least_memory(problem))
    limit = max(1, int(room * max(least.rank_bytes)))
    method = data.draw(st.sampled_from(sorted(METHODS)))
    try:
        found = solve(graph, stages=stages, method=method, memory_limit=limit, **running)
    except PlanError:
        assert method not in ("auto", "exact", "chain") or limit < max(least.rank_bytes)
        return
    assert found.evaluation.fits
    assert max(found.evaluation.rank_bytes) <= limit


@settings(max_examples=40)
@given(graphs_with_memory(), st.integers(2, 3), RUNNING, st.floats(1.0, 1.5))
def test_the_plan_within_a_limit_is_the_best_of_all_that_fit(graph, stages, running, room):
    running = running | {"schedule": "async-1f1b"}
    link = Link(bytes_per_s=1e3)
    setting = make_setting(stages, memory_limit=10**9, **running)
    problem = problem_of(graph, stages, link, setting)
    limit = int(room * max(evaluate(problem, least_memory(problem)).rank_bytes)) + 1
    problem = problem_of(graph, stages, link, make_setting(stages, memory_limit=limit, **running))
    all_plans = [evaluate(problem, Placement(one)) for one in all_ordered(graph, stages)]
    best_ms = min(one.bottleneck_ms for one in all_plans if one.fits)
    found = solve(graph, stages=stages, link=link, prefer_modules=0, memory_limit=limit, **running)
    assert found.bottleneck_ms == pytest.approx(best_ms)
    assert found.lower_bound_ms <= best_ms * (1 + 1e-9)


@settings(max_examples=40)
@given(graphs_with_memory(), st.integers(1, 3), RUNNING)
def test_the_least_memory_is_that_of_brute_force(graph, stages, running):
    setting = make_setting(stages, memory_limit=10**9, **running)
    problem = problem_of(graph, stages, setting=setting)
    of_all = [
        max(evaluate(problem, Placement(tuple(one))).rank_bytes)
        for one in contiguous(len(graph), stages)
    ]
    assert max(evaluate(problem, least_memory(problem)).rank_bytes) == min(of_all)


def test_recomputation_is_chosen_where_memory_demands_it_and_never_at_the_last_stage():
    free = plan_graph(blocks(), 4)
    tight = plan_graph(blocks(), 4, memory_limit="2.5GiB")
    assert not any(stage.recompute for stage in free.stages)
    assert any(stage.recompute for stage in tight.stages) and not tight.stages[-1].recompute
    assert max(stage.peak_bytes for stage in tight.stages) <= bytes_of("2.5GiB")
    assert tight.bottleneck_ms > free.bottleneck_ms
    recomputing = next(stage for stage in tight.stages if stage.recompute)
    assert recomputing.backward_ms == 3 * recomputing.forward_ms  # 2, and forward once more


def test_nothing_fits_says_what_the_best_needs_and_what_fits():
    running = {"schedule": "gpipe", "micro_batches": 16, "recompute": "none"}
    with pytest.raises(PlanError) as raised:
        plan_graph(blocks(micro_batch_size=8), 4, memory_limit="3GiB", **running)
    assert raised.value.what == (
        "no 4-stage plan fits 3 GiB per device: the best needs 10.7 GiB on stage 1 "
        "(9.4 of it activations of 16 micro-batches in flight)."
    )
    assert raised.value.cure == (
        "Fits with: --recompute auto · or --micro-batch-size 1 · or --schedule 1f1b · "
        "or --micro-batches 2"
    )


@pytest.mark.parametrize("limit", ["3GiB", "2GiB", "1500MiB", "700MiB"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async-1f1b"])
def test_whatever_is_suggested_fits(limit, schedule):
    running: dict[str, Any] = {"schedule": schedule, "micro_batches": 8, "recompute": "none"}
    try:
        plan_graph(blocks(16, micro_batch_size=4), 4, memory_limit=limit, **running)
    except PlanError as error:
        cure = error.cure
    else:
        assume_fitting = limit in ("3GiB", "2GiB")
        assert assume_fitting
        return
    offers = re.findall(r"--[^·]+?(?= · | would|$)", cure)
    assert offers
    for offer in offers:
        changed, stages, size = dict(running) | {"memory_limit": limit}, 4, 4
        words = shlex.split(offer)
        for flag, value in zip(words[::2], words[1::2], strict=True):
            name = flag[2:].replace("-", "_")
            if name == "stages":
                stages = int(value)
            elif name == "micro_batch_size":
                size = int(value)
            else:
                changed[name] = int(value) if value.isdigit() else value
        graph = blocks(16)
        for _, data in graph.nodes(data=True):
            data["saved"] = {name: saved * size // 4 for name, saved in data["saved"].items()}
            data["output_bytes"] = data["output_bytes"] * size // 4
            data["transient_bytes"] = data["transient_bytes"] * size // 4
        plan_graph(graph, stages, **changed)


def test_a_method_that_finds_nothing_sends_to_the_one_that_searches():
    graph, limit = blocks(), "3GiB"
    graph.nodes[0]["param_bytes"] *= 6
    plan_graph(graph, 4, memory_limit=limit)
    with pytest.raises(PlanError, match="--method uniform finds no 4-stage plan") as raised:
        plan_graph(graph, 4, method="uniform", memory_limit=limit)
    assert raised.value.cure == "--method auto searches all cuts."


def test_a_demanded_cut_is_kept_within_a_limit():
    solution = solve(blocks(), stages=2, memory_limit="8GiB", cut_before=["1"])
    assert [solution.stage_of[group] for group in "01"] == [0, 1]
    solve(blocks(), stages=2, memory_limit="6GiB")
    with pytest.raises(PlanError, match="no 2-stage plan fits 6 GiB .* needs .* on stage 1"):
        with explained():
            solve(blocks(), stages=2, memory_limit="6GiB", cut_before=["1"])


def test_a_need_that_is_hardly_above_the_limit_is_written_so_that_it_can_be_seen():
    least = least_memory(problem_of(blocks(), 4, setting=make_setting(4, memory_limit="1GB")))
    problem = problem_of(blocks(), 4, setting=make_setting(4, memory_limit="1GB"))
    limit = max(evaluate(problem, least).rank_bytes) - MIB
    with pytest.raises(PlanError) as raised:
        plan_graph(blocks(), 4, memory_limit=limit)
    found = re.search(r"fits (\S+) GiB per device: the best needs (\S+) GiB", raised.value.what)
    assert found and found[1] != found[2]


@pytest.mark.parametrize(
    ("text", "size"),
    [("11GiB", 11 * 2**30), ("500 mb", 5 * 10**8), ("1.5e9", 15 * 10**8), (7, 7), ("2TB", 2e12)],
)
def test_sizes_of_memory_are_read(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "many", "-3GiB", "0", "11Gi b", "3 gigs", "1.2.3GB"])
def test_what_is_no_size_is_told_in_one_sentence(text):
    with pytest.raises(PlanError, match="is not a memory size") as raised:
        check_options({"memory_limit": text})
    assert "11GiB" in raised.value.cure and "\n" not in raised.value.what


def test_a_large_graph_is_told_in_seconds_what_it_lacks():
    rng = np.random.default_rng(0)
    graph = nx.DiGraph(name="large")
    for index in range(750):
        graph.add_node(
            index, forward_ms=1.0, backward_ms=2.0, param_bytes=int(rng.integers(1, 9)) * MIB
        )
    nx.add_path(graph, range(750))
    with pytest.raises(PlanError, match="no 4-stage plan fits 1 GiB per device"):
        plan_graph(graph, 4, memory_limit="1GiB")
