"""`--zero` in a plan: less memory on replicas, and the sums after each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import asyncpipe
from asyncpipe.partitioner.graph.costs import Link
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.choose_devices import choose
from asyncpipe.partitioner.planning.cluster import cluster_of_hosts
from asyncpipe.partitioner.planning.infeasible import explained
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.plan.sharing import MESSAGE_BYTES, UNDER_WAY
from asyncpipe.runtime.plan.trust import code_hashes
from asyncpipe.runtime.schedule.asynchronous import KEEPS
from asyncpipe.runtime.sharding.planned import with_shares
from asyncpipe.runtime.staleness.compose import _OF_WHOLE_STATE, METHODS
from asyncpipe.tests.support.models.copies import made_once

MIB = 2**20
TWO = replace(cluster_of_hosts("a:2"), within={"a": Link(bytes_per_s=1e13)})


def layers(sizes: list[int]) -> nx.DiGraph:
    """Layers with parameters of so many MiB, one tensor each."""
    graph = nx.DiGraph()
    for index, size in enumerate(sizes):
        graph.add_node(
            index,
            forward_ms=4.0,
            backward_ms=8.0,
            parameters={f"weight {index}": size * MIB},
            transient_bytes=0,
        )
    nx.add_path(graph, range(len(sizes)))
    return graph


def memory(sizes: list[int], zero: int, **options: Any) -> tuple[int, int]:
    """MiB of gradients and of the optimizer's state of one stage on two replicas."""
    options = {"schedule": "1f1b", "stages": 1, "micro_batches": 4, "zero": zero} | options
    choice = choose(layers(sizes), TWO, **options)
    assert choice.layout.shape == (2,)
    of_stage = choice.solution.loads[0].memory
    return of_stage.gradients // MIB, of_stage.optimizer // MIB


def test_the_fullest_replica_has_half_or_the_largest_parameter() -> None:
    passing = UNDER_WAY * MESSAGE_BYTES // MIB
    assert memory([40, 20, 60, 80], 0) == (200, 400)
    assert memory([40, 20, 60, 80], 1) == (200, 200)
    assert memory([40, 20, 60, 30], 2) == (75 + 60 + passing, 150)
    assert memory([10, 20, 10, 90], 1) == (130, 180)
    assert memory([40, 20, 60, 80], 1, optimizer="sgd") == (200, 0)


def test_a_limit_that_needs_shared_state_is_kept_by_every_method() -> None:
    graph = layers([20] * 8)
    options = {"schedule": "1f1b", "memory_limit": 500 * MIB, "stages": 1}
    with pytest.raises(PlanError, match="640 MiB") as error, explained():
        choose(graph, TWO, **options)
    assert "Fits with: --zero 1" in str(error.value)
    for method in ("auto", "chain", "acyclic", "metis"):
        choice = choose(graph, TWO, zero=1, method=method, **options)
        assert choice.layout.shape == (2,)
        assert choice.solution.evaluation.rank_bytes == (480 * MIB,)


def test_gradients_that_are_summed_after_each_micro_batch_take_longer() -> None:
    link = Link(bytes_per_s=1e10)
    cluster = replace(TWO, within={"a": link})
    once_ms = 1e3 * 80 * MIB / 1e10

    def step_ms(zero: int) -> float:
        given = {"schedule": "1f1b", "stages": 1, "micro_batches": 8, "zero": zero}
        return choose(layers([20] * 4), cluster, **given).solution.step_ms

    assert step_ms(1) == step_ms(0) == pytest.approx(4 * 48 + once_ms)
    assert step_ms(2) == pytest.approx(4 * 48 + once_ms * (4 + 1) / 2)


def partitioned(place: Path, zero: int) -> Path:
    """An MLP in one stage on two replicas."""

    def partition() -> None:
        source = load_model("mlp")
        asyncpipe.partition(
            source.model,
            source.example_inputs,
            stages=1,
            output=place,
            loss="cross_entropy",
            schedule="1f1b",
            micro_batches=4,
            devices=TWO,
            zero=zero,
            profile="analytic",
        )

    return made_once(f"mlp on two fast devices, zero {zero}", place, partition)


def test_a_run_has_the_zero_of_its_plan_and_its_memory(tmp_path: Path) -> None:
    folders = {zero: partitioned(tmp_path / f"zero {zero}", zero) for zero in (0, 1, 2)}
    plans = {zero: read_plan(folder) for zero, folder in folders.items()}

    def counted(plan_of: int, **given: Any) -> Plan:
        folder, plan = folders[plan_of], plans[plan_of]
        settings = Settings(folder=str(folder), schedule="1f1b", steps=2, **given)
        config, _ = resolve(settings, plan)
        assert config.zero == given.get("zero", plan_of if config.pipelines > 1 else 0)
        return with_shares(plan, config, [(0,)], code_hashes(folder))[0]

    whole = plans[0].stages[0].memory
    assert counted(0).stages[0].memory == whole
    for zero in (1, 2):
        planned = plans[zero].stages[0].memory
        assert planned.optimizer < whole.optimizer
        assert counted(zero).stages[0].memory.total == pytest.approx(planned.total, rel=0.02)
        assert counted(zero, zero=0).stages[0].memory == whole
        assert counted(zero, replicas=1).stages[0].memory == whole
        assert counted(zero).stages[0].peak_bytes < counted(zero, zero=0).stages[0].peak_bytes


def test_a_written_step_has_the_sums_of_its_replicas(tmp_path: Path) -> None:
    for zero, passes in ((0, 1.0), (2, 1.5)):
        plan = read_plan(partitioned(tmp_path / str(zero), zero))
        (stage,) = plan.stages
        own_ms = 2 * (stage.forward_ms + stage.backward_ms)
        assert plan.setting.step_ms == pytest.approx(own_ms + stage.summing_ms)
        once_ms = stage.summing_ms / passes
        assert forecast_step(plan, "1f1b", 2, replicas=2).step_ms == pytest.approx(own_ms + once_ms)


def test_what_replicas_cannot_share_out_is_refused() -> None:
    graph, asynchronous = layers([1, 1]), {"schedule": "async-1f1b", "zero": 1}
    with pytest.raises(PlanError, match="each stage of the plan has 1 replica"):
        asyncpipe.plan_graph(graph, 2, zero=1)
    with pytest.raises(PlanError, match="error-feedback reads the optimizer's state") as error:
        choose(graph, TWO, staleness="stash+error-feedback", **asynchronous)
    assert "--staleness stash, or --zero 0" in str(error.value)
    with pytest.raises(PlanError, match="--method pipedream single stages have replicas"):
        asyncpipe.plan_graph(graph, 2, zero=2, method="pipedream", schedule="1f1b")


def test_methods_that_read_the_state_of_all_weights_are_known_to_the_planner() -> None:
    reading = {name for name, method in METHODS.items() if method.needs & _OF_WHOLE_STATE}
    assert reading == {name for name, keeps in KEEPS.items() if keeps.of_state}
