"""The tensor ranks of a stage, and the parts of a tensor that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..errors import PlanError

Groups = int | tuple[int, ...]
"""The blocks of a dimension that are divided each: how many equal ones, or the lengths of all."""


def share(length: int, size: int, groups: Groups = 1) -> int:
    """The share of each of `size` ranks of a length of blocks. Raises PlanError if the ranks cannot
    divide them, or the blocks make another length."""
    if isinstance(groups, tuple):
        if sum(groups) != length:
            raise PlanError(
                f"blocks of {_listed(groups)} make {sum(groups)}, not {length}.",
                f"Give groups that make {length}.",
            )
        return sum(share(block, size) for block in groups)
    if length % (groups * size):
        raise PlanError(
            f"{length}{in_blocks(groups)} cannot be divided over {size} tensor ranks.",
            f"Use --tensor-parallel with a divisor of {length // groups}.",
        )
    return length // size


def in_blocks(groups: Groups) -> str:
    """The blocks of a dimension in words, after its length; nothing for a single one."""
    if groups == 1:
        return ""
    if isinstance(groups, int):
        return f" in {groups} equal blocks"
    return f" in blocks of {_listed(groups)}"


def _listed(lengths: Sequence[int]) -> str:
    return f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"


def uneven_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """The range of one of `size` ranks, as (first, last + 1), of a length that they need not divide
    equally: the first ranks have one more."""
    least, more = divmod(length, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is divided: along `dim`, in which blocks stand one after the other and are
    divided each (a fused projection of queries, keys and values has three).

    groups: the number of equal blocks, or their lengths
    length: the whole length, where the parts may be unequal: the first ranks have one more

    >>> import torch
    >>> Split(0, groups=2).part(torch.arange(8), rank=1, size=2)
    tensor([2, 3, 6, 7])
    >>> Split(0, groups=(4, 2, 2)).part(torch.arange(8), rank=1, size=2)
    tensor([2, 3, 5, 7])
    >>> Split(0, length=5).part(torch.arange(5), rank=1, size=2)
    tensor([3, 4])
    """

    dim: int
    groups: Groups = 1
    length: int | None = None

    def fits(self, length: int, size: int) -> bool:
        """True if a dimension of that length can be divided over `size` ranks."""
        if self.length is not None:
            return length == self.length >= size
        if isinstance(self.groups, tuple):
            return length == sum(self.groups) and all(n % size == 0 for n in self.groups)
        return length % (self.groups * size) == 0

    def ranges(self, length: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The ranges of the dimension that one rank holds, as (first, last + 1). Raises PlanError
        if the ranks cannot divide it."""
        if self.length is not None:
            return [uneven_range(length, rank, size)]
        share(length, size, self.groups)
        blocks = self._blocks(length)
        starts = [
            end - block + rank * (block // size)
            for end, block in zip(accumulate(blocks), blocks, strict=True)
        ]
        return [(start, start + block // size) for start, block in zip(starts, blocks, strict=True)]

    def _blocks(self, length: int) -> tuple[int, ...]:
        if isinstance(self.groups, tuple):
            return self.groups
        return (length // self.groups,) * self.groups

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of one rank, a view if there is one group."""
        ranges = self.ranges(whole.shape[self.dim], rank, size)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole_shape(self, part: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of the tensor of which a rank has a part of this shape."""
        own = part[self.dim] * size if self.length is None else self.length
        return (*part[: self.dim], own, *part[self.dim + 1 :])

    def part_shape(self, whole: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The shape of the part that a rank has of a tensor of this shape."""
        own = sum(stop - start for start, stop in self.ranges(whole[self.dim], rank, size))
        return (*whole[: self.dim], own, *whole[self.dim + 1 :])

    def read(self, stored: Any, rank: int, size: int) -> Tensor:
        """The part of one rank of a tensor in a file (a slice of `safetensors`), of which no more
        is read."""
        ranges = self.ranges(stored.get_shape()[self.dim], rank, size)
        before = (slice(None),) * self.dim
        parts = [stored[(*before, slice(start, stop))] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor whose parts the ranks hold."""
        if self.groups == 1:
            return torch.cat(list(parts), self.dim)
        length = sum(part.shape[self.dim] for part in parts)
        own = [block // len(parts) for block in self._blocks(length)]
        blocks = [torch.split(part, own, self.dim) for part in parts]
        return torch.cat(
            [block for group in zip(*blocks, strict=True) for block in group], self.dim
        )


def split_of_length(dim: int, length: int, size: int, groups: Groups = 1) -> Split:
    """The split of a length along `dim`: in equal parts if the ranks divide it, or if it has
    several blocks."""
    is_uneven = groups == 1 and length % size > 0
    return Split(dim, groups, length if is_uneven else None)


Reduction = Literal["sum", "max"]


class Collectives(Protocol):
    """The collectives of a stage's tensor ranks, which all make the same calls in the same
    order."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks of each element of a tensor that has the same shape on
        all of them: a new contiguous tensor."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape, by rank: new contiguous tensors."""

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over the ranks of the part that each has for this one: a new contiguous tensor.
        Each gives one part to each rank, by rank, all of the same shape."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the rank `source`; that of the others has its shape and dtype."""

    def close(self) -> None:
        """Ends the connections between the ranks."""


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share out the layers of a stage, from the view of one of them.

    rank: this rank among them
    size: the number of these ranks
    collectives: their collectives; None if each rank treats its own tensor as the result, because
        it is alone or without a network
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """As `Collectives`."""
        if self.collectives is None:
            return tensor.clone(memory_format=torch.contiguous_format)
        return self.collectives.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collectives`."""
        if self.collectives is None:
            return [tensor.clone(memory_format=torch.contiguous_format) for _ in range(self.size)]
        return self.collectives.all_gather(tensor)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Collectives`."""
        if self.collectives is None:
            return parts[self.rank].clone(memory_format=torch.contiguous_format)
        return self.collectives.reduce_scatter(parts)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As `Collectives`."""
        return tensor if self.collectives is None else self.collectives.broadcast(tensor, source)

    def close(self) -> None:
        """As `Collectives`."""
        if self.collectives is not None:
            self.collectives.close()


ONE_RANK = TensorRanks()
_current: ContextVar[TensorRanks] = ContextVar("tensor_ranks", default=ONE_RANK)


def current_ranks() -> TensorRanks:
    """The ranks for which modules are built and run now."""
    return _current.get()


@contextmanager
def using(ranks: TensorRanks) -> Iterator[None]:
    """Inside, modules are built and run for these ranks."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


_loss_alone: ContextVar[bool] = ContextVar("loss_alone", default=False)


@contextmanager
def reading_loss_alone(is_alone: bool = True) -> Iterator[None]:
    """Inside, nothing reads the results of a model but its loss: those in parts stay in parts."""
    token = _loss_alone.set(is_alone or _loss_alone.get())
    try:
        yield
    finally:
        _loss_alone.reset(token)


def reads_loss_alone() -> bool:
    """True if nothing reads the results of the model but its loss."""
    return _loss_alone.get()


def bind(stage: nn.Module, ranks: TensorRanks) -> None:
    """Makes each forward of a stage run for these ranks, which it was built for."""
    if ranks.size == 1:
        return
    tokens = []
    stage.register_forward_pre_hook(lambda *_: tokens.append(_current.set(ranks)))
    stage.register_forward_hook(lambda *_: _current.reset(tokens.pop()), always_call=True)


_SPLIT = "tensor_parallel_split"


def mark_split(tensor: Tensor, split: Split) -> None:
    """Notes on a parameter or buffer that it is one rank's part."""
    setattr(tensor, _SPLIT, split)


def split_of(tensor: Tensor) -> Split | None:
    """How a parameter or buffer is divided; None if each rank has the whole."""
    return getattr(tensor, _SPLIT, None)


def whole_shape(tensor: Tensor, size: int) -> torch.Size:
    """The shape of the tensor of which a rank has this part, or all."""
    split = split_of(tensor)
    return tensor.shape if split is None else torch.Size(split.whole_shape(tensor.shape, size))


def largest_part(tensor: Tensor, size: int) -> torch.Size:
    """The shape of the part of the first rank, which is the same on all ranks that ask."""
    split = split_of(tensor)
    if split is None:
        return tensor.shape
    return torch.Size(split.part_shape(whole_shape(tensor, size), 0, size))


def mark_splits(stage: nn.Module, splits: Mapping[str, Split]) -> None:
    """Notes on the parameters and buffers of these names that they are parts: of a stage that was
    moved or converted."""
    tensors = dict(stage.named_buffers(remove_duplicate=False))
    tensors |= dict(stage.named_parameters(remove_duplicate=False))
    for name, split in splits.items():
        mark_split(tensors[name], split)


def splits_of(stage: nn.Module) -> dict[str, Split]:
    """The names of the parameters and buffers of a stage that are divided, and how. Read it before
    the stage is moved or converted: new tensors carry no notes."""
    tensors = (
        *stage.named_parameters(remove_duplicate=False),
        *stage.named_buffers(remove_duplicate=False),
    )
    return {name: split for name, tensor in tensors if (split := split_of(tensor))}
