"""Gradients of many stages -> one norm and one factor, the same on every rank.

Each stage contributes the sum of its squares; a tied parameter is counted by its owner alone.
Every rank gets all contributions and adds them in the order of the stages, so that the number of
ranks changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..plan import Plan


def counted_parameters(plan: Plan, index: int, stage: nn.Module) -> list[nn.Parameter]:
    """The stage's parameters without those that another stage owns."""
    borrowed = {
        name for shared in plan.shared for holder, name in shared.holders[1:] if holder == index
    }
    return [parameter for name, parameter in stage.named_parameters() if name not in borrowed]


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The sum of squares of all gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            total += torch.linalg.vector_norm(parameter.grad).double().cpu().square()
    return float(total)


def global_squared_norm(
    own: Mapping[int, float], stages: int, group: dist.ProcessGroup | None
) -> float:
    """The sum over all stages of what each rank gives for its own; every rank must call it."""
    squares = torch.zeros(stages, dtype=torch.float64)
    for stage, square in own.items():
        squares[stage] = square
    if group is not None:
        # Every place has one contributor: adding zeros is exact in any order.
        dist.all_reduce(squares, group=group)
    return sum(squares.tolist(), 0.0)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by; `limit` 0 means no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    gradients: list[Tensor] = [
        parameter.grad for parameter in parameters if parameter.grad is not None
    ]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
