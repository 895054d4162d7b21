"""A real pipeline and the single-process recurrence, held equal in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncpipe.runtime.optimizers.param_groups import Joint
from asyncpipe.runtime.training.stage_optimizer import uncompiled
from asyncpipe.tests.support.models.hand_plans import HandModel
from asyncpipe.tests.support.oracles.async_simulation import Oracle, Reference, async_run
from asyncpipe.tests.support.processes.executor import Trained, lowered, train_together

_sgd = partial(uncompiled(torch.optim.SGD), lr=0.1)
_adam, _adamw = (
    partial(uncompiled(kind), lr=0.05) for kind in (torch.optim.Adam, torch.optim.AdamW)
)


def _muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest, which a stage may lack."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.ndim == 2 else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1)
    return Joint([muon, _adamw(others)] if others else [muon])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "momentum": partial(_sgd, momentum=0.9),
    "decay": partial(_sgd, momentum=0.9, weight_decay=0.1),
    "sgd decay": partial(_sgd, weight_decay=0.1),
    "adam": _adam,
    "adam decay": partial(_adam, weight_decay=0.1),
    "adamw": partial(_adamw, weight_decay=0.1),
    "muon": _muon,
}


def recomputing(model: HandModel) -> HandModel:
    """The same model whose stages run their forward again, all but the last."""
    stages = tuple(
        replace(stage, recompute=stage.index < len(model.stages) - 1) for stage in model.plan.stages
    )
    return replace(model, plan=replace(model.plan, stages=stages))


def run_both(
    model: HandModel,
    staleness: str,
    reference: Reference,
    optimizer: str = "momentum",
    *,
    step_every: int = 1,
    steps: int = 6,
    recompute: bool = False,
    segments: int = 1,
    schedule: str = "async-1f1b",
    fault: str = "",
) -> tuple[Trained, Oracle]:
    """The same training by a pipeline and by the recurrence."""
    optimize = OPTIMIZERS[optimizer]
    of_pipeline = recomputing(model) if recompute else model
    trained = train_together(
        of_pipeline,
        lowered(of_pipeline, schedule, steps // segments * step_every, step_every),
        segments=segments,
        optimize=optimize,
        staleness=staleness,
        seed=5,
    )
    oracle = async_run(
        model,
        model.build(),
        steps,
        step_every,
        optimize,
        method=reference,
        recompute=recompute,
        seed=5,
        flush_every=steps // segments if segments > 1 and schedule == "async-1f1b" else 0,
        fault=fault,
    )
    return trained, oracle


def assert_equal(trained: Trained, oracle: Oracle, *, tolerance: float = 0.0) -> None:
    """Losses, versions and all that the stages hold are the same, to the last bit by default; what
    several stages hold is the same at all of them, always to the last bit."""
    assert trained.ledger == oracle.ledger
    for shared in trained.pipelines[0].plan.shared:
        copies = [trained.modules[stage].get_parameter(name) for stage, name in shared.holders]
        assert all(torch.equal(copies[0], copy) for copy in copies), shared.names
    assert set(trained.seen.losses) == set(oracle.losses)
    pairs = [(str(i), trained.seen.losses[i], oracle.losses[i]) for i in oracle.losses]
    for j, (got, wanted) in enumerate(zip(trained.modules, oracle.modules, strict=True)):
        expected = wanted.state_dict()
        pairs += [
            (f"{j} {name}", value, expected[name]) for name, value in got.state_dict().items()
        ]
    for name, got, wanted in pairs:
        if tolerance:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(got, wanted), name


def check(model: HandModel, staleness: str, reference: Reference, *arguments: Any, **options: Any):
    """Holds both equal."""
    tolerance = options.pop("tolerance", 0.0)
    assert_equal(*run_both(model, staleness, reference, *arguments, **options), tolerance=tolerance)
