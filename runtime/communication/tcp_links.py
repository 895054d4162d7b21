"""Point-to-point links of a ring over TCP, with small socket buffers.

A buffer that holds a whole message lets the kernel send it while the program already receives, and
hides what a serial endpoint costs. With 32 KiB the program itself has to be in a call for most of a
message, as over a network without hardware progress.
"""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass
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

    Raises TransportError when a neighbor does not answer in time.
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
