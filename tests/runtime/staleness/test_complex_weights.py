"""A complex weight trains as its real and imaginary parts do, with every staleness method.

Beside it is a weight without numbers.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.tests.runtime.staleness.test_methods_in_processes import RUNS
from asyncpipe.tests.support.models.hand_plans import (
    WIDTH,
    HandModel,
    HandStage,
    hand_model,
    regression,
)
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS, recomputing
from asyncpipe.tests.support.processes.executor import lowered, train_together

STEPS, STAGES = 6, 3


class Filter(nn.Module):
    """A layer whose Fourier modes are weighted by a complex matrix, or by its parts."""

    def __init__(self, *, in_parts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        modes = WIDTH // 2 + 1
        parts = torch.randn(modes, modes, 2, dtype=torch.float64)
        self.weight = nn.Parameter(parts if in_parts else torch.view_as_complex(parts))
        self.nothing = nn.Linear(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        modes = torch.fft.rfft(torch.tanh(self.linear(x))) @ weight
        return torch.fft.irfft(modes, n=WIDTH) + self.nothing(x[:, :0])


class Error(Filter):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().forward(x) - y).square().mean()


def filters(*, in_parts: bool) -> HandModel:
    names = ["x", *(f"h{stage}" for stage in range(1, STAGES)), "loss"]
    stages = [
        HandStage(
            partial(Error if stage == STAGES - 1 else Filter, in_parts=in_parts),
            (names[stage], "y") if stage == STAGES - 1 else (names[stage],),
            (names[stage + 1],),
        )
        for stage in range(STAGES)
    ]
    return hand_model(stages, regression)


def losses(
    staleness: str, optimizer: str, step_every: int, *, in_parts: bool, recompute: bool
) -> Tensor:
    model = filters(in_parts=in_parts)
    model = recomputing(model) if recompute else model
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
    optimize = OPTIMIZERS[optimizer]
    trained = train_together(model, schedule, optimize=optimize, staleness=staleness)
    return torch.stack([trained.seen.losses[index] for index in range(STEPS * step_every)])


@pytest.mark.parametrize(("staleness", "optimizer", "step_every", "recompute"), RUNS)
def test_a_complex_weight_trains_as_its_parts_do(
    staleness: str, optimizer: str, step_every: int, recompute: bool
) -> None:
    run = partial(losses, staleness, optimizer, step_every, recompute=recompute)
    torch.testing.assert_close(run(in_parts=False), run(in_parts=True), rtol=1e-12, atol=0.0)
