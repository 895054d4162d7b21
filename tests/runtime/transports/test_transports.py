"""Every transport keeps one protocol: a message arrives bit for bit and is found by its name."""

import random
import time
from dataclasses import replace

import pytest
import torch

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.executor.mailbox import take
from asyncpipe.runtime.transports import Transport
from asyncpipe.tests.support.models.odd_tensors import put_off
from asyncpipe.tests.support.processes.messages import (
    BACK,
    DTYPES,
    HIDDEN,
    LARGE,
    LARGE_BACK,
    SHAPES,
    Steps,
    content,
    every_kind,
    every_process_kind,
    receive,
)
from asyncpipe.tests.support.processes.transports import (
    PROCESS_KINDS,
    converse,
    open_transport,
    run_ranks,
    same_bits,
)

# --- What is sent arrives -----------------------------------------------------------------------


def typed(transport: Transport) -> Steps:
    channels = [
        replace(HIDDEN, tag=10 + n, dtype=dtype, shape=shape)
        for n, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in SHAPES)
    ]
    for channel in channels:
        if transport.rank == 0:
            for i in range(3):
                transport.send(channel, content(channel, i), i)
        else:
            handles = [transport.recv(channel, i) for i in range(3)]
            for i, handle in enumerate(handles):
                found = yield from take(transport, handle)
                assert same_bits(found, content(channel, i)), channel


@every_kind
def test_every_dtype_and_shape_arrives_bit_for_bit(kind: str) -> None:
    converse(kind, 2, typed)


def strided(transport: Transport) -> Steps:
    for n, size in enumerate((6, 600)):
        base = torch.arange(float(size * size)).view(size, size)
        tensors = [
            base.T,
            base[::2, 1::3],
            base[:, None].expand(size, 2, size),
            base.flip(0),
            base.view(1, 1, size, size).contiguous(memory_format=torch.channels_last),
            base[0].clone().requires_grad_().exp(),
            *put_off(base),
        ]
        for i, tensor in enumerate(tensors):
            shape, dtype = tuple(tensor.shape), tensor.dtype
            channel = replace(HIDDEN, tag=20 * n + i, shape=shape, dtype=dtype)
            if transport.rank == 0:
                transport.send(channel, tensor, 0)
            else:
                found = yield from take(transport, transport.recv(channel, 0))
                assert same_bits(found, tensor.detach().resolve_conj().resolve_neg())
                assert not found.requires_grad and found.is_contiguous()


@every_kind
def test_any_layout_arrives_contiguous_and_cut_off_from_its_graph(kind: str) -> None:
    converse(kind, 2, strided)


def huge(transport: Transport) -> Steps:
    shape = (64, 2**20)
    there, back = replace(HIDDEN, shape=shape), replace(BACK, shape=shape)
    for sent, taken in ((there, back),) if transport.rank == 0 else ((back, there),):
        mine = torch.full(shape, float(sent.tag))
        mine[-1, -1] = 0.5
        transport.send(sent, mine, 0)
        found = yield from take(transport, transport.recv(taken, 0))
        assert float(found[-1, -1]) == 0.5
        found[-1, -1] = taken.tag
        assert bool((found == taken.tag).all())


@every_kind
def test_a_quarter_of_a_gibibyte_goes_both_ways_at_once(kind: str) -> None:
    converse(kind, 2, huge)


def resized(transport: Transport) -> Steps:
    for i in range(30):
        length = (7 * i) % 11 * 300
        channel = replace(LARGE, shape=(2, length))
        if transport.rank == 0:
            transport.send(channel, content(channel, i), i)
        else:
            yield from receive(transport, channel, i)


@every_kind
def test_a_channel_may_carry_another_shape_at_each_index(kind: str) -> None:
    converse(kind, 2, resized)


def many_tensors(transport: Transport) -> Steps:
    channels = [
        replace(HIDDEN, name=f"t{n}", tag=n, shape=(n, 40), dtype=DTYPES[n % len(DTYPES)])
        for n in range(100)
    ]
    for i in range(6):
        if transport.rank == 0:
            for channel in channels:
                transport.send(channel, content(channel, i), i)
        else:
            handles = [transport.recv(channel, i) for channel in channels]
            for channel, handle in zip(channels, handles, strict=True):
                found = yield from take(transport, handle)
                assert same_bits(found, content(channel, i))


@every_kind
def test_a_micro_batch_may_have_a_hundred_tensors(kind: str) -> None:
    converse(kind, 2, many_tensors)


def skipping(transport: Transport) -> Steps:
    pairs = [(0, 2), (0, 3), (1, 3), (0, 1), (2, 3)]
    channels = [
        replace(LARGE, name=f"{a}{b}", tag=n, source=a, target=b, source_rank=a, target_rank=b)
        for n, (a, b) in enumerate(pairs)
    ]
    for i in range(8):
        for channel in channels:
            if channel.target == transport.rank:
                yield from receive(transport, channel, i)
        for channel in channels:
            if channel.source == transport.rank:
                transport.send(channel, content(channel, i), i)


@every_kind
def test_ranks_that_are_no_neighbours_talk_too(kind: str) -> None:
    converse(kind, 4, skipping)


# --- In any order -------------------------------------------------------------------------------


def shuffled(transport: Transport) -> Steps:
    channels = [replace(HIDDEN, tag=n, shape=(n * n, 100)) for n in range(12)]
    for first in range(0, 24, 4):
        keys = [(channel, i) for channel in channels for i in range(first, first + 4)]
        random.Random(transport.rank + first).shuffle(keys)
        if transport.rank == 0:
            for channel, i in keys:
                transport.send(channel, content(channel, i), i)
        else:
            handles = [(transport.recv(channel, i), channel, i) for channel, i in keys]
            random.Random(first).shuffle(handles)
            for handle, channel, i in handles:
                found = yield from take(transport, handle)
                assert same_bits(found, content(channel, i)), channel.message(i)


@every_kind
def test_messages_are_found_by_channel_and_index_in_any_order(kind: str) -> None:
    converse(kind, 2, shuffled)


def noticed(transport: Transport) -> Steps:
    if transport.rank == 0:
        yield from receive(transport, BACK, 0)
        transport.send(LARGE, content(LARGE, 0), 0)
        transport.send(HIDDEN, content(HIDDEN, 0), 0)
    else:
        handle = transport.recv(LARGE, 0)
        assert not transport.arrived(handle)
        transport.send(BACK, content(BACK, 0), 0)
        yield from receive(transport, HIDDEN, 0)
        end_s = time.monotonic() + 10
        while not transport.arrived(handle):
            assert time.monotonic() < end_s
        assert same_bits(transport.wait(handle), content(LARGE, 0))


@pytest.mark.parametrize("kind", ["local", "shm", "mpi"])
def test_a_message_is_known_to_have_arrived_before_it_is_waited_for(kind: str) -> None:
    converse(kind, 2, noticed)


def repeated(transport: Transport) -> Steps:
    for value in range(5):
        if transport.rank == 0:
            transport.send(HIDDEN, torch.full((2, 3), float(value)), 7)
        else:
            found = yield from take(transport, transport.recv(HIDDEN, 7))
            assert float(found[0, 0]) == value


@every_process_kind
def test_one_index_used_again_arrives_in_the_order_of_its_sends(kind: str) -> None:
    converse(kind, 2, repeated, depth=2)


def crossing(transport: Transport) -> Steps:
    mine, other = (LARGE, LARGE_BACK) if transport.rank == 0 else (LARGE_BACK, LARGE)
    for first in range(0, 40, 4):
        for i in range(first, first + 4):
            transport.send(mine, content(mine, i), i)
        for i in range(first, first + 4):
            yield from receive(transport, other, i)


@every_kind
def test_ranks_that_send_depth_messages_to_each_other_first_do_not_block(kind: str) -> None:
    converse(kind, 2, crossing, depth=4)


def posted_ahead(transport: Transport) -> Steps:
    """Rank 1 waits for rank 2, which waits until rank 0 has sent more than its depth."""
    after = replace(HIDDEN, name="after", source_rank=0, target_rank=2, tag=8)
    then = replace(HIDDEN, name="then", source_rank=2, target_rank=1, tag=9)
    if transport.rank == 0:
        for i in range(10):
            transport.send(LARGE, content(LARGE, i), i)
        transport.send(after, content(after, 0), 0)
    elif transport.rank == 2:
        yield from receive(transport, after, 0)
        transport.send(then, content(then, 0), 0)
    else:
        handles = [transport.recv(LARGE, i) for i in range(10)]
        yield from receive(transport, then, 0)
        for i, handle in enumerate(handles):
            assert same_bits((yield from take(transport, handle)), content(LARGE, i))


@every_kind
def test_what_is_posted_is_taken_in_while_its_rank_waits_for_something_else(kind: str) -> None:
    converse(kind, 3, posted_ahead, depth=2)


def far_ahead(transport: Transport) -> Steps:
    for i in range(300):
        if transport.rank == 0:
            transport.send(LARGE, torch.full(LARGE.shape, float(i)), i)
        else:
            found = yield from take(transport, transport.recv(LARGE, i))
            assert float(found[0, 0]) == float(found[-1, -1]) == i


@every_kind
def test_many_more_messages_than_the_depth_go_through(kind: str) -> None:
    converse(kind, 2, far_ahead, depth=3)


def hold_back(rank: int, kind: str) -> list[float]:
    transport = open_transport(kind, depth=3)
    channel = replace(LARGE, shape=(1024, 1024))
    times, start_s = [], time.monotonic()
    if rank == 1:
        time.sleep(1.0)
        for i in range(8):
            transport.wait(transport.recv(channel, i))
    else:
        for i in range(8):
            transport.send(channel, torch.zeros(channel.shape), i)
            times.append(time.monotonic() - start_s)
    transport.close()
    return times


@pytest.mark.parametrize("kind", [kind for kind in PROCESS_KINDS if PROCESS_KINDS[kind].holds_back])
def test_a_sender_is_held_back_once_depth_messages_are_under_way(kind: str) -> None:
    times = run_ranks(kind, 2, hold_back, limit_s=40)[0]
    assert isinstance(times, list), times
    assert times[2] < 0.8 < times[6]


# --- Whose memory it is -------------------------------------------------------------------------


def owned(transport: Transport) -> Steps:
    if transport.rank == 0:
        for i in range(40):
            mine = content(LARGE, i)
            transport.send(LARGE, mine, i)
            transport.wait_sent(LARGE, i)
            mine.zero_()  # It has arrived, and is ours again.
        return
    kept = []
    handles = [transport.recv(LARGE, i) for i in range(40)]
    for i, handle in enumerate(handles):
        found = yield from take(transport, handle)
        if i % 3 == 0:
            found.zero_()
        elif i % 3 == 1:
            kept.append((i, found))
    for i, tensor in kept:
        assert same_bits(tensor, content(LARGE, i))


@every_kind
def test_a_received_tensor_is_its_receivers_to_write_to_and_to_keep(kind: str) -> None:
    converse(kind, 2, owned, depth=2)


def in_a_graph(transport: Transport) -> Steps:
    """What arrived is saved by autograd, and read in the backward, long after."""
    weight = torch.full((513,), 0.5, requires_grad=True)
    losses = []
    for i in range(12):
        if transport.rank == 0:
            transport.send(LARGE, torch.full(LARGE.shape, float(i)), i)
        else:
            found = yield from take(transport, transport.recv(LARGE, i))
            losses.append((found * weight).sum())
    for loss in losses:
        loss.backward()
    if transport.rank == 1:
        assert torch.equal(weight.grad, torch.full((513,), 512.0 * sum(range(12))))


@every_kind
def test_what_autograd_keeps_is_not_overwritten(kind: str) -> None:
    converse(kind, 2, in_a_graph, depth=2)


def side_by_side(rank: int, kind: str) -> str:
    first, second = open_transport(kind), open_transport(kind)
    for channel in (HIDDEN, LARGE):
        if rank == 0:
            second.send(channel, torch.full(channel.shape, 2.0), 0)
            first.send(channel, torch.full(channel.shape, 1.0), 0)
        else:
            assert float(first.wait(first.recv(channel, 0)).mean()) == 1.0
            assert float(second.wait(second.recv(channel, 0)).mean()) == 2.0
    first.close()
    second.close()
    return "kept"


@every_process_kind
def test_two_transports_side_by_side_do_not_mix(kind: str) -> None:
    assert run_ranks(kind, 2, side_by_side) == ["kept", "kept"]


# --- What is refused ----------------------------------------------------------------------------


def refused(transport: Transport) -> Steps:
    with pytest.raises(TransportError) as raised:
        transport.send(HIDDEN, torch.ones(3, 3), 7)
    assert (
        'stage 0 made the activation "hidden" of micro-batch 7 as float32[3, 3], '
        "but the plan has float32[2, 3]." in str(raised.value)
    )
    assert "fill up a smaller last one" in str(raised.value)
    with pytest.raises(TransportError, match=r"float64\[2, 3\].*\n.*--dtype"):
        transport.send(HIDDEN, torch.ones(2, 3).double(), 0)
    yield from ()


@every_kind
def test_a_tensor_of_another_shape_or_dtype_is_refused(kind: str) -> None:
    converse(kind, 1, refused)
