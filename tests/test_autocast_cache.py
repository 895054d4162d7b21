"""Autocast's own cache: a weight is cast once per step, a boundary not once for all readers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncpipe.runtime.executor.precision import AS_PLANNED, Precision
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.tests.support.models.hand_plans import HandModel, HandStage, hand_model
from asyncpipe.tests.test_mixed_precision import (
    STEPS,
    Found,
    assert_same,
    pipelined,
    plain,
)


class Widen(nn.Module):
    """A float32 boundary, of which many will make their own cast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Readers(nn.Module):
    """Three layers that read one boundary, and one weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        mixed = self.one(h) * self.two(h) + self.three(self.three(h))
        return (mixed.float() - y).square().mean()


def readers() -> HandModel:
    def inputs(i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        return {name: torch.randn(8, 16, generator=generator) for name in "xy"}

    def doubled(i: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in inputs(i).items()}

    stages = [HandStage(Widen, ("x",), ("h",)), HandStage(Readers, ("h", "y"), ("loss",))]
    model = hand_model(stages, doubled)
    return replace(model, make_inputs=inputs)


class CountCasts(TorchDispatchMode):
    """How often something of the shape of a weight is cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and args[0].shape == (16, 16)
        self.casts += is_cast and (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("is_kept", "casts"), [(True, 3 * STEPS), (False, 3 * 4 * STEPS)])
def test_a_weight_is_cast_once_a_step(
    is_kept: bool, casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_kept:
        monkeypatch.setattr(Precision, "casts_kept", lambda self: nullcontext())
    model = readers()
    dtypes = replace(AS_PLANNED, by_name={"h": torch.float32, "loss": torch.float32})
    modules = [module.float() for module in model.build()]
    with CountCasts() as counted:
        pipelined(
            model.plan,
            modules,
            model.make_inputs,
            precision=Precision(torch.bfloat16),
            dtypes=dtypes,
        )
    assert counted.casts == casts


class CachedArguments(Precision):
    """The fault: boundary tensors are given as the leaves that they are."""

    def argument(self, tensor: Tensor) -> Tensor:
        return tensor


def run_readers(precision: Precision) -> tuple[Found, Found, Plan]:
    model = readers()
    modules = [module.float() for module in model.build()]
    chained = nn.ModuleList(modules)

    def loss(i: int) -> Tensor:
        value: Tensor = model.forward(modules, model.make_inputs(i))["loss"]
        return value

    expected = plain(chained, loss, torch.bfloat16)
    named = {(step, name.split(".", 1)[1]): g for (step, name), g in expected[1].items()}
    dtypes = replace(AS_PLANNED, by_name={"h": torch.float32, "loss": torch.float32})
    fresh = [module.float() for module in model.build()]
    actual = pipelined(model.plan, fresh, model.make_inputs, precision=precision, dtypes=dtypes)
    return (expected[0], named), actual, model.plan


def test_readers_of_one_boundary_add_their_gradients_in_its_own_dtype() -> None:
    expected, actual, plan = run_readers(Precision(torch.bfloat16))
    assert_same(plan, expected, actual)


def test_a_boundary_cast_once_for_all_readers_would_be_seen() -> None:
    expected, actual, plan = run_readers(CachedArguments(torch.bfloat16))
    with pytest.raises(AssertionError, match="the loss of|scale at step"):
        assert_same(plan, expected, actual)
