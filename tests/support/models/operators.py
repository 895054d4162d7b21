"""Operators that Python registers with torch, in both ways, and models that call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("asyncpipe_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.factor, None


scaled.register_autograd(_backward, setup_context=_keep)

LIBRARY = torch.library.Library("asyncpipe_tests_too", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


class Calling(nn.Module):
    """Calls `torch.ops`, packets of overloads and one overload."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.aten.slice(self.first(x), 1, 0, 6, 1)
        x = torch.ops.asyncpipe_tests.scaled(scaled(x, 0.5), 3.0)
        return self.last(torch.ops.asyncpipe_tests_too.twice.default(x))
