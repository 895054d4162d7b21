"""Clipping where stages step alone equals a recurrence, in real processes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpipe.runtime.activity import Activities
from asyncpipe.runtime.delays import Delays
from asyncpipe.runtime.launching.launchers import Place
from asyncpipe.runtime.launching.world import World
from asyncpipe.runtime.training.async_clipping import StageNorms, steps_until_known
from asyncpipe.runtime.training.observer import Trainer
from asyncpipe.runtime.training.settings import Settings, SettingsError
from asyncpipe.runtime.transports import GlooTransport
from asyncpipe.tests.executor import lowered, make_pipeline
from asyncpipe.tests.hand_plans import chain
from asyncpipe.tests.held_equal import OPTIMIZERS
from asyncpipe.tests.oracle import Oracle, Reference, StageHistory, async_run
from asyncpipe.tests.processes import run_processes

STAGES, STEPS, LIMIT = 3, 6, 0.05
BY = ("stage", "proportion", "global", "known")


class Clipped(Reference):
    """Stashing, with gradients clipped by a norm; `norms` are those of all steps and stages."""

    def __init__(self, by: str, modules: list[nn.Module], late: int, fault: str = "") -> None:
        self.by, self.modules, self.late, self.fault = by, modules, late, fault
        self.squares: list[list[float]] = []

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        if history.stage == 0:
            self.squares.append(
                [sum(float(p.grad.square().sum()) for p in m.parameters()) for m in self.modules]
            )
        now, counts = (
            self.squares[-1],
            [sum(p.numel() for p in m.parameters()) for m in self.modules],
        )
        square, limit = now[history.stage], LIMIT
        if self.by == "proportion":
            limit *= math.sqrt(counts[history.stage] / sum(counts))
        elif self.by == "global":
            square = sum(now)
        elif self.by == "known":
            step = len(self.squares) - 1
            late = self.late + (self.fault == "one step later")
            known = list(self.squares[step - late] if step >= late else now)
            known[history.stage] = now[history.stage]
            square = sum(known)
        factor = min(1.0, limit / (math.sqrt(square) + 1e-6))
        for parameter in module.parameters():
            parameter.grad *= factor


def expected(by: str, step_every: int, fault: str = "") -> Oracle:
    model = chain(STAGES)
    modules = model.build()
    late = math.ceil(STAGES / step_every)
    return async_run(
        model,
        modules,
        STEPS,
        step_every,
        OPTIMIZERS["momentum"],
        method=Clipped(by, modules, late, fault),
    )


def train(rank: int, runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """The states of this rank's stage after each run."""
    place = Place(rank, STAGES, rank, STAGES)
    world = World(place, control=dist.group.WORLD)
    model, transport, states = chain(STAGES), GlooTransport(), []
    names = [tuple(dict(module.named_parameters())) for module in model.build()]
    plan = replace(
        model.plan,
        stages=tuple(
            replace(stage, parameters=own)
            for stage, own in zip(model.plan.stages, names, strict=True)
        ),
    )
    for by, step_every in runs:
        module = model.build()[rank]
        settings = Settings(
            folder="x",
            schedule="async-1f1b",
            micro_batches=step_every,
            steps=STEPS,
            optimizer="sgd",
            lr=0.1,
            momentum=0.9,
            weight_decay=0.0,
            clip=LIMIT,
            clip_by=by,
        )
        schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
        modules: list[Any] = [module] * STAGES
        pipeline = make_pipeline(model, schedule, modules, transport, "stash")
        trainer = Trainer(
            plan, {rank: module}, settings, world, lambda _: None, lr_scale=pipeline.lr_scale
        )
        trainer.start_segment(delays=Delays((2, 1, 0), step_every))
        pipeline.run(schedule, model.make_inputs, observer=trainer)
        states.append(module.state_dict())
    return states


def test_every_way_to_clip_equals_its_recurrence() -> None:
    runs = [*((by, 1) for by in BY), ("known", 2), ("global", 2)]
    ranks = run_processes(STAGES, train, runs, limit_s=150)
    seen = []
    for number, (by, step_every) in enumerate(runs):
        oracle = expected(by, step_every)
        for rank, states in enumerate(ranks):
            assert isinstance(states, list), states
            for name, value in oracle.modules[rank].state_dict().items():
                torch.testing.assert_close(states[number][name], value, rtol=1e-12, atol=1e-12)
        if step_every == 1:
            seen.append(float(oracle.modules[0].matrix[0, 0].detach()))
    assert len(set(seen)) == len(BY)


def test_the_comparison_would_see_norms_of_another_step() -> None:
    right, wrong = (
        expected("known", 1, fault).modules[0].matrix for fault in ("", "one step later")
    )
    assert not torch.allclose(right, wrong, rtol=1e-9)


def test_the_bounds_of_all_stages_add_up_to_the_bound() -> None:
    modules = chain(STAGES).build()
    settings = Settings(folder="x", schedule="async-1f1b", clip=2.0, clip_by="proportion")
    parameters = {j: list(module.parameters()) for j, module in enumerate(modules)}
    norms = StageNorms(settings, World(), STAGES, parameters, {}, Activities())
    bounds = [norms.of(stage, 1, 1)[1] for stage in range(STAGES)]
    assert math.hypot(*bounds) == pytest.approx(2.0)


@pytest.mark.parametrize("by", ["global", "known"])
def test_ranks_with_several_stages_cannot_wait_for_all_stages(by: str) -> None:
    settings = Settings(folder="x", schedule="async-1f1b", clip=2.0, clip_by=by)
    with pytest.raises(SettingsError, match="needs a rank for each of the 3 stages"):
        StageNorms(settings, World(), STAGES, {}, {}, Activities())


def test_known_norms_are_as_late_as_the_longest_warm_up() -> None:
    assert [steps_until_known((3, 2, 1, 0), k) for k in (1, 2, 3, 4, 8)] == [4, 2, 2, 1, 1]
