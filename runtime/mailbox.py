"""The tensors on their way to and from one rank's stages during a run.

Between stages of one rank a tensor is handed over; between ranks it waits for its SEND action,
and its receive is posted ahead of its RECV action by the transport's depth, in program order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from .schedule import Action
from .transports.protocol import Channel, ChannelKind, Handle, Transport

Waiting: TypeAlias = Generator[Handle, None, Tensor]
"""A tensor to come: a generator that stops at a receive which is not ready, and returns it."""

_Edge = tuple[ChannelKind, int, int]


def take(transport: Transport, handle: Handle) -> Waiting:
    """Waits for a posted receive."""
    while not handle.ready:
        yield handle
    return transport.wait(handle)


class Mailbox:
    """Gives and takes one tensor of a channel and micro-batch at a time."""

    def __init__(
        self, channels: Iterable[Channel], transport: Transport, program: Sequence[Action]
    ) -> None:
        self.transport = transport
        self._here: dict[tuple[Channel, int], Tensor] = {}
        self._posted: dict[tuple[Channel, int], Handle] = {}
        self._edges: dict[_Edge, list[Channel]] = defaultdict(list)
        self._into: dict[tuple[ChannelKind, int], list[Channel]] = defaultdict(list)
        self._out_of: dict[tuple[ChannelKind, int], list[Channel]] = defaultdict(list)
        for channel in sorted(channels, key=lambda channel: channel.source):
            self._edges[channel.kind, channel.source, channel.target].append(channel)
            self._into[channel.kind, channel.target].append(channel)
            self._out_of[channel.kind, channel.source].append(channel)
        self._to_post: dict[_Edge, deque[int]] = defaultdict(deque)
        for action in program:
            if action.kind.startswith("RECV"):
                self._to_post[_edge(action)].append(action.index)
        for edge in self._to_post:
            for _ in range(transport.depth):
                self._post_next(edge)

    def incoming(self, kind: ChannelKind, stage: int) -> list[Channel]:
        """The channels of a kind into a stage, by source."""
        return self._into[kind, stage]

    def outgoing(self, kind: ChannelKind, stage: int) -> list[Channel]:
        """The channels of a kind out of a stage."""
        return self._out_of[kind, stage]

    def put(self, channel: Channel, index: int, tensor: Tensor) -> None:
        """Leaves a tensor for the next stage, or for the SEND action to come."""
        self._here[channel, index] = tensor

    def send(self, action: Action) -> None:
        for channel in self._edges[_edge(action)]:
            self.transport.send(channel, self._here.pop((channel, action.index)), action.index)

    def post(self, action: Action) -> None:
        edge = _edge(action)
        while action.index in self._to_post[edge]:
            self._post_next(edge)

    def take(self, channel: Channel, index: int) -> Waiting:
        """The tensor of a stage's input, waited for if it comes from another rank."""
        if channel.is_local:
            return self._here.pop((channel, index))
        tensor = yield from take(self.transport, self._posted.pop((channel, index)))
        edge = channel.kind, channel.source, channel.target
        if channel is self._edges[edge][0]:
            self._post_next(edge)
        return tensor

    def assert_empty(self) -> None:
        """Nothing that was made or posted in a whole run is left over."""
        left = [*self._here, *self._posted]
        assert not left, f"{left[0][0].message(left[0][1])} was made or posted, but never used"

    def _post_next(self, edge: _Edge) -> None:
        if self._to_post[edge]:
            index = self._to_post[edge].popleft()
            for channel in self._edges[edge]:
                self._posted[channel, index] = self.transport.recv(channel, index)


def _edge(action: Action) -> _Edge:
    assert action.peer is not None
    ends = action.stage, action.peer
    source, target = ends if action.kind.startswith("SEND") else ends[::-1]
    return "activation" if action.kind.endswith("_F") else "gradient", source, target
