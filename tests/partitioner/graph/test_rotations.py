"""The memory that a plan counts for SOAP and Muon is the memory that they keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.partitioner.graph import cost_graph
from asyncpipe.runtime.optimizers import soap
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.training.stage_optimizer import make_optimizer
from asyncpipe.tests.support.run_configs import run_config


class Words(nn.Module):
    """A table, two matrices of unlike sides, a tall one that is not turned on its long side."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.long = nn.Linear(6, cost_graph.LARGEST + 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.table(x))))
        return self.long(hidden).sum(-1)


def planned(optimizer: str, folder: Path) -> Plan:
    torch.manual_seed(0)
    x = torch.randint(11, (2, 3))
    return asyncpipe.partition(
        Words(), {"x": x}, stages=2, name="words", output=folder, profile="analytic",
        optimizer=optimizer,
    )  # fmt: skip


def kept_bytes(stage: nn.Module, optimizer: str) -> int:
    """Bytes that the optimizer keeps in tensors after a step; all but the table are hidden."""
    hidden = [p for name, p in stage.named_parameters() if p.ndim == 2 and "table" not in name]
    settings = run_config(optimizer=optimizer, lr=0.1, momentum=0.9)
    made = make_optimizer(stage.parameters(), settings, hidden=hidden)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    tensors = (value for state in made.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize("optimizer", ["soap", "muon", "nadam", "sutskever"])
def test_a_plan_counts_what_the_optimizer_keeps(optimizer: str, tmp_path: Path) -> None:
    plan = planned(optimizer, tmp_path / "words")
    pipe = asyncpipe.load(tmp_path / "words")
    for stage, spec in zip(pipe.stages, plan.stages, strict=True):
        counted, kept = spec.memory.optimizer + spec.memory.buffers, kept_bytes(stage, optimizer)
        if optimizer == "muon":
            assert 0.5 * counted <= kept < counted
        else:
            assert counted == kept > 0


def test_another_optimizer_has_no_bases(tmp_path: Path) -> None:
    plan = planned("adamw", tmp_path / "words")
    assert [spec.memory.buffers for spec in plan.stages] == [0, 0]


def test_both_leave_the_same_sides_alone() -> None:
    assert cost_graph.LARGEST == soap.LARGEST
    matrices = [torch.zeros(3, 5), torch.zeros(7), torch.zeros(2, cost_graph.LARGEST + 1)]
    assert cost_graph.rotation_bytes(matrices) == 4 * 2 * (9 + 25 + 4)
