"""The interface of a transport, and the reference transport for ranks in one process.

A channel of static shape carries one tensor a micro-batch (or step) from one stage to another. A
message is identified by its channel and index, so ranks may send and receive in different orders.
`Sends` keeps the sends in transit; `CastingTransport` sends tensors in a smaller dtype than they
have at both ends.

`LocalHub` connects ranks that live in one process and thread; tests use it too. A message is copied
once, as between processes. The ranks' pipelines are generators that yield until a tensor arrives;
`run_together` runs them round-robin, and detects at once when no rank can continue.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import TransportError

ChannelKind = Literal["activation", "gradient", "shared gradient", "checksum", "message"]

DIRECTIONS: dict[ChannelKind, str] = {
    "activation": "activations",
    "gradient": "gradients",
    "shared gradient": "control",
    "checksum": "control",
    "message": "control",
}
"""Kind of channel -> the traffic it belongs to; each kind of traffic has its own process group."""

GENERATOR_STATE = "generator state"
"""Name of the channel that carries a micro-batch's generator state."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The channel of one tensor that travels repeatedly from stage `source` to stage `target`.

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
        """Raises TransportError if a tensor does not have the channel's shape and dtype."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise TransportError(
                f"stage {self.source} made {self.message(index)} as "
                f"{_describe(tensor.dtype, tuple(tensor.shape))}, but the plan has "
                f"{_describe(self.dtype, self.shape)}.",
                _OTHER_SIZES if tensor.shape != self.shape else _OTHER_DTYPE,
            )


_OTHER_SIZES = "Every micro-batch has the sizes of the run; drop or fill up a smaller last one."
_OTHER_DTYPE = "Leave out --dtype: parameters then have the dtypes that were partitioned."


class Handle(Protocol):
    """A receive that was posted."""

    @property
    def channel(self) -> Channel: ...

    @property
    def index(self) -> int: ...

    @property
    def ready(self) -> bool:
        """True if `wait` may be called; False only if waiting would block forever."""


class Transport(Protocol):
    """Moves tensors from one rank to another."""

    @property
    def rank(self) -> int: ...

    @property
    def depth(self) -> int:
        """The number of receives to post ahead on a channel, and of sends that may be in transit on
        it."""

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        """Sends message `index`; the tensor must not be written to until it has arrived.

        Raises TransportError if the tensor does not fit the channel.
        """

    def recv(self, channel: Channel, index: int) -> Handle:
        """Posts the receive of message `index`, and returns at once."""

    def arrived(self, handle: Handle) -> bool:
        """True if the message is known to be here, so that `wait` returns at once."""

    def wait(self, handle: Handle) -> Tensor:
        """The tensor, which the caller may keep or write to.

        Raises TransportError after the timeout, or if its sender is gone.
        """

    def wait_sent(self, channel: Channel, index: int) -> None:
        """Waits until what was sent on the channel has arrived, up to message `index`; those
        tensors are the caller's again. Raises TransportError as `wait` does."""

    def close(self) -> None:
        """Waits until everything sent has arrived."""


def timed_out(wait: str, peer: int, timeout_s: float) -> TransportError:
    """`wait` is a channel's `waiting` or `sending`."""
    return TransportError(
        f"{wait} ({timeout_s:g} s).",
        f"See what rank {peer} does, or allow more time with --timeout-s.",
    )


def peer_is_gone(wait: str, peer: int, detail: str = "") -> TransportError:
    """`wait` is a channel's `waiting` or `sending`."""
    return TransportError(
        f"{wait}, but rank {peer} is gone{detail}",
        f"The output of rank {peer} says why it ended.",
    )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


Sent = TypeVar("Sent")


class Sends(Generic[Sent]):
    """Sends that must live until they have arrived; `finish(channel, index, sent)` waits for
    one."""

    def __init__(self, finish: Callable[[Channel, int, Sent], None]) -> None:
        self._finish = finish
        self._under_way: dict[Channel, deque[tuple[int, Sent]]] = defaultdict(deque)

    def add(self, channel: Channel, index: int, sent: Sent) -> None:
        self._under_way[channel].append((index, sent))

    def make_room(self, channel: Channel, depth: int) -> None:
        """Waits for the oldest sends while `depth` of a channel are in transit."""
        while len(self._under_way[channel]) >= depth:
            self._finish_oldest(channel)

    def finish_until(self, channel: Channel, index: int) -> None:
        """Waits for the messages of a channel up to `index`."""
        under_way = self._under_way[channel]
        while under_way and under_way[0][0] <= index:
            self._finish_oldest(channel)

    def forget(self, channel: Channel, is_over: Callable[[Sent], bool]) -> None:
        """Lets go of the oldest of a channel that are over."""
        under_way = self._under_way[channel]
        while under_way and is_over(under_way[0][1]):
            under_way.popleft()

    def finish_all(self) -> None:
        for channel, under_way in self._under_way.items():
            while under_way:
                self._finish_oldest(channel)

    def _finish_oldest(self, channel: Channel) -> None:
        self._finish(channel, *self._under_way[channel].popleft())


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

    def arrived(self, handle: Handle) -> bool:
        return self._transport.arrived(handle)

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


Result = TypeVar("Result")
Messages = dict[tuple[Channel, int], Tensor]


class LocalHub:
    """The ranks of one process.

    world_size: their number.
    depth: the number of receives to post ahead on a channel.
    messages: the tensors that no rank has taken yet.
    """

    def __init__(self, world_size: int = 1, *, depth: int = 4) -> None:
        self.world_size = world_size
        self.depth = depth
        self.messages: Messages = {}

    def transport(self, rank: int) -> LocalTransport:
        """The transport of one rank."""
        return LocalTransport(self, rank)


@dataclass(frozen=True)
class LocalHandle:
    channel: Channel
    index: int
    messages: Messages

    @property
    def ready(self) -> bool:
        return (self.channel, self.index) in self.messages


@dataclass(frozen=True)
class LocalTransport:
    """One rank's end of a hub."""

    hub: LocalHub
    rank: int

    @property
    def depth(self) -> int:
        return self.hub.depth

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        if (channel, index) in self.hub.messages:
            raise TransportError(f"rank {self.rank} sent {channel.message(index)} twice.")
        # As it comes out of another process: kernels may round differently for other strides.
        self.hub.messages[channel, index] = tensor.detach().clone(
            memory_format=torch.contiguous_format
        )

    def recv(self, channel: Channel, index: int) -> LocalHandle:
        return LocalHandle(channel, index, self.hub.messages)

    def arrived(self, handle: Handle) -> bool:
        return handle.ready

    def wait(self, handle: Handle) -> Tensor:
        if not handle.ready:
            raise TransportError(
                f"{_waiting(handle)}, which was not sent.",
                "Ranks of one process take turns in run_together.",
            )
        return self.hub.messages.pop((handle.channel, handle.index))

    def wait_sent(self, channel: Channel, index: int) -> None:
        """Does nothing, because messages are copies."""

    def close(self) -> None:
        left = [key for key in self.hub.messages if key[0].source_rank == self.rank]
        if left:
            channel, index = left[0]
            raise TransportError(
                f"rank {channel.target_rank} never took {channel.message(index)} "
                f"from rank {self.rank}."
            )


class _Turn(Generic[Result]):
    """One rank's generator, the receive that it waits for, and its result."""

    def __init__(self, steps: Generator[Handle | None, None, Result]) -> None:
        self.steps = steps
        self.waits_for: Handle | None = None
        self.result: list[Result] = []

    def go_on(self) -> None:
        try:
            self.waits_for = next(self.steps)
        except StopIteration as end:
            self.result.append(end.value)


def run_together(ranks: Sequence[Generator[Handle | None, None, Result]]) -> list[Result]:
    """Runs the ranks' generators round-robin until all are done; returns their results in order.

    Raises TransportError if every rank waits for another.
    """
    turns = [_Turn(steps) for steps in ranks]
    while active := [turn for turn in turns if not turn.result]:
        can_go_on = [turn for turn in active if turn.waits_for is None or turn.waits_for.ready]
        if not can_go_on:
            waits = "; ".join(_waiting(turn.waits_for) for turn in active if turn.waits_for)
            raise TransportError(f"no rank can continue: {waits}.")
        for turn in can_go_on:
            turn.go_on()
    return [result for turn in turns for result in turn.result]


def _waiting(handle: Handle) -> str:
    return handle.channel.waiting(handle.index)
