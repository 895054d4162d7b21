"""`hidden-delay-rate`: with the run's own optimizers, late stages step their hidden matrices at
lower learning rates, and all other weights at that of the schedule."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.optimizers.param_groups import Joint
from asyncpipe.runtime.staleness import Conditions
from asyncpipe.runtime.staleness import check as check_fits
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.runtime.training.test_rates_of_stages import with_names
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, tied
from asyncpipe.tests.support.oracles.async_simulation import (
    Oracle,
    Reference,
    StageHistory,
    async_run,
    tau_of,
)
from asyncpipe.tests.support.oracles.gradient_corrections import DelayRateReference, Together
from asyncpipe.tests.support.oracles.weight_predictions import StockReference
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline
from asyncpipe.tests.support.run_configs import run_config

STEPS = 6


def hidden_rate(history: StageHistory, version: int, name: str) -> float:
    """1 / (1 + tau) for what Muon steps, 1 for what AdamW steps."""
    is_hidden = "ns_steps" in history.options[name]
    return 1 / (1 + tau_of(history, version, name)) if is_hidden else 1.0


class HiddenDelayRateReference(Reference):
    def rate(self, history: StageHistory, version: int, name: str) -> float:
        return hidden_rate(history, version, name)


class MsnagAndHiddenDelayRateReference(StockReference):
    def scale(self, history: StageHistory, version: int, name: str) -> float:
        return hidden_rate(history, version, name)


def by_pipeline(model: HandModel, staleness: str, step_every: int) -> list[nn.Module]:
    """The modules after `STEPS` steps by the executor with the run's own optimizers."""
    settings = run_config(
        folder="x",
        schedule="async-1f1b",
        micro_batches=step_every,
        steps=STEPS,
        optimizer="muon",
        lr=0.05,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
    )
    modules = model.build()
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
    hub, pairs = LocalHub(len(modules)), []
    for rank, module in enumerate(modules):
        pipeline = make_pipeline(model, schedule, modules, hub.transport(rank), staleness)
        trainer = OptimizerStepper(
            model.plan,
            {rank: module},
            settings,
            World(),
            lambda _: None,
            lr_scale=pipeline.lr_scale,
        )
        pipeline.attach(trainer.optimizers)
        pairs.append((pipeline, trainer))
    run_together(
        [
            pipeline.steps(schedule, model.make_inputs, observer=trainer)
            for pipeline, trainer in pairs
        ]
    )
    return modules


def by_recurrence(model: HandModel, method: Reference, step_every: int) -> Oracle:
    modules = model.build()
    *_, output = [weight for weight in modules[-1].parameters() if weight.ndim == 2]

    def optimize(parameters: Iterable[torch.Tensor]) -> Optimizer:
        own = list(parameters)
        hidden = [weight for weight in own if weight.ndim == 2 and weight is not output]
        others = [weight for weight in own if weight.ndim == 2 and weight is output]
        vectors = [weight for weight in own if weight.ndim < 2]
        adamw = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
        muon = Muon(hidden, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        rest = AdamW([group for group in adamw if group["params"]], lr=0.05, weight_decay=0.1)
        return Joint([muon, rest])

    return async_run(model, modules, STEPS, step_every, optimize, method=method)


def difference(ours: list[nn.Module], theirs: list[nn.Module]) -> float:
    return max(
        float((own - other).detach().abs().max())
        for module, reference in zip(ours, theirs, strict=True)
        for own, other in zip(module.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize(("stages", "step_every"), [(2, 1), (4, 1), (4, 2)])
def test_matrices_step_at_lower_rates_and_all_else_at_that_of_the_schedule(
    stages: int, step_every: int
) -> None:
    model = with_names(chain(stages))
    trained = by_pipeline(model, "stash+hidden-delay-rate", step_every)
    oracle = by_recurrence(model, HiddenDelayRateReference(), step_every)
    assert difference(trained, oracle.modules) < 1e-12
    everywhere = by_recurrence(model, Together(Reference(), DelayRateReference()), step_every)
    assert difference(trained, everywhere.modules) > 1e-3


def test_a_prediction_expects_both_rates() -> None:
    """Of one step: Muon rounds each step of a longer prediction to bfloat16."""
    model = with_names(chain(2))
    trained = by_pipeline(model, "stash+msnag+hidden-delay-rate", 1)
    oracle = by_recurrence(model, MsnagAndHiddenDelayRateReference("muon"), 1)
    assert difference(trained, oracle.modules) < 1e-12


def test_a_weight_of_several_stages_has_the_rate_of_the_schedule() -> None:
    model = with_names(tied(3))
    trained = by_pipeline(model, "stash+hidden-delay-rate", 2)
    for shared in model.plan.shared:
        copies = [trained[stage].get_parameter(name) for stage, name in shared.holders]
        assert all(torch.equal(copies[0], copy) for copy in copies)


def test_an_optimizer_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ScheduleError, match="Muon or SOAP steps, but the optimizer is adamw"):
        check_fits("stash+hidden-delay-rate", Conditions("adamw", 0.9))
    for optimizer in ("muon", "soap"):
        check_fits("stash+hidden-delay-rate", Conditions(optimizer, 0.9, ahead=3))
