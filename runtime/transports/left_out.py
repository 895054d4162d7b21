"""`--transport none`: nothing is sent, and each receive makes a tensor locally.

A run over it takes as long as the computation alone; its losses and gradients are meaningless. A
received tensor has the shape and dtype of its channel. It has zeros, which are valid indices and
additive masks; ones for masks of booleans; or a state that generators accept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..rng import GeneratorState
from .protocol import GENERATOR_STATE, Channel, Handle

WITHOUT_NETWORK = (
    "--transport none leaves the network out: losses are meaningless, because ranks compute on "
    "tensors that they make themselves and exchange no gradients. No weights, checkpoints or "
    "evaluations are made; only times count."
)
"""The first line of such a run."""


@dataclass(frozen=True, slots=True)
class MadeHandle:
    """A receive that needs no sender."""

    channel: Channel
    index: int
    ready: bool = True


@dataclass(frozen=True)
class LeftOutTransport:
    """One rank's end of a transport that carries nothing."""

    rank: int
    device: torch.device
    depth: int = 4

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)

    def recv(self, channel: Channel, index: int) -> MadeHandle:
        return MadeHandle(channel, index)

    def arrived(self, handle: Handle) -> bool:
        return True

    def wait(self, handle: Handle) -> Tensor:
        channel = handle.channel
        if channel.name == GENERATOR_STATE:
            return _generator_state(self.device, *channel.shape)
        value = channel.dtype is torch.bool
        return torch.full(channel.shape, value, dtype=channel.dtype, device=self.device)

    def wait_sent(self, channel: Channel, index: int) -> None:
        """Does nothing, because nothing was sent."""

    def close(self) -> None:
        """Does nothing, because nothing was sent."""


def _generator_state(device: torch.device, size: int) -> Tensor:
    """The state of a micro-batch's generators in so many bytes."""
    states = (GeneratorState.seeded(device, 0, numbers).state for numbers in (False, True))
    return next(state for state in states if len(state) == size)
