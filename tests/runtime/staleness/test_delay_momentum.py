"""`delay-momentum`: the earlier a stage, the longer its optimizer averages gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, NAdam, Optimizer

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.staleness import Conditions
from asyncpipe.runtime.staleness import check as check_fits
from asyncpipe.runtime.training.stage_optimizer import uncompiled
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.oracles.async_equality import assert_equal
from asyncpipe.tests.support.oracles.async_simulation import LiveReference, Reference, async_run
from asyncpipe.tests.support.oracles.weight_predictions import MsnagReference
from asyncpipe.tests.support.processes.executor import lowered, train_together

STEPS = 6


def betas_of_the_paper(stages: int) -> list[float]:
    """gamma_i = 0.9 + 0.09 (p - i) / p, from the first stage to the last."""
    return [0.9 + 0.09 * (stages - i) / stages for i in range(1, stages + 1)]


@pytest.mark.parametrize(
    ("staleness", "reference", "kind"),
    [
        ("none+delay-momentum", LiveReference(), NAdam),
        ("stash+delay-momentum", Reference(), Adam),
        ("stash+msnag+delay-momentum", MsnagReference("adamw"), AdamW),
    ],
)
@pytest.mark.parametrize(("stages", "step_every", "segments"), [(2, 1, 1), (4, 1, 2), (4, 2, 1)])
def test_each_stage_has_the_momentum_of_the_paper(
    staleness: str,
    reference: Reference,
    kind: type[Optimizer],
    stages: int,
    step_every: int,
    segments: int,
) -> None:
    model, betas = chain(stages, dropout=0.25), iter(betas_of_the_paper(stages))

    def optimize(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return uncompiled(kind)(parameters, lr=0.05, betas=(next(betas), 0.999))

    oracle = async_run(
        model,
        model.build(),
        STEPS,
        step_every,
        optimize,
        method=reference,
        flush_every=STEPS // segments if segments > 1 else 0,
    )
    trained = train_together(
        model,
        lowered(model, "async-1f1b", STEPS // segments * step_every, step_every),
        segments=segments,
        optimize=partial(uncompiled(kind), lr=0.05),
        staleness=staleness,
    )
    assert_equal(trained, oracle, tolerance=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step_every", "first_beta"), [("1f1b", 4, 0.9), ("async-1f1b", 1, 0.995)]
)
def test_synchronous_steps_and_longer_averages_stay_as_they_are(
    schedule: str, step_every: int, first_beta: float
) -> None:
    model, optimize = chain(3), partial(uncompiled(NAdam), lr=0.05, betas=(first_beta, 0.999))
    plain, raised = (
        train_together(
            model,
            lowered(model, schedule, 4, step_every),
            segments=3,
            optimize=optimize,
            staleness=staleness,
        )
        for staleness in ("none", "none+delay-momentum")
    )
    for ours, theirs in zip(raised.modules, plain.modules, strict=True):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_an_optimizer_without_the_moments_of_adam_is_refused() -> None:
    for optimizer in ("sgd", "muon", "soap"):
        with pytest.raises(ScheduleError, match=f"first beta, but the optimizer is {optimizer}"):
            check_fits("stash+delay-momentum", Conditions(optimizer, 0.9, ahead=3))
    check_fits("none+delay-momentum", Conditions("nadam", ahead=3))
