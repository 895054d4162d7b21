"""The ranks of one host, connected pairwise by sockets that carry short packets, and their shared
memory.

The kernel keeps the packets' borders and order, wakes the process that waits for one, and ends a
connection when a process ends in any way. Nothing has a name in the file system that could be left
behind: sockets listen in Linux's abstract namespace until all are connected, and a rank's memory is
handed over the connection as an open file.

A rank's memory has reusable slots for the messages that it sends. It is an unnamed file as large as
the machine's memory, of which only the pages exist that were written to: it lives while a process
has it open, and is not limited by the size of /dev/shm. A slot has a power of two of bytes; the
last one returned is the next one used, while the caches still hold it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..errors import TransportError

ALIGNMENT = 64

_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2  # linux/memfd.h
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # linux/fcntl.h
_MOST_BYTES = 256 * 2**30  # of addresses, which many ranks need of many ranks


def has_shared_memory() -> bool:
    """True if this process can create and map such a file."""
    try:
        SharedMemory(create_memory())
    except (
        AttributeError,
        ImportError,
        OSError,
    ):  # not Linux; forbidden, or no address space (ulimit -v)
        return False
    return True


def create_memory(size: int | None = None) -> int:
    """A new file of memory that only this user's processes can open, by default as large as the
    machine's memory. Raises OSError."""
    import fcntl  # Not every system that this module is loaded on has it.

    # Pythons that were built for an old C library (conda's, uv's) lack os.memfd_create.
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(b"asyncpipe", _CLOSE_ON_EXEC | _ALLOW_SEALING)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no file of memory can be created")
    os.fchmod(descriptor, 0o600)
    of_machine = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _MOST_BYTES)
    os.ftruncate(descriptor, of_machine if size is None else size)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return descriptor


class SharedMemory:
    """A file of memory, mapped for as long as this object or an array in it lives."""

    def __init__(self, descriptor: int) -> None:
        try:
            self.size = os.fstat(descriptor).st_size
            self._map = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)

    def bytes_at(self, place: int, size: int) -> npt.NDArray[np.uint8]:
        """A new array of bytes in the memory."""
        return np.frombuffer(self._map, np.uint8, size, place)

    def write(self, place: int, content: bytes) -> None:
        self._map[place : place + len(content)] = content

    def read(self, place: int, size: int) -> bytes:
        return self._map[place : place + size]


class Slots:
    """Which places of a memory of `size` bytes are in use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_bytes = 0
        self._capacity: dict[int, int] = {}
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, size: int) -> int:
        """The place of a slot of at least `size` bytes. Raises TransportError when the memory
        for messages is used up."""
        capacity = max(ALIGNMENT, 1 << (size - 1).bit_length())
        if self._free[capacity]:
            return self._free[capacity].pop()
        place = self.used_bytes
        if place + capacity > self.size:
            raise TransportError(
                f"a message of {size} bytes does not fit into the {self.size} bytes of memory for "
                f"messages, of which {place} are in use."
            )
        self.used_bytes += capacity
        self._capacity[place] = capacity
        return place

    def capacity(self, place: int) -> int:
        return self._capacity[place]

    def give_back(self, place: int) -> None:
        self._free[self._capacity[place]].append(place)


PACKET_BYTES = 16 * 1024
"""The longest packet."""

_TOKEN_BYTES = 16
_BUFFER_BYTES = 2**20
_HELLO = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


def obstacle(group: dist.ProcessGroup | None = None) -> str | None:
    """Why the ranks of `group` cannot share memory, or None; all of them call it together."""
    places = _gather(_host(), group)
    if not all(any(place) for place in places):
        rank = next(rank for rank, place in enumerate(places) if not any(place))
        return f"rank {rank} cannot map a memory file of Linux's (memfd, ulimit -v)"
    other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    if other is not None:
        return f"ranks 0 and {other} are not on one host, or not in one network or user of it"
    return None


class Peers:
    """This rank's connections to all others, and the memory that they handed over.

    Making one is collective. `gone` are the ranks whose connection ended; everything that they
    had sent was received before.
    """

    def __init__(self, group: dist.ProcessGroup | None, memory: int, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.gone: set[int] = set()
        self.memories: dict[int, SharedMemory] = {}
        self._timeout_s = timeout_s
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._unsent: dict[int, deque[bytes]] = defaultdict(deque)
        self._behind: set[int] = set()
        self._epoll = select.epoll()
        self._peer_of: dict[int, int] = {}
        try:
            self._connect(group, memory)
        except OSError as error:
            self.close()
            raise TransportError(
                f"rank {self.rank} cannot connect to the other ranks of this host: {error}.",
                "Use --transport gloo.",
            ) from error

    def send(self, peer: int, packet: bytes) -> None:
        """Sends a packet, now or as soon as the peer has taken in what it was sent before."""
        if peer in self.gone:
            return
        unsent = self._unsent[peer]
        unsent.append(packet)
        if len(unsent) == 1:
            self._flush(peer)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Packets and their senders, as soon as there are any; none when the time is over or
        something else happened."""
        packets: list[tuple[int, bytes]] = []
        for descriptor, events in self._epoll.poll(timeout_s):
            peer = self._peer_of.get(descriptor)
            if peer is None:  # It went while this loop ran.
                continue
            if descriptor == self._processes.get(peer):
                while packet := self._read(peer):
                    packets.append((peer, packet))
                self._end(peer)
                continue
            if events & select.EPOLLOUT:
                self._flush(peer)
            if events & ~select.EPOLLOUT and (packet := self._read(peer)):
                packets.append((peer, packet))
        return packets

    def close(self) -> None:
        """Sends what is unsent and ends all connections."""
        for peer, connection in list(self._sockets.items()):
            with suppress(OSError):
                connection.settimeout(self._timeout_s)
                for packet in self._unsent[peer]:
                    connection.send(packet, socket.MSG_NOSIGNAL)
            self._end(peer)
        self._epoll.close()

    def _connect(self, group: dist.ProcessGroup | None, memory: int) -> None:
        ranks = dist.get_world_size(group)
        end_s = time.monotonic() + self._timeout_s
        with _socket(self._timeout_s) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            listener.bind(_address(token))
            listener.listen(ranks)
            tokens = _gather(token, group)
            for peer in range(self.rank):
                connection = _socket(self._timeout_s)
                self._sockets[peer] = connection
                connection.connect(_address(tokens[peer]))
                self._greet(connection, memory)
                self._meet(connection)
            while len(self._sockets) < ranks - 1:
                listener.settimeout(max(0.0, end_s - time.monotonic()))
                connection, _ = listener.accept()
                if _credentials(connection)[1] != os.getuid():
                    connection.close()
                    continue
                connection.settimeout(self._timeout_s)
                self._sockets[self._meet(connection)] = connection
                self._greet(connection, memory)
        for peer, connection in self._sockets.items():
            self._watch(peer, connection)

    def _greet(self, connection: socket.socket, memory: int) -> None:
        socket.send_fds(connection, [_HELLO.pack(self.rank)], [memory])

    def _meet(self, connection: socket.socket) -> int:
        hello, descriptors, *_ = socket.recv_fds(connection, _HELLO.size, 1)
        if len(hello) != _HELLO.size or len(descriptors) != 1:
            raise OSError("a connection ended before it began")
        peer: int = _HELLO.unpack(hello)[0]
        self.memories[peer] = SharedMemory(descriptors[0])
        return peer

    def _watch(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._epoll.register(connection, select.EPOLLIN)
        self._peer_of[connection.fileno()] = peer
        # A process that a dead peer has forked may hold its connection open. Kernels before 5.3
        # cannot tell of a process's end.
        with suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(_credentials(connection)[0])
            self._processes[peer] = descriptor
            self._epoll.register(descriptor, select.EPOLLIN)
            self._peer_of[descriptor] = peer

    def _read(self, peer: int) -> bytes:
        """The next packet; nothing when there is none yet, or will be none."""
        if peer in self.gone:
            return b""
        connection, packet = self._sockets[peer], b""
        try:
            try:
                packet = connection.recv(PACKET_BYTES)
            except ConnectionResetError:
                # It ended with packets of ours unread; what it had sent still comes, after this.
                packet = connection.recv(PACKET_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            packet = b""
        if not packet:
            self._end(peer)
        return packet

    def _flush(self, peer: int) -> None:
        unsent, connection = self._unsent[peer], self._sockets[peer]
        try:
            while unsent:
                connection.send(unsent[0], socket.MSG_NOSIGNAL)
                unsent.popleft()
        except BlockingIOError:
            self._behind.add(peer)
            self._epoll.modify(connection, select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError:
            # What it had sent is still to be read; then comes the end.
            unsent.clear()
        if peer in self._behind:
            self._behind.remove(peer)
            self._epoll.modify(connection, select.EPOLLIN)

    def _end(self, peer: int) -> None:
        if peer in self.gone:
            return
        self.gone.add(peer)
        self._unsent.pop(peer, None)
        self._behind.discard(peer)
        connection = self._sockets.pop(peer)
        self._peer_of.pop(connection.fileno(), None)
        connection.close()
        if (descriptor := self._processes.pop(peer, None)) is not None:
            del self._peer_of[descriptor]
            os.close(descriptor)


def _socket(timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    return connection


def _address(token: bytes) -> bytes:
    return b"\0asyncpipe-" + token.hex().encode()


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _host() -> bytes:
    """The same on all ranks that can connect to each other; zeros where no rank can."""
    if not has_shared_memory():
        return bytes(_TOKEN_BYTES)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {network} {os.getuid()}".encode()).digest()[:_TOKEN_BYTES]


def _gather(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    own = torch.tensor(list(content), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist()) for part in parts]
