"""Processes on GPUs of their own that communicate over torch.distributed's NCCL.

NCCL has no tags: between two ranks, the messages of one communicator are matched in the order in
which both call it, and a wrong order gives wrong numbers. The protocol lets the two ends disagree
on the order (several stages per rank, skips, tied weights), so the sender's order is law:

    lane     one direction of one kind of traffic between two ranks; a communicator of its own
    header   channel, index and bytes of each message, sent over gloo in the lane's order

The receiver posts NCCL receives as the headers say, in whatever order the rank asks. So the two
orders are equal by construction, no receive holds a GPU for a message that was never sent, and a
missing message is a wait on the host, with a time-out that names both ranks.

Sends and receives run on NCCL's streams concurrently with the computation; `wait` makes the
computing stream wait, not the host. Tensors are sent as bytes, so every dtype works.
"""

from __future__ import annotations

import datetime
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..tensor_files import dense
from .protocol import DIRECTIONS, Channel, Handle, peer_is_gone, timed_out

Lane = tuple[str, int, int]
"""Kind of traffic (a value of DIRECTIONS), rank that sends, rank that receives."""

_NOT_THERE = -1
"""The tag of a missing header."""

_MOST_HEADERS = 1024
"""The messages of a channel whose headers may be under way: only a receiver that is further behind
makes the host of its sender wait."""


def lanes_of(channels: Iterable[Channel]) -> frozenset[Lane]:
    """The lanes that channels between ranks need."""
    return frozenset(
        (DIRECTIONS[channel.kind], channel.source_rank, channel.target_rank)
        for channel in channels
        if not channel.is_local
    )


@dataclass(frozen=True)
class NcclHandle:
    channel: Channel
    index: int

    @property
    def ready(self) -> bool:
        return True


@dataclass
class _Arrivals:
    """The receiving end of a lane: the header to come, and the messages that were announced."""

    header: Tensor
    work: dist.Work
    messages: defaultdict[tuple[int, int], deque[tuple[Tensor, dist.Work | None]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


@dataclass(frozen=True)
class _Sent:
    """A message whose header, and the work that sends it, must live until the header has arrived:
    gloo takes a header back when nothing refers to them.

    NCCL's work says nothing of that: it is over as soon as the content is in NCCL's buffers, before
    the receiver knows of the message.
    """

    index: int
    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, dist.Work | None]

    def without_content(self) -> _Sent:
        """Makes the stream that computes wait until NCCL has the content in its buffers, so that it
        can use the memory again."""
        if content := self.works[1]:
            content.wait()
        return replace(self, tensors=self.tensors[:1])

    def wait(self, timeout: datetime.timedelta) -> None:
        """Waits until both have arrived."""
        for work in self.works:
            if work is not None:
                work.wait(timeout)


class NcclTransport:
    """One rank's end of the lanes between the ranks of `group` (by default all ranks).

    Making one is collective: all ranks of `group` do it, with the same `lanes`. `timeout_s` is the
    longest that any wait takes. `backend` is gloo where the ordering is tested without GPUs: it
    too matches messages of one tag in order.
    """

    def __init__(
        self,
        lanes: Iterable[Lane],
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        depth: int = 4,
        device: str | torch.device = "cuda",
        backend: str = "nccl",
    ) -> None:
        self.rank = dist.get_rank(group)
        self.depth = depth
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._is_nccl = backend == "nccl"
        self._stream: Any = torch.cuda.Stream(self._device) if self._is_nccl else None  # type: ignore[no-untyped-call]
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        ordered = sorted(set(lanes))
        self._headers = self._new_group("gloo")
        self._groups = {
            key: self._new_group(backend) for key in sorted({_group_key(lane) for lane in ordered})
        }
        self._tags = {lane: number for number, lane in enumerate(ordered)}
        self._sends: dict[Channel, deque[_Sent]] = defaultdict(deque)
        # Two ranks meet when they first use a communicator: all do so in one order, before any
        # of them can wait for something else.
        for lane in ordered:
            self._meet(lane)
        self._arrivals = {
            lane: _Arrivals(*self._next_header(lane)) for lane in ordered if lane[2] == self.rank
        }

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        lane = _lane(channel)
        self._drain()
        under_way = self._sends[channel]
        if len(under_way) == _MOST_HEADERS:
            self._finish_send(channel)
        # This holds up the stream. The host waits for nobody here: it may have to post what its
        # peer waits for.
        if self._is_nccl and len(under_way) >= self.depth:
            under_way[-self.depth] = under_way[-self.depth].without_content()
        content = dense(tensor).reshape(-1).view(torch.uint8)
        header = torch.tensor([channel.tag, index, len(content)])
        with self._waiting(channel.sending(index), channel.target_rank):
            announced = self._send_header(lane, header)
            work = self._send_bytes(lane, content) if len(content) else None
        under_way.append(_Sent(index, (header, content), (announced, work)))

    def recv(self, channel: Channel, index: int) -> NcclHandle:
        self._drain()
        return NcclHandle(channel, index)

    def arrived(self, handle: Handle) -> bool:
        return False  # the host does not follow the stream that receives

    def wait(self, handle: Handle) -> Tensor:
        channel, index = handle.channel, handle.index
        lane = _lane(channel)
        messages = self._arrivals[lane].messages
        with self._waiting(channel.waiting(index), channel.source_rank):
            self._drain()
            while not messages[channel.tag, index]:
                self._take_header(lane)
            content, work = messages[channel.tag, index].popleft()
            if work is not None:
                work.wait()
        if not messages[channel.tag, index]:
            del messages[channel.tag, index]
        if self._is_nccl:
            content.record_stream(torch.cuda.current_stream(self._device))
        size = channel.dtype.itemsize
        for length in channel.shape:
            size *= length
        if len(content) != size:
            raise TransportError(
                f"rank {channel.source_rank} sent {channel.message(index)} with {len(content)} "
                f"bytes, and rank {self.rank} expects {size}."
            )
        return content.view(channel.dtype).reshape(channel.shape)

    def wait_sent(self, channel: Channel, index: int) -> None:
        under_way = self._sends[channel]
        while under_way and under_way[0].index <= index:
            self._finish_send(channel)

    def close(self) -> None:
        for channel, under_way in self._sends.items():
            while under_way:
                self._finish_send(channel)

    def _finish_send(self, channel: Channel) -> None:
        self._drain()
        sent = self._sends[channel].popleft()
        with self._waiting(channel.sending(sent.index), channel.target_rank):
            sent.wait(self._timeout)

    def _drain(self) -> None:
        """Posts the receives of all messages whose headers are there."""
        for lane, arrivals in self._arrivals.items():
            # gloo writes the header while this reads it: a hint, and `_take_header` waits for all.
            while int(arrivals.header[0]) >= 0:
                self._take_header(lane)
                arrivals = self._arrivals[lane]

    def _take_header(self, lane: Lane) -> None:
        """Waits for a lane's next header and posts its receive."""
        arrivals = self._arrivals[lane]
        arrivals.work.wait(self._timeout)
        tag, index, size = arrivals.header.tolist()
        arrivals.header, arrivals.work = self._next_header(lane)
        arrivals.messages[tag, index].append(self._receive_bytes(lane, size))

    def _next_header(self, lane: Lane) -> tuple[Tensor, dist.Work]:
        header = torch.full((3,), _NOT_THERE)
        work = dist.irecv(header, self._ranks[lane[1]], group=self._headers, tag=self._tags[lane])
        assert work is not None
        return header, work

    def _send_header(self, lane: Lane, header: Tensor) -> dist.Work:
        work = dist.isend(header, self._ranks[lane[2]], group=self._headers, tag=self._tags[lane])
        assert work is not None
        return work

    def _send_bytes(self, lane: Lane, content: Tensor) -> dist.Work:
        work = dist.isend(content, self._ranks[lane[2]], group=self._groups[_group_key(lane)])
        assert work is not None
        return work

    def _receive_bytes(self, lane: Lane, size: int) -> tuple[Tensor, dist.Work | None]:
        with self._beside():
            content = torch.empty(size, dtype=torch.uint8, device=self._device)
            if not size:
                return content, None
            work = dist.irecv(content, self._ranks[lane[1]], group=self._groups[_group_key(lane)])
        return content, work

    def _meet(self, lane: Lane) -> None:
        _, source, target = lane
        if self.rank == source:
            self._send_bytes(lane, torch.zeros(1, dtype=torch.uint8, device=self._device)).wait()
        if self.rank == target:
            _, work = self._receive_bytes(lane, 1)
            assert work is not None
            work.wait()

    def _beside(self) -> AbstractContextManager[Any]:
        """A receive must not wait for what the computing stream was given before it."""
        return torch.cuda.stream(self._stream) if self._is_nccl else nullcontext()

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        options = None
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = self._timeout  # torch warns of one that differs from the group's
        group: dist.ProcessGroup = dist.new_group(
            self._ranks,
            timeout=self._timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
        )
        return group

    @contextmanager
    def _waiting(self, wait: str, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if re.search("tim(ed|ing) out", str(error), re.IGNORECASE):
                raise timed_out(wait, peer, self._timeout.total_seconds()) from error
            raise peer_is_gone(wait, peer, f": {str(error).splitlines()[0]}") from error


def _lane(channel: Channel) -> Lane:
    return DIRECTIONS[channel.kind], channel.source_rank, channel.target_rank


def _group_key(lane: Lane) -> tuple[str, bool]:
    """Lanes of one group have different pairs of ranks, and NCCL has a communicator a pair."""
    traffic, source, target = lane
    return traffic, source < target
