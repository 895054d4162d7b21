"""Synchronous steps after asynchronous ones are those of the plain loop, whatever the method."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from asyncpipe.tests.runtime.training.test_async_replicas import REFERENCES
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, tied
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS
from asyncpipe.tests.support.oracles.async_simulation import (
    Oracle,
    Reference,
    async_run,
    plain_losses_and_gradients,
)
from asyncpipe.tests.support.processes.executor import Trained, lowered, train_together

STAGES, FIRST, LAST, SEED = 3, 5, 3, 5
"""Stages, asynchronous steps, synchronous steps, seed."""


def trained(model: HandModel, staleness: str, optimizer: str, every: int) -> Trained:
    flushed = lowered(model, "1f1b", every)
    return train_together(
        model,
        lowered(model, "async-1f1b", FIRST * every, every),
        then=[flushed] * LAST,
        optimize=OPTIMIZERS[optimizer],
        staleness=staleness,
        seed=SEED,
    )


def expected(model: HandModel, reference: Reference, optimizer: str, every: int) -> Oracle:
    """The recurrence, continued by the plain loop with the same optimizers."""
    optimizers: list[torch.optim.Optimizer] = []

    def optimize(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(OPTIMIZERS[optimizer](parameters))
        return optimizers[-1]

    oracle = async_run(model, model.build(), FIRST, every, optimize, method=reference, seed=SEED)
    for module, history in zip(oracle.modules, oracle.histories, strict=True):
        module.load_state_dict(history.notes.get("y", {}), strict=False)  # of error-feedback
    for step in range(FIRST, FIRST + LAST):
        for module in oracle.modules:
            module.zero_grad()
        numbers = range(step * every, (step + 1) * every)
        losses, gradients = plain_losses_and_gradients(model, oracle.modules, numbers, seed=SEED)
        oracle.losses |= losses
        for shared in model.plan.shared:
            total = sum(gradients[holder] for holder in shared.holders)
            total = total + oracle.left_over.pop(shared.names[0], 0)
            for stage, name in shared.holders:
                oracle.modules[stage].get_parameter(name).grad = total.clone()
        for own in optimizers:
            own.step()
    return oracle


def difference(found: Trained, oracle: Oracle) -> float:
    """The largest difference between losses and between weights."""
    pairs = [(found.seen.losses[number], loss) for number, loss in oracle.losses.items()]
    for module, own in zip(found.modules, oracle.modules, strict=True):
        pairs += zip(module.state_dict().values(), own.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("staleness", REFERENCES)
def test_the_plain_loop_follows_the_recurrence(staleness: str) -> None:
    model, every = chain(STAGES, dropout=0.25), 3 if staleness == "2bw" else 1
    found = trained(model, staleness, "decay", every)
    oracle = expected(model, REFERENCES[staleness], "decay", every)
    assert difference(found, oracle) < 1e-12


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", [partial(chain, STAGES, dropout=0.25), partial(tied, STAGES)])
def test_adams_state_and_late_gradients_of_tied_weights_are_kept(make: Any, every: int) -> None:
    found = trained(make(), "stash", "adamw", every)
    oracle = expected(make(), REFERENCES["stash"], "adamw", every)
    assert difference(found, oracle) < 1e-12
    asynchronous = train_together(
        make(),
        lowered(make(), "async-1f1b", (FIRST + LAST) * every, every),
        optimize=OPTIMIZERS["adamw"],
        staleness="stash",
        seed=SEED,
    )
    assert difference(asynchronous, oracle) > 1e-6
