"""Cost graphs of captured models, and the plans that are made of them."""

from __future__ import annotations

import json
from functools import cache

import networkx as nx
import pytest

from asyncpipe.partitioner.assemble_plan import PlanFacts, assemble
from asyncpipe.partitioner.capture import Capture, capture, colocated
from asyncpipe.partitioner.graph.build import build_graph, stage_of_nodes, with_copies
from asyncpipe.partitioner.graph.costs import LOCALHOST
from asyncpipe.partitioner.graph.formats import read_graph, write_graph
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile.profiler import Profile, profile_analytic
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.serialization import Origin, shaped
from asyncpipe.tests.support.models.zoo import ZOO
from asyncpipe.tests.support.oracles.captures import of_zoo
from asyncpipe.tests.support.oracles.stage_chain import cut


@cache
def graph_of(name: str) -> tuple[Capture, Profile, nx.DiGraph]:
    """The cost graph of a model of the zoo, with an analytic profile: the same every time."""
    captured = of_zoo(name)
    found = profile_analytic(captured, captured.arguments.tensors)
    return captured, found, build_graph(captured, found, name)


def plan_of(name: str, stages: int, **options: object) -> Plan:
    captured, found, graph = graph_of(name)
    solution = solve(graph, stages=stages, link=LOCALHOST, **options)
    again = Recomputation(captured, Prices.of(found))
    placed = stage_of_nodes(captured, graph, solution.stage_of, again)
    captured, stage_graphs = cut(captured, placed)
    found = with_copies(found, captured)
    facts = PlanFacts(name, f"zoo:{name}")
    return assemble(captured, stage_graphs, found, solution, facts)


def computed(captured: Capture) -> set[str]:
    ops = ("placeholder", "get_attr", "output")
    return {node.name for node in captured.graph.nodes if node.op not in ops}


@pytest.mark.parametrize("name", ZOO)
def test_groups_are_acyclic_ordered_and_hold_each_node_once(name):
    captured, found, graph = graph_of(name)
    assert nx.is_directed_acyclic_graph(graph)
    order = {group: position for position, group in enumerate(graph)}
    assert all(order[source] < order[target] for source, target in graph.edges)
    members = [member for _, names in graph.nodes(data="names") for member in names]
    assert len(members) == len(set(members))
    assert set(members) <= computed(captured)
    again = Recomputation(captured, Prices.of(found))
    placed = stage_of_nodes(captured, graph, dict.fromkeys(graph, 0), again)
    assert {node.name for node in placed} == computed(captured)


@pytest.mark.parametrize("name", ZOO)
def test_what_must_stay_together_is_in_one_group(name):
    captured, _, graph = graph_of(name)
    group_of = {member: group for group, names in graph.nodes(data="names") for member in names}
    for together in colocated(captured):
        assert len({group_of.get(node.name) for node in together}) == 1


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_that_is_read_is_in_a_group(name):
    captured, _, graph = graph_of(name)
    found = {key for _, held in graph.nodes(data="parameters") for key in held}
    assert found == {key for key, _ in captured.model.named_parameters()}


def test_edges_carry_the_bytes_of_the_tensors_that_cross():
    _, found, graph = graph_of("mlp")
    batch = found.sizes["batch"]
    for _, _, edge in graph.edges(data=True):
        for size in edge["tensors"].values():
            assert size in (4 * batch * 24, 4 * batch * 48, 4 * batch * 5)
        assert edge["grads"] == edge["tensors"]


def test_masks_and_positions_are_no_groups_and_cost_no_transfer():
    captured, _, graph = graph_of("llama")
    dtypes = {
        node.name: node.meta["val"].dtype for node in captured.graph.nodes if node.op != "output"
    }
    carried = {name for _, _, edge in graph.edges(data=True) for name in edge["tensors"]}
    assert all(dtypes[name].is_floating_point for name in carried)
    members = {member for _, names in graph.nodes(data="names") for member in names}
    assert len(members) < len(computed(captured))


def test_depth_counts_from_the_repeated_block_down():
    _, _, graph = graph_of("gpt2")
    at = {data["label"]: data for _, data in graph.nodes(data=True)}
    assert at["transformer.wte"]["block"] == "" and at["transformer.wte"]["depth"] == 0
    assert at["transformer.h.1.ln_1"]["modules"] == ["transformer.h.1"]
    inside = [data for data in at.values() if data["modules"][1:] == ["transformer.h.1.mlp"]]
    assert inside and all(data["depth"] == 2 for data in inside)


def test_a_cost_graph_survives_its_file(tmp_path):
    _, _, graph = graph_of("resnet")
    write_graph(graph, tmp_path / "graph.json")
    again = read_graph(tmp_path / "graph.json")
    assert solve(again, stages=3).loads_ms == pytest.approx(solve(graph, stages=3).loads_ms)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_model_of_the_zoo_gets_a_plan(name, stages, tmp_path):
    plan = plan_of(name, stages)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path) == json_like(plan)
    known = {spec.name for spec in plan.inputs}
    for stage in plan.stages:
        assert set(stage.inputs) <= known
        known |= set(stage.outputs)
        assert stage.peak_bytes >= stage.param_bytes + stage.activation_bytes
        assert {boundary.tensor.name for boundary in stage.receives} == (
            set(stage.inputs) - {spec.name for spec in plan.inputs}
        )
    assert set(leaves(plan.outputs)) <= known
    assert {value.name for value in plan.values} <= known
    held = {key for stage in plan.stages for key in (*stage.parameters, *stage.buffers)}
    tied = {key for shared in plan.shared for key in shared.names}
    assert set(plan.state_keys) == held | tied | set(plan.unused)
    assert plan.bottleneck_ms >= plan.lower_bound_ms * (1 - 1e-9)
    assert plan.bottleneck_ms <= plan.even_split_ms * 1.02 + 1e-9
    assert plan.stages[0].modules


def json_like(plan: Plan) -> Plan:
    """A plan as it reads back: what JSON has no word for is a list or a dict."""
    return shaped(Plan, json.loads(plan.to_json()), Origin("the plan", PlanError))


def leaves(outputs: object) -> list[str]:
    if isinstance(outputs, str):
        return [outputs]
    inner = outputs.values() if isinstance(outputs, dict) else outputs
    return [name for value in inner or () if value is not None for name in leaves(value)]


def test_tied_weights_of_two_stages_are_shared_and_owned_by_the_first():
    plan = plan_of("gpt2", 3)
    (shared,) = plan.shared
    assert shared.names == ("transformer.wte.weight", "lm_head.weight")
    assert shared.holders == ((0, "transformer.wte.weight"), (2, "lm_head.weight"))


def test_the_loss_is_found_by_its_key_and_is_absent_without():
    assert plan_of("gpt2", 2).loss == plan_of("gpt2", 2).outputs["loss"]
    assert plan_of("branches", 2).loss is not None
    assert plan_of("mlp", 2).loss is None


def test_stages_that_draw_random_numbers_say_so():
    assert [stage.draws_random for stage in plan_of("gpt2", 2).stages] == [True, True]
    assert not any(stage.draws_random for stage in plan_of("resnet", 2).stages)


def test_modules_are_named_whole_and_numbered_ones_in_a_row():
    (stage,) = plan_of("mlp", 1).stages
    assert stage.modules == ("embed", "blocks", "head")
    first, last = plan_of("mlp", 2, granularity="module").stages
    assert first.modules[:1] == ("embed",) and last.modules[-1:] == ("head",)
    assert any(label.startswith("blocks.") for label in first.modules + last.modules)


def test_a_skip_is_sent_once_to_all_that_read_it():
    plan = plan_of("branches", 3)
    targets = [boundary.targets for boundary in plan.boundaries]
    assert all(list(places) == sorted(set(places)) for places in targets)
    for boundary in plan.boundaries:
        for target in boundary.targets:
            assert boundary in plan.stages[target].receives


def test_capturing_a_cost_graph_twice_gives_the_same_graph():
    model, inputs = ZOO["branches"]()
    graphs = [
        build_graph(found, profile_analytic(found, inputs))
        for found in (capture(model, inputs, check=False) for _ in range(2))
    ]
    assert nx.utils.graphs_equal(*graphs)
