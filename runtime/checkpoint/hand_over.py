"""The state of all ranks after a step -> the state of ranks with other stages, in memory.

It is a checkpoint in memory: every rank copies the tensors that it would write. When the ranks have
their new stages, each tensor is broadcast once, by its name, together with others of its rank, and
a rank keeps those of its own stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.process_groups import World
from ..executor.loading import shared_names
from ..tensor_files import dense
from .contents import Rank, Wanted, state_of, weights_of

_WEIGHT = "weight "
_MESSAGE_BYTES = 1 << 24
"""The most bytes of a message that has several tensors."""


class HandOver:
    """The state that one rank hands over; `unused` are as for `weights_of`."""

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
        for together in _messages(entries):
            sizes = [entry.size for entry in together]
            if source == world.rank:
                tensors = [own[entry.key] for entry in together]
                content = torch.cat([dense(each).flatten().view(torch.uint8) for each in tensors])
            else:
                content = torch.empty(sum(sizes), dtype=torch.uint8)
            if content.numel():
                dist.broadcast(content, src=source, group=world.control)
            for entry, part in zip(together, torch.split(content, sizes), strict=True):
                if wanted(entry.key):  # a copy is aligned, and lets go of the others
                    dtype = getattr(torch, entry.dtype)
                    kept[entry.key] = part.clone().view(dtype).view(entry.shape)
    return kept


class _Entry(NamedTuple):
    """A tensor that is handed over."""

    key: str
    dtype: str
    shape: list[int]

    @property
    def size(self) -> int:
        """Its bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


def _messages(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """The entries in their order, as many together as a message takes."""
    together: list[_Entry] = []
    size = 0
    for entry in entries:
        if together and size + entry.size > _MESSAGE_BYTES:
            yield together
            together, size = [], 0
        together.append(entry)
        size += entry.size
    if together:
        yield together


def _entries_of_all(own: Mapping[str, Tensor], world: World) -> list[list[_Entry]]:
    entries = [
        (key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for key, tensor in own.items()
    ]
    content = json.dumps(entries).encode()
    lengths = world.gathered(len(content).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    parts = world.gathered(content.ljust(longest))
    return [[_Entry(*entry) for entry in json.loads(part)] for part in parts]
