"""A setting's numbers for ranks match the runtime: in flight, versions, copies, memory."""

from __future__ import annotations

import inspect

import networkx as nx
import pytest
import torch
from torch import nn

from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.graph.costs import stage_sums
from asyncpipe.partitioner.graph.problem import Placement, evaluate
from asyncpipe.partitioner.graph.rank_model import DEPTH
from asyncpipe.partitioner.planning.cluster import make_setting
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.executor.run import version_pairs
from asyncpipe.runtime.executor.weight_binding import WeightBinder
from asyncpipe.runtime.optimizers import facts
from asyncpipe.runtime.optimizers.soap import Soap, Sutskever
from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS
from asyncpipe.runtime.schedule.builders import SCHEDULES, make_schedule
from asyncpipe.runtime.schedule.schedule import Numbering, count_in_flight
from asyncpipe.runtime.staleness import make_staleness
from asyncpipe.runtime.staleness.weight_versions import WeightVersions
from asyncpipe.runtime.transports.gloo import GlooTransport
from asyncpipe.tests.support.models.placements import problem_of
from asyncpipe.tests.support.models.small_schedules import ranks_for

SIZES = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in range(1, 11)]


TIGHT = {"schedule": "gpipe", "micro_batches": 4, "memory_limit": 10}
PLANNED = [name for name in SCHEDULES if name not in ("single", "virtual-stages-1f1b")]


@pytest.mark.parametrize("name", PLANNED)
def test_in_flight_is_what_the_schedule_has_at_its_fullest(name: str) -> None:
    for stages, micro_batches in SIZES:
        long = 4 * micro_batches + 4 * stages if name in ASYNCHRONOUS else 1
        if name == "2bw" and micro_batches < stages:
            continue
        for ranks in ranks_for(name, stages):
            made = make_schedule(
                name,
                stages=stages,
                micro_batches=micro_batches * long,
                step_every=micro_batches,
                ranks=ranks,
            )
            setting = make_setting(stages, schedule=name, ranks=ranks, micro_batches=micro_batches)
            placed = setting.at(made.rank_of_stage)
            expected = count_in_flight(made.ranks, stages)
            assert setting.stages == ranks
            assert tuple(map(placed.in_flight, range(stages))) == expected == made.in_flight


def test_one_stage_of_single_has_one_micro_batch_in_flight() -> None:
    assert make_setting(1, schedule="single").in_flight(0) == 1


def test_versions_are_the_copies_that_a_stash_keeps() -> None:
    """The most copies of weights at once, when the runtime's own stash goes through a schedule."""
    for stages, step_every in SIZES:
        made = make_schedule(
            "async-1f1b",
            stages=stages,
            micro_batches=step_every * (2 * stages + 4),
            step_every=step_every,
        )
        setting = make_setting(stages, micro_batches=step_every, staleness="stash")
        for stage, row in enumerate(made.ranks):
            weights = WeightVersions(stage, nn.Linear(1, 1))
            binder = WeightBinder(weights, make_staleness("stash"))
            known, most = version_pairs(row, {stage: 0}, Numbering()), 0
            for action in row:
                if action.kind == "F":
                    binder.forward(known[stage, action.index], repeats=False)
                elif action.kind == "B":
                    weights.went_backward(action.index)
                else:
                    weights.begin_step()
                    weights.stepped()
                most = max(most, weights.ring_size)
            assert setting.versions(stage) == most, (stages, step_every, stage)


@pytest.mark.parametrize("name", facts.PLANNED)
def test_optimizers_keep_as_many_copies_as_counted(name: str) -> None:
    shapes = {"soap": (1000, 1), "adafactor": (100, 100)}
    weight = nn.Parameter(torch.ones(shapes.get(name, (1000,))))
    made = {
        "adamw": lambda: torch.optim.AdamW([weight]),
        "adam": lambda: torch.optim.Adam([weight]),
        "sgd": lambda: torch.optim.SGD([weight]),
        "momentum": lambda: torch.optim.SGD([weight], momentum=0.9),
        "sutskever": lambda: Sutskever([weight], lr=0.1),
        "nadam": lambda: torch.optim.NAdam([weight]),
        "muon": lambda: torch.optim.AdamW([weight]),  # for what is no hidden matrix
        "adafactor": lambda: torch.optim.Adafactor([weight]),
        "soap": lambda: Soap([weight], lr=0.1, largest=1),
    }[name]()
    weight.grad = torch.ones_like(weight)
    made.step()
    kept = sum(
        value.numel()
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    assert kept // weight.numel() == facts.PLANNED[name].copies


def test_as_many_messages_are_counted_as_the_transport_has_under_way() -> None:
    assert inspect.signature(GlooTransport).parameters["depth"].default == DEPTH


def middle_stage(*, saved: bool) -> nx.DiGraph:
    """x -> y -> z, each sends 1000 bytes; y keeps 50, and what it sends if `saved`."""
    graph = nx.DiGraph(name="three")
    for name in "xyz":
        graph.add_node(name, forward_ms=1.0, backward_ms=2.0, output_bytes=1000)
    graph.nodes["y"].update(param_bytes=10, buffer_bytes=7, transient_bytes=3, saved={"inside": 50})
    if saved:
        graph.nodes["y"]["saved"]["y"] = 1000
    nx.add_path(graph, "xyz")
    return graph


def test_memory_by_parts_adds_up_to_the_peak() -> None:
    sums = stage_sums(costs_of(middle_stage(saved=False)), [0, 1, 2], 3)[1]
    setting = make_setting(3, schedule="gpipe", micro_batches=6)
    memory = setting.memory(1, sums, recompute=False)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (10, 10, 20)
    assert (memory.buffers, memory.activations, memory.transient) == (7, 6 * 50, 3)
    # Received: the gradient being made. Sent: 4 gradients to come, and 6 micro-batches.
    assert memory.transport == 1000 + 4 * 1000 + 6 * 1000
    assert memory.total == setting.memory_bytes(1, sums, recompute=False)
    again = setting.memory(1, sums, recompute=True)
    assert again.activations == 6 * 1000 + 50
    assert again.transport == 1000 + 4 * 1000 + 4 * 1000


def test_what_is_sent_and_saved_is_counted_once() -> None:
    setting = make_setting(3, schedule="gpipe", micro_batches=6)
    parts = []
    for saved in (False, True):
        sums = stage_sums(costs_of(middle_stage(saved=saved)), [0, 1, 2], 3)[1]
        parts.append(setting.memory(1, sums, recompute=False))
    assert parts[1].activations - parts[0].activations == 6 * 1000
    assert parts[0].transport - parts[1].transport == 6 * 1000
    assert parts[0].total == parts[1].total


def test_a_tensor_in_the_memory_of_another_is_saved_as_that() -> None:
    graph = middle_stage(saved=False)
    graph.nodes["y"].update(saved={"inside": 1000}, saved_as={"y": "inside"})
    assert not stage_sums(costs_of(graph), [0, 1, 2], 3)[1].root_bytes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"schedule": "1f2b"}, "--schedule 1f2b is not one of"),
        ({"recompute": "some"}, "--recompute some is not one of auto, all, none"),
        ({"optimizer": "adamv"}, "--optimizer adamv is not one of"),
        ({"staleness": "stashed"}, "--staleness stashed is not one of"),
        ({"micro_batches": 0}, "--micro-batches 0 is not a whole number from 1 to"),
        ({"schedule": "1f1b", "staleness": "stash"}, "under 1f1b no weights are stale"),
        ({"memory_limit": "lots"}, "--memory-limit lots is not a memory size"),
    ],
)
def test_what_cannot_be_run_so_is_told_in_one_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_setting(2, **options)
    assert sentence in raised.value.what and raised.value.cure


def test_a_misspelt_option_is_no_option() -> None:
    with pytest.raises(TypeError, match="memory_limits"):
        make_setting(2, memory_limits="1GiB")


@pytest.mark.parametrize("recompute", ["auto", "all"])
def test_a_stage_that_saves_nothing_counts_as_one_that_never_recomputes(recompute: str) -> None:
    graph = nx.DiGraph()
    for node, saved_bytes in enumerate((0, 0, 8)):
        graph.add_node(node, forward_ms=1.0, output_bytes=100, saved_bytes=saved_bytes)
    nx.add_path(graph, range(3))
    placed = Placement((0, 1, 2))
    plain, again = (
        evaluate(problem_of(graph, 3, setting=make_setting(3, recompute=choice, **TIGHT)), placed)
        for choice in ("none", recompute)
    )
    assert [load.recomputes for load in again.stages] == [False, False, True]
    assert again.stages[:2] == plain.stages[:2] and again.stages[2] != plain.stages[2]
