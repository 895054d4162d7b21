"""Values that cross a boundary, values that are recomputed, and values that a stage holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.capture.values import is_mutating
from asyncpipe.partitioner.split.split import StageGraph, split, stage_tensors, unused_tensors
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models import zoo
from asyncpipe.tests.support.models.residual import ResidualMLP
from asyncpipe.tests.support.oracles.stage_chain import cut, stages_at


def stages_of(
    model: nn.Module, inputs: dict[str, Any], *cuts: float
) -> tuple[Capture, tuple[StageGraph, ...]]:
    captured = capture(model, inputs, check=False)
    return cut(captured, stages_at(captured, cuts))


def names(nodes: tuple[fx.Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def test_a_skip_crosses_every_boundary_on_its_way_once() -> None:
    _, graphs = stages_of(ResidualMLP(), {"x": torch.randn(8, 32)}, 0.35, 0.7)
    embed = next(node for node in graphs[0].nodes if node.target == "embed")
    assert embed in graphs[0].outputs
    assert embed not in graphs[1].inputs
    assert embed in graphs[2].inputs
    assert [node.op for node in graphs[0].inputs] == ["placeholder"]


def test_every_node_is_in_one_stage_and_the_outputs_in_the_model_s_order() -> None:
    captured, graphs = stages_of(*zoo.branches(), 0.6)
    nodes = [node for graph in graphs for node in graph.nodes]
    assert len(nodes) == len(set(nodes))
    (output,) = captured.graph.find_nodes(op="output")
    assert list(graphs[-1].outputs) == list(output.args[0].values())


def test_masks_are_computed_again_and_not_sent() -> None:
    captured, graphs = stages_of(*zoo.gpt2_eager(), 0.6)
    mask = captured.graph.find_nodes(op="placeholder")[1]
    assert mask.name == "attention_mask"
    assert mask in graphs[0].inputs and mask in graphs[1].inputs
    again = set(graphs[0].nodes) & set(graphs[1].nodes)
    assert again
    assert not any(node.meta["random"] for node in again)
    sent = [captured.tensor_spec(node) for node in graphs[0].outputs]
    assert all(spec.dtype == "float32" and "sequence" in spec.shape for spec in sent)
    assert not any(spec.shape.count("sequence") > 1 for spec in sent)


def test_rotary_tables_are_computed_again() -> None:
    captured, graphs = stages_of(*zoo.llama(), 0.5)
    used = [stage_tensors(captured, graph) for graph in graphs]
    assert not any("inv_freq" in name for held in used for name in held.buffers)
    assert {"cos", "sin"} <= {node.target for node in graphs[1].nodes}


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        every, last = self.recurrent(x)
        return torch.relu(every.mean(1)) + last[0]


def test_the_items_of_a_tuple_are_taken_where_it_is_made() -> None:
    captured = capture(Pieces(), {"x": torch.randn(4, 5, 8)}, check=False)
    order = [node for node in captured.graph.nodes if node.op.startswith("call")]
    made = next(node for node in order if node.target == "recurrent")
    stage_of = {node: int(order.index(node) > order.index(made)) for node in order}
    graphs = split(captured, stage_of)
    assert all(isinstance(node.meta["val"], Tensor) for node in graphs[0].outputs)
    assert len(graphs[0].outputs) == 2


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        flat = self.linear(x.view(-1, 8))
        return torch.relu(flat).view(batch, length, 8)


def test_a_stage_that_cannot_read_a_size_off_its_inputs_gets_one_that_has_it() -> None:
    captured = capture(
        Sizes(),
        {"x": torch.randn(4, 5, 8)},
        dynamic={"x": {0: "batch", 1: "sequence"}},
        check=False,
    )
    graphs = split(captured, stages_at(captured, (0.7,)))
    assert names(graphs[1].inputs)[0] == "x"


def test_a_value_that_would_flow_back_is_refused() -> None:
    captured = capture(ResidualMLP(), {"x": torch.randn(8, 32)}, check=False)
    nodes = [node for node in captured.graph.nodes if node.op.startswith("call")]
    with pytest.raises(PlanError, match="is made in stage 1 and read in stage 0"):
        split(captured, {node: int(node is nodes[0]) for node in nodes})


def test_an_empty_stage_is_refused() -> None:
    captured = capture(ResidualMLP(), {"x": torch.randn(8, 32)}, check=False)
    nodes = [node for node in captured.graph.nodes if node.op.startswith("call")]
    with pytest.raises(PlanError, match="stage 1 of 3 would compute nothing") as raised:
        split(captured, {node: 2 * (place > 3) for place, node in enumerate(nodes)})
    assert raised.value.cure == "Use --stages 2."


def test_a_plan_without_a_node_is_refused() -> None:
    captured = capture(ResidualMLP(), {"x": torch.randn(8, 32)}, check=False)
    with pytest.raises(PlanError, match="the plan gives no stage for embed"):
        split(captured, {})


def test_a_tied_parameter_is_in_each_stage_under_the_name_used_there() -> None:
    captured, graphs = stages_of(*zoo.gpt2(), 0.5)
    first, second = (stage_tensors(captured, graph) for graph in graphs)
    assert "transformer.wte.weight" in first.parameters
    assert "lm_head.weight" in second.parameters
    assert "transformer.wte.weight" not in second.parameters
    assert unused_tensors(captured, graphs) == ()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_tensors_that_no_stage_holds_are_known() -> None:
    captured, graphs = stages_of(Unused(), {"x": torch.randn(4, 8)})
    assert unused_tensors(captured, graphs) == ("spare.weight", "spare.bias")


def test_what_changes_a_tensor_is_told_from_what_does_not() -> None:
    captured = capture(*zoo.branches(), check=False)
    changing = {node.name for node in captured.graph.nodes if is_mutating(node)}
    targets = {
        getattr(node.target, "__name__", node.target)
        for node in captured.graph.nodes
        if node.name in changing
    }
    assert targets == {"iadd", "copy_", "mul_", "setitem"}
