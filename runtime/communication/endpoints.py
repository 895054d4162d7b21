"""Point-to-point links over a group of torch.distributed, a communicator of MPI, and a transport of
asyncpipe."""

from __future__ import annotations

import datetime
import os
import time
from collections import Counter
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..transports.protocol import Channel, Transport, peer_is_gone, timed_out


class GroupLinks:
    """Links over the point-to-point calls of a group, by default of all ranks. `timeout_s` is the
    longest that any wait takes."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s

    def send(self, peer: int, tensor: Tensor) -> None:
        try:
            self._finish(dist.isend(tensor, group=self._group, group_dst=peer))
        except RuntimeError as error:
            raise self._error(f"waits for rank {peer} to take a tensor", peer, error) from error

    def recv(self, peer: int, tensor: Tensor) -> None:
        try:
            self._finish(dist.irecv(tensor, group=self._group, group_src=peer))
        except RuntimeError as error:
            raise self._error(f"waits for a tensor from rank {peer}", peer, error) from error

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        try:
            receiving = dist.irecv(incoming, group=self._group, group_src=source)
            self.send(target, outgoing)
            sent_s = perf_counter()
            self._finish(receiving)
        except RuntimeError as error:
            raise self._error(f"waits for a tensor from rank {source}", source, error) from error
        return sent_s

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait(datetime.timedelta(seconds=self._timeout_s))

    def _error(self, wait: str, peer: int, error: RuntimeError) -> TransportError:
        words = f"rank {self.rank} {wait}"
        if "Timed out" in str(error):
            return timed_out(words, peer, self._timeout_s)
        return peer_is_gone(words, peer, f": {str(error).splitlines()[0]}")


class MpiLinks:
    """Links over a communicator of mpi4py; one that threads share carries their messages in any
    order. `timeout_s` is the longest that any wait takes."""

    def __init__(self, world: Any, *, timeout_s: float) -> None:
        self.rank: int = world.Get_rank()
        self.ranks: int = world.Get_size()
        self._world = world
        self._timeout_s = timeout_s

    def send(self, peer: int, tensor: Tensor) -> None:
        wait = f"rank {self.rank} waits for rank {peer} to take a tensor"
        self._finish(self._world.Isend(tensor.numpy(), peer), wait, peer)

    def recv(self, peer: int, tensor: Tensor) -> None:
        wait = f"rank {self.rank} waits for a tensor from rank {peer}"
        self._finish(self._world.Irecv(tensor.numpy(), peer), wait, peer)

    def _finish(self, request: Any, wait: str, peer: int) -> None:
        end_s = time.monotonic() + self._timeout_s
        while not request.Test():
            if time.monotonic() > end_s:
                raise timed_out(wait, peer, self._timeout_s)
            os.sched_yield()


class TransportLinks:
    """Links over a transport between `ranks` ranks."""

    def __init__(self, transport: Transport, ranks: int) -> None:
        self.rank = transport.rank
        self.ranks = ranks
        self._transport = transport
        self._indices: Counter[tuple[int, int]] = Counter()

    def send(self, peer: int, tensor: Tensor) -> None:
        """Returns once the tensor was taken; raises TransportError if it is not in time."""
        channel, index = self._next(self.rank, peer, tensor)
        self._transport.send(channel, tensor, index)
        self._transport.wait_sent(channel, index)

    def recv(self, peer: int, tensor: Tensor) -> None:
        """Fills the tensor; raises TransportError if none arrives in time."""
        handle = self._transport.recv(*self._next(peer, self.rank, tensor))
        tensor.copy_(self._transport.wait(handle))

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        """Sends and receives at the same time; returns when the send had ended."""
        handle = self._transport.recv(*self._next(source, self.rank, incoming))
        self.send(target, outgoing)
        sent_s = perf_counter()
        incoming.copy_(self._transport.wait(handle))
        return sent_s

    def _next(self, source: int, target: int, tensor: Tensor) -> tuple[Channel, int]:
        """The channel from one rank to another, and the number of its next message."""
        index = self._indices[source, target]
        self._indices[source, target] += 1
        ends = (source, target, source, target)
        tag = source * self.ranks + target
        shape = tuple(tensor.shape)
        return Channel("message", "tensor", *ends, tag, tensor.dtype, shape), index
