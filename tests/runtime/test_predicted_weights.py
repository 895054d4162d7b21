"""Pipelines whose forwards read predicted weights equal the recurrence of the method's paper.

To 1e-12 in float64, not to the last bit: a prediction is summed up in another order than steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from asyncpipe.runtime.optimizers.sutskever import Sutskever
from asyncpipe.tests.executor import Trained, lowered, train_together
from asyncpipe.tests.hand_plans import HandModel, chain, skips
from asyncpipe.tests.oracle import Oracle, Reference, async_run
from asyncpipe.tests.predictions import (
    AggMsnagReference,
    LwpReference,
    LwpWReference,
    MsnagReference,
    NagReference,
    NesterovLastReference,
    PartialGradientReference,
    PipeOptimReference,
    PredictedReference,
    Rates,
    SpecTrainReference,
    XPipeReference,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "sgd with decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sutskever": partial(Sutskever, lr=0.1, weight_decay=0.1),
    "adam": partial(Adam, lr=0.05),
    "adam with decay": partial(Adam, lr=0.05, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
    "nadam": partial(NAdam, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
}
REFERENCES: dict[str, type[PredictedReference]] = {
    "msnag": MsnagReference,
    "aggmsnag": AggMsnagReference,
    "partial-gradient": PartialGradientReference,
    "nag": NagReference,
    "lwp": LwpReference,
    "lwp-w": LwpWReference,
    "spectrain": SpecTrainReference,
    "xpipe": XPipeReference,
    "pipeoptim": PipeOptimReference,
    "nesterov-last": NesterovLastReference,
}
BY_VELOCITY = ("lwp", "spectrain")
OWN_BACKWARD = ("spectrain", "xpipe", "pipeoptim")
STEPS = 6


def fits(method: str, optimizer: str) -> bool:
    if method == "nesterov-last":
        return optimizer.startswith("sgd")
    return method not in BY_VELOCITY or optimizer.startswith(("sgd", "sutskever"))


def names(method: str, *, stashed: bool) -> str:
    return method if method in OWN_BACKWARD or not stashed else f"stash+{method}"


def recomputing(model: HandModel) -> HandModel:
    last = len(model.stages) - 1
    stages = tuple(replace(stage, recompute=stage.index < last) for stage in model.plan.stages)
    return replace(model, plan=replace(model.plan, stages=stages))


def pipeline(
    model: HandModel,
    method: str,
    optimizer: str,
    step_every: int,
    *,
    rates: Rates | None = None,
    stashed: bool = True,
    recompute: bool = False,
) -> Trained:
    rates = rates or Rates()
    model = recomputing(model) if recompute else model
    return train_together(
        model,
        lowered(model, "async-1f1b", STEPS * step_every, step_every),
        optimize=OPTIMIZERS[optimizer],
        factors=rates.factors,
        staleness=names(method, stashed=stashed) + ("+schedule-aware" if rates.known else ""),
        seed=5,
    )


def recurrence(
    model: HandModel,
    reference: Reference,
    optimizer: str,
    step_every: int,
    *,
    recompute: bool = False,
    fault: str = "",
) -> Oracle:
    return async_run(
        model,
        model.build(),
        STEPS,
        step_every,
        OPTIMIZERS[optimizer],
        method=reference,
        recompute=recompute,
        seed=5,
        fault=fault,
    )


def largest_difference(trained: Trained, oracle: Oracle) -> float:
    """Of losses and final weights; versions are the same."""
    assert trained.ledger == oracle.ledger
    pairs = [(trained.seen.losses[i], loss) for i, loss in oracle.losses.items()]
    for got, wanted in zip(trained.modules, oracle.modules, strict=True):
        pairs += zip(got.state_dict().values(), wanted.state_dict().values(), strict=True)
    return max(float((got.detach() - wanted.detach()).abs().max()) for got, wanted in pairs)


def check(
    model: HandModel,
    method: str,
    optimizer: str,
    step_every: int,
    *,
    rates: Rates | None = None,
    stashed: bool = True,
    recompute: bool = False,
) -> None:
    kind = optimizer.partition(" ")[0]
    reference = REFERENCES[method](kind, rates, stashed=stashed)
    oracle = recurrence(model, reference, optimizer, step_every, recompute=recompute)
    trained = pipeline(
        model,
        method,
        optimizer,
        step_every,
        rates=rates,
        stashed=stashed,
        recompute=recompute,
    )
    # NAdam keeps the product of its momentums in float32.
    assert largest_difference(trained, oracle) < (1e-6 if kind == "nadam" else 1e-12)


@pytest.mark.parametrize("method", REFERENCES)
@pytest.mark.parametrize("step_every", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_equals_the_recurrence(method: str, stages: int, step_every: int) -> None:
    check(chain(stages), method, "sgd with decay", step_every)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(m, o) for m in REFERENCES for o in OPTIMIZERS if fits(m, o) and o != "sgd with decay"],
)
def test_with_every_optimizer_that_it_is_for(method: str, optimizer: str) -> None:
    check(chain(4), method, optimizer, 1)
    check(chain(3, dropout=0.25), method, optimizer, 2)


@pytest.mark.parametrize("method", REFERENCES)
def test_with_recomputation_and_random_numbers(method: str) -> None:
    optimizer = "sgd" if fits(method, "sgd") and not fits(method, "adamw") else "adamw"
    for stashed in (True, False):
        if method == "nesterov-last" and not stashed:
            continue  # Without a stash nobody decides what a backward reads.
        check(chain(4, dropout=0.25), method, optimizer, 2, stashed=stashed, recompute=True)
        if stashed:
            check(skips(), method, optimizer, 1, recompute=True)


@pytest.mark.parametrize("method", [m for m in REFERENCES if m not in OWN_BACKWARD])
def test_without_a_stash_a_backward_reads_what_its_forward_saved(method: str) -> None:
    if method != "nesterov-last":
        check(chain(4), method, "sgd", 1, stashed=False)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        ("msnag", "adamw"),
        ("msnag", "sgd"),
        ("msnag", "sutskever"),
        ("partial-gradient", "adam with decay"),
        ("nag", "sgd with decay"),
        ("lwp", "sgd"),
        ("spectrain", "sgd"),
        ("xpipe", "adam"),
        ("pipeoptim", "adamw"),
    ],
)
def test_learning_rates_to_come_are_used_where_they_are_asked_for(
    method: str, optimizer: str, known: bool
) -> None:
    rates = Rates(lambda version: 1 / version, known=known)
    for step_every in (1, 2):
        check(chain(3), method, optimizer, step_every, rates=rates)
