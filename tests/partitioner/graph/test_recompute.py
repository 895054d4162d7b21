"""Values that a stage recomputes or receives; either way its numbers are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.compile import partition_spec
from asyncpipe.partitioner.graph.build import build_graph
from asyncpipe.partitioner.graph.costs import LOCALHOST, Link
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.partitioner.profile.profiler import profile_analytic
from asyncpipe.partitioner.split.split import StageGraph, split, stage_tensors
from asyncpipe.runtime.plan.forecast import traffic
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.oracles.captures import of_zoo
from asyncpipe.tests.support.oracles.stage_chain import stages_at

FAST = Link(latency_ms=0.0001, bytes_per_s=1e12)


def again(captured: Capture, link: Link = LOCALHOST, **work_ms: float) -> Recomputation:
    return Recomputation(captured, Prices(captured.sizes, work_ms, link))


def cut(name: str, share: float, link: Link = LOCALHOST) -> Any:
    captured = of_zoo(name)
    return captured, split(captured, stages_at(captured, (share,)), again(captured, link))


def sent(captured: Capture, graphs: tuple[StageGraph, ...]) -> list[tuple[Any, ...]]:
    """The shapes that later stages receive from earlier ones."""
    return [
        captured.tensor_spec(node).shape
        for graph in graphs
        for node in graph.inputs
        if node.op != "placeholder"
    ]


def test_rotary_tables_and_masks_are_not_sent() -> None:
    captured, graphs = cut("llama", 0.5)
    width = captured.model.config.hidden_size
    assert sent(captured, graphs) == [("batch", "sequence", width)]


def test_a_small_parameter_is_held_by_all_who_read_what_it_makes() -> None:
    captured, graphs = cut("t5", 0.2)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert all(name in stage_tensors(captured, graph).parameters for graph in graphs)
    assert all(shape.count("sequence") < 2 for shape in sent(captured, graphs))


def test_on_a_fast_link_what_takes_long_to_make_is_sent() -> None:
    captured, graphs = cut("t5", 0.2, FAST)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert name not in stage_tensors(captured, graphs[1]).parameters
    assert any(shape.count("sequence") == 2 for shape in sent(captured, graphs))


class Pairs(nn.Module):
    """Much work on whole numbers for a small result, and little for a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        equal = ids[:, :, None] == ids[:, None, :]
        count = equal.sum(-1)
        x = self.first(x) * count[..., None]
        return self.last(x * count[..., None]) + equal.sum(-1, keepdim=True)


def pairs() -> tuple[nn.Module, dict[str, Tensor]]:
    return Pairs(), {"x": torch.randn(4, 6, 8), "ids": torch.randint(9, (4, 6))}


@pytest.mark.parametrize(("work_ms", "is_sent"), [(0.001, False), (50.0, True)])
def test_the_cost_decides_and_not_the_kind(work_ms: float, is_sent: bool) -> None:
    model, inputs = pairs()
    dynamic = {"x": {0: "batch", 1: "sequence"}, "ids": {0: "batch", 1: "sequence"}}
    captured = capture(model, inputs, dynamic=dynamic, check=False)
    equal, count = (named(captured, name) for name in ("equal", "count"))
    chosen = again(captured, **{equal.name: work_ms, count.name: 0.001})
    nodes = [node for node in captured.graph.nodes if node.op.startswith("call")]
    first = next(node for node in nodes if node.target == "first")
    stage_of = {node: int(nodes.index(node) > nodes.index(first) + 2) for node in nodes}
    graphs = split(captured, stage_of, chosen)
    assert (count in graphs[1].inputs or equal in graphs[1].inputs) == is_sent
    assert ({equal, count} <= {*graphs[1].nodes}) != is_sent
    assert ({equal, count} <= chosen.free) != is_sent


def named(captured: Capture, name: str) -> fx.Node:
    return next(node for node in captured.graph.nodes if node.name == name)


class Wide(nn.Module):
    """A cast and an expansion between the two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 1)
        self.last = nn.Linear(16384, 8)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.first(x)
        wide = narrow.expand(-1, 16384).double() * 2
        return self.last(wide.float()) + narrow


def test_a_smaller_ancestor_is_sent_in_place_of_what_is_made_of_it() -> None:
    captured = capture(Wide(), {"x": torch.randn(4, 8)}, check=False)
    nodes = [node for node in captured.graph.nodes if node.op.startswith("call")]
    last = next(node for node in nodes if node.target == "last")
    stage_of = {node: int(nodes.index(node) >= nodes.index(last)) for node in nodes}
    graphs = split(captured, stage_of, again(captured))
    assert sent(captured, graphs) == [("batch", 1)]


def test_the_planner_pays_for_what_is_sent() -> None:
    model, inputs = Wide(), {"x": torch.randn(4, 8)}
    captured = capture(model, inputs, check=False)
    graph = build_graph(captured, profile_analytic(captured, inputs))
    carried = {name for _, _, edge in graph.edges(data=True) for name in edge["tensors"]}
    assert "narrow" in carried
    assert not any("float" in name or "mul" in name or "wide" in name for name in carried)


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        noise = torch.rand_like(ids, dtype=torch.float32)[:, None].expand(-1, 8)
        ids += 1
        shifted = (ids * 2)[:, None].expand(-1, 8)
        return self.last(self.first(x) * noise + shifted) * noise + shifted


def test_random_numbers_and_changed_inputs_are_never_made_again() -> None:
    inputs = {"x": torch.randn(4, 8), "ids": torch.arange(4)}
    captured = capture(Drawn(), inputs, check=False)
    cheapest = again(captured, Link(latency_ms=1e3, bytes_per_s=1.0))
    for node in captured.graph.nodes:
        if node.meta.get("random") or "iadd" in node.name or node.name == "ids":
            assert node.op == "placeholder" or not cheapest.is_makeable(node)
            assert node not in cheapest.free


@pytest.mark.parametrize(("model", "least"), [("t5-small", 0.6), ("t5-3b", 0.79)])
def test_the_position_bias_of_a_t5_is_most_of_what_would_be_sent(
    model: str, least: float, tmp_path: Path
) -> None:
    short = {"num_layers": 6, "num_decoder_layers": 1, "vocab_size": 500}
    options = PartitionOptions(
        stages=2, output=tmp_path / "made", meta=True, model_args=short,
        granularity="module", micro_batch_size=1,
    )  # fmt: skip
    plan = partition_spec(model, options)
    assert read_plan(tmp_path / "made").if_sent == plan.if_sent
    (flow,) = traffic(plan)
    assert 1 - flow.sent / flow.if_sent >= least
    for page in ("README.md", "report.html"):
        assert "with everything sent" in (tmp_path / "made" / page).read_text()
