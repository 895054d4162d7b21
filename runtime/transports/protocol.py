"""What a transport is: five verbs over named channels of static shape.

A channel carries one tensor a micro-batch (or step) from one stage to another. A message is found
by its channel and index, so ranks may send and receive in different orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..errors import TransportError

ChannelKind = Literal["activation", "gradient", "shared gradient", "checksum"]

DIRECTIONS: dict[ChannelKind, str] = {
    "activation": "activations",
    "gradient": "gradients",
    "shared gradient": "control",
    "checksum": "control",
}
"""Kind of channel -> the traffic it belongs to; each kind of traffic has its own process group."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One tensor that goes from stage `source` to stage `target`, again and again.

    `tag` is the same number on both ranks and belongs to no other channel.
    """

    kind: ChannelKind
    name: str
    source: int
    target: int
    source_rank: int
    target_rank: int
    tag: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def message(self, index: int) -> str:
        """`the activation "hidden" of micro-batch 5`."""
        unit = "micro-batch" if self.kind in ("activation", "gradient") else "step"
        return f'the {self.kind} "{self.name}" of {unit} {index}'

    def waiting(self, index: int) -> str:
        """`rank 2 waits for the activation "hidden" of micro-batch 5 from rank 1`."""
        return (
            f"rank {self.target_rank} waits for {self.message(index)} from rank {self.source_rank}"
        )

    def sending(self, index: int) -> str:
        """`rank 1 waits for rank 2 to take the activation "hidden" of micro-batch 5`."""
        ends = f"rank {self.source_rank} waits for rank {self.target_rank}"
        return f"{ends} to take {self.message(index)}"

    def check(self, tensor: Tensor, index: int) -> None:
        """Raises TransportError when a tensor is not what the channel carries."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise TransportError(
                f"Stage {self.source} made {self.message(index)} as "
                f"{_describe(tensor.dtype, tuple(tensor.shape))}, but the plan has "
                f"{_describe(self.dtype, self.shape)}.",
                "Every micro-batch has the sizes of the run; drop or fill up a smaller last one.",
            )


class Handle(Protocol):
    """A receive that was posted."""

    @property
    def channel(self) -> Channel: ...

    @property
    def index(self) -> int: ...

    @property
    def ready(self) -> bool:
        """Whether `wait` may be called; False only where waiting would block for ever."""


class Transport(Protocol):
    """How tensors get from one rank to another."""

    @property
    def rank(self) -> int: ...

    @property
    def depth(self) -> int:
        """Receives to post ahead on a channel, and sends that may be under way on it."""

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        """Sends message `index`; the tensor must not be written to until it has arrived.

        Raises TransportError when the tensor is not what the channel carries.
        """

    def recv(self, channel: Channel, index: int) -> Handle:
        """Posts the receive of message `index`, and returns at once."""

    def wait(self, handle: Handle) -> Tensor:
        """The tensor, which is the caller's own to keep or to write to.

        Raises TransportError when it does not come in time or its sender is gone.
        """

    def wait_sent(self, channel: Channel, index: int) -> None:
        """Waits until what was sent on the channel has arrived, up to message `index`; those
        tensors are the caller's again. Raises TransportError as `wait` does."""

    def close(self) -> None:
        """Waits until everything sent has arrived."""


def timed_out(what: str, peer: int, timeout_s: float) -> TransportError:
    """`what` is a channel's `waiting` or `sending`."""
    return TransportError(
        f"{what} ({timeout_s:g} s).",
        f"See what rank {peer} does, or allow more time with --timeout-s.",
    )


def peer_is_gone(what: str, peer: int, detail: str = "") -> TransportError:
    """`what` is a channel's `waiting` or `sending`."""
    return TransportError(
        f"{what}, but rank {peer} is gone{detail}",
        f"The output of rank {peer} says why it ended.",
    )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
