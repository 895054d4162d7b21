"""The ranks that share out the layers of the same stages -> their sums, and whole tensors again.

A rank's stages compute for `TensorRanks`, whose sums go over the transport of the run. States are
gathered over gloo to the first of the ranks, which writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TransportError
from ..executor.instrumented import TENSOR_RANKS, Activities, Activity
from ..tensor_parallel.ranks import (
    ONE_RANK,
    Collectives,
    Reduction,
    Split,
    TensorRanks,
    split_of,
)
from ..transports.reductions import MissingRanks
from .process_groups import World


def tensor_ranks(
    world: World, collectives: Collectives | None, activities: Activities
) -> TensorRanks:
    """The ranks that share out the layers of this rank's stages, and what they exchange; without
    collectives, each has its own summand as the sum."""
    if world.tensor_ranks == 1:
        return ONE_RANK
    observed = None if collectives is None else _ObservedCollectives(world, collectives, activities)
    return TensorRanks(world.tensor_rank, world.tensor_ranks, observed)


_VERBS = {
    "sum": "sum",
    "max": "take the maximum of",
    "gather": "gather",
    "scatter": "sum the parts of",
    "broadcast": "exchange",
}


@dataclass(frozen=True)
class _ObservedCollectives:
    """Collectives that are recorded as activities of this rank, and whose failures name who waits
    for whom."""

    world: World
    collectives: Collectives
    activities: Activities

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """As `Collectives`."""
        with self._waiting(op, tensor):
            return self.collectives.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Collectives`."""
        with self._waiting("gather", tensor):
            return self.collectives.all_gather(tensor)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Collectives`."""
        with self._waiting("scatter", parts[0], gives=len(parts) - 1):
            return self.collectives.reduce_scatter(parts)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """As `Collectives`."""
        with self._waiting("broadcast", tensor, gives=int(self.world.tensor_rank == source)):
            return self.collectives.broadcast(tensor, source)

    def close(self) -> None:
        """As `Collectives`."""
        self.collectives.close()

    @contextmanager
    def _waiting(self, op: str, tensor: Tensor, *, gives: int = 1) -> Iterator[None]:
        ranks = self.world.grid.tensor_group_of(self.world.rank)
        others = [rank for rank in ranks if rank != self.world.rank]
        self.activities.sent[TENSOR_RANKS] += gives * tensor.nbytes
        with self.activities.during(Activity("exchange", _waits(others, op, tensor))):
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, MissingRanks):
                    others = [ranks[missing] for missing in error.ranks]
                waits = _waits(others, op, tensor)
                raise TransportError(
                    f"rank {self.world.rank} {waits}: {str(error).splitlines()[0]}",
                    "Tensor ranks run the same stages and make the same sums; see the output of "
                    "the others for the cause. --timeout-s allows more time.",
                ) from error


def _waits(others: Sequence[int], op: str, tensor: Tensor) -> str:
    peers = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    shape = "x".join(map(str, tensor.shape))
    return f"waits for {peers} to {_VERBS[op]} a tensor of {shape} over the tensor ranks"


def whole(part: Tensor, split: Split | None, world: World) -> Tensor | None:
    """The tensor of which each tensor rank has a part, on the first of them: in host memory, or the
    one that it has if that is whole (`split` is None); None on the others. Collective among them
    for a part."""
    if world.tensor_group is None or split is None:
        return part.detach() if world.tensor_rank == 0 else None
    own = part.detach().cpu()
    ranks = world.grid.tensor_group_of(world.rank)
    is_first, size = world.rank == ranks[0], len(ranks)
    shape = split.whole_shape(own.shape, size)
    shapes = [split.part_shape(shape, rank, size) for rank in range(size)]
    largest = max(map(math.prod, shapes))  # as all give as much to a gather
    given = torch.nn.functional.pad(own.reshape(-1), (0, largest - own.numel())).view(torch.uint8)
    content = [torch.empty_like(given) for _ in ranks] if is_first else None
    dist.gather(given, content, dst=ranks[0], group=world.tensor_group)
    if content is None:
        return None
    parts = [
        each.view(own.dtype)[: math.prod(of)].view(of)
        for each, of in zip(content, shapes, strict=True)
    ]
    return split.whole(parts)


def whole_state(module: nn.Module, world: World) -> dict[str, Tensor]:
    """A stage's state_dict with whole tensors, on the first of its tensor ranks; empty on the
    others. Collective among them."""
    tensors = {
        name: whole(tensor, split_of(tensor), world)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
