"""Processes that talk over torch.distributed's gloo backend (TCP, host memory).

Each kind of traffic has a process group of its own, so that a late gradient never stands behind
an activation. A message's tag is its channel and index. Every wait has a time-out; gloo closes
the connection when one passes, so a TransportError ends the run.

A received tensor goes into fresh memory: autograd may keep an activation until its backward and
evaluation may keep outputs for ever, so a ring of buffers would have to know who still reads
them. Page faults of fresh memory cost 0.1 ms for 512 KiB and nothing measurable from 4 MiB on
(2 cores, loopback), against more than 100 ms of compute for a stage that sends as much.

Tensors on another device go through host memory.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..tensor_files import dense
from .protocol import DIRECTIONS, Channel, Handle, Sends, peer_is_gone, timed_out

INDICES = 1024
"""The number of messages of a channel that tags distinguish: `tag * INDICES + index`."""


@dataclass(frozen=True)
class GlooHandle:
    channel: Channel
    index: int
    buffer: Tensor
    work: dist.Work

    @property
    def ready(self) -> bool:
        return True


class GlooTransport:
    """One rank's end of a gloo process group.

    Making one is collective: all ranks of `group` (by default all ranks) do it. `timeout_s` is
    the longest that any wait takes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        depth: int = 4,
        device: str | torch.device = "cpu",
    ) -> None:
        self.rank = dist.get_rank(group)
        self.depth = depth
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._groups = {
            direction: dist.new_group(
                self._ranks, timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )
            for direction in sorted(set(DIRECTIONS.values()))
        }
        # A tensor is kept here: gloo reads it until the peer has it.
        self._sends: Sends[tuple[dist.Work, Tensor]] = Sends(self._finish_send)

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        self._sends.make_room(channel, self.depth)
        host = dense(tensor.cpu())
        try:
            work = dist.isend(
                host,
                self._ranks[channel.target_rank],
                group=self._groups[DIRECTIONS[channel.kind]],
                tag=_tag(channel, index),
            )
        except RuntimeError as error:
            raise self._send_error(channel, index, error) from error
        assert work is not None
        self._sends.add(channel, index, (work, host))

    def recv(self, channel: Channel, index: int) -> GlooHandle:
        buffer = torch.empty(channel.shape, dtype=channel.dtype)
        try:
            work = dist.irecv(
                buffer,
                self._ranks[channel.source_rank],
                group=self._groups[DIRECTIONS[channel.kind]],
                tag=_tag(channel, index),
            )
        except RuntimeError as error:
            raise self._recv_error(channel, index, error) from error
        assert work is not None
        return GlooHandle(channel, index, buffer, work)

    def arrived(self, handle: Handle) -> bool:
        return False  # gloo completes a receive only in its wait

    def wait(self, handle: Handle) -> Tensor:
        assert isinstance(handle, GlooHandle)
        try:
            handle.work.wait(self._timeout)
        except RuntimeError as error:
            raise self._recv_error(handle.channel, handle.index, error) from error
        return handle.buffer.to(self._device)

    def wait_sent(self, channel: Channel, index: int) -> None:
        self._sends.finish_until(channel, index)

    def close(self) -> None:
        self._sends.finish_all()

    def _finish_send(self, channel: Channel, index: int, sent: tuple[dist.Work, Tensor]) -> None:
        try:
            sent[0].wait(self._timeout)
        except RuntimeError as error:
            raise self._send_error(channel, index, error) from error

    def _recv_error(self, channel: Channel, index: int, error: RuntimeError) -> TransportError:
        return self._error(channel.waiting(index), channel.source_rank, error)

    def _send_error(self, channel: Channel, index: int, error: RuntimeError) -> TransportError:
        return self._error(channel.sending(index), channel.target_rank, error)

    def _error(self, wait: str, peer: int, error: RuntimeError) -> TransportError:
        if "Timed out" in str(error):
            return timed_out(wait, peer, self._timeout.total_seconds())
        return peer_is_gone(wait, peer, f": {str(error).splitlines()[0]}")


def _tag(channel: Channel, index: int) -> int:
    return channel.tag * INDICES + index % INDICES
