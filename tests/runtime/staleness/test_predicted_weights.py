"""Pipelines whose forwards read predicted weights equal the recurrence of the method's paper.

To 1e-12 in float64, not to the last bit: a prediction is summed up in another order than steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.optimizers.param_groups import Joint
from asyncpipe.runtime.optimizers.soap import Sutskever
from asyncpipe.runtime.schedule.asynchronous import KEEPS, weight_copies
from asyncpipe.runtime.staleness import METHODS, Conditions
from asyncpipe.runtime.staleness import check as check_fit
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, skips, tied
from asyncpipe.tests.support.oracles.async_equality import recomputing
from asyncpipe.tests.support.oracles.async_simulation import (
    LiveReference,
    Oracle,
    Reference,
    async_run,
)
from asyncpipe.tests.support.oracles.weight_predictions import (
    AggMsnagReference,
    LwpReference,
    LwpWReference,
    MsnagAndDelayRateReference,
    MsnagReference,
    NagReference,
    NesterovLastReference,
    PartialGradientReference,
    PipeOptimReference,
    PredictedReference,
    Rates,
    SpecTrainReference,
    StockPartialGradientReference,
    StockReference,
    XPipeReference,
)
from asyncpipe.tests.support.processes.executor import Planned, Trained, lowered, train_together

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "sgd with decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sutskever": partial(Sutskever, lr=0.1, weight_decay=0.1),
    "adam": partial(Adam, lr=0.05),
    "adam with decay": partial(Adam, lr=0.05, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
    "muon": lambda parameters: muon_of_matrices(list(parameters)),
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


def muon_of_matrices(parameters: list[torch.nn.Parameter]) -> Optimizer:
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    return Joint([Muon(matrices, lr=0.05, weight_decay=0.1), AdamW(others, lr=0.05)])


def fits(method: str, optimizer: str) -> bool:
    if optimizer == "muon":
        return method == "lwp-w"
    if method == "nesterov-last":
        return optimizer.startswith("sgd")
    return method not in BY_VELOCITY or optimizer.startswith(("sgd", "sutskever"))


def names(method: str, *, stashed: bool) -> str:
    return method if method in OWN_BACKWARD or not stashed else f"stash+{method}"


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
    """The largest difference in losses and final weights; asserts equal versions."""
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


@pytest.mark.parametrize("method", REFERENCES)
def test_a_weight_of_several_stages_is_predicted_too(method: str) -> None:
    optimizer = "adamw" if fits(method, "adamw") else "sgd with decay"
    for step_every in (1, 2):
        check(tied(3), method, optimizer, step_every)


@pytest.mark.parametrize("kind", ["chain", "tied"])
@pytest.mark.parametrize("optimizer", ["sgd with decay", "adamw"])
def test_a_prediction_expects_the_rates_of_late_stages(kind: str, optimizer: str) -> None:
    model = {"chain": chain(4), "tied": tied(4)}[kind]
    trained = train_together(
        model,
        lowered(model, "async-1f1b", STEPS * 2, 2),
        optimize=OPTIMIZERS[optimizer],
        staleness="stash+msnag+delay-rate",
        seed=5,
    )
    reference = MsnagAndDelayRateReference(optimizer.partition(" ")[0])
    oracle = recurrence(model, reference, optimizer, 2)
    assert largest_difference(trained, oracle) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd with decay", "adamw"])
@pytest.mark.parametrize("method", ["aggmsnag", "partial-gradient"])
def test_gathered_gradients_are_clipped_before_they_predict(
    method: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.01

    def clip_factor(self: Planned, gradients: Sequence[torch.Tensor], scale: float) -> float:
        norm = scale * float(torch.cat([each.flatten() for each in gradients]).norm())
        return min(1.0, limit / norm)

    monkeypatch.setattr(Planned, "clip_factor", clip_factor)
    kind = optimizer.partition(" ")[0]
    for model in (chain(3), tied(3)):
        trained = pipeline(model, method, optimizer, 4)
        clipped = recurrence(model, REFERENCES[method](kind, clip=limit), optimizer, 4)
        assert largest_difference(trained, clipped) < 1e-12
        unclipped = recurrence(model, REFERENCES[method](kind), optimizer, 4)
        assert largest_difference(trained, unclipped) > 1e-6


@pytest.mark.parametrize("method", REFERENCES)
@pytest.mark.parametrize(("stages", "step_every"), [(2, 8), (4, 2), (8, 1), (8, 2)])
def test_every_size_equals_the_recurrence(method: str, stages: int, step_every: int) -> None:
    optimizer = "adamw" if fits(method, "adamw") else "sgd with decay"
    for recompute in (False, True):
        check(chain(stages, dropout=0.25), method, optimizer, step_every, recompute=recompute)
    check(tied(stages), method, "sgd with decay", step_every)


@pytest.mark.parametrize(
    ("method", "reference"),
    [("msnag", StockReference), ("partial-gradient", StockPartialGradientReference)],
)
def test_with_muon_one_step_ahead_is_torchs_own_step(
    method: str, reference: type[PredictedReference]
) -> None:
    """A prediction of several steps would differ: Muon rounds each of them to bfloat16."""
    for stages, step_every in ((2, 1), (3, 4)):
        model = chain(stages)
        oracle = recurrence(model, reference("muon"), "muon", step_every)
        trained = pipeline(model, method, "muon", step_every)
        assert largest_difference(trained, oracle) < 1e-12


@pytest.mark.parametrize("method", REFERENCES)
def test_without_delay_only_nesterovs_methods_differ_from_plain_training(method: str) -> None:
    model = chain(1)
    plain = recurrence(model, LiveReference(), "sgd", 1)
    trained = pipeline(model, method, "sgd", 1)
    assert (largest_difference(trained, plain) > 1e-3) == (method in ("nag", "nesterov-last"))


@pytest.mark.parametrize("method", REFERENCES)
def test_a_synchronous_segment_predicts_nothing(method: str) -> None:
    model, schedule = chain(3), lowered(chain(3), "1f1b", 4)
    plain, trained = (
        train_together(model, schedule, segments=3, optimize=OPTIMIZERS["sgd"], staleness=staleness)
        for staleness in ("none", method)
    )
    for expected, module in zip(plain.modules, trained.modules, strict=True):
        for name, value in expected.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name


def test_with_one_micro_batch_a_step_nothing_is_gathered_and_msnag_is_left() -> None:
    runs = [
        pipeline(chain(3), method, "adam", 1)
        for method in ("msnag", "aggmsnag", "partial-gradient")
    ]
    losses = [{i: float(loss) for i, loss in run.seen.losses.items()} for run in runs]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    "fault", ["new weights in one backward", "drop one gradient", "swap two micro-batches"]
)
def test_the_comparison_sees_a_planted_fault(fault: str) -> None:
    model = chain(3)
    oracle = recurrence(model, MsnagReference("adamw"), "adamw", 2, fault=fault)
    assert largest_difference(pipeline(model, "msnag", "adamw", 2), oracle) > 1e-9


def test_the_comparison_sees_another_method() -> None:
    model = chain(4)
    # At one learning rate SGD's last step is its velocity.
    same, optimizer = {"lwp", "lwp-w"}, "sgd with decay"
    runs = {method: pipeline(model, method, optimizer, 2) for method in REFERENCES}
    for method, reference in REFERENCES.items():
        oracle = recurrence(model, reference("sgd"), optimizer, 2)
        equal = {other for other, run in runs.items() if is_equal(run, oracle)}
        assert equal == (same if method in same else {method})


def is_equal(trained: Trained, oracle: Oracle) -> bool:
    return trained.ledger == oracle.ledger and largest_difference(trained, oracle) < 1e-9


@pytest.mark.parametrize("method", [m for m in REFERENCES if m != "nesterov-last"])
@pytest.mark.parametrize("step_every", [1, 2, 4])
def test_copies_of_weights_are_as_many_as_plans_count(method: str, step_every: int) -> None:
    for stashed, recompute in ((True, False), (True, True), (False, False), (False, True)):
        trained = pipeline(
            chain(4), method, "sgd", step_every, stashed=stashed, recompute=recompute
        )
        for pipe in trained.pipelines:
            for stage, weights in pipe.weights.items():
                counted = weight_copies(
                    names(method, stashed=stashed),
                    3 - stage,
                    step_every,
                    recomputes=recompute and stage < 3,
                )
                held = weights.ring_size + (method == "lwp-w" and stage < 3)
                if recompute and KEEPS[method].twice:
                    # Early stages predict nothing for their backward.
                    assert counted - 1 <= held <= counted
                else:
                    assert held == counted, (stage, stashed, recompute)


def test_plans_know_what_every_method_keeps() -> None:
    assert set(METHODS) <= set(KEEPS)


@pytest.mark.parametrize(
    ("staleness", "conditions", "told"),
    [
        (
            "msnag",
            Conditions("sgd"),
            "msnag predicts by momentum, but the optimizer is sgd without",
        ),
        ("nag", Conditions("muon"), "the optimizer is muon without momentum"),
        ("msnag", Conditions("adafactor"), "msnag predicts by momentum, but the optimizer is adaf"),
        ("stash+partial-gradient", Conditions("adafactor"), "by its formula, but the optimizer is"),
        ("stash+gap-aware", Conditions("adafactor"), "measures gaps in steps of adamw, adam, sgd"),
        ("stash+error-feedback", Conditions("own.py:make"), "known optimizer, but the opt"),
        ("stash+gap-aware", Conditions("sgd", 0.9, True), "the optimizer is sgd with --nesterov"),
        ("lwp", Conditions("sgd", 0.9, True), "the optimizer is sgd with --nesterov"),
        ("lwp", Conditions("adamw"), "lwp needs the velocity of sgd, but the optimizer is adamw"),
        ("spectrain", Conditions("sgd"), "the optimizer is sgd without momentum"),
        ("xpipe", Conditions("muon", 0.9), "Adam's moments, but the optimizer is muon"),
        ("pipeoptim", Conditions("soap"), "Adam's moments, but the optimizer is soap"),
        ("msnag+nesterov-last", Conditions("adam"), "an option of sgd with momentum, but the opt"),
        ("stash+schedule-aware", Conditions("sgd", 0.9), "expect, but no method predicts"),
        ("lwp-w+schedule-aware", Conditions("sgd", 0.9), "expect, but no method predicts"),
        ("msnag+lwp", Conditions("sgd", 0.9), "msnag and lwp both decide which weights a forward"),
        ("stash+spectrain", Conditions("sgd", 0.9), "both decide which weights a backward reads"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    staleness: str, conditions: Conditions, told: str
) -> None:
    with pytest.raises(ScheduleError, match=told):
        check_fit(staleness, conditions)


@pytest.mark.parametrize(
    ("staleness", "conditions"),
    [
        ("stash+msnag+schedule-aware", Conditions("soap")),
        ("partial-gradient", Conditions("sgd")),
        ("stash+lwp-w", Conditions("muon", 0.95)),
        ("nag+nesterov-last", Conditions("sgd", 0.9)),
        ("xpipe+schedule-aware", Conditions("nadam")),
        ("stash+lwp", Conditions("sutskever", 0.9)),
    ],
)
def test_what_fits_is_not_refused(staleness: str, conditions: Conditions) -> None:
    check_fit(staleness, conditions)
