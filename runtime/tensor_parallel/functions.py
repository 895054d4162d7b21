"""The functions between split and whole tensors, each with its dual in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import PlanError
from .ranks import Split, TensorRanks, current_ranks


def local(number: int) -> int:
    """The share of each rank of a size that is divided. Raises PlanError if it cannot be."""
    size = current_ranks().size
    if number % size:
        raise PlanError(
            f"{number} cannot be divided over {size} tensor ranks.",
            f"Use --tensor-parallel with a divisor of {number}.",
        )
    return number // size


def parallel_input(x: Tensor) -> Tensor:
    """A whole tensor that split layers read: itself; its gradient is summed over the ranks."""
    ranks = current_ranks()
    result: Tensor = x if ranks.size == 1 else _ParallelInput.apply(x, ranks)
    return result


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of the ranks' summands; each has the gradient of the sum."""
    ranks = current_ranks()
    result: Tensor = x if ranks.size == 1 else _SumOverRanks.apply(x, ranks)
    return result


def on_one_rank(x: Tensor) -> Tensor:
    """A whole summand, such as a bias, of which a sum over the ranks must have one: itself on rank
    0 and zeros elsewhere; its gradient is whole on all ranks."""
    ranks = current_ranks()
    result: Tensor = x if ranks.size == 1 else _OnOneRank.apply(x, ranks)
    return result


def split_dropout(x: Tensor, p: float, training: bool, dim: int, groups: int = 1) -> Tensor:
    """Dropout of a split tensor: the ranks draw the mask of the whole and use their part of it, so
    the numbers are those of the unsplit model."""
    ranks = current_ranks()
    if ranks.size == 1 or not training or p == 0.0:
        return torch.nn.functional.dropout(x, p, training)
    split = Split(dim, groups)
    shape = [n * ranks.size if place == dim else n for place, n in enumerate(x.shape)]
    # The order in which a mask is filled follows the strides.
    order = sorted(range(x.dim()), key=lambda place: (-x.stride(place), place))
    ones = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(1)
    mask = torch.nn.functional.dropout(ones, p, training)
    return x * split.part(mask, ranks.rank, ranks.size)


class _ParallelInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.ranks), None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return _summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _OnOneRank(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return x.view_as(x) if ranks.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _summed(part: Tensor, ranks: TensorRanks) -> Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(whole)
    return whole
