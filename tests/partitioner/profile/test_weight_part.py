"""Which part of a backward is of weights: by operation, and as autograd has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.build import build_graph
from asyncpipe.partitioner.graph.cost_graph import costs_of
from asyncpipe.partitioner.profile.measure import Repeats
from asyncpipe.partitioner.profile.operation_costs import weight_ms, weight_share
from asyncpipe.partitioner.profile.profiler import CPU_CORE, profile, profile_analytic
from asyncpipe.runtime.errors import PlanError


class Reader(nn.Module):
    """An embedding, a norm, a layer, a product with a bare weight and one of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.layer(self.norm(self.embed(ids))))
        product = torch.matmul(h, self.weight)
        likeness = torch.matmul(product, product.transpose(1, 2))
        return likeness.sum()


def shares() -> dict[str, float]:
    model = Reader()
    captured = capture(model, {"ids": torch.randint(0, 11, (4, 3))})
    return {node.name: weight_share(node, model) for node in captured.graph.nodes}


def test_products_with_a_weight_have_half_of_their_backward_for_it() -> None:
    found = shares()
    assert found["layer"] == found["product"] == 0.5
    assert found["norm"] == found["h"] == found["likeness"] == 0.0


def test_where_the_input_has_no_gradient_all_is_for_the_weight() -> None:
    assert shares()["embed"] == 1.0


def test_the_graph_has_the_part_of_every_group() -> None:
    captured = capture(Reader(), {"ids": torch.randint(0, 11, (4, 3))})
    profile = profile_analytic(captured, captured.arguments.tensors, CPU_CORE)
    costs = costs_of(build_graph(captured, profile))
    assert 0 < costs.weight_ms.sum() < costs.backward_ms.sum()
    assert (costs.weight_ms <= costs.backward_ms).all()


def test_a_part_that_is_more_than_the_whole_is_refused() -> None:
    captured = capture(Reader(), {"ids": torch.randint(0, 11, (4, 3))})
    graph = build_graph(captured, profile_analytic(captured, captured.arguments.tensors, CPU_CORE))
    graph.nodes[next(iter(graph))]["weight_ms"] = 1e9
    with pytest.raises(PlanError, match="is a part of its backward_ms"):
        costs_of(graph)


def test_what_a_run_puts_off_is_measured_with_the_operation() -> None:
    model = Reader()
    ids = torch.randint(0, 11, (64, 32))
    captured = capture(model, {"ids": ids})
    found = profile(captured, {"ids": ids}, threads=1, repeats=Repeats(enough_ms=200))
    shares = {name: cost.weight_share for name, cost in found.nodes.items()}
    assert shares["norm"] == shares["likeness"] == shares["h"] == 0.0  # all in B
    assert shares["embed"] is not None and shares["embed"] > 0.5  # hardly anything is
    for name in ("layer", "product"):
        share = shares[name]
        assert share is not None and 0.1 < share < 0.9
    nodes = {node.name: node for node in captured.graph.nodes}
    measured = weight_ms(nodes["layer"], model, found.nodes["layer"])
    assert measured == shares["layer"] * found.nodes["layer"].backward_ms
    unknown = replace(found.nodes["layer"], weight_share=None)
    assert weight_ms(nodes["layer"], model, unknown) == unknown.backward_ms / 2
    assert all(parameter.grad is None for parameter in model.parameters())
