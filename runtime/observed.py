"""A transport, a feed or an observer -> what it does is told to a rank's Activities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from .activity import Activities, Activity, Kind, Message
from .errors import TransportError
from .report import Observer
from .schedule import Action
from .transports.protocol import Channel, Handle, Transport

Made = TypeVar("Made")


def observed_feed(feed: Callable[[int], Made], activities: Activities) -> Callable[[int], Made]:
    """The feed, whose time is `data`; micro-batches are counted as in the segment."""

    def fed(micro_batch: int) -> Made:
        index = micro_batch - activities.first_micro_batch
        with activities.during(Activity("data", index=index)):
            return feed(micro_batch)

    return fed


class ActionObserver(Observer):
    """Tells of every action; what it makes of the rest is up to who derives from it."""

    def __init__(self, activities: Activities) -> None:
        self.activities = activities

    def on_begin(self, action: Action) -> None:
        self.activities.begin(Activity(_kind(action), action, action.index))

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        self.activities.end()


class ObservedTransport:
    """A transport whose waits are `receive` and `taken`, and whose sends are `send`.

    `first_rank` is the number of the pipeline's rank 0 among the ranks of all replicas.
    """

    def __init__(
        self, transport: Transport, activities: Activities, *, first_rank: int = 0
    ) -> None:
        self._transport = transport
        self._activities = activities
        self._first_rank = first_rank
        self._numbered = _Numbered(first_rank)
        self._messages: dict[Channel, Message] = {}

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def depth(self) -> int:
        return self._transport.depth

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        sending = self._activities.during(Activity("send", self._message(channel), index))
        with sending, self._numbered:
            self._transport.send(channel, tensor, index)

    def recv(self, channel: Channel, index: int) -> Handle:
        with self._numbered:
            return self._transport.recv(channel, index)

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
        with self._activities.during(Activity("meet", "what was sent is taken")):
            self._transport.close()

    def _message(self, channel: Channel) -> Message:
        if channel not in self._messages:
            self._messages[channel] = Message(
                channel.kind,
                channel.name,
                channel.source,
                channel.target,
                self._first_rank + channel.source_rank,
                self._first_rank + channel.target_rank,
                math.prod(channel.shape) * channel.dtype.itemsize,
            )
        return self._messages[channel]


class _Numbered:
    """Within, an error of the transport says where its ranks are counted from, if not from 0."""

    __slots__ = ("_first_rank",)

    def __init__(self, first_rank: int) -> None:
        self._first_rank = first_rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._first_rank and isinstance(error, TransportError):
            error.what += f" (ranks of one replica, counted from rank {self._first_rank})"


def _kind(action: Action) -> Kind:
    kind = action.kind
    assert kind in ("F", "B", "W", "S")
    return kind
