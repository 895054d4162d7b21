"""What a forward changes is exact with several micro-batches in flight, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.runtime.config.asynchronous_options import check_methods
from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.hand_plans import HandModel, HandStage
from asyncpipe.tests.support.oracles.async_simulation import REFERENCES, async_run
from asyncpipe.tests.support.processes.executor import lowered, train_together
from asyncpipe.tests.support.run_configs import run_config

STEPS = 6


class Follower(nn.Module):
    """An encoder that follows another one, through which gradients pass."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.k = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for now, average in zip(self.q.parameters(), self.k.parameters(), strict=True):
                average.mul_(0.7).add_(now, alpha=0.3)
        return self.q(x) + self.k(x)


class Codes(nn.Module):
    """A codebook that changes unseen by autograd, and through which gradients pass."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 12), requires_grad=False)
        self.scale = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.data.mul_(0.7).add_(x.detach().mean(0), alpha=0.3)
        return self.scale(x + torch.softmax(x @ self.codes.T, 1) @ self.codes)


class Centered(nn.Module):
    """A running mean and a count, in buffers, through which gradients pass."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 1 / self.count)
        return self.scale(x - self.mean) * (1 + self.mean) / self.count


class Unit(nn.Module):
    """Training normalises the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.linear.weight.copy_(F.normalize(self.linear.weight, dim=1))
        return torch.tanh(self.linear(x))


class Whole(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Sequential(nn.Linear(12, 12), part()) for _ in range(3)
        )

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.third(self.second(self.first(x)))
        return {"loss": F.mse_loss(y, target)}


def batch(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return {name: torch.randn(4, 12, generator=generator).double() for name in ("x", "target")}


@cache
def pipeline_of(part: type[nn.Module], recompute: str) -> HandModel:
    torch.manual_seed(0)
    folder = Path(mkdtemp()) / "3p"
    asyncpipe.partition(
        Whole(part).double(), batch(0), stages=3, cut_at=["second", "third"], output=folder,
        profile="analytic", schedule="1f1b", recompute=recompute,
    )  # fmt: skip
    plan = read_plan(folder)
    stages = tuple(
        HandStage(partial(load_stage, folder, plan, spec.index), spec.inputs, spec.outputs)
        for spec in plan.stages
    )
    return HandModel(plan, stages, batch)


@pytest.mark.parametrize("part", [Follower, Codes, Centered, Unit])
def test_stages_are_timed_with_several_micro_batches_in_flight(
    part: type[nn.Module], tmp_path: Path
) -> None:
    model = Whole(part).double()
    before = copy.deepcopy(model.state_dict())
    plan = asyncpipe.partition(
        model, batch(0), stages=3, cut_at=["second", "third"], output=tmp_path / "3p",
        schedule="gpipe", micro_batches=4, no_cache=True,
    )  # fmt: skip
    assert all(stage.forward_ms > 0 for stage in plan.stages)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


FROZEN = [Follower, Codes, Centered]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("part", FROZEN)
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("step_every", [1, 2])
@pytest.mark.parametrize("staleness", ["none", "stash"])
def test_what_forward_changes_is_that_of_the_exact_simulator(
    part: type[nn.Module], recompute: str, step_every: int, staleness: str
) -> None:
    model = pipeline_of(part, recompute)
    modules = model.build()
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
    trained = train_together(
        model, schedule, optimize=SGD, staleness=staleness, seed=5, modules=modules
    )
    oracle = async_run(
        model, model.build(), STEPS, step_every, SGD, method=REFERENCES[staleness](),
        recompute=recompute == "all", seed=5,
    )  # fmt: skip
    assert {i: float(loss) for i, loss in trained.seen.losses.items()} == {
        i: float(loss) for i, loss in oracle.losses.items()
    }
    for got, wanted in zip(trained.modules, oracle.modules, strict=True):
        for key, value in got.state_dict().items():
            assert torch.equal(value, wanted.state_dict()[key]), key


@pytest.mark.parametrize("part", [*FROZEN, Unit])
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_forward_changes_is_that_of_the_plain_model(
    part: type[nn.Module], recompute: str, schedule: str
) -> None:
    model = pipeline_of(part, recompute)
    modules = model.build()
    trained = train_together(
        model, lowered(model, schedule, 4), optimize=SGD, seed=5, modules=modules
    )
    oracle = model.build()
    optimizer = SGD([p for module in oracle for p in module.parameters()])
    for i in range(4):
        (model.forward(oracle, batch(i))[str(model.plan.loss)] / 4).backward()
    optimizer.step()
    for got, wanted in zip(trained.modules, oracle, strict=True):
        for key, value in got.state_dict().items():
            torch.testing.assert_close(value, wanted.state_dict()[key], rtol=1e-12, atol=1e-12)


def test_trained_parameters_that_forward_changes_are_refused_in_asynchronous_runs() -> None:
    plan = pipeline_of(Unit, "none").plan
    settings = run_config(
        folder="made", output="run", schedule="async-1f1b", staleness="stash", optimizer="sgd",
        micro_batches=1,
    )  # fmt: skip
    with pytest.raises(SettingsError, match="stage 0 writes to first.1.linear.weight, which is"):
        check_methods(settings, plan)
    check_methods(settings, pipeline_of(Follower, "none").plan)
