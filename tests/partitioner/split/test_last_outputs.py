"""Outputs that a criterion reads are sent to the last stage that makes one, and planned so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.build import build_graph
from asyncpipe.partitioner.model_loss import criterion_inputs
from asyncpipe.partitioner.profile.profiler import profile_analytic


class Encoder(nn.Module):
    """Returns the mean of its first half beside the result; with a target also a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 6)

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, ...]:
        hidden = self.first(x).tanh()
        mean = self.mean(hidden)
        mask = mean > 0
        result = self.last(hidden)
        return mean, mask, result if target is None else F.mse_loss(result, target)


def partition(inputs: dict[str, Tensor], folder: Path, **options: Any) -> Any:
    return asyncpipe.partition(
        Encoder(), inputs, stages=2, profile="analytic", output=folder, cut_at=["last"], **options
    )


def test_the_last_stage_returns_the_outputs_of_earlier_ones(tmp_path: Path) -> None:
    plan = partition({"x": torch.randn(4, 6)}, tmp_path / "stages")
    assert plan.stages[0].outputs == ("hidden", "mean")  # the last stage makes the mask again
    assert plan.stages[1].outputs == (*plan.outputs,) == ("mean_out", "mask_out", "result")
    code = (tmp_path / "stages" / "stage_1.py").read_text()
    assert "mean = mean.view_as(mean)  # f32[batch, 3]" in code
    assert "return mean, mask, result" in code


def test_a_loss_of_the_model_is_returned_alone_by_the_last_stage(tmp_path: Path) -> None:
    plan = partition({"x": torch.randn(4, 6), "target": torch.randn(4, 6)}, tmp_path / "stages")
    assert plan.loss == "mse_loss"
    assert plan.stages[0].outputs == ("hidden", "mean", "mask")
    assert plan.stages[1].outputs == ("mse_loss",)


@pytest.mark.parametrize("has_target", [False, True])
def test_a_plan_counts_the_transfers_of_outputs(has_target: bool) -> None:
    inputs = {"x": torch.randn(4, 6)} | ({"target": torch.randn(4, 6)} if has_target else {})
    captured = capture(Encoder(), inputs)
    costs = profile_analytic(captured, captured.arguments.tensors)
    outputs = criterion_inputs(captured, None)
    assert [node.name for node in outputs] == ([] if has_target else ["mean", "mask", "result"])
    graph = build_graph(captured, costs, read_together=outputs)
    edges = {pair: graph.edges[pair]["tensors"] for pair in graph.edges}
    sent = {"mean": 4 * 3 * 4, "mask": 4 * 3}
    assert [edges.get((name, "result")) for name in sent] == [
        None if has_target else {name: size} for name, size in sent.items()
    ]
