"""The functions between split and whole tensors, each with its dual in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import PlanError
from .ranks import (
    Groups,
    Split,
    TensorRanks,
    current_ranks,
    reads_loss_alone,
    share,
    split_of_length,
    uneven_range,
)


def local(number: int, *, uneven: bool = False) -> int:
    """The share of this rank of a size that is divided. Raises PlanError if the ranks cannot divide
    it equally and the shares may not be `uneven`."""
    ranks = current_ranks()
    if not uneven:
        return share(number, ranks.size)
    start, stop = uneven_range(number, ranks.rank, ranks.size)
    return stop - start


def parallel_input(x: Tensor, *, sequence: int | None = None) -> Tensor:
    """A whole tensor that split layers read: itself; its gradient is summed over the ranks.

    sequence: the dimension of the positions of which each rank has a part of `x`: the parts are
        gathered, and each rank gets its part of the sum of the gradients
    """
    ranks = current_ranks()
    if ranks.size == 1:
        return x
    if sequence is None:
        return applied(_ParallelInput, x, ranks)
    return applied(_ParallelParts, x, Split(sequence), ranks)


def sum_over_ranks(x: Tensor, *, sequence: int | None = None) -> Tensor:
    """The sum of the ranks' summands; each has the gradient of the sum.

    sequence: the dimension of the positions of which each rank keeps a part of the sum; the parts
        of its gradient are gathered
    """
    ranks = current_ranks()
    if ranks.size == 1:
        return x
    if sequence is None:
        return applied(_SumOverRanks, x, ranks)
    return applied(_SumInParts, x, _positions(x, sequence, ranks), ranks)


def _positions(x: Tensor, dim: int, ranks: TensorRanks) -> Split:
    """The division of the positions of a tensor. Raises PlanError if they are not divisible."""
    if x.shape[dim] % ranks.size:
        raise PlanError(
            f"{x.shape[dim]} positions cannot be divided over {ranks.size} tensor ranks.",
            f"Use sequences of a multiple of {ranks.size}, or partition without "
            "--sequence-parallel.",
        )
    return Split(dim)


def whole_of(x: Tensor, dim: int) -> Tensor:
    """The tensor of which each rank has an equal part along `dim`; each part gets its part of the
    gradient, which is the same on all ranks."""
    ranks = current_ranks()
    return x if ranks.size == 1 else applied(_WholeOf, x, Split(dim), ranks)


def on_one_rank(x: Tensor) -> Tensor:
    """A whole summand, such as a bias, of which a sum over the ranks must have one: itself on rank
    0 and zeros elsewhere; its gradient is whole on all ranks."""
    ranks = current_ranks()
    return x if ranks.size == 1 else applied(_OnOneRank, x, ranks)


def part_of(x: Tensor, dim: int, groups: Groups = 1, *, uneven: bool = False) -> Tensor:
    """This rank's part of a whole tensor; the gradient of the whole is put together again."""
    ranks = current_ranks()
    if ranks.size == 1:
        return x
    split = split_of_length(dim, x.shape[dim], ranks.size) if uneven else Split(dim, groups)
    return applied(_PartOf, x, split, ranks)


def whole_output(x: Tensor, dim: int, length: int, groups: Groups = 1) -> Tensor:
    """The whole of a result of the model that the ranks have in parts, with `length` in all along
    `dim`. Where the loss alone is read of a model (`reading_loss_alone`), the part."""
    ranks = current_ranks()
    if ranks.size == 1 or reads_loss_alone():
        return x
    return applied(_WholeOf, x, split_of_length(dim, length, ranks.size, groups), ranks)


def split_dropout(x: Tensor, p: float, training: bool, dim: int, groups: Groups = 1) -> Tensor:
    """Dropout of a split tensor: the ranks draw the mask of the whole and use their part of it, so
    the numbers are those of the unsplit model."""
    ranks = current_ranks()
    if ranks.size == 1 or not training or p == 0.0:
        return torch.nn.functional.dropout(x, p, training)
    return x * _mask_part(x, p, Split(dim, groups), ranks)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    dim: int,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's heads, which are dimension `dim`; `options` are
    its `scale` and `enable_gqa`.

    With dropout, the ranks draw the mask of all heads and use their part of it, as torch's own
    kernel for CPU does: it multiplies by the root of the scale on both sides.
    """
    ranks = current_ranks()
    if ranks.size == 1 or dropout_p == 0.0:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    scale = options.get("scale")
    if options.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(
            ~attn_mask, float("-inf")
        )
    weights = torch.softmax(scores if attn_mask is None else scores + attn_mask, -1)
    return (weights * _mask_part(weights, dropout_p, Split(dim), ranks)) @ value


def _mask_part(x: Tensor, p: float, split: Split, ranks: TensorRanks) -> Tensor:
    """This rank's part of the factors by which dropout multiplies the whole tensor."""
    shape = split.whole_shape(x.shape, ranks.size)
    # The order in which a mask is filled follows the strides.
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda place: (-strides[place], place))
    ones = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(1)
    mask = torch.nn.functional.dropout(ones, p, True)
    return split.part(mask, ranks.rank, ranks.size).clone()  # a view would keep the whole


def applied(function: type[Function], *arguments: Any) -> Tensor:
    """The result of a differentiable function."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _ParallelInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce(gradients[0]), None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _ParallelParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, ranks: TensorRanks) -> Tensor:
        ctx.split, ctx.ranks = split, ranks
        return gathered(x, split.whole_shape(x.shape, ranks.size), split, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.reduce_scatter(_parts(gradients[0], ctx.split, ctx.ranks)), None, None


class _SumInParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, ranks: TensorRanks) -> Tensor:
        ctx.split, ctx.ranks, ctx.shape = split, ranks, x.shape
        return ranks.reduce_scatter(_parts(x, split, ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.shape, ctx.split, ctx.ranks), None, None


class _OnOneRank(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return x.view_as(x) if ranks.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _PartOf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, ranks: TensorRanks) -> Tensor:
        ctx.split, ctx.ranks, ctx.shape = split, ranks, x.shape
        return split.part(x, ranks.rank, ranks.size).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.shape, ctx.split, ctx.ranks), None, None


class _WholeOf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, ranks: TensorRanks) -> Tensor:
        ctx.split, ctx.ranks = split, ranks
        return gathered(x, split.whole_shape(x.shape, ranks.size), split, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.split.part(gradients[0], ctx.ranks.rank, ctx.ranks.size), None, None


def _parts(whole: Tensor, split: Split, ranks: TensorRanks) -> list[Tensor]:
    """The parts of all ranks, by rank."""
    return [split.part(whole, rank, ranks.size) for rank in range(ranks.size)]


def gathered(part: Tensor, shape: Sequence[int], split: Split, ranks: TensorRanks) -> Tensor:
    """The tensor of this shape of which the ranks have these parts, the smaller ones filled up."""
    of_ranks = [split.part_shape(shape, rank, ranks.size)[split.dim] for rank in range(ranks.size)]
    filled = list(part.shape)
    filled[split.dim] = max(of_ranks) - part.shape[split.dim]
    if filled[split.dim]:
        part = torch.cat([part, part.new_zeros(filled)], split.dim)
    parts = zip(ranks.all_gather(part), of_ranks, strict=True)
    return split.whole([each.narrow(split.dim, 0, own) for each, own in parts])
