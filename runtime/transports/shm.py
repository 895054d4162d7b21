"""Processes of one host that communicate through shared memory, woken by the kernel.

A sender copies a tensor into a slot of its own memory, which all ranks have mapped, and sends the
slot's place over a socket (`peers.py`). A receive finds its message by channel and index, in any
order of arrival: a channel may have `depth` messages without a posted receive, then their sender
waits. The received tensor is the slot itself, which is returned when the tensor is freed: autograd
may keep it until its backward. While `depth` of a channel's tensors are kept, further ones are
copied out, so that slots are bounded. Small messages travel in the packet; tensors on a GPU through
slots on it (`device_slots.py`).

    sender                                              receiver
    take a slot, copy in, HOST(place)  ---------------> a receive is posted for it
    one message less in transit, free slots  <--------- notes: arrivals, released slots

Notes travel with the next packet to that rank; they have a packet of their own if the sender might
miss them, and before the receiver sleeps. So a hop costs one packet.

Measured on 2 cores: taking the slot itself halves the receiver's core time (16 MiB, read once: 1.2
against 2.7 ms), and makes no difference at 64 KiB. A socket wakes in 6.5 us, a futex in 5, but a
socket also reports a peer's end.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..tensor_files import raw_bytes
from .device_slots import CudaMemory, DeviceMemory, Incoming, Outgoing
from .peers import PACKET_BYTES, Peers, SharedMemory, Slots, create_memory, obstacle
from .protocol import Channel, Handle, peer_is_gone, timed_out

INLINE_BYTES = 8192
"""Messages up to this size go in the packet."""

_HEADER = struct.Struct("<BxHIqqq")  # kind, number of notes, tag, index, place, bytes
_NOTE = struct.Struct("<qq")  # tag and index of what arrived, or _FREE and a place
_FREE = -1
_MOST_NOTES = 192
assert INLINE_BYTES + _HEADER.size + 2 * _MOST_NOTES * _NOTE.size <= PACKET_BYTES

# Messages in a host slot, in the packet and in a device slot; a device slot was emptied for the
# first time; notes alone.
_HOST, _INLINE, _DEVICE, _EMPTIED, _NOTES = range(5)

_Key = tuple[int, int, int]
"""The origin of a message: peer, tag and index."""

_UnderWay = deque[tuple[Channel, int]]
"""The sends of a channel that are still under way, with their indices."""


@dataclass(frozen=True, slots=True)
class _Message:
    """An arrived message: its place, or its content in the packet after the header."""

    kind: int
    place: int
    size: int
    rest: bytes


@dataclass(eq=False)
class ShmHandle:
    channel: Channel
    index: int
    message: _Message | None = field(default=None)
    is_taken: bool = field(default=False)

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
        device_memory: DeviceMemory | None = None,
    ) -> None:
        self.depth = depth
        self._withheld = depth // 2  # arrivals of a channel that its sender is not told of yet
        self._timeout_s = timeout_s
        if device_memory is None and torch.device(device).type == "cuda":
            device_memory = CudaMemory(torch.device(device))
        self._device_memory = device_memory
        if reason := obstacle(group):
            raise TransportError(f"{reason}: they cannot share memory.", "Use --transport gloo.")
        descriptor = create_memory()
        self._peers = Peers(group, descriptor, timeout_s)
        self.rank = self._peers.rank
        self._memory = SharedMemory(descriptor)
        self._slots = Slots(self._memory.size)
        self._under_way: dict[tuple[int, int], _UnderWay] = defaultdict(deque)
        self._expected: dict[_Key, deque[ShmHandle]] = defaultdict(deque)
        self._unexpected: dict[_Key, deque[_Message]] = defaultdict(deque)
        self._arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._kept: Counter[tuple[int, int]] = Counter()
        self._let_go: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        if device_memory is not None:
            self._outgoing = {peer: Outgoing(device_memory) for peer in self._peers.memories}
            self._incoming = {peer: Incoming(device_memory) for peer in self._peers.memories}

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        peer, tag, size = channel.target_rank, channel.tag, tensor.nbytes
        under_way = self._under_way[peer, tag]
        self._wait_for_arrivals(peer, under_way, self.depth + self._withheld - 1)
        if peer in self._peers.gone:
            raise peer_is_gone(channel.sending(index), peer, ".")
        under_way.append((channel, index))
        kind, place, rest = _INLINE, 0, b""
        if self._device_memory is not None and size and self._device_memory.holds(tensor):
            self._progress(0.0)  # Slots that came back.
            kind = _DEVICE
            place, handles = self._outgoing[peer].fill(tensor)
            rest = handles.encode()
        elif size <= INLINE_BYTES:
            rest = raw_bytes(tensor).tobytes()
        else:
            self._progress(0.0)
            kind, place = _HOST, self._slots.take(size)
            _fill(torch.from_numpy(self._memory.bytes_at(place, size)), tensor)
        self._post(peer, kind, tag, index, place, size, rest)

    def recv(self, channel: Channel, index: int) -> ShmHandle:
        handle = ShmHandle(channel, index)
        key = channel.source_rank, channel.tag, index
        if arrived := self._unexpected.get(key):
            handle.message = arrived.popleft()
            if not arrived:
                del self._unexpected[key]
            self._note_arrival(*key)
        else:
            self._expected[key].append(handle)
        return handle

    def arrived(self, handle: Handle) -> bool:
        assert isinstance(handle, ShmHandle)
        if handle.message is None:
            self._progress(0.0)
        return handle.message is not None

    def wait(self, handle: Handle) -> Tensor:
        assert isinstance(handle, ShmHandle) and not handle.is_taken
        channel = handle.channel
        if handle.message is None:
            self._wait(
                lambda: handle.message is not None,
                channel.source_rank,
                channel.waiting(handle.index),
            )
        assert handle.message is not None
        handle.is_taken = True
        return self._tensor(channel, handle.index, handle.message)

    def wait_sent(self, channel: Channel, index: int) -> None:
        """Does nothing, because messages are copies."""

    def close(self) -> None:
        self._post_notes()
        for (peer, _), under_way in self._under_way.items():
            self._wait_for_arrivals(peer, under_way, 0)
        self._peers.close()

    def _wait_for_arrivals(self, peer: int, under_way: _UnderWay, most: int) -> None:
        """Waits until at most so many messages of a channel are under way."""
        while (count := len(under_way)) > most:
            channel, index = under_way[0]
            self._wait(partial(_is_shorter, under_way, count), peer, channel.sending(index))

    def _wait(self, done: Callable[[], bool], peer: int, waiting: str) -> None:
        """Takes packets in until `done`; `waiting` describes the wait for `peer` in errors."""
        end_s = time.monotonic() + self._timeout_s
        while not done():
            if peer in self._peers.gone:
                raise peer_is_gone(waiting, peer, ".")
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise timed_out(waiting, peer, self._timeout_s)
            self._post_notes()
            self._progress(left_s)

    def _progress(self, wait_s: float) -> None:
        for peer, packet in self._peers.receive(wait_s):
            kind, notes, tag, index, place, size = _HEADER.unpack_from(packet)
            end = _HEADER.size + notes * _NOTE.size
            for note in _NOTE.iter_unpack(packet[_HEADER.size : end]):
                self._take_note(peer, *note)
            if kind == _EMPTIED:
                self._outgoing[peer].give_back(place, packet[end:].decode())
            elif kind != _NOTES:
                self._take_in((peer, tag, index), _Message(kind, place, size, packet[end:]))

    def _take_note(self, peer: int, tag: int, number: int) -> None:
        if tag != _FREE:
            under_way = self._under_way[peer, tag]
            under_way.remove(next(sent for sent in under_way if sent[1] == number))
        elif number >= 0:
            self._slots.give_back(number)
        else:
            self._outgoing[peer].give_back(~number)

    def _take_in(self, key: _Key, message: _Message) -> None:
        if expected := self._expected.get(key):
            expected.popleft().message = message
            if not expected:
                del self._expected[key]
            self._note_arrival(*key)
        else:
            self._unexpected[key].append(message)

    def _note_arrival(self, peer: int, tag: int, index: int) -> None:
        arrivals = self._arrivals[peer]
        arrivals.append((tag, index))
        of_channel = sum(of_tag == tag for of_tag, _ in arrivals)
        if of_channel > self._withheld or len(arrivals) == _MOST_NOTES:
            self._post(peer, _NOTES)

    def _post_notes(self) -> None:
        for peer, arrivals in self._arrivals.items():
            if arrivals:
                self._post(peer, _NOTES)

    def _post(
        self,
        peer: int,
        kind: int,
        tag: int = 0,
        index: int = 0,
        place: int = 0,
        size: int = 0,
        rest: bytes = b"",
    ) -> None:
        """Sends a packet, and with it all notes for that rank."""
        notes, let_go = self._arrivals[peer], self._let_go[peer]
        while let_go and len(notes) < 2 * _MOST_NOTES:
            of_tag, free = let_go.popleft()
            self._kept[peer, of_tag] -= free >= 0
            notes.append((_FREE, free))
        header = _HEADER.pack(kind, len(notes), tag, index, place, size)
        self._peers.send(peer, b"".join((header, *(_NOTE.pack(*note) for note in notes), rest)))
        notes.clear()

    def _tensor(self, channel: Channel, index: int, message: _Message) -> Tensor:
        peer, tag, size = channel.source_rank, channel.tag, channel.nbytes
        if message.size != size:
            raise TransportError(
                f"{channel.waiting(index)} as {size} bytes, but {message.size} were sent.",
                "Both ranks must be given one plan and the same sizes.",
            )
        if not size:
            device = "cpu" if self._device_memory is None else self._device_memory.device
            return torch.empty(channel.shape, dtype=channel.dtype, device=device)
        if message.kind == _INLINE:
            content = torch.frombuffer(bytearray(message.rest), dtype=channel.dtype)
            # To memory as torch aligns it: sums of oneMKL depend on where 64 bytes begin (its
            # guide, "Obtaining Numerically Reproducible Results"), and Python's memory begins
            # elsewhere in every run.
            return content.view(channel.shape).clone()
        if message.kind == _DEVICE:
            handles = message.rest.decode()
            tensor, handle = self._incoming[peer].empty(message.place, handles, channel)
            if handle:
                self._post(peer, _EMPTIED, place=message.place, rest=handle.encode())
            else:
                self._let_go[peer].append((tag, ~message.place))
            return tensor
        slot = self._peers.memories[peer].bytes_at(message.place, size)
        tensor = torch.from_numpy(slot).view(channel.dtype).view(channel.shape)
        is_kept = self._kept[peer, tag] < self.depth
        self._kept[peer, tag] += 1
        let_go = weakref.finalize(slot, self._let_go[peer].append, (tag, message.place))
        let_go.atexit = False
        return tensor if is_kept else tensor.clone()


def _is_shorter(under_way: _UnderWay, count: int) -> bool:
    return len(under_way) < count


def _fill(content: Tensor, tensor: Tensor) -> None:
    """Copies the elements, whatever their layout, into bytes."""
    content.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
