"""Staleness methods that correct gradients, rates and steps equal recurrences of their formulas."""

from __future__ import annotations

from functools import partial
from math import sqrt

import pytest
import torch
from torch import nn

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import Delays
from asyncpipe.runtime.staleness import Conditions, VersionPair, make_staleness
from asyncpipe.runtime.staleness import check as check_fits
from asyncpipe.runtime.staleness.protocol import StageContext
from asyncpipe.runtime.staleness.weight_versions import WeightVersions
from asyncpipe.runtime.transports import run_together
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, skips, tied
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS, assert_equal, check, run_both
from asyncpipe.tests.support.oracles.async_simulation import LiveReference, Reference
from asyncpipe.tests.support.oracles.gradient_corrections import (
    AdaptivelyCompensatedReference,
    DelayCompensatedReference,
    DelayRateReference,
    GapAwareActivationsReference,
    GapAwareLossReference,
    GapAwareReference,
    LookAheadReference,
    PipeMareRateReference,
    PipeMareReference,
    SpikeCompensationReference,
    Together,
    TwoBufferedReference,
    WholeDecayReference,
)
from asyncpipe.tests.support.oracles.weight_predictions import LwpReference
from asyncpipe.tests.support.processes.executor import Planned, lowered, train_together

# Formulas in one expression, and the runtime's operations in place, round differently.
ROUNDED = 1e-12
EXACT = ("stash+delay-rate", "stash+dc-asgd")

METHODS = {
    "pipemare": PipeMareReference(),
    "none+pipemare-rate": Together(LiveReference(), PipeMareRateReference(4)),
    "stash+delay-rate": Together(Reference(), DelayRateReference()),
    "pipemare+pipemare-rate": Together(PipeMareReference(), PipeMareRateReference(4)),
    "stash+dc-asgd": Together(Reference(), DelayCompensatedReference()),
    "stash+dc-asgd-adaptive": Together(Reference(), AdaptivelyCompensatedReference()),
    "stash+gap-aware": Together(Reference(), GapAwareReference()),
    "stash+gap-aware-activations": Together(Reference(), GapAwareActivationsReference()),
    "stash+gap-aware+pipemare-rate": Together(
        Reference(), GapAwareReference(), PipeMareRateReference(4)
    ),
    "stash+error-feedback": Together(Reference(), LookAheadReference()),
    "none+error-feedback": Together(LiveReference(), LookAheadReference()),
    "stash+spike-compensation": Together(Reference(), SpikeCompensationReference()),
}


def legal(method: str, optimizer: str) -> bool:
    if "spike-compensation" in method:
        return optimizer != "sgd decay"  # it has no momentum
    # Its reference measures steps at the scheduled rate.
    return not ("gap-aware+" in method and "adam" in optimizer)


CASES = [(m, o) for m in METHODS for o in ("decay", "sgd decay", "adam", "adamw") if legal(m, o)]


@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_a_method_equals_its_recurrence(method: str, optimizer: str) -> None:
    for stages, step_every, recompute in ((2, 1, True), (3, 1, False), (4, 2, True), (4, 4, False)):
        check(
            chain(stages, dropout=0.25),
            method,
            METHODS[method],
            optimizer,
            step_every=step_every,
            recompute=recompute,
            tolerance=0.0 if method in EXACT else ROUNDED,
        )


@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_a_method_of_eight_stages_equals_its_recurrence(method: str, optimizer: str) -> None:
    check(chain(8), method, METHODS[method], optimizer, steps=10, tolerance=ROUNDED)


@pytest.mark.parametrize("kind", ["chain", "tied"])
def test_spike_compensation_with_muon_equals_its_recurrence(kind: str) -> None:
    model = {"chain": chain(4, dropout=0.25), "tied": tied(3)}[kind]
    for step_every in (1, 2, 4):
        check(
            model,
            "stash+spike-compensation",
            METHODS["stash+spike-compensation"],
            "muon",
            step_every=step_every,
            recompute=True,
            tolerance=ROUNDED,
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["skips", "tied"])
def test_a_method_with_other_models_equals_its_recurrence(kind: str, method: str) -> None:
    model = {"skips": skips(), "tied": tied(3)}[kind]
    check(model, method, METHODS[method], "decay", tolerance=ROUNDED)


LATER = ("delay-rate", "pipemare-rate", "error-feedback", "spike-compensation")


@pytest.mark.parametrize("method", [m for m in METHODS if m.endswith(LATER)])
@pytest.mark.parametrize("kind", ["chain", "tied"])
def test_a_delay_is_that_of_the_step_also_after_a_drain(kind: str, method: str) -> None:
    model = {"chain": chain(4), "tied": tied(4)}[kind]
    for segments, step_every in ((2, 1), (6, 1), (3, 2)):
        check(
            model,
            method,
            METHODS[method],
            "decay",
            step_every=step_every,
            segments=segments,
            tolerance=ROUNDED,
        )


@pytest.mark.parametrize("method", [m for m in METHODS if m.endswith(LATER)])
def test_where_every_step_is_flushed_nothing_is_scaled(method: str) -> None:
    plain, _ = run_both(chain(3), "stash", Reference(), "decay", segments=6)
    trained, _ = run_both(chain(3), method, METHODS[method], "decay", segments=6)
    for ours, theirs in zip(trained.modules, plain.modules, strict=True):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("optimizer", ["momentum", "decay", "adam", "adam decay", "adamw"])
def test_gap_aware_without_a_stash_equals_its_recurrence(optimizer: str, recompute: bool) -> None:
    reference = Together(LiveReference(), WholeDecayReference())
    for model, step_every in ((chain(2), 1), (chain(3), 2), (chain(4), 4), (tied(3), 2)):
        check(
            model,
            "gap-aware",
            reference,
            optimizer,
            step_every=step_every,
            recompute=recompute,
            segments=2,
            tolerance=ROUNDED,
        )


def test_gap_aware_without_a_stash_keeps_one_copy_less() -> None:
    def kept(methods: str) -> int:
        schedule = lowered(chain(3), "async-1f1b", 8, 2)
        optimize = OPTIMIZERS["adam"]
        trained = train_together(chain(3), schedule, optimize=optimize, staleness=methods)
        binder = trained.pipelines[0].binders[0]
        return binder.kept_bytes // sum(weight.nbytes for weight in binder.weights.live.values())

    assert (kept("gap-aware"), kept("stash+gap-aware")) == (1, 2)


@pytest.mark.parametrize(
    ("names", "conditions", "words"),
    [
        ("gap-aware", {"ahead": 3, "step_every": 2}, "gradients are up to 2 steps late"),
        ("gap-aware", {"ahead": 1, "momentum": 0.0}, "has no record of its last step"),
        ("gap-aware+error-feedback", {"ahead": 1}, "under error-feedback"),
        ("pipemare+gap-aware", {"ahead": 1}, "under pipemare"),
    ],
)
def test_a_gap_that_is_not_the_last_step_needs_a_stash(
    names: str, conditions: dict[str, int], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        check_fits(names, Conditions(**{"momentum": 0.9, **conditions}))
    check_fits("gap-aware", Conditions(ahead=1, momentum=0.9))
    check_fits("none+gap-aware", Conditions(ahead=3, step_every=3, optimizer="adamw"))


@pytest.mark.parametrize("optimizer", ["decay", "sgd decay", "adamw"])
@pytest.mark.parametrize("step_every", [1, 2])
def test_gap_aware_loss_equals_its_recurrence(step_every: int, optimizer: str) -> None:
    check(
        chain(4, dropout=0.25),
        "gap-aware-loss",
        GapAwareLossReference(),
        optimizer,
        step_every=step_every,
        recompute=True,
        tolerance=ROUNDED,
    )


@pytest.mark.parametrize(
    ("added", "reference"),
    [
        ("error-feedback", LookAheadReference(two_buffered=True)),
        ("gap-aware", GapAwareReference()),
        ("dc-asgd", DelayCompensatedReference()),
    ],
)
def test_a_correction_knows_that_2bw_is_late_at_every_stage(
    added: str, reference: Reference
) -> None:
    both = Together(TwoBufferedReference(), reference)
    check(chain(3), f"2bw+{added}", both, "decay", step_every=4, tolerance=ROUNDED)


@pytest.mark.parametrize(
    ("added", "reference"),
    [
        ("spike-compensation", SpikeCompensationReference()),
        ("gap-aware", GapAwareReference()),
        ("dc-asgd", DelayCompensatedReference()),
    ],
)
def test_a_correction_goes_with_predicted_weights(added: str, reference: Reference) -> None:
    both = Together(LwpReference("sgd"), reference)
    check(chain(3), f"stash+lwp+{added}", both, "decay", tolerance=ROUNDED)


@pytest.mark.parametrize("method", [*METHODS, "gap-aware-loss"])
def test_a_method_is_plain_training_where_nothing_is_late(method: str) -> None:
    model = chain(3)
    flushed = partial(
        train_together, model, lowered(model, "1f1b", 4), segments=3, optimize=OPTIMIZERS["decay"]
    )
    for ours, plain in zip(flushed(staleness=method).modules, flushed().modules, strict=True):
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_training_and_the_comparison_sees_it(method: str) -> None:
    plain = LiveReference() if method.startswith(("none", "pipemare")) else Reference()
    with pytest.raises(AssertionError):
        assert_equal(*run_both(chain(3), method, plain), tolerance=ROUNDED)


# Live weights are the newest anyway.
FAULTS = [
    *((method, "drop one gradient") for method in METHODS),
    *((m, "new weights in one backward") for m in METHODS if not m.startswith("none")),
]


@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_the_comparison_sees_a_planted_fault(method: str, fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_equal(*run_both(chain(3), method, METHODS[method], fault=fault), tolerance=ROUNDED)


def one_weight(staleness: str, delay: int = 2) -> tuple:
    """A method of a lone stage of one matrix, before its first step."""
    module = nn.Linear(2, 2, bias=False).double()
    weights = WeightVersions(0, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    (method,) = make_staleness(staleness)
    method.steps = Planned(optimizer, lambda version: 1.0, weights)
    delays = Delays((delay, 0, 0), step_every=1)
    method.begin(StageContext(0, delays, micro_batches=1, keeps_forward=True))
    return module.weight, weights, optimizer, method


@pytest.mark.parametrize("staleness", ["gap-aware", "dc-asgd", "dc-asgd-adaptive"])
def test_a_gradient_without_a_gap_is_left_alone(staleness: str) -> None:
    weight, weights, optimizer, method = one_weight(staleness)
    for _ in range(3):
        leaves = weights.bind(0, weights.live_view)
        weights.went_forward(0)
        leaves["weight"].grad = gradient = torch.randn_like(weight)
        expected = gradient.clone()
        method.after_backward(weights, VersionPair(0, 0, 1), leaves)
        assert torch.equal(leaves["weight"].grad, expected)
        weights.went_backward(0)
        with method.stepping(weights):
            optimizer.step()
        weights.stepped()
        method.after_step(weights)


def test_a_gap_of_one_usual_step_halves_a_gradient() -> None:
    weight, weights, optimizer, method = one_weight("gap-aware")
    leaves = weights.bind(0, weights.live_view)
    weights.went_forward(0)
    weight.grad = torch.ones_like(weight)
    with method.stepping(weights):
        weights.begin_step()
        optimizer.step()
    weights.stepped()
    leaves["weight"].grad = torch.full_like(weight, 3.0)
    method.after_backward(weights, VersionPair(0, 0, 1), leaves)
    assert torch.allclose(leaves["weight"].grad, torch.full_like(weight, 1.5), rtol=1e-6)


def test_error_feedback_hands_out_the_weights_that_it_has_come_to() -> None:
    model = chain(3)
    trained, oracle = run_both(
        model, "stash+error-feedback", METHODS["stash+error-feedback"], "adamw"
    )
    stored = [p.clone() for p in trained.modules[0].parameters()]
    with trained.pipelines[0].eval_weights():
        to_evaluate = [p.clone() for p in trained.modules[0].parameters()]
    assert all(map(torch.equal, stored, trained.modules[0].parameters()))
    assert not any(map(torch.equal, stored, to_evaluate))

    class Remembering(LookAheadReference):
        bases: dict[int, dict] = {}

        def after_step(self, history, module, optimizer) -> None:
            super().after_step(history, module, optimizer)
            self.bases[history.stage] = history.notes["y"]

    run_both(model, "stash", Together(Reference(), Remembering()), "adamw")
    for value, base in zip(to_evaluate, Remembering.bases[0].values(), strict=True):
        torch.testing.assert_close(value, base, rtol=ROUNDED, atol=ROUNDED)


def test_an_evaluation_sees_the_weights_to_evaluate() -> None:
    model = chain(2)
    trained, _ = run_both(model, "stash+error-feedback", METHODS["stash+error-feedback"])
    flushed = lowered(model, "1f1b", 1)
    with trained.pipelines[0].eval_weights():
        to_evaluate = float(model.forward(trained.modules, model.make_inputs(0))["loss"].detach())
    stored = float(model.forward(trained.modules, model.make_inputs(0))["loss"].detach())
    assert to_evaluate != stored
    assert evaluated(trained, model, flushed) == to_evaluate


def evaluated(trained, model: HandModel, schedule) -> float:
    run_together(
        [
            pipeline.steps(schedule, model.make_inputs, observer=trained.seen, training=False)
            for pipeline in trained.pipelines
        ]
    )
    return float(trained.seen.losses[0])


def test_the_rate_of_late_stages_rises_to_the_schedules() -> None:
    _, _, _, method = one_weight("pipemare-rate", delay=4)
    # The first gradients are less late: 0, 2 and 4 steps.
    factors = [method.lr_scale(version) for version in (1, 3, 5, 9)]
    assert factors == pytest.approx([1, 1 / sqrt(2), 1, 1])
    _, _, _, method = one_weight("delay-rate", delay=4)
    assert [method.lr_scale(version) for version in (1, 2, 5, 9)] == [1, 1 / 2, 1 / 5, 1 / 5]


FITTING = {"optimizer": "sgd", "momentum": 0.9, "recomputes": True, "step_every": 4, "ahead": 3}


@pytest.mark.parametrize(
    ("names", "changed", "words"),
    [
        (
            "gap-aware",
            {"ahead": 5},
            "with the weights of the forward, which are not kept, and grad",
        ),
        ("dc-asgd+pipemare", {}, "compares with the weights of the forward, which are not kept"),
        (
            "gap-aware-loss",
            {"recomputes": False, "without_recompute": (0,)},
            "needs a second forward in every stage but the last, and stage 0 recomputes nothing",
        ),
        ("gap-aware-loss+stash", {}, "both decide which weights a backward reads"),
        ("stash+gap-aware+dc-asgd", {}, "both decide how gradients are corrected"),
        ("pipemare+stash", {}, "both decide which weights a backward reads"),
        ("stash+none", {}, "stash and none both decide which weights a backward reads"),
        ("none+2bw", {}, "none and 2bw both decide which weights a backward reads"),
        ("none+msnag", {}, "none and msnag both decide which weights a forward reads"),
        ("none+none", {}, "--staleness names none twice"),
        ("stash+msnag+schedule-aware+schedule-aware", {}, "names schedule-aware twice"),
        ("stash+", {}, "has an empty method name"),
        ("stash+pipemare-rate+delay-rate", {}, "both decide the learning rate"),
        ("stash+error-feedback+spike-compensation", {}, "both decide the step"),
        ("msnag+error-feedback", {}, "both decide how far ahead weights look"),
        (
            "stash+gap-aware",
            {"optimizer": "muon"},
            "gaps in steps of adamw, adam, sgd",
        ),
        (
            "stash+spike-compensation",
            {"optimizer": "nadam"},
            "changes the momentum of adamw, adam, sgd and muon, but the optimizer is nadam",
        ),
        ("stash+spike-compensation", {"nesterov": True}, "the optimizer is sgd with --nesterov"),
        ("stash+spike-compensation", {"momentum": 0.0}, "the optimizer is sgd without momentum"),
        (
            "stash+dc-asgd-adaptive",
            {"replicas": 2},
            "every micro-batch of a step, and each of the 2 replicas has only its own",
        ),
        ("stash+partial-gradient", {"replicas": 3}, "each of the 3 replicas has only its own"),
        ("aggmsnag", {"replicas": 2}, "aggmsnag uses the gradient of every micro-batch"),
        (
            "stash+gap-aware",
            {"replicas": 2, "momentum": 0.0},
            "of a step where sgd has no momentum, and each of the 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(names: str, changed: dict, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check_fits(names, Conditions(**FITTING | changed))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("pipedream", "stash"),
        ("ws", "stash"),
        ("wp", "msnag"),
        ("GA", "gap-aware"),
        ("ga_jfl", "gap-aware-loss"),
        ("jfl", "gap-aware-loss"),
        ("stsh", "stash"),
    ],
)
def test_other_names_of_methods_suggest_the_right_one(word: str, meant: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_fits(f"none+{word}", Conditions(**FITTING))
    assert caught.value.cure == f"Did you mean {meant}?"


def test_an_unknown_method_has_a_short_answer() -> None:
    with pytest.raises(ScheduleError) as caught:
        check_fits("xyzzy", Conditions(**FITTING))
    assert "docs/asynchronous-methods.md" in caught.value.cure and len(caught.value.cure) < 120


@pytest.mark.parametrize(
    "names", ["gap-aware", "none+gap-aware", "pipemare+dc-asgd", "gap-aware+delay-rate"]
)
def test_a_cure_for_weights_that_are_not_kept_fits(names: str) -> None:
    late = Conditions(**FITTING | {"step_every": 1})
    with pytest.raises(ScheduleError, match="which are not kept") as caught:
        check_fits(names, late)
    check_fits(caught.value.cure.removeprefix("--staleness "), late)


@pytest.mark.parametrize("names", [*METHODS, "gap-aware-loss", "2bw+error-feedback+delay-rate"])
def test_what_fits_is_accepted(names: str) -> None:
    check_fits(names, Conditions(**FITTING))
    if "adaptive" not in names:
        check_fits(names, Conditions(**FITTING, replicas=2))
