"""A transport -> one whose messages are of a smaller dtype than the tensors at both ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .protocol import Channel, Handle, Transport


class CastingTransport:
    """Casts the tensors named in `cast`, which has their dtype at the stages, and their gradients
    to the dtype of their channel, and back where they arrive."""

    def __init__(self, transport: Transport, cast: Mapping[str, torch.dtype]) -> None:
        self._transport = transport
        self._cast = cast

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def depth(self) -> int:
        return self._transport.depth

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        if self._at_stages(channel) is tensor.dtype:
            tensor = tensor.to(channel.dtype)
        self._transport.send(channel, tensor, index)

    def recv(self, channel: Channel, index: int) -> Handle:
        return self._transport.recv(channel, index)

    def wait(self, handle: Handle) -> Tensor:
        tensor = self._transport.wait(handle)
        return tensor.to(self._at_stages(handle.channel) or tensor.dtype)

    def wait_sent(self, channel: Channel, index: int) -> None:
        self._transport.wait_sent(channel, index)

    def close(self) -> None:
        self._transport.close()

    def _at_stages(self, channel: Channel) -> torch.dtype | None:
        is_boundary = channel.kind in ("activation", "gradient")
        return self._cast.get(channel.name) if is_boundary else None
