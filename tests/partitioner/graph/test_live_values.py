"""A plan counts the values that are alive together: those of a forward without gradients, and what
backward has not freed yet when it comes to the first operation of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.profile.measure import counting
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import read_plan

WIDTH, SAMPLES = 64, 16


class Gated(nn.Module):
    """Values with and without names, read at once and late."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gate = torch.sigmoid(self.gate(normed))
        up = torch.relu(self.up(normed)) * gate
        return x + self.down(up)


class Nested(nn.Module):
    """A large argument lives until the module that is given it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wide = Gated(), nn.Linear(WIDTH, 16 * WIDTH)
        self.narrow = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        x = self.inner(self.narrow(wide))
        return x.tanh() + wide[:, :WIDTH]


class Chain(nn.Module):
    """One variable, in place and with views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(-1, 2, WIDTH // 2).flatten(1)
            x += 1
        return x


@pytest.mark.parametrize("build", [Gated, Nested, Chain])
def test_variables_of_a_frozen_stage_are_counted(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    frozen = nn.Sequential(*(build() for _ in range(3))).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(WIDTH, 4))
    x = torch.randn(SAMPLES, WIDTH)
    asyncpipe.partition(
        model, {"input": x}, stages=2, cut_at=["1"], output=tmp_path / "2p", profile="analytic",
        schedule="1f1b", recompute="all",
    )  # fmt: skip
    plan = read_plan(tmp_path / "2p")
    stage = load_stage(tmp_path / "2p", plan, 0)
    with counting(torch.device("cpu"), [x, *stage.parameters()]) as counted:
        stage(x)
    assert not plan.stages[0].recompute and plan.stages[0].memory.activations == 0
    assert 0.99 * counted.peak <= plan.stages[0].memory.transient <= 1.3 * counted.peak


class Tokens(nn.Module):
    """A table of as many bytes as several micro-batches save."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("samples", [16, 64, 256])
def test_the_gradient_of_an_embedding_comes_when_the_activations_are_gone(
    samples: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(1024, (samples,))
    asyncpipe.partition(
        Tokens(), {"tokens": tokens}, stages=2, cut_at=["head"], output=tmp_path / "2p",
        profile="analytic", schedule="gpipe", micro_batches=2,
    )  # fmt: skip
    plan = read_plan(tmp_path / "2p")
    stage = load_stage(tmp_path / "2p", plan, 0)
    stage(tokens).sum().backward()  # makes the gradients that the next ones are added to
    state = [tokens, *stage.parameters(), *(weight.grad for weight in stage.parameters())]
    with counting(torch.device("cpu"), state) as counted:
        results = [stage(tokens) for _ in range(2)]
        for result in results:
            result.backward(torch.ones_like(result))
    memory = plan.stages[0].memory
    assert memory.activations + memory.transient == pytest.approx(counted.peak, rel=0.1)
