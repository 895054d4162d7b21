"""The tensors on their way to and from one rank's stages during a run, and their channels.

Between stages of one rank a tensor is handed over; between ranks it waits for its SEND action, and
its receive is posted ahead of its RECV action: as far as the sender may be ahead, within the
transport's depth. If stage s sends activations to r and receives gradients, and may hold f_s
micro-batches between forward and backward (`in_flight`),

    F_s <= B_s + f_s <= B_r + f_s     r gets no more activations than that,
    B_r <= F_r <= F_s                 and s no more gradients,

where F and B count a stage's forwards and backwards. A sent tensor is released when it must have
arrived: an activation with its gradient, a gradient with the activation of f_s micro-batches later.

Channels are the same on every rank. Boundary tensors travel forward between two stages, and the
gradients of those that need one back. The generator state of a micro-batch travels from each stage
that draws random numbers to the next one that does, as one more tensor of that edge. Holders of a
shared parameter exchange its gradients and, once, its checksum.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, permutations
from typing import TypeAlias

import torch
from torch import Tensor

from ..plan.plan import Boundary, Plan
from ..schedule.schedule import Action, Schedule
from ..transports.protocol import GENERATOR_STATE, Channel, ChannelKind, Handle, Transport
from .precision import BoundaryDtypes

Waiting: TypeAlias = Generator[Handle, None, Tensor]
"""A generator that yields a receive until it is ready, and returns its tensor."""

_Edge = tuple[ChannelKind, int, int]


def take(transport: Transport, handle: Handle) -> Waiting:
    """Waits for a posted receive."""
    while not handle.ready:
        yield handle
    return transport.wait(handle)


@dataclass(slots=True)
class _Receives:
    """The receives of one edge."""

    at_most: float
    """The most sends so far."""
    to_post: deque[int] = field(default_factory=deque)
    """The indices to post."""
    posted: int = 0
    received: int = 0


class Mailbox:
    """Sends and receives one tensor of a channel and micro-batch at a time.

    - `in_flight`: as in the schedule; None for a run without backwards
    - `replicas`: the number of ranks of each stage, if not one
    - `by_index`: the channels of each micro-batch, if micro-batches differ in size or ranks
    - `may`: whether a micro-batch runs, if not all do; only the last ones may be left out
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
        by_tag = {id(own): {channel.tag: channel for channel in own} for own in by_index}
        self._by_index = [by_tag[id(own)] for own in by_index]
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
            if all(index < following for index, following in pairwise(indices))
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
        if (channel, index) in self._here or channel.is_local:
            return self._here.pop((channel, index))
        tensor = yield from take(self.transport, self._posted.pop((channel, index)))
        self._count(channel, index)
        return tensor

    def early(self, channel: Channel, index: int) -> Tensor | None:
        """The tensor of a stage's input before it is taken; None if it is not known to be here."""
        where = channel, index
        if where in self._posted and self.transport.arrived(self._posted[where]):
            self._here[where] = self.transport.wait(self._posted.pop(where))
            self._count(channel, index)
        return self._here.get(where)

    def _count(self, channel: Channel, index: int) -> None:
        """Takes note of a tensor that has arrived from another rank."""
        edge = channel.kind, channel.source, channel.target
        if channel is self._edges[edge][0]:
            self._receives[edge].received += 1
            self._post_ahead(edge)
            self._let_go(channel, index)

    def completed(self, action: Action) -> None:
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
        most = min(receives.at_most, receives.received + self.transport.depth)
        while receives.to_post and receives.posted < most and self._is_run(receives.to_post[0]):
            self._post_next(edge)

    def _post_next(self, edge: _Edge) -> None:
        receives = self._receives[edge]
        index = receives.to_post.popleft()
        receives.posted += 1
        for channel in self._edges[edge]:
            self._posted[channel, index] = self.transport.recv(self._at(channel, index), index)

    def _let_go(self, arrived: Channel, index: int) -> None:
        """Releases the tensors that must have arrived, because a tensor has come back from their
        receiver."""
        back: ChannelKind = "gradient" if arrived.kind == "activation" else "activation"
        edge = back, arrived.target, arrived.source
        if edge not in self._in_order or self._in_flight is None:
            return
        if back == "gradient":
            # A replica has every `apart`-th micro-batch: count only those of this sender.
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


Edge = tuple[int, int]
Sizes = Mapping[str, int]
"""Numbers for a plan's symbols, such as batch and sequence."""
_Spec = tuple[torch.dtype, tuple[int, ...]]

CHECKSUM_BYTES = 32


def forward_edges(plan: Plan) -> frozenset[Edge]:
    """The (source, target) stages between which tensors travel in a training forward: boundary
    tensors, and the generator state of stages that draw random numbers."""
    return frozenset((boundary.source, target) for boundary, target in _crossings(plan)) | {
        *_drawing_edges(plan)
    }


def gradient_edges(plan: Plan) -> frozenset[Edge]:
    """The (source, target) stages between which a gradient comes back, from target to source."""
    return frozenset(
        (boundary.source, target)
        for boundary, target in _crossings(plan)
        if boundary.tensor.requires_grad
    )


def channels_of_each(
    plan: Plan,
    schedule: Schedule,
    sizes: Sequence[Sizes],
    *,
    shared_specs: Mapping[str, _Spec],
    state_bytes: int,
    dtypes: BoundaryDtypes,
) -> list[tuple[Channel, ...]]:
    """The channels for each micro-batch's sizes and the ranks that have it: they differ in shape or
    ranks, and not in their tags."""
    by_sizes: dict[object, tuple[Channel, ...]] = {}
    channels, ranks = [], schedule.rank_of_stage
    for index, own in enumerate(sizes):
        if schedule.replicas:
            ranks = tuple(schedule.rank_of(stage, index) for stage in range(schedule.stages))
        if (key := (ranks, *own.items())) not in by_sizes:
            by_sizes[key] = plan_channels(
                plan,
                ranks,
                sizes=own,
                shared_specs=shared_specs,
                state_bytes=state_bytes,
                dtypes=dtypes,
            )
        channels.append(by_sizes[key])
    return channels


def plan_channels(
    plan: Plan,
    rank_of_stage: Sequence[int],
    *,
    sizes: Sizes,
    shared_specs: Mapping[str, _Spec],
    state_bytes: int,
    dtypes: BoundaryDtypes,
) -> tuple[Channel, ...]:
    """All channels of a plan at the given sizes. A tag stays the same when boundary tensors need no
    gradient any more.

    `shared_specs` gives dtype and shape of the shared parameters that this rank holds, by their
    first name. `dtypes` says what boundary tensors are.
    """
    channels: list[Channel] = []
    tags = count()

    def add(kind: ChannelKind, name: str, source: int, target: int, spec: _Spec) -> None:
        ranks = rank_of_stage[source], rank_of_stage[target]
        channels.append(Channel(kind, name, source, target, *ranks, next(tags), *spec))

    for boundary, target in _crossings(plan):
        tensor = boundary.tensor
        is_local = rank_of_stage[boundary.source] == rank_of_stage[target]
        dtype = dtypes.at_stages(tensor) if is_local else dtypes.between_ranks(tensor)
        spec = dtype, tensor.resolve(sizes)
        add("activation", tensor.name, boundary.source, target, spec)
        if tensor.requires_grad:
            add("gradient", tensor.name, target, boundary.source, spec)
        else:
            next(tags)
    for source, target in _drawing_edges(plan):
        add("activation", GENERATOR_STATE, source, target, (torch.uint8, (state_bytes,)))
    for shared in plan.shared:
        name = shared.names[0]
        # A rank that does not hold the parameter has no use for its shape, but counts its tags.
        spec = shared_specs.get(name, (torch.float32, ()))
        for source, target in permutations(shared.stages, 2):
            add("shared gradient", name, source, target, spec)
            add("checksum", name, source, target, (torch.uint8, (CHECKSUM_BYTES,)))
    return tuple(channels)


def _crossings(plan: Plan) -> Iterator[tuple[Boundary, int]]:
    for boundary in plan.boundaries:
        for target in boundary.targets:
            yield boundary, target


def _drawing_edges(plan: Plan) -> Iterator[Edge]:
    return pairwise(stage.index for stage in plan.stages if stage.draws_random)
