"""Autograd functions of a user's, at the top level of a module as generated code needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScaleAndAdd(torch.autograd.Function):
    """Two results, arguments that are not tensors, gradients that may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, label: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x * weight * factor, x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scaled, added = gradients
        x, weight = ctx.saved_tensors
        total_x, total_weight = torch.zeros_like(x), torch.zeros_like(x)
        if scaled is not None:
            total_x, total_weight = scaled * weight * ctx.factor, scaled * x * ctx.factor
        if added is not None:
            total_x, total_weight = total_x + added, total_weight + added
        return total_x, total_weight.sum(0), None, None


class SineWithContext(torch.autograd.Function):
    """With `setup_context`, and a gradient that is not the derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * 2


class Passes(torch.autograd.Function):
    """No gradient for its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None
