"""Embeddings and losses over a vocabulary of which each tensor rank has some words.

Each rank looks up the words that it has, and one sum over the ranks makes the embedding whole. The
logits of a `ColumnLinear` stay in parts: the cross-entropy needs of each token the sum of the
exponentials, which the ranks exchange, and the logit of one word (Shoeybi et al. 2019, section 3).
Vocabularies need not be divisible by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from .functions import applied, local, sum_over_ranks
from .ranks import TensorRanks, current_ranks, mark_split, split_of_length, uneven_range


class VocabEmbedding(nn.Embedding):
    """An `nn.Embedding(num_embeddings, embedding_dim)` whose words are divided over the ranks.

    sequence: the dimension of the positions of which each rank keeps a part of the embeddings
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(local(num_embeddings, uneven=True), embedding_dim, dtype=dtype)
        self.sequence = sequence
        self.num_embeddings = num_embeddings
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx
        mark_split(self.weight, split_of_length(0, num_embeddings, current_ranks().size))

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings of the words, `[..., embedding_dim]`, or this rank's part of them."""
        ranks = current_ranks()
        if ranks.size == 1:
            return super().forward(input)
        _verify_words(input, self.num_embeddings, "an embedding")
        place, is_own = _own(input, self.num_embeddings, ranks)
        padding = None if self.padding_idx is None else self.padding_idx - self._first(ranks)
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        rows = F.embedding(place, self.weight, padding)
        rows = rows.masked_fill(~is_own.unsqueeze(-1), 0.0)
        return sum_over_ranks(rows, sequence=self.sequence)

    def _first(self, ranks: TensorRanks) -> int:
        return uneven_range(self.num_embeddings, ranks.rank, ranks.size)[0]


def split_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which each rank has those of some of the
    `classes`; the loss is whole on all ranks. Targets are numbers of classes, and `weight` is that
    of all classes. One sum over the ranks, and none in backward."""
    ranks = current_ranks()
    if ranks.size == 1:
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    logits, labels, kept = _rows(input, target, ignore_index, classes)
    own_weight = (
        None if weight is None else weight[slice(*uneven_range(classes, ranks.rank, ranks.size))]
    )
    log_sum, logit, total = _SumsOfRows.apply(  # type: ignore[no-untyped-call]
        logits, *_own(labels, classes, ranks), own_weight, label_smoothing > 0, ranks
    )
    of_target = None if weight is None else weight[labels]
    loss = log_sum - logit if of_target is None else (log_sum - logit) * of_target
    if label_smoothing > 0:
        of_all = classes if weight is None else weight.sum()
        share = label_smoothing / classes
        loss = (1 - label_smoothing) * loss + share * (of_all * log_sum - total)
    loss = loss.masked_fill(~kept, 0.0)
    return _reduced(loss, kept, of_target, reduction, target).to(input.dtype)


def split_nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.nll_loss` of logarithms of which each rank has those of some of the
    `classes`, as `split_cross_entropy`."""
    ranks = current_ranks()
    if ranks.size == 1:
        return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    logarithms, labels, kept = _rows(input, target, ignore_index, classes)
    place, is_own = _own(labels, classes, ranks)
    own = logarithms.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~is_own, 0.0)
    of_target = None if weight is None else weight[labels]
    loss = -sum_over_ranks(own) if of_target is None else -sum_over_ranks(own) * of_target
    loss = loss.masked_fill(~kept, 0.0)
    return _reduced(loss, kept, of_target, reduction, target).to(input.dtype)


def split_log_softmax(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.nn.functional.log_softmax` along `dim`, of which each rank has a part, as it has of
    the result. One sum over the ranks in forward and one in backward."""
    ranks = current_ranks()
    if ranks.size == 1:
        return F.log_softmax(input, dim, dtype=dtype)
    return applied(_LogSoftmax, input.to(dtype or input.dtype), dim, ranks)


def _rows(
    input: Tensor, target: Tensor, ignore_index: int, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits as `[tokens, classes of this rank]`, in float32 at least; the targets of the
    tokens, 0 for those that are ignored; which are not. Raises ValueError for probabilities as
    targets, and for logits of other classes."""
    if target.is_floating_point():
        raise ValueError("the targets of a split loss are numbers of classes, not probabilities")
    dim = 1 if input.dim() > 1 else 0
    if input.shape[dim] != local(classes, uneven=True):
        raise ValueError(f"{input.shape[dim]} classes are not the part of a rank of {classes}")
    rows = input.movedim(dim, -1).reshape(-1, input.shape[dim])
    if target.numel() != len(rows):
        raise ValueError(f"{len(rows)} rows of logits have {target.numel()} targets")
    labels = target.reshape(-1)
    kept = labels != ignore_index
    labels = labels.masked_fill(~kept, 0)
    _verify_words(labels, classes, "a loss")
    return rows.to(torch.promote_types(rows.dtype, torch.float32)), labels, kept


def _own(words: Tensor, number: int, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """The places of words in the part of this rank, 0 for those of others; which it has."""
    start, stop = uneven_range(number, ranks.rank, ranks.size)
    is_own = (words >= start) & (words < stop)
    return (words - start).masked_fill(~is_own, 0), is_own


def _verify_words(words: Tensor, number: int, where: str) -> None:
    """Raises an error where torch's kernels would: otherwise no rank had such a word."""
    is_known = ((words >= 0) & (words < number)).all()
    torch._assert_async(is_known, f"an index of {where} is not among its {number} rows")


def _reduced(
    loss: Tensor, kept: Tensor, of_target: Tensor | None, reduction: str, target: Tensor
) -> Tensor:
    """The mean or sum of the losses of tokens, or those of all."""
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    share = kept if of_target is None else of_target.masked_fill(~kept, 0.0)
    return loss.sum() / share.sum()


class _SumsOfRows(Function):
    """Three figures of each row: the logarithm of the sum of its exponentials, its number at
    `place` on the rank that has it, and on request the sum of its numbers, weighted by `weight`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        place: Tensor,
        is_own: Tensor,
        weight: Tensor | None,
        with_total: bool,
        ranks: TensorRanks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = rows.new_zeros(ranks.size + 2, len(rows))
        sums[ranks.rank] = rows.logsumexp(1)
        sums[-2] = rows.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~is_own, 0.0)
        if with_total:
            sums[-1] = rows.sum(1) if weight is None else rows @ weight.to(rows.dtype)
        sums = ranks.all_reduce(sums)
        log_sum = sums[:-2].logsumexp(0)
        ctx.save_for_backward(rows, log_sum, place, is_own, weight)
        ctx.with_total = with_total
        return log_sum, sums[-2], sums[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, log_sum, place, is_own, weight = ctx.saved_tensors
        of_sum, of_number, of_total = gradients
        gradient = (rows - log_sum.unsqueeze(1)).exp_().mul_(of_sum.unsqueeze(1))
        own = of_number.masked_fill(~is_own, 0.0)
        gradient.scatter_add_(1, place.unsqueeze(1), own.unsqueeze(1))
        if ctx.with_total:
            share = of_total.unsqueeze(1)
            gradient += share if weight is None else share * weight.to(rows.dtype)
        return gradient, None, None, None, None, None


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
        sums = torch.stack(ranks.all_gather(x.logsumexp(dim)))
        result = x - sums.logsumexp(0).unsqueeze(dim)
        ctx.save_for_backward(result)
        ctx.dim, ctx.ranks = dim, ranks
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        total = ctx.ranks.all_reduce(gradients[0].sum(ctx.dim, keepdim=True))
        return gradients[0] - result.exp() * total, None, None
