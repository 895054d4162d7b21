"""The tensors on their way to and from one rank's stages during a run.

Between stages of one rank a tensor is handed over; between ranks it waits for its SEND action,
and its receive is posted ahead of its RECV action: as far as the sender may be ahead, within the
transport's depth. Where stage s sends activations to r and gets gradients back, and may hold f_s
micro-batches between forward and backward (`in_flight`),

    F_s <= B_s + f_s <= B_r + f_s     r gets no more activations than that,
    B_r <= F_r <= F_s                 and s no more gradients,

with F and B for how many forwards and backwards a stage has made. What was sent is let go when it
must have arrived: an activation when its gradient is there, a gradient with the activation of f_s
micro-batches later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


@dataclass(slots=True)
class _Receives:
    """Of one edge: the indices to post, and the numbers posted, taken, and sent at most by now."""

    at_most: float
    to_post: deque[int] = field(default_factory=deque)
    posted: int = 0
    taken: int = 0


class Mailbox:
    """Gives and takes one tensor of a channel and micro-batch at a time.

    `in_flight` is the schedule's, None for a run without backwards; `replicas` are how many ranks
    each stage is on, if not one. `by_index` are the channels of each micro-batch, by tag, where
    micro-batches differ in size or ranks. `may` says whether a micro-batch is to be run, if not all
    are: the last ones may be left out.
    """

    def __init__(
        self,
        channels: Iterable[Channel],
        transport: Transport,
        program: Sequence[Action],
        *,
        in_flight: Sequence[int] | None = None,
        replicas: Sequence[int] = (),
        by_index: Sequence[Sequence[Channel]] = (),
        may: Callable[[int], bool] | None = None,
    ) -> None:
        self.transport = transport
        self._in_flight = in_flight
        self._replicas = replicas
        self._by_index = by_index
        self._may = may
        self._here: dict[tuple[Channel, int], Tensor] = {}
        self._posted: dict[tuple[Channel, int], Handle] = {}
        self._edges: dict[_Edge, list[Channel]] = defaultdict(list)
        self._into: dict[tuple[ChannelKind, int], list[Channel]] = defaultdict(list)
        self._out_of: dict[tuple[ChannelKind, int], list[Channel]] = defaultdict(list)
        for channel in sorted(channels, key=lambda channel: channel.source):
            self._edges[channel.kind, channel.source, channel.target].append(channel)
            self._into[channel.kind, channel.target].append(channel)
            self._out_of[channel.kind, channel.source].append(channel)
        self._receives: dict[_Edge, _Receives] = {}
        self._sends: dict[_Edge, list[int]] = defaultdict(list)
        for action in program:
            if action.kind.startswith("SEND"):
                self._sends[_edge(action)].append(action.index)
            elif action.kind.startswith("RECV"):
                edge = _edge(action)
                if edge not in self._receives:
                    self._receives[edge] = _Receives(self._at_most_at_first(edge))
                self._receives[edge].to_post.append(action.index)
        self._sent = {edge: frozenset(indices) for edge, indices in self._sends.items()}
        self._in_order = {
            edge
            for edge, indices in self._sends.items()
            if all(one < next_one for one, next_one in pairwise(indices))
        }
        self._receives_of: dict[tuple[ChannelKind, int], list[_Edge]] = defaultdict(list)
        for edge in self._receives:
            self._receives_of[edge[0], edge[2]].append(edge)
            self._post_ahead(edge)

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
            tensor = self._here.pop((channel, action.index))
            self.transport.send(self._at(channel, action.index), tensor, action.index)

    def post(self, action: Action) -> None:
        edge = _edge(action)
        while action.index in self._receives[edge].to_post:
            self._post_next(edge)

    def take(self, channel: Channel, index: int) -> Waiting:
        """The tensor of a stage's input, waited for if it comes from another rank."""
        if channel.is_local:
            return self._here.pop((channel, index))
        tensor = yield from take(self.transport, self._posted.pop((channel, index)))
        edge = channel.kind, channel.source, channel.target
        if channel is self._edges[edge][0]:
            self._receives[edge].taken += 1
            self._post_ahead(edge)
            self._let_go(channel, index)
        return tensor

    def made(self, action: Action) -> None:
        """An F or B is over, so that more may have been sent to its stage."""
        kind: ChannelKind = "gradient" if action.kind == "F" else "activation"
        for edge in self._receives_of[kind, action.stage]:
            self._receives[edge].at_most += 1
            self._post_ahead(edge)

    def finish(self) -> None:
        """Waits until all that was sent has arrived; nothing that was made or posted in a whole
        run may be left over."""
        left = [*self._here, *self._posted]
        assert not left, f"{left[0][0].message(left[0][1])} was made or posted, but never used"
        for edge, planned in self._sends.items():
            indices = [index for index in planned if self._is_run(index)]
            for channel in self._edges[edge]:
                last = {self._at(channel, index): index for index in sorted(indices)}
                for at_its_size, index in last.items():
                    self.transport.wait_sent(at_its_size, index)

    def _at_most_at_first(self, edge: _Edge) -> float:
        kind, source, target = edge
        if kind == "gradient":
            return 0
        if self._in_flight is None or ("gradient", target, source) not in self._edges:
            return float("inf")
        return self._in_flight[source]

    def _post_ahead(self, edge: _Edge) -> None:
        receives = self._receives[edge]
        most = min(receives.at_most, receives.taken + self.transport.depth)
        while receives.to_post and receives.posted < most and self._is_run(receives.to_post[0]):
            self._post_next(edge)

    def _post_next(self, edge: _Edge) -> None:
        receives = self._receives[edge]
        index = receives.to_post.popleft()
        receives.posted += 1
        for channel in self._edges[edge]:
            self._posted[channel, index] = self.transport.recv(self._at(channel, index), index)

    def _let_go(self, arrived: Channel, index: int) -> None:
        """Of what this stage sent to where a tensor has come from, that which must be there."""
        back: ChannelKind = "gradient" if arrived.kind == "activation" else "activation"
        edge = back, arrived.target, arrived.source
        if edge not in self._in_order or self._in_flight is None:
            return
        if back == "gradient":
            # Replicas have every so many-th: of those of this sender, the last that came from here.
            apart = self._replicas[arrived.source] if self._replicas else 1
            index -= self._in_flight[arrived.source] * apart
            while index >= 0 and index not in self._sent[edge]:
                index -= apart
        for channel in self._edges[edge] if index >= 0 else ():
            self.transport.wait_sent(self._at(channel, index), index)

    def _is_run(self, index: int) -> bool:
        return self._may is None or self._may(index)

    def _at(self, channel: Channel, index: int) -> Channel:
        """The channel as it is for one micro-batch's sizes, between the ranks that have it."""
        return self._by_index[index][channel.tag] if self._by_index else channel


def _edge(action: Action) -> _Edge:
    assert action.peer is not None
    ends = action.stage, action.peer
    source, target = ends if action.kind.startswith("SEND") else ends[::-1]
    return "activation" if action.kind.endswith("_F") else "gradient", source, target
