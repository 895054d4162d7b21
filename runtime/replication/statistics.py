"""The buffers of replicas -> those of the first one, for as long as an evaluation takes.

Weights of replicas are equal; what a model keeps of its data in buffers, such as the statistics of
batch norm, each replica has of its own micro-batches. The first one's are written at the end, so an
evaluation that replicas share reads them everywhere. Training goes on with each one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..launching.world import World


@contextmanager
def first_buffers(modules: Mapping[int, nn.Module], world: World) -> Iterator[None]:
    """Within, this rank's stages have the buffers of the first rank with the same stages.
    Collective among these."""
    buffers = [buffer for module in modules.values() for buffer in module.buffers()]
    if world.copies is None or not buffers:
        yield
        return
    content = torch.cat([_bytes(buffer) for buffer in buffers])
    own = content.clone()
    dist.broadcast(content, src=world.grid.copies_of(world.rank)[0], group=world.copies)
    _put(content, buffers)
    try:
        yield
    finally:
        _put(own, buffers)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu()


def _put(content: Tensor, buffers: list[Tensor]) -> None:
    parts = torch.split(content, [buffer.nbytes for buffer in buffers])
    with torch.no_grad():
        for buffer, part in zip(buffers, parts, strict=True):
            # A copy lies at an address that fits every dtype.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
