"""Processes of one host that talk through shared memory, woken by the kernel.

A sender copies a tensor into a slot of its own memory, which all ranks have mapped, and sends the
slot's place over a socket (`peers.py`). A receive finds its message by channel and index, in
whatever order they come; what arrives before it is asked for waits, at most `depth` messages of a
channel, then the sender does. The received tensor is the slot itself, which goes back when the
tensor is let go: autograd may keep it until its backward. So that the slots of a channel are
bounded, what arrives while `depth` of its tensors are kept is copied out. Small messages go in
the packet.

    sender                                              receiver
    take a slot, copy in, MESSAGE(place)  ------------> a receive is posted: ARRIVED
    one message less on its way   <-------------------- ARRIVED(slots that were let go)
"""

from __future__ import annotations

import math
import struct
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from .peers import PACKET_BYTES, Peers, obstacle
from .protocol import Channel, Handle, peer_is_gone, timed_out
from .slots import SharedMemory, Slots, create_memory

INLINE_BYTES = 8192
"""Messages up to this size go in the packet."""

_HEADER = struct.Struct("<BxxxIqqq")  # kind, tag, index, place, bytes
_MESSAGE, _INLINE, _ARRIVED = range(3)
_PLACE = struct.Struct("<q")
_MOST_PLACES = 1024
assert INLINE_BYTES + _HEADER.size <= PACKET_BYTES

_Key = tuple[int, int, int]
"""Where a message comes from: peer, tag and index."""


@dataclass(frozen=True, slots=True)
class _Message:
    """What arrived: its slot, or its content."""

    place: int
    size: int
    content: bytearray | None


@dataclass(eq=False)
class ShmHandle:
    channel: Channel
    index: int
    message: _Message | None = field(default=None)

    @property
    def ready(self) -> bool:
        return True


class ShmTransport:
    """One rank's end of the shared memory of a host.

    Making one is collective: all ranks of `group` (by default all ranks) do it, and all must be
    on one host; `peers.obstacle` says beforehand whether they are. `timeout_s` is the longest that
    any wait takes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        depth: int = 4,
        device: str | torch.device = "cpu",
    ) -> None:
        self.depth = depth
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        if reason := obstacle(group):
            raise TransportError(f"{reason}: they cannot share memory.", "Use --transport gloo.")
        descriptor = create_memory()
        self._peers = Peers(group, descriptor, timeout_s)
        self.rank = self._peers.rank
        self._memory = SharedMemory(descriptor)
        self._slots = Slots(self._memory.size)
        self._under_way: dict[tuple[int, int], deque[tuple[Channel, int]]] = defaultdict(deque)
        self._expected: dict[_Key, deque[ShmHandle]] = defaultdict(deque)
        self._unexpected: dict[_Key, deque[_Message]] = defaultdict(deque)
        self._kept: Counter[tuple[int, int]] = Counter()
        self._let_go: dict[int, deque[tuple[int, int]]] = defaultdict(deque)

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        peer, size = channel.target_rank, tensor.nbytes
        under_way = self._under_way[peer, channel.tag]
        if len(under_way) >= self.depth:
            self._wait(lambda: len(under_way) < self.depth, peer, channel.sending(under_way[0][1]))
        if peer in self._peers.gone:
            raise peer_is_gone(channel.sending(index), peer, ".")
        under_way.append((channel, index))
        if size <= INLINE_BYTES:
            header = _HEADER.pack(_INLINE, channel.tag, index, 0, size)
            self._peers.send(peer, header + _content(tensor))
            return
        self._progress(0.0)  # Slots that came back.
        place = self._slots.take(size)
        slot = torch.from_numpy(self._memory.bytes_at(place, size))
        slot.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._peers.send(peer, _HEADER.pack(_MESSAGE, channel.tag, index, place, size))

    def recv(self, channel: Channel, index: int) -> ShmHandle:
        handle = ShmHandle(channel, index)
        key = channel.source_rank, channel.tag, index
        if arrived := self._unexpected.get(key):
            handle.message = arrived.popleft()
            if not arrived:
                del self._unexpected[key]
            self._acknowledge(*key)
        else:
            self._expected[key].append(handle)
        return handle

    def wait(self, handle: Handle) -> Tensor:
        assert isinstance(handle, ShmHandle)
        channel = handle.channel
        if handle.message is None:
            self._wait(
                lambda: handle.message is not None,
                channel.source_rank,
                channel.waiting(handle.index),
            )
        assert handle.message is not None
        return self._tensor(channel, handle.index, handle.message)

    def wait_sent(self, channel: Channel, index: int) -> None:
        """What was sent are copies."""

    def close(self) -> None:
        for (peer, _), under_way in self._under_way.items():
            while under_way:
                channel, index = under_way[0]
                count = len(under_way)
                self._wait(
                    lambda under_way=under_way, count=count: len(under_way) < count,  # type: ignore[misc]
                    peer,
                    channel.sending(index),
                )
        self._peers.close()

    def _wait(self, done: Callable[[], bool], peer: int, what: str) -> None:
        """Takes packets in until `done`; `what` is waited for, of `peer`."""
        end_s = time.monotonic() + self._timeout_s
        while not done():
            if peer in self._peers.gone:
                raise peer_is_gone(what, peer, ".")
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise timed_out(what, peer, self._timeout_s)
            self._progress(left_s)

    def _progress(self, wait_s: float) -> None:
        for peer, packet in self._peers.receive(wait_s):
            kind, tag, index, place, size = _HEADER.unpack_from(packet)
            if kind == _ARRIVED:
                under_way = self._under_way[peer, tag]
                under_way.remove(next(sent for sent in under_way if sent[1] == index))
                for (place,) in _PLACE.iter_unpack(packet[_HEADER.size :]):
                    self._slots.give_back(place)
                continue
            content = bytearray(packet[_HEADER.size :]) if kind == _INLINE else None
            key, message = (peer, tag, index), _Message(place, size, content)
            if expected := self._expected.get(key):
                expected.popleft().message = message
                if not expected:
                    del self._expected[key]
                self._acknowledge(*key)
            else:
                self._unexpected[key].append(message)

    def _acknowledge(self, peer: int, tag: int, index: int) -> None:
        """Tells a sender that a message met its receive, and which slots are free again."""
        places: list[bytes] = []
        let_go = self._let_go[peer]
        while let_go and len(places) < _MOST_PLACES:
            of_tag, place = let_go.popleft()
            self._kept[peer, of_tag] -= 1
            places.append(_PLACE.pack(place))
        self._peers.send(peer, _HEADER.pack(_ARRIVED, tag, index, 0, 0) + b"".join(places))

    def _tensor(self, channel: Channel, index: int, message: _Message) -> Tensor:
        size = channel.dtype.itemsize * math.prod(channel.shape)
        if message.size != size:
            raise TransportError(
                f"{channel.waiting(index)} as {size} bytes, but {message.size} were sent.",
                "Both ranks must be given one plan and the same sizes.",
            )
        if message.content is not None:
            if not size:
                return torch.empty(channel.shape, dtype=channel.dtype)
            return torch.frombuffer(message.content, dtype=channel.dtype).view(channel.shape)
        peer, tag = channel.source_rank, channel.tag
        slot = self._peers.memories[peer].bytes_at(message.place, size)
        found = torch.from_numpy(slot).view(channel.dtype).view(channel.shape)
        is_kept = self._kept[peer, tag] < self.depth
        self._kept[peer, tag] += 1
        let_go = weakref.finalize(slot, self._let_go[peer].append, (tag, message.place))
        let_go.atexit = False
        return found if is_kept else found.clone()


def _content(tensor: Tensor) -> bytes:
    """The elements' bytes, in order."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
