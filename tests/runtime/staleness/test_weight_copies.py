"""What plans count of the weights that staleness methods keep is what pipelines have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from torch import nn

from asyncpipe.runtime.schedule.asynchronous import weight_copies
from asyncpipe.tests.support.models.hand_plans import HandStage, chain, hand_model
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS, recomputing
from asyncpipe.tests.support.processes.executor import lowered, train_together

STAGES = 4
# Methods, an optimizer that suits them, and the copies that there are only while a step is made or
# in some of the stages, which are counted too.
KEPT = (
    ("none", "adam", 0),
    ("stash", "adam", 0),
    ("pipemare", "adam", 1),
    ("stash+pipemare-rate", "adam", 0),
    ("msnag", "adam", 0),
    ("stash+aggmsnag", "momentum", 0),
    ("nag", "momentum", 0),
    ("stash+lwp-w", "adam", 0),
    ("pipeoptim", "adam", 0),
    ("stash+gap-aware", "adam", 1),
    ("stash+gap-aware-activations", "adam", 0),
    ("gap-aware-loss", "momentum", 1),
    ("stash+dc-asgd", "adam", 0),
    ("stash+dc-asgd-adaptive", "adam", 0),
    ("stash+error-feedback", "adam", 1),
    ("stash+spike-compensation", "momentum", 2),
)


@pytest.mark.parametrize(("staleness", "optimizer"), [kept[:2] for kept in KEPT])
def test_a_stage_without_weights_keeps_none(staleness: str, optimizer: str) -> None:
    whole = chain(2)
    first, last = whole.stages
    between = HandStage(nn.Tanh, ("h1",), ("h2",))
    last = replace(last, inputs=("h2", "y"))
    model = hand_model([first, between, last], whole.make_inputs)
    if staleness == "gap-aware-loss":
        model = recomputing(model)
    trained = train_together(
        model,
        lowered(model, "async-1f1b", 6, 1),
        optimize=OPTIMIZERS[optimizer],
        staleness=staleness,
    )
    assert trained.pipelines[1].binders[1].kept_bytes == 0
    assert trained.pipelines[1].versions == {1: 6}


@pytest.mark.parametrize(("staleness", "optimizer", "passing"), KEPT)
def test_what_is_counted_is_what_there_is(staleness: str, optimizer: str, passing: int) -> None:
    for step_every, recompute in itertools.product((1, 2, 4), (False, True)):
        if staleness == "gap-aware-loss" and not recompute:
            continue
        model = recomputing(chain(STAGES)) if recompute else chain(STAGES)
        trained = train_together(
            model,
            lowered(model, "async-1f1b", 8 * step_every, step_every),
            optimize=OPTIMIZERS[optimizer],
            staleness=staleness,
        )
        for stage, pipe in enumerate(trained.pipelines):
            binder = pipe.binders[stage]
            one = sum(weight.nbytes for weight in binder.weights.live.values())
            again = recompute and stage < STAGES - 1
            ahead = STAGES - 1 - stage
            counted = weight_copies(staleness, ahead, step_every, recomputes=again)
            held = binder.kept_bytes / one
            assert counted - passing <= held <= counted, (step_every, recompute, stage)
