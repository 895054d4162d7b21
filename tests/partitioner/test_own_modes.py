"""Modules that an overridden `train` keeps in one mode stay in it in the stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut

X = torch.randn(6, 12, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.dropout(self.linear(x))))


class Frozen(nn.Module):
    """As detectors freeze them: batch norms of some blocks, or all, or whole blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(12, 4)
        self.how = how

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.how == "block":
            self.blocks[0].eval()
        if self.how == "sampling":  # Monte Carlo dropout
            for block in self.blocks:
                block.dropout.train()
        for number, block in enumerate(self.blocks):
            if self.how == "norms" or (self.how == "some" and number < 2):
                block.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


KEPT = {
    "norms": "if isinstance(module, nn.BatchNorm1d):\n                module.training = False",
    "some": '        for path in ("blocks.0.norm", "blocks.1.norm"):\n',
    "block": 'in ("blocks.0.linear", "blocks.0.dropout", "blocks.0.norm"):\n',
    "sampling": "if isinstance(module, nn.Dropout):\n                module.training = True",
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("stages", [1, 2])
def test_an_overridden_train_is_kept(how: str, stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Frozen(how)
    for block in model.blocks:
        nn.init.normal_(block.norm.running_mean)
    pipe = assert_same(model, {"x": X}, tmp_path, stages)
    if stages == 1:
        assert KEPT[how] in (tmp_path / "cut" / "stage_0.py").read_text()
    # From the beginning on, without a call of train.
    fresh = asyncpipe.load(tmp_path / "cut")
    torch.manual_seed(1)
    expected = copy.deepcopy(model).train()(X)
    torch.manual_seed(1)
    torch.testing.assert_close(fresh(X), expected, rtol=0, atol=0)
    assert pipe.plan.notes == ()


def test_flat_code_keeps_modes_too(tmp_path: Path) -> None:
    assert_same_flat = cut(Frozen("some"), {"x": X}, tmp_path, 2, code="flat")
    text = "".join(p.read_text() for p in sorted((tmp_path / "cut").glob("stage_*.py")))
    assert ".training = False" in text and assert_same_flat.plan.notes == ()


def test_modes_set_by_hand_are_noted(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(12, 4))
    model[1].eval()
    pipe = cut(model, (X,), tmp_path, 2)
    (note,) = pipe.plan.notes
    assert "1 (Block)" in note and "evaluation mode" in note and "override train()" in note
    assert not model[1].training and model.training
    model.train()
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    torch.testing.assert_close(pipe.train()(X), expected, rtol=0, atol=0)


class Meter(nn.Module):
    """A module that the tracer cannot read: it decides by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.tensor(True))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            self.is_on.fill_(True)
        if self.training:
            self.mean += x.detach().mean(0)
        return x - self.mean


class FrozenInForward(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.meter, self.head = Block(), Meter(), nn.Linear(12, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "norm":
            self.block.norm.eval()
        if self.how == "dropout":
            self.block.dropout.train()
        if self.how == "leaf":
            self.meter.eval()
        if self.how == "for a while":
            self.block.eval()
        h = self.block(x)
        if self.how == "for a while":
            self.block.train(self.training)
        return self.head(self.meter(h))


@pytest.mark.parametrize("how", ["norm", "dropout", "leaf", "for a while"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_mode_that_forward_sets_is_kept(how: str, stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FrozenInForward(how)
    nn.init.normal_(model.block.norm.running_mean)
    assert_same(model, {"x": X}, tmp_path, stages)
