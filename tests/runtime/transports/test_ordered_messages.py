"""The transport over NCCL, with gloo in its place: messages without tags find their receives.

gloo is given no tags here either, so a message that is received in another order than it was sent
has another's bytes.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncpipe.runtime.distributed.connections import lanes_of_plan
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.transports import Channel, nccl
from asyncpipe.runtime.transports.nccl import Lane, NcclTransport, lanes_of
from asyncpipe.tests.support.models.hand_plans import chain, tied
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
SKIP = replace(HIDDEN, name="skip", source=2, target=3, tag=1, dtype=torch.int64, shape=(5,))
MASK = replace(HIDDEN, name="mask", tag=2, dtype=torch.bool, shape=(7,))
SCALAR = replace(HIDDEN, name="scalar", tag=3, dtype=torch.bfloat16, shape=())
EMPTY = replace(HIDDEN, name="empty", tag=4, shape=(2, 0, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=5)
CHANNELS = (HIDDEN, SKIP, MASK, SCALAR, EMPTY, BACK)


def ordered(lanes: frozenset[Lane], timeout_s: float = 30.0, depth: int = 4) -> NcclTransport:
    return NcclTransport(lanes, timeout_s=timeout_s, depth=depth, device="cpu", backend="gloo")


def content(channel: Channel, index: int) -> Tensor:
    return torch.full(channel.shape, index + channel.tag, dtype=channel.dtype)


def ask_in_another_order(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS))
    forward = CHANNELS[:-1]
    if rank == 0:
        for i in range(6):
            for channel in forward if i % 2 else reversed(forward):
                transport.send(channel, content(channel, i), i)
        for i in range(6):
            assert torch.equal(transport.wait(transport.recv(BACK, i)), content(BACK, i))
        transport.wait_sent(HIDDEN, 5)
    else:
        # Channel by channel, the last message first: nothing in the order of sending.
        for channel in sorted(forward, key=lambda channel: -channel.tag):
            handles = [transport.recv(channel, i) for i in range(6)]
            for i in reversed(range(6)):
                assert torch.equal(transport.wait(handles[i]), content(channel, i)), channel
        for i in range(6):
            transport.send(BACK, content(BACK, i), i)
    transport.close()
    return "kept"


def test_messages_find_their_receives_whatever_the_order_of_asking() -> None:
    assert run_processes(2, ask_in_another_order) == ["kept", "kept"]


class Buffered:
    """NCCL's work for a small message: over when the content is in its buffers, whether or not the
    receiver has asked for it."""

    def __init__(self, work: dist.Work, content: Tensor) -> None:
        self.work, self.content = work, content

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """On a GPU the stream waits, and the host sends on."""
        if timeout is not None:
            self.work.wait(timeout)


def send_far_ahead(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS), timeout_s=10.0)
    count = nccl._MOST_HEADERS
    if rank == 0:
        begin_send, buffers = transport._send_bytes, []

        def send_bytes(lane: Lane, content: Tensor) -> Buffered:
            buffers.append(Buffered(begin_send(lane, content), content))
            return buffers[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "_is_nccl", True)
            patch.setattr(transport, "_send_bytes", send_bytes)
            for i in range(count):
                transport.send(HIDDEN, content(HIDDEN, i), i)
            dist.barrier()
            for i in range(count, 2 * count):
                transport.send(HIDDEN, content(HIDDEN, i), i)
        most = len(transport._sends[HIDDEN])
        transport.close()
        return f"{most} kept"
    dist.barrier()
    for i in range(2 * count):
        assert torch.equal(transport.wait(transport.recv(HIDDEN, i)), content(HIDDEN, i))
    transport.close()
    return "all there"


def test_a_sender_whose_host_is_far_ahead_loses_no_header() -> None:
    assert run_processes(2, send_far_ahead) == ["1024 kept", "all there"]


def mismatch(rank: int) -> str:
    """Negative control: the same messages, received in the order of asking."""
    tensors = [content(channel, 1) for channel in (HIDDEN, BACK)]
    if rank == 0:
        for tensor in tensors:
            dist.send(tensor, 1)
        return ""
    found = [torch.empty(2, 3) for _ in tensors]
    for buffer in reversed(found):
        dist.recv(buffer, 0)
    return "same" if torch.equal(found[0], tensors[0]) else "mixed up"


def test_without_headers_they_would_be_mixed_up() -> None:
    assert run_processes(2, mismatch)[1] == "mixed up"


def lanes(plan: Plan) -> frozenset[Lane]:
    return lanes_of_plan(plan, range(len(plan.stages)))


def test_each_direction_of_each_traffic_between_two_ranks_has_a_lane() -> None:
    assert lanes(chain(3).plan) == {
        ("activations", 0, 1), ("activations", 1, 2), ("gradients", 1, 0), ("gradients", 2, 1),
    }  # fmt: skip
    assert {("control", 0, 3), ("control", 3, 0)} <= lanes(tied(4).plan)
    assert lanes_of([replace(HIDDEN, target_rank=0)]) == frozenset()


def send_more_bytes(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS))
    if rank == 0:
        transport.send(HIDDEN, content(HIDDEN, 0), 0)
        transport.close()
        return ""
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(replace(HIDDEN, shape=(2, 2)), 0))
    transport.close()
    return str(raised.value)


def test_a_message_of_another_size_is_refused() -> None:
    assert run_processes(2, send_more_bytes)[1] == (
        'rank 0 sent the activation "hidden" of micro-batch 0 with 24 bytes, and rank 1 expects 16.'
    )
