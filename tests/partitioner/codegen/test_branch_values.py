"""A value that one mode makes alone is never read where the other mode has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncpipe.tests.support.oracles.generated_equality import assert_same

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Gate(nn.Module):
    """Other work in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + self.scale * torch.randn_like(x)
        return x * (1 + self.scale)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.gate = Gate()
        self.parts = nn.ModuleList([Part()])


class BranchAfterGate(Base):
    """The gate's results are read by mode."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gate(x)
        x = self.first(x)
        hidden = hidden * 2 if self.training else self.second(hidden)
        return hidden + x


class BranchBeforeGate(Base):
    """The gate's argument is another value in each mode."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2 if self.training else self.second(x)
        x = self.first(x)
        return self.gate(hidden) + x


class DeviceAfterBranch(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            y = self.first(x)
            y = y.relu() + y
            x = y * 2
        else:
            x = self.second(x) * 3
        return self.third(x) + torch.arange(6, device=x.device)


class PartAfterBranch(Base):
    """The branch is the first to use parts of an item of a list."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            part = self.parts[0]
            x = part.left(x) + part.right(x)
        return self.parts[0].left(x) + self.parts[0].right(x).relu()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, is_dropped: bool | Tensor) -> Tensor:
        x = self.before(x)
        return x if is_dropped else self.inner(x)


class Dropping(nn.Module):
    """A random number, drawn only in training, decides whether a layer does its work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.layer(x, self.training and torch.rand([]) < 0.5).relu()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "build",
    [BranchAfterGate, BranchBeforeGate, DeviceAfterBranch, PartAfterBranch, Dropping],
)
def test_both_modes_have_the_values_that_they_read(
    build: type[nn.Module], stages: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    assert_same(build(), {"x": X}, tmp_path, stages)


class Steps(nn.Module):
    """Runs a sequence of steps on two values."""

    def __init__(self, steps: tuple[str, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(6, 6)
        self.linears = nn.ModuleList([nn.Linear(6, 6) for _ in steps])
        self.gates = nn.ModuleList([Gate() for _ in steps])
        self.parts = nn.ModuleList([Part() for _ in steps])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x), x
        for step, linear, gate in zip(self.steps, self.linears, self.gates, strict=True):
            match step:
                case "gate":
                    a = gate(a)
                case "gate again":
                    a = gate(gate(b))
                case "recomputed gate":
                    a = checkpoint(lambda y, f=linear, g=gate: g(f(y)), a, use_reentrant=False)
                case "linear":
                    b = linear(b)
                case "part":
                    part = self.parts[0]
                    a = part.left(a) * part.right(a)
                case "part in training":
                    if self.training:
                        part = self.parts[0]
                        b = part.left(b) * part.right(b)
                case "device":
                    a = a + torch.arange(6, device=a.device)
                case "training":
                    if self.training:
                        a = a * 2 + b
                case "evaluation":
                    if not self.training:
                        a = linear(b)
                case "both":
                    if self.training:
                        a = b * 2
                    else:
                        a = linear(a)
                case "both values":
                    if self.training:
                        a, b = b + 1, linear(a)
                    else:
                        y = linear(b)
                        b = a * y
                case "swap":
                    a, b = b, a
        return self.first(a) + b


STEPS = (
    "gate", "gate again", "recomputed gate", "linear", "part", "part in training", "device",
    "training", "evaluation", "both", "both values", "swap",
)  # fmt: skip


@settings(max_examples=4, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(["both", "linear", "both values"])
@given(st.lists(st.sampled_from(STEPS), min_size=3, max_size=7))
def test_any_sequence_of_branches_has_its_values(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    torch.manual_seed(0)
    assert_same(Steps(tuple(steps)), {"x": X}, tmp_path_factory.mktemp("branches"), 1)
