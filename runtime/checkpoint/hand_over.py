"""The state of all ranks after a step -> the state of ranks with other stages, in memory.

It is a checkpoint that no file has: every rank copies what it would write, and when the ranks have
their new stages, each tensor is broadcast once, by its name; a rank keeps those of its own stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.process_groups import World
from ..executor.loading import shared_names
from .contents import Rank, Wanted, state_of, weights_of

_WEIGHT = "weight "


class HandOver:
    """What one rank hands over; `unused` are as for `weights_of`."""

    def __init__(self, rank: Rank, unused: Mapping[str, Tensor]) -> None:
        weights = weights_of(rank, unused)
        self._own = state_of(rank) | {
            _WEIGHT + name: tensor for own in weights.values() for name, tensor in own.items()
        }

    @torch.no_grad()
    def take(self, rank: Rank) -> dict[str, Tensor]:
        """Gives a rank's new stages their weights and buffers; returns its other state, as
        `contents.put` takes it. Collective; only once."""
        wanted, names = Wanted(rank), shared_names(rank.plan)
        own = {
            _WEIGHT + other: (module, name)
            for module in rank.modules.values()
            for name in module.state_dict()
            for other in names.get(name, (name,))
        }
        kept = _exchanged(self._own, lambda key: key in own or wanted(key), rank.world)
        self._own = {}
        for module in rank.modules.values():
            for name, tensor in module.state_dict().items():
                keys = (_WEIGHT + other for other in names.get(name, (name,)))
                tensor.copy_(next(kept[key] for key in keys if key in kept))
        return {key: tensor for key, tensor in kept.items() if not key.startswith(_WEIGHT)}


def _exchanged(
    own: Mapping[str, Tensor], wanted: Callable[[str], bool], world: World
) -> dict[str, Tensor]:
    """The tensors of all ranks whose keys are wanted. Collective."""
    if world.control is None:
        return {key: tensor for key, tensor in own.items() if wanted(key)}
    kept: dict[str, Tensor] = {}
    for source, entries in enumerate(_entries_of_all(own, world)):
        for key, dtype, shape in entries:
            if source == world.rank:
                content = own[key].contiguous().flatten().view(torch.uint8)
            else:
                size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                content = torch.empty(size, dtype=torch.uint8)
            if content.numel():
                dist.broadcast(content, src=source, group=world.control)
            if wanted(key):
                kept[key] = content.view(getattr(torch, dtype)).view(shape)
    return kept


def _entries_of_all(
    own: Mapping[str, Tensor], world: World
) -> list[list[tuple[str, str, list[int]]]]:
    """The key, dtype and shape of each tensor of each rank."""
    entries = [
        (key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for key, tensor in own.items()
    ]
    content = json.dumps(entries).encode()
    lengths = world.gathered(len(content).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    return [json.loads(part) for part in world.gathered(content.ljust(longest))]
