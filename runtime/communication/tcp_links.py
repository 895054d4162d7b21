"""Point-to-point links of a ring over TCP with small socket buffers, and the bandwidth of paths.

A buffer that holds a whole message lets the kernel send it while the program already receives, and
hides what a serial endpoint costs. With 32 KiB the program itself has to be in a call for most of a
message, as over a network without hardware progress.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from ..transports.protocol import peer_is_gone, timed_out

BUFFER_BYTES = 32 * 1024


@dataclass(frozen=True)
class TcpRing:
    """The sockets to the next rank of a ring and from the one before; implements `PointToPoint`.

    rank, ranks: the place in the ring, and its length.
    """

    rank: int
    ranks: int
    to_next: socket.socket
    from_previous: socket.socket
    timeout_s: float

    def send(self, peer: int, tensor: Tensor) -> None:
        wait = f"rank {self.rank} of the ring waits for rank {peer} to take a tensor"
        try:
            self.to_next.sendall(_bytes_of(tensor))
        except TimeoutError as error:
            raise timed_out(wait, peer, self.timeout_s) from error
        except OSError as error:
            raise peer_is_gone(wait, peer, f": {error.strerror}") from error

    def recv(self, peer: int, tensor: Tensor) -> None:
        wait = f"rank {self.rank} of the ring waits for a tensor from rank {peer}"
        rest = _bytes_of(tensor)
        try:
            while rest:
                rest = rest[self._read(rest, peer, wait) :]
        except TimeoutError as error:
            raise timed_out(wait, peer, self.timeout_s) from error

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        unsent, unread = _bytes_of(outgoing), _bytes_of(incoming)
        wait = f"rank {self.rank} of the ring exchanges tensors with ranks {target} and {source}"
        sent_s = perf_counter()
        while unsent or unread:
            readable, writable, _ = select.select(
                [self.from_previous] if unread else [],
                [self.to_next] if unsent else [],
                [],
                self.timeout_s,
            )
            if not (readable or writable):
                raise timed_out(wait, source if unread else target, self.timeout_s)
            if writable:
                try:
                    unsent = unsent[self.to_next.send(unsent) :]
                except OSError as error:
                    raise peer_is_gone(wait, target, f": {error.strerror}") from error
                sent_s = perf_counter()
            if readable:
                unread = unread[self._read(unread, source, wait) :]
        return sent_s

    def close(self) -> None:
        for end in {self.to_next, self.from_previous}:
            end.close()

    def _read(self, rest: memoryview, peer: int, wait: str) -> int:
        try:
            count = self.from_previous.recv_into(rest)
        except ConnectionError as error:
            raise peer_is_gone(wait, peer, f": {error.strerror}") from error
        if not count:
            raise peer_is_gone(wait, peer)
        return count


def listen(address: str) -> socket.socket:
    """A socket on a free port of an address, for `connect_ring`."""
    listener = _socket(address)
    listener.bind((address, 0))
    listener.listen(1)
    return listener


def connect_ring(
    rank: int, ranks: int, listener: socket.socket, next_rank: tuple[str, int], timeout_s: float
) -> TcpRing:
    """Connects to the next rank, which listens, and accepts the one before; closes the listener.

    Raises TransportError when a neighbor is silent for too long.
    """
    target, source = (rank + 1) % ranks, (rank - 1) % ranks
    to_next = _socket(next_rank[0])
    wait = f"rank {rank} of the ring connects to rank {target} at {next_rank[0]}:{next_rank[1]}"
    with listener, contextlib.ExitStack() as failed:
        failed.callback(to_next.close)
        for end in (listener, to_next):
            end.settimeout(timeout_s)
        try:
            to_next.connect(next_rank)
            wait, target = f"rank {rank} of the ring waits for rank {source} to connect", source
            from_previous, _ = listener.accept()
        except TimeoutError as error:
            raise timed_out(wait, target, timeout_s) from error
        except OSError as error:
            raise peer_is_gone(wait, target, f": {error.strerror}") from error
        failed.pop_all()
    from_previous.settimeout(timeout_s)
    for end in (to_next, from_previous):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TcpRing(rank, ranks, to_next, from_previous, timeout_s)


def _socket(address: str) -> socket.socket:
    """A socket with small buffers, which those that it accepts inherit."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return made


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


_ECHO_S = 0.1
"""The time of an echo that is long enough: a shaped link has sent its burst long before."""
_ECHO_BYTES = (256 * 1024, 16 * 1024 * 1024)
_ECHOS = 4
_TRY_S, _MOVE_S = 2.0, 20.0  # to connect, and for an echo
_HEADER = 8


@dataclass
class EchoServer:
    """Sends back as many bytes as it receives, to clients that know its word.

    addresses: those at which it listens, each on a port of its own.
    """

    addresses: Iterable[str]
    word: bytes
    ports: dict[str, int] = field(default_factory=dict)
    _listeners: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> EchoServer:
        for address in self.addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):  # an address that went away
                listener = socket.create_server((address, 0), family=family)
                self._listeners.append(listener)
                self.ports[address] = listener.getsockname()[1]
                threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept
            listener.close()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            with client, contextlib.suppress(OSError, EOFError):
                client.settimeout(_MOVE_S)
                if _exactly(client, len(self.word)) != self.word:
                    continue
                while True:
                    size = int.from_bytes(_exactly(client, _HEADER), "big")
                    client.sendall(_exactly(client, min(size, _ECHO_BYTES[1])))


@dataclass(frozen=True)
class EchoPath:
    """A way to an EchoServer: the own address, and the server's address and port."""

    source: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """A way from one host to another.

    rank, peer: the ranks at its ends.
    interface, address: the interface of `rank`, and the address of `peer`.
    gb_s: its bandwidth.
    is_used: the ranks communicate over it.
    """

    rank: int
    peer: int
    interface: str
    address: str
    gb_s: float
    is_used: bool


def echo_rates(paths: Sequence[EchoPath], word: bytes) -> list[float]:
    """The undisturbed bandwidth of each path there and back, in bytes a second; 0 for a path that
    cannot reach the server. The paths are measured alternately."""
    with contextlib.ExitStack() as stack:
        ends = [_connected(path, word, stack) for path in paths]
        sizes = [0 if end is None else _echo_size(end) for end in ends]
        best = [0.0] * len(paths)
        for _ in range(_ECHOS):
            for place, end in enumerate(ends):
                if end is not None and (seconds := _echo_s(end, sizes[place])):
                    best[place] = max(best[place], 2 * sizes[place] / seconds)
        return best


def _connected(path: EchoPath, word: bytes, stack: contextlib.ExitStack) -> socket.socket | None:
    try:
        end = socket.create_connection(
            (path.address, path.port), timeout=_TRY_S, source_address=(path.source, 0)
        )
        stack.enter_context(end)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(_MOVE_S)
        end.sendall(word)
    except OSError:
        return None
    return end


def _echo_size(end: socket.socket) -> int:
    """A size whose echo takes long enough."""
    size, most = _ECHO_BYTES
    while 0 < _echo_s(end, size) < _ECHO_S and size < most:
        size *= 2
    return size


def _echo_s(end: socket.socket, size: int) -> float:
    """The time of an echo; 0 if none comes back."""
    start_s = perf_counter()
    try:
        end.sendall(size.to_bytes(_HEADER, "big") + bytes(size))
        _exactly(end, size)
    except (OSError, EOFError):
        return 0.0
    return perf_counter() - start_s


def _exactly(end: socket.socket, size: int) -> bytes:
    """The next bytes. Raises EOFError if the other end is closed before."""
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = end.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return bytes(content)
