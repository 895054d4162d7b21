"""Clipping where stages step alone equals a recurrence, in real processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.executor.instrumented import Activities
from asyncpipe.runtime.schedule.asynchronous import Delays
from asyncpipe.runtime.training.clipping import (
    NormShare,
    StageNorms,
    share_of,
    squared_norm_alike,
    steps_until_known,
)
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.runtime.transports import GlooTransport
from asyncpipe.tests.support.models.hand_plans import chain, tied
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS
from asyncpipe.tests.support.oracles.async_simulation import (
    Oracle,
    Reference,
    StageHistory,
    async_run,
)
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.run_configs import run_config

STAGES, STEPS, LIMIT = 3, 6, 0.05
BY = ("stage", "proportion", "global", "known")
MODELS = {"chain": chain, "tied": tied}


class Clipped(Reference):
    """Stashing, with gradients clipped by norms, a weight that stages share by one of its own.

    `squares` are those of all steps and stages; a shared weight is stage 0's.
    """

    def __init__(self, by: str, modules: list[nn.Module], late: int, fault: str = "") -> None:
        self.by, self.modules, self.late, self.fault = by, modules, late, fault
        self.squares: list[list[float]] = []

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        if history.stage == 0:
            self.squares.append([self.counted(j, _square) for j in range(STAGES)])
        now, step = self.squares[-1], len(self.squares) - 1
        late = self.late + (self.fault == "one step later")
        known = list(self.squares[step - late] if step >= late else now)
        total = sum(self.counted(j, torch.Tensor.numel) for j in range(STAGES))
        shared = {name: module.get_parameter(name) for name in history.shared}
        own = [p for name, p in module.named_parameters() if name not in shared]
        groups = [own, *([p] for p in shared.values() if p.grad is not None)]
        for place, group in enumerate(groups):
            limit, square = LIMIT, sum(map(_square, group))
            if self.by == "proportion":
                limit *= math.sqrt(sum(p.numel() for p in group) / total)
            elif self.by == "global":
                square = sum(now)
            elif self.by == "known":
                others = list(known)
                others[history.stage] = now[history.stage]
                square = max(sum(known), square) if place else sum(others)
            for parameter in group:
                parameter.grad *= min(1.0, limit / (math.sqrt(square) + 1e-6))

    def counted(self, stage: int, of: Callable[[torch.Tensor], float]) -> float:
        """The sum over the weights that a stage counts: of shared ones those of stage 0."""
        names = dict(self.modules[stage].named_parameters())
        return sum(of(p) for name, p in names.items() if stage == 0 or name != "out.weight")


def _square(parameter: torch.Tensor) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.square().sum())


def expected(by: str, step_every: int, fault: str = "", kind: str = "chain") -> Oracle:
    model = MODELS[kind](STAGES)
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


def train(rank: int, runs: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """The states of this rank's stage after each run."""
    info = RankInfo(rank, STAGES, rank, STAGES)
    world, transport = World(info, control=dist.group.WORLD), GlooTransport()
    states = []
    for kind, by, step_every in runs:
        model = MODELS[kind](STAGES)
        names = [tuple(dict(module.named_parameters())) for module in model.build()]
        plan = replace(
            model.plan,
            stages=tuple(
                replace(stage, parameters=own)
                for stage, own in zip(model.plan.stages, names, strict=True)
            ),
        )
        module = model.build()[rank]
        settings = run_config(
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
        trainer = OptimizerStepper(
            plan, {rank: module}, settings, world, lambda _: None, lr_scale=pipeline.lr_scale
        )
        trainer.start_segment(delays=Delays((2, 1, 0), step_every))
        pipeline.run(schedule, model.make_inputs, observer=trainer)
        states.append(module.state_dict())
    return states


def test_every_way_to_clip_equals_its_recurrence() -> None:
    runs = [
        *(("chain", by, 1) for by in BY),
        ("chain", "known", 2),
        ("chain", "global", 2),
        *(("tied", by, 1) for by in BY),
        ("tied", "known", 2),
    ]
    ranks = run_processes(STAGES, train, runs, limit_s=150)
    seen: dict[str, set[float]] = {kind: set() for kind in MODELS}
    for number, (kind, by, step_every) in enumerate(runs):
        oracle = expected(by, step_every, kind=kind)
        for rank, states in enumerate(ranks):
            assert isinstance(states, list), states
            for name, value in oracle.modules[rank].state_dict().items():
                torch.testing.assert_close(states[number][name], value, rtol=1e-12, atol=1e-12)
        if kind == "tied":
            first, last = ranks[0][number], ranks[-1][number]
            assert torch.equal(first["table.weight"], last["out.weight"]), by
        if step_every == 1:
            seen[kind].add(float(next(oracle.modules[0].parameters())[0, 0].detach()))
    assert all(len(values) == len(BY) for values in seen.values())


def test_the_comparison_would_see_norms_of_another_step() -> None:
    right, wrong = (
        expected("known", 1, fault).modules[0].matrix for fault in ("", "one step later")
    )
    assert not torch.allclose(right, wrong, rtol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
def test_the_bounds_of_all_stages_add_up_to_the_bound(kind: str) -> None:
    model = MODELS[kind](STAGES)
    settings = run_config(schedule="async-1f1b", clip=2.0, clip_by="proportion")
    shares = {j: share_of(model.plan, j, module) for j, module in enumerate(model.build())}
    for share in shares.values():
        for parameter in share.shared:
            parameter.grad = torch.ones_like(parameter)
    norms = StageNorms(settings, World(), STAGES, shares, Activities())
    found = [norms.of(stage, 1, 1) for stage in range(STAGES)]
    once = {shared.bound for _, of_shared in found for shared in of_shared.values()}
    assert math.hypot(*(own.bound for own, _ in found), *once) == pytest.approx(2.0)


@pytest.mark.parametrize("by", BY)
def test_a_prediction_expects_the_factor_of_the_step(by: str) -> None:
    """With the gradients of the step itself, and the other stages' squares of the step before."""
    model = chain(STAGES)
    modules = model.build()
    settings = run_config(schedule="async-1f1b", clip=LIMIT, clip_by=by)
    shares = {j: share_of(model.plan, j, module) for j, module in enumerate(modules)}
    info = RankInfo(0, STAGES, 0, STAGES)
    norms = StageNorms(settings, World(info), STAGES, shares, Activities())
    if by in ("global", "known"):
        norms.load({"last": [9.0, 4.0, 1.0]})
    for parameter in modules[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = norms.expected_factor(1, [p.grad for p in modules[1].parameters()], 2.0)
    for parameter in modules[1].parameters():
        parameter.grad *= 2
    if by in ("stage", "proportion"):
        own, _ = norms.of(1, 1, 1)
        assert expected == pytest.approx(own.factor)
    else:
        square = sum(float(p.grad.square().sum()) for p in modules[1].parameters())
        assert expected == pytest.approx(LIMIT / math.sqrt(9 + square + 1))


def test_a_tied_gradient_that_grows_is_clipped_before_others_know_its_norm() -> None:
    """Under `known` the norm of all stages is that of an earlier step, and may be smaller."""
    model = MODELS["tied"](STAGES)
    settings = run_config(schedule="async-1f1b", clip=2.0, clip_by="known")
    (share,) = [share_of(model.plan, 0, model.build()[0])]
    world = World(RankInfo(0, STAGES, 0, STAGES))
    for growth, norm in ((1e-3, 5.0), (1e3, None)):
        norms = StageNorms(settings, world, STAGES, {0: share}, Activities())
        norms.load({"1": [9.0, 16.0, *[0.0] * (STAGES - 2)]})
        (parameter,) = share.shared
        parameter.grad = torch.full_like(parameter, growth)
        _, shared = norms.of(0, version=2, late=1)
        (found,) = shared.values()
        assert found.norm == pytest.approx(norm or math.sqrt(parameter.numel()) * growth)


def test_the_norm_of_a_complex_gradient_has_both_parts() -> None:
    gradient = torch.complex(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
    assert float(squared_norm_alike(gradient)) == float(squared_norm_alike(gradient.conj())) == 25


def test_a_tied_gradient_is_clipped_by_a_norm_with_the_same_bits_at_all_holders() -> None:
    settings = run_config(schedule="async-1f1b", clip=2.0, clip_by="stage")
    parameter = nn.Parameter(torch.zeros(40))
    parameter.grad = torch.linspace(0.1, 1.7, 40)
    share = NormShare([], {"head": parameter}, [])
    norms = StageNorms(settings, World(), STAGES, {0: share}, Activities())
    _, shared = norms.of(0, version=1, late=0)
    assert shared["head"].norm == math.sqrt(float(squared_norm_alike(parameter.grad)))


@pytest.mark.parametrize("by", ["global", "known"])
def test_ranks_with_several_stages_cannot_wait_for_all_stages(by: str) -> None:
    settings = run_config(schedule="async-1f1b", clip=2.0, clip_by=by)
    with pytest.raises(SettingsError, match="needs a rank for each of the 3 stages"):
        StageNorms(settings, World(), STAGES, {}, Activities())


def test_known_norms_are_as_late_as_the_longest_warm_up() -> None:
    assert [steps_until_known((3, 2, 1, 0), k) for k in (1, 2, 3, 4, 8)] == [4, 2, 2, 1, 1]
