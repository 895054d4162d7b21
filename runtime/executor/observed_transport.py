"""A transport that records a rank's waits and sends, and counts the bytes that it is given."""

from __future__ import annotations

import math

from torch import Tensor

from ..errors import TransportError
from ..transports.protocol import Channel, Handle, Transport
from .instrumented import Activities, Activity, StageMessage


class ObservedTransport:
    """A transport whose waits are recorded as `receive` and `taken`, and whose sends as `send`. It
    counts the bytes of the tensors that it is given.

    `first_rank` is the number of the pipeline's rank 0 among all ranks, and `every` the distance to
    the next one.
    """

    def __init__(
        self, transport: Transport, activities: Activities, *, first_rank: int = 0, every: int = 1
    ) -> None:
        self._transport = transport
        self._activities = activities
        self._first_rank, self._every = first_rank, every
        self._numbered = _Numbered(first_rank, every)
        self._messages: dict[Channel, StageMessage] = {}

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def depth(self) -> int:
        return self._transport.depth

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        message = self._message(channel)
        if message.purpose:
            self._activities.sent[message.purpose] += tensor.nbytes
        with self._activities.during(Activity("send", message, index)), self._numbered:
            self._transport.send(channel, tensor, index)

    def recv(self, channel: Channel, index: int) -> Handle:
        with self._numbered:
            return self._transport.recv(channel, index)

    def arrived(self, handle: Handle) -> bool:
        with self._numbered:
            return self._transport.arrived(handle)

    def wait(self, handle: Handle) -> Tensor:
        message = self._message(handle.channel)
        receiving = self._activities.during(Activity("receive", message, handle.index))
        with receiving, self._numbered:
            return self._transport.wait(handle)

    def wait_sent(self, channel: Channel, index: int) -> None:
        waiting = self._activities.during(Activity("taken", self._message(channel), index))
        with waiting, self._numbered:
            self._transport.wait_sent(channel, index)

    def close(self) -> None:
        with self._activities.during(Activity("meet", "all messages are taken")):
            self._transport.close()

    def _message(self, channel: Channel) -> StageMessage:
        if channel not in self._messages:
            self._messages[channel] = StageMessage(
                channel.kind,
                channel.name,
                channel.source,
                channel.target,
                self._first_rank + self._every * channel.source_rank,
                self._first_rank + self._every * channel.target_rank,
                math.prod(channel.shape) * channel.dtype.itemsize,
            )
        return self._messages[channel]


class _Numbered:
    """Inside, errors of the transport say from which rank and in which steps ranks are counted, if
    not one by one from 0."""

    __slots__ = ("_counted",)

    def __init__(self, first_rank: int, every: int) -> None:
        self._counted = ""
        if first_rank or every > 1:
            steps = f" in steps of {every}" if every > 1 else ""
            self._counted = f" (ranks of one replica, counted from rank {first_rank}{steps})"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, TransportError):
            error.what += self._counted
