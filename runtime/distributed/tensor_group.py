"""The ranks that share out the layers of the same stages -> their sums, and whole tensors again.

A rank's stages compute for `TensorRanks`, whose sums go through the group of its device. States are
gathered over gloo to the first of the ranks, which writes them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TransportError
from ..executor.instrumented import TENSOR_RANKS, Activities, Activity
from ..tensor_parallel.ranks import ONE_RANK, Split, TensorRanks, split_of
from .process_groups import World


def tensor_ranks(
    world: World, group: dist.ProcessGroup | None, activities: Activities
) -> TensorRanks:
    """The ranks that share out the layers of this rank's stages, which sum over the group; without
    one, each has its own summand as the sum."""
    if world.tensor_ranks == 1:
        return ONE_RANK
    if group is None:
        return TensorRanks(world.tensor_rank, world.tensor_ranks)
    own = [str(rank) for rank in world.grid.tensor_group_of(world.rank) if rank != world.rank]
    peers = f"rank{'s' if len(own) > 1 else ''} {', '.join(own)}"

    def all_reduce(tensor: Tensor) -> None:
        activities.sent[TENSOR_RANKS] += tensor.nbytes
        shape = "x".join(map(str, tensor.shape))
        waits = f"waits for {peers} to sum a tensor of {shape} over the tensor ranks"
        with activities.during(Activity("exchange", waits)):
            try:
                dist.all_reduce(tensor, group=group)
            except RuntimeError as error:
                raise TransportError(
                    f"rank {world.rank} {waits}: {str(error).splitlines()[0]}",
                    "Tensor ranks run the same stages and make the same sums; see the output of "
                    "the others for the cause. --timeout-s allows more time.",
                ) from error

    return TensorRanks(world.tensor_rank, world.tensor_ranks, all_reduce)


def whole(part: Tensor, split: Split | None, world: World) -> Tensor | None:
    """The tensor of which each tensor rank has a part, on the first of them: in host memory, or the
    one that it has if that is whole (`split` is None); None on the others. Collective among them
    for a part."""
    if world.tensor_group is None or split is None:
        return part.detach() if world.tensor_rank == 0 else None
    own = part.detach().cpu().contiguous()
    ranks = world.grid.tensor_group_of(world.rank)
    is_first = world.rank == ranks[0]
    parts = [torch.empty_like(own) for _ in ranks] if is_first else []
    content = [each.reshape(-1).view(torch.uint8) for each in parts]
    dist.gather(
        own.reshape(-1).view(torch.uint8),
        content if is_first else None,
        dst=ranks[0],
        group=world.tensor_group,
    )
    return split.whole(parts) if is_first else None


def whole_state(module: nn.Module, world: World) -> dict[str, Tensor]:
    """A stage's state_dict with whole tensors, on the first of its tensor ranks; empty on the
    others. Collective among them."""
    tensors = {
        name: whole(tensor, split_of(tensor), world)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
