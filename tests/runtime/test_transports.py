"""Both transports keep the one protocol; the process one ends in bounded time when a peer does."""

import os
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import Channel, GlooTransport, LocalHub, Transport, run_together
from asyncpipe.tests.processes import run_processes

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
SHAPES = ((), (0,), (3,), (2, 0, 3), (4, 5))
HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=1)
TIED = replace(HIDDEN, kind="shared gradient", name="wte.weight", tag=2)


def conversation(channel: Channel) -> dict[int, Tensor]:
    return {i: torch.full(channel.shape, i, dtype=channel.dtype) for i in (0, 1, 2)}


def typed_channels() -> list[Channel]:
    pairs = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    return [
        replace(HIDDEN, tag=10 + n, dtype=dtype, shape=shape)
        for n, (dtype, shape) in enumerate(pairs)
    ]


def sender(transport: Transport) -> None:
    for channel in typed_channels():
        for i, tensor in conversation(channel).items():
            transport.send(channel, tensor, i)
    for i in (2, 0, 1):
        transport.send(HIDDEN, torch.full((3, 2), float(i)).T, i)
    transport.send(TIED, torch.full((2, 3), 8.0), 1)
    transport.wait_sent(TIED, 1)
    for i in range(3):
        assert float(transport.wait(transport.recv(BACK, i)).sum()) == 6 * i


def receiver(transport: Transport) -> None:
    for channel in typed_channels():
        expected = conversation(channel)
        handles = {i: transport.recv(channel, i) for i in expected}
        for i, handle in handles.items():
            found = transport.wait(handle)
            assert found.dtype == channel.dtype and found.shape == channel.shape
            assert torch.equal(found, expected[i])
    # Messages are found by their index, not by the order in which they were sent.
    tied, handles = transport.recv(TIED, 1), [transport.recv(HIDDEN, i) for i in range(3)]
    first, second, third = map(transport.wait, handles)
    first.zero_()
    assert float(second.sum()) == 6 and float(third.sum()) == 12
    assert float(transport.wait(tied).sum()) == 48
    for i in range(3):
        transport.send(BACK, torch.full((2, 3), float(i)), i)


def test_local_transport_keeps_the_protocol() -> None:
    hub = LocalHub(2)
    # One thread: what the receiver sends back must be there before the sender waits for it.
    for i in range(3):
        hub.transport(1).send(BACK, torch.full((2, 3), float(i)), i)
    sender(hub.transport(0))
    for i in range(3):
        assert not hub.transport(0).recv(BACK, i).ready
    receiver(hub.transport(1))
    hub.transport(0).close()


def keep_protocol(rank: int) -> str:
    transport = GlooTransport(timeout_s=20.0, depth=2)
    (sender if rank == 0 else receiver)(transport)
    transport.close()
    return "kept"


def test_gloo_transport_keeps_the_protocol() -> None:
    assert run_processes(2, keep_protocol, limit_s=40) == ["kept", "kept"]


def let_go(rank: int) -> tuple[bool, bool]:
    transport = GlooTransport()
    if rank == 1:
        transport.wait(transport.recv(TIED, 5))
        return True, True
    sent = torch.ones(2, 3)
    memory = StorageWeakRef(sent.untyped_storage())
    transport.send(TIED, sent, 5)
    del sent
    is_held = not memory.expired()
    transport.wait_sent(TIED, 5)
    return is_held, memory.expired()


def test_what_was_sent_is_held_until_it_was_waited_for() -> None:
    assert run_processes(2, let_go, limit_s=40)[0] == (True, True)


def test_a_received_tensor_is_the_receivers_own() -> None:
    hub = LocalHub(2)
    mine = torch.ones(2, 3)
    hub.transport(0).send(HIDDEN, mine, 0)
    hub.transport(1).wait(hub.transport(1).recv(HIDDEN, 0)).zero_()
    assert float(mine.sum()) == 6


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    transport = LocalHub(2).transport(0)
    with pytest.raises(TransportError) as raised:
        transport.send(HIDDEN, torch.ones(3, 3), 7)
    assert (
        'Stage 0 made the activation "hidden" of micro-batch 7 as float32[3, 3], '
        "but the plan has float32[2, 3]." in str(raised.value)
    )
    with pytest.raises(TransportError, match=r"float64\[2, 3\]"):
        transport.send(HIDDEN, torch.ones(2, 3).double(), 0)


def test_local_transport_names_a_message_that_nobody_took() -> None:
    transport = LocalHub(2).transport(0)
    transport.send(HIDDEN, torch.ones(2, 3), 4)
    with pytest.raises(TransportError, match='Rank 1 never took the activation "hidden" of mic'):
        transport.close()
    with pytest.raises(TransportError, match="twice"):
        transport.send(HIDDEN, torch.ones(2, 3), 4)


def test_ranks_that_wait_for_each_other_are_found_at_once() -> None:
    hub = LocalHub(2)

    def waiting(rank: int, channel: Channel):
        handle = hub.transport(rank).recv(channel, 3)
        while not handle.ready:
            yield handle

    with pytest.raises(TransportError) as raised:
        run_together([waiting(0, BACK), waiting(1, HIDDEN)])
    assert str(raised.value) == (
        'No rank can go on: rank 0 waits for the gradient "hidden" of micro-batch 3 from rank 1; '
        'rank 1 waits for the activation "hidden" of micro-batch 3 from rank 0.'
    )


def wait_in_vain(rank: int) -> tuple[str, float]:
    if rank == 0:
        transport = GlooTransport()
        time.sleep(3.0)
        return "", 0.0
    transport = GlooTransport(timeout_s=1.0)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(HIDDEN, 5))
    return str(raised.value), time.monotonic() - start_s


def test_a_wait_has_a_time_out_that_says_who_waits_for_whom() -> None:
    text, waited_s = run_processes(2, wait_in_vain, limit_s=30)[1]
    assert 'rank 1 waits for the activation "hidden" of micro-batch 5 from rank 0 (1 s)' in text
    assert 0.9 < waited_s < 2.5


def send_in_vain(rank: int) -> tuple[str, float]:
    transport = GlooTransport(timeout_s=1.0 if rank == 0 else 60.0, depth=1)
    if rank == 1:
        time.sleep(3.0)
        return "", 0.0
    start_s = time.monotonic()
    transport.send(HIDDEN, torch.ones(2, 3), 0)
    with pytest.raises(TransportError) as raised:
        transport.close()
    return str(raised.value), time.monotonic() - start_s


def test_closing_waits_for_what_was_sent_but_not_for_ever() -> None:
    text, waited_s = run_processes(2, send_in_vain, limit_s=30)[0]
    assert 'rank 0 waits for rank 1 to take the activation "hidden" of micro-batch 0 (1 s)' in text
    assert 0.9 < waited_s < 2.5


def lose_peer(rank: int) -> tuple[str, float]:
    transport = GlooTransport(timeout_s=50.0)
    if rank == 0:
        time.sleep(0.5)
        os._exit(9)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(HIDDEN, 5))
    return str(raised.value), time.monotonic() - start_s


def test_a_killed_peer_is_noticed_long_before_the_time_out() -> None:
    gone, (text, waited_s) = run_processes(2, lose_peer, limit_s=40)
    assert gone is None
    assert 'waits for the activation "hidden" of micro-batch 5 from rank 0, but rank 0 is' in text
    assert waited_s < 10


def sleep_or_raise(rank: int) -> None:
    if rank == 1:
        raise ValueError("no such luck")
    time.sleep(60)


def test_a_rank_that_hangs_is_killed_and_one_that_raises_gives_its_traceback() -> None:
    start_s = time.monotonic()
    hung, raised = run_processes(2, sleep_or_raise, limit_s=3)
    assert hung is None and "ValueError: no such luck" in raised
    assert time.monotonic() - start_s < 15
