"""Optimizers are torch's, the learning rate follows its formula, and one norm covers all stages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.config.settings import RunConfig
from asyncpipe.runtime.control.learning_rate import lr_factor
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.monitoring.gather import RankFigures
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.training.clipping import (
    LossError,
    StepMessage,
    clip_factor,
    gradients_of,
    scale_gradients,
    share_of,
    squared_norm,
)
from asyncpipe.runtime.training.optimizer_step import OptimizerStepper
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer, make_optimizer
from asyncpipe.tests.support.models.hand_folders import PlainText, write_text
from asyncpipe.tests.support.run_configs import run_config


def settings(**options: object) -> RunConfig:
    given = {"optimizer": "adamw", "lr": 0.1, "weight_decay": 0.5, "micro_batches": 2} | options
    return run_config(**given)


def test_the_learning_rate_rises_and_falls() -> None:
    def factors(decay: str) -> list[float]:
        return [
            lr_factor(step, steps=10, warmup=2, decay=decay, final_ratio=0.2)
            for step in (0, 1, 2, 6, 10)
        ]

    assert factors("none") == [0.5, 1, 1, 1, 1]
    assert factors("linear") == pytest.approx([0.5, 1, 1, 0.6, 0.2])
    assert factors("cosine") == pytest.approx([0.5, 1, 1, 0.6, 0.2])
    assert lr_factor(4, steps=10, warmup=2, decay="cosine") > 0.75 > 2 / 3


def test_wsd_is_constant_until_the_last_fifth_of_the_steps() -> None:
    def factor(step: int, **given: float) -> float:
        return lr_factor(step, **{"steps": 100, "warmup": 10, "decay": "wsd", **given})

    assert [factor(step) for step in (4, 9, 10, 80, 90, 100)] == [0.5, 1, 1, 1, 0.5, 0]
    assert factor(95, final_ratio=0.2) == pytest.approx(1 - 0.8 * 0.75)
    # A longer warm-up leaves the rest of the steps for the decay.
    assert [factor(step, warmup=90) for step in (89, 90, 95, 100)] == [1, 1, 0.5, 0]


def test_linear_decay_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.3, total_iters=10)
    for step in range(10):
        expected = lr_factor(step, steps=10, decay="linear", final_ratio=0.3)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_vectors_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(module.parameters(), settings())
    decayed, kept = optimizer.param_groups
    assert [parameter.ndim for parameter in decayed["params"]] == [2]
    assert [parameter.ndim for parameter in kept["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_the_plain_optimizer(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, plain = nn.Linear(3, 3).to(dtype), nn.Linear(3, 3).to(dtype)
    plain.load_state_dict(ours.state_dict())
    given = settings(optimizer=name, momentum=0.9, weight_decay=0.0, steps=4, decay="linear")
    stage = StageOptimizer(ours, given)
    reference = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    }[name](plain.parameters())
    for step in range(4):
        for group in reference.param_groups:
            group["lr"] = 0.1 * (1 - step / 4)
        for module in (ours, plain):
            module(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
        stage.step()
        reference.step()
        for module in (ours, plain):
            module.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_parameter_may_have_its_first_gradient_a_step_later(name: str) -> None:
    early, late = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([early, late], settings(optimizer=name, momentum=0.9))
    early.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(late, torch.ones(2, 2))
    late.grad = torch.ones(2, 2)
    optimizer.step()
    assert (late < 1).all()


def test_a_scaled_step_leaves_the_schedule_alone() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    stage = StageOptimizer(module, settings(optimizer="sgd", weight_decay=0.0, lr=1.0))
    for scale in (0.5, 1.0):
        module.weight.grad = torch.ones(1, 1)
        stage.step(scale)
    assert module.weight.item() == -1.5


def test_future_learning_rates_are_those_that_the_steps_then_have() -> None:
    module = nn.Linear(2, 2)
    given = settings(steps=9, warmup=3, decay="cosine", final_lr_ratio=0.1)
    stage = StageOptimizer(module, given)
    assert stage.optimizer is not None
    ahead, seen = stage.future_lr(15), []
    for step in range(12):
        assert stage.future_lr(3) == ahead[step : step + 3]
        seen += [group["lr"] for group in stage.optimizer.param_groups]
        if step == 4:
            stage.skip()
        else:
            stage.step(0.5)
    assert seen == [0.1 * factor for factor in ahead[:12] for _ in range(2)]
    assert len({*ahead}) > 8


def test_a_stage_without_parameters_steps() -> None:
    stage = StageOptimizer(nn.ReLU(), settings())
    stage.step()
    assert stage.future_lr(4) == ()


@pytest.fixture
def stages(tmp_path: Path) -> tuple[Plan, dict[int, nn.Module]]:
    plan = write_text(tmp_path / "text")
    return plan, {index: load_stage(tmp_path / "text", plan, index) for index in (0, 1)}


def backward(plain: PlainText, modules: dict[int, nn.Module]) -> None:
    """Puts the plain model's gradients into the stages, tied ones into both holders."""
    ids = torch.arange(32).reshape(1, 32)
    plain(ids, ids)[0].backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    gradients["head.weight"] = gradients["wte.weight"]
    for module in modules.values():
        for name, parameter in module.named_parameters():
            gradient = gradients[name]
            assert gradient is not None
            parameter.grad = gradient.clone()


def test_clipping_over_stages_is_that_of_the_whole_model(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    plan, modules = stages
    torch.manual_seed(7)
    plain = PlainText()
    backward(plain, modules)
    expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
    squares = {
        index: squared_norm(gradients_of(share_of(plan, index, module).counted))
        for index, module in modules.items()
    }
    norm = StepMessage(squares, 2, World()).agreed().norm
    assert norm == pytest.approx(expected, rel=1e-6)
    clipped = dict(plain.named_parameters())
    for module in modules.values():
        scale_gradients(module.parameters(), clip_factor(norm, 0.3))
        for name, parameter in module.named_parameters():
            reference = clipped["wte.weight" if name == "head.weight" else name].grad
            torch.testing.assert_close(parameter.grad, reference, rtol=1e-6, atol=1e-9)


def test_counting_a_tied_parameter_twice_would_be_seen(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    plan, modules = stages
    plain = PlainText()
    backward(plain, modules)
    once = sum(squared_norm(gradients_of(share_of(plan, j, m).counted)) for j, m in modules.items())
    twice = sum(squared_norm(gradients_of(module.parameters())) for module in modules.values())
    assert twice > once * 1.01


def test_no_limit_and_a_small_norm_change_nothing() -> None:
    assert clip_factor(5.0, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5)


def trainer(
    stages: tuple[Plan, dict[int, nn.Module]], told: list[RankFigures], **options: object
) -> OptimizerStepper:
    plan, modules = stages
    return OptimizerStepper(
        plan,
        modules,
        settings(weight_decay=0.0, **options),
        World(),
        told.append,
        lr_scale=lambda stage, version, name: 1.0,
    )


def test_a_rank_of_several_stages_steps_them_together(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    plan, modules = stages
    told: list[RankFigures] = []
    observer = trainer(stages, told, clip=0.3)
    plain = PlainText()
    backward(plain, modules)
    before = modules[0].inner.bias.clone()
    for stage in modules:
        observer.on_gradients(stage, 1)
    observer.on_step(0, 1)
    modules[0].zero_grad()  # as the pipeline does after each stage's step
    assert torch.equal(modules[0].inner.bias, before) and not told
    observer.on_step(1, 1)
    assert not torch.equal(modules[0].inner.bias, before)
    assert [figures.step for figures in told] == [1]
    expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
    assert math.sqrt(sum(told[0].squares)) == pytest.approx(expected, rel=1e-6)


def test_asynchronous_stages_step_by_themselves(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    _, modules = stages
    observer = trainer(stages, [], schedule="async-1f1b", clip=1.0)
    backward(PlainText(), modules)
    before = modules[0].inner.bias.clone()
    observer.on_step(0, 1)
    assert not torch.equal(modules[0].inner.bias, before)


def test_a_loss_that_is_no_number_ends_the_run(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    observer = trainer(stages, [])

    def step(version: int, loss: Tensor) -> None:
        for micro_batch in (2 * version - 2, 2 * version - 1):
            observer.on_loss(micro_batch, loss, None)
        observer.on_step(0, version)
        observer.on_step(1, version)

    step(1, torch.tensor(3.21))
    with pytest.raises(LossError, match=r"the loss is nan at step 2 \(it was 3.2100 at step 1"):
        step(2, torch.tensor(math.nan))


def test_a_gradient_that_is_no_number_ends_a_clipped_run_before_its_step(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    _, modules = stages
    observer = trainer(stages, [], clip=1.0)
    backward(PlainText(), modules)
    assert modules[1].norm.bias.grad is not None
    modules[1].norm.bias.grad[3] = math.inf
    before = modules[0].inner.bias.clone()
    observer.on_loss(0, torch.tensor(3.21), None)
    for stage in modules:
        observer.on_gradients(stage, 1)
    observer.on_step(0, 1)
    found = (
        r"the gradient norm of stage 1 is inf at step 1, where the loss is 3.2100. Stopped before"
    )
    with pytest.raises(LossError, match=found):
        observer.on_step(1, 1)
    assert torch.equal(modules[0].inner.bias, before)


def test_a_clipped_run_says_that_the_loss_is_no_number_rather_than_its_gradients(
    stages: tuple[Plan, dict[int, nn.Module]],
) -> None:
    _, modules = stages
    observer = trainer(stages, [], clip=1.0)
    for version, loss in ((1, 3.21), (2, math.nan)):
        backward(PlainText(), modules)
        for module in modules.values():
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, loss)
        observer.on_loss(2 * version - 2, torch.tensor(loss), None)
        for stage in modules:
            observer.on_gradients(stage, version)
        observer.on_step(0, version)
        if version == 1:
            observer.on_step(1, version)
    with pytest.raises(LossError, match=r"the loss is nan at step 2 \(it was 3.2100 at step 1"):
        observer.on_step(1, 2)


def test_one_message_tells_all_ranks_the_norm_an_overflow_and_the_loss() -> None:
    squares = {0: torch.tensor(9.0, dtype=torch.float64), 2: torch.tensor(16.0)}
    agreed = StepMessage(squares, 3, World(), overflowed=True, loss=2.5).agreed()
    assert agreed.norm == 5.0 and agreed.squares == (9.0, 0.0, 16.0)
    assert agreed.overflowed and agreed.loss == 2.5


def test_norms_are_those_of_torch() -> None:
    gradients = [torch.randn(n, 7, dtype=torch.float32) for n in (1, 30, 400)]
    expected = torch.nn.utils.get_total_norm(gradients)
    assert math.sqrt(float(squared_norm(gradients))) == pytest.approx(float(expected), rel=1e-6)
    mixed = [*gradients, torch.randn(5, dtype=torch.float64)]
    whole = torch.cat([gradient.flatten().double() for gradient in mixed])
    assert float(squared_norm(mixed)) == pytest.approx(float(whole.square().sum()), rel=1e-6)
    assert float(squared_norm([])) == 0.0
