"""The tensor ranks of a stage, and the parts of a tensor that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..errors import PlanError


def share(length: int, size: int, groups: int = 1) -> int:
    """The share of each of `size` ranks of a length of equal blocks. Raises PlanError if the ranks
    cannot divide it."""
    if length % (groups * size):
        blocks = f" in {groups} equal blocks" if groups > 1 else ""
        raise PlanError(
            f"{length}{blocks} cannot be divided over {size} tensor ranks.",
            f"Use --tensor-parallel with a divisor of {length // groups}.",
        )
    return length // size


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is divided: along `dim`, in which `groups` equal blocks stand one after the
    other and are divided each (a fused projection of queries, keys and values has three).

    >>> import torch
    >>> Split(0, groups=2).part(torch.arange(8), rank=1, size=2)
    tensor([2, 3, 6, 7])
    """

    dim: int
    groups: int = 1

    def fits(self, length: int, size: int) -> bool:
        """True if a dimension of that length can be divided over `size` ranks."""
        return length % (self.groups * size) == 0

    def ranges(self, length: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The ranges of the dimension that one rank holds, as (first, last + 1). Raises PlanError
        if the ranks cannot divide it."""
        block = length // self.groups
        part = share(length, size, self.groups) // self.groups
        starts = [group * block + rank * part for group in range(self.groups)]
        return [(start, start + part) for start in starts]

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of one rank, a view if there is one group."""
        ranges = self.ranges(whole.shape[self.dim], rank, size)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole_shape(self, part: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of the tensor of which a rank has a part of this shape."""
        return tuple(n * size if place == self.dim else n for place, n in enumerate(part))

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
        blocks = [part.chunk(self.groups, self.dim) for part in parts]
        return torch.cat(
            [block for group in zip(*blocks, strict=True) for block in group], self.dim
        )


Reduction = Literal["sum", "max"]


class Collectives(Protocol):
    """What the tensor ranks of a stage exchange: all of them make the same calls in one order."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks of each element of a tensor that has the same shape on
        all of them: a new contiguous tensor."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape, by rank: new contiguous tensors."""

    def close(self) -> None:
        """Ends the connections between the ranks."""


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share out the layers of a stage, from the view of one of them.

    rank: this rank among them
    size: how many they are
    collectives: what they exchange; None where each takes its own tensor as those of all, because
        it is alone or there is no network
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
