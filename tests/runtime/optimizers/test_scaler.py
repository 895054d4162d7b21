"""The loss scale is that of torch.amp.GradScaler, step by step and bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.optimizers.loss_scale import INITIAL, LossScale
from asyncpipe.runtime.training.clipping import Finite, LossError
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer
from asyncpipe.tests.support.run_configs import run_config


def gradients(step: int, *, bad: float | None) -> list[Tensor]:
    """The gradients that a backward of the unscaled loss would give, with `bad` in one place."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)]
    if bad is not None:
        made[step % 2].view(-1)[step % 3] = bad
    return made


@pytest.mark.parametrize("initial", [INITIAL, 1000.0])
def test_scale_skips_and_weights_are_those_of_gradscaler(initial: float) -> None:
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = run_config(optimizer="adamw", lr=0.01, weight_decay=0.0, steps=20)
    optimizer = StageOptimizer(ours, settings)
    assert optimizer.optimizer is not None
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    scale = LossScale(initial, interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=3)
    scaler.scale(torch.ones(()))  # makes its tensors
    scales, skipped = [], 0
    for step in range(20):
        bad = {1: math.inf, 2: math.nan, 9: -math.inf}.get(step)
        skipped += bad is not None
        assert scale.value == scaler.get_scale()
        for module, factor in ((ours, scale.value), (theirs, scaler.get_scale())):
            for parameter, gradient in zip(
                module.parameters(), gradients(step, bad=bad), strict=True
            ):
                parameter.grad = gradient * factor
        scaler.unscale_(reference)  # otherwise the fused step divides by the scale
        scaler.step(reference)
        scaler.update()
        scale.unscale([parameter.grad for parameter in ours.parameters()])  # type: ignore[misc]
        overflowed = scale.overflowed()
        scale.update(overflowed=overflowed)
        if overflowed:
            optimizer.skip()
        else:
            optimizer.step()
        scales.append(scale.value)
        for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(own, expected)
    assert scale.skipped == skipped == 3
    assert min(scales) < initial < max(scales)


def test_an_overflow_elsewhere_leaves_the_step_out_here_too() -> None:
    scale = LossScale(8.0)
    scale.unscale([torch.ones(2)])
    assert not scale.overflowed()
    scale.update(overflowed=True)
    assert scale.value == 4.0 and scale.skipped == 1 and not scale.overflowed()


def test_a_scale_goes_on_from_its_state() -> None:
    whole = LossScale(8.0, interval=3)
    scales, states = [], []
    for step in range(9):
        whole.update(overflowed=step == 4)
        scales.append(whole.value)
        states.append(whole.state())
    for step, state in enumerate(states):
        resumed = LossScale(interval=3)
        resumed.load(state)
        for later in range(step + 1, 9):
            resumed.update(overflowed=later == 4)
            assert resumed.value == scales[later]
        assert resumed.state() == states[-1]


def test_skipped_steps_move_the_learning_rate_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    settings = run_config(optimizer="sgd", lr=1.0, steps=4, decay="linear")
    module = nn.Linear(1, 1)
    optimizer = StageOptimizer(module, settings)
    optimizer.skip()
    optimizer.skip()
    assert optimizer.optimizer is not None
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert not recwarn.list


def test_a_scale_below_one_ends_the_run() -> None:
    finite = Finite(run_config(precision="float16"))
    finite.check_scale(3, 1.0)
    with pytest.raises(LossError, match="overflow in float16 at step 3") as error:
        finite.check_scale(3, 0.5)
    assert error.value.cure == "--precision bfloat16"
