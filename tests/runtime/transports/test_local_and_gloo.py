"""Behavior specific to ranks of one thread, and to ranks over gloo."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import Channel, GlooTransport, Handle, LocalHub, run_together
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=1)


def test_a_receive_over_local_is_not_ready_before_its_send() -> None:
    hub = LocalHub(2)
    handle = hub.transport(1).recv(HIDDEN, 0)
    assert not handle.ready
    hub.transport(0).send(HIDDEN, torch.ones(2, 3), 0)
    assert handle.ready


def test_local_transport_names_a_message_that_nobody_took() -> None:
    transport = LocalHub(2).transport(0)
    transport.send(HIDDEN, torch.ones(2, 3), 4)
    with pytest.raises(TransportError, match='rank 1 never took the activation "hidden" of mic'):
        transport.close()
    with pytest.raises(TransportError, match="twice"):
        transport.send(HIDDEN, torch.ones(2, 3), 4)


def test_ranks_that_wait_for_each_other_are_found_at_once() -> None:
    hub = LocalHub(2)

    def waiting(rank: int, channel: Channel) -> Generator[Handle, None, None]:
        handle = hub.transport(rank).recv(channel, 3)
        while not handle.ready:
            yield handle

    with pytest.raises(TransportError) as raised:
        run_together([waiting(0, BACK), waiting(1, HIDDEN)])
    assert str(raised.value) == (
        'no rank can continue: rank 0 waits for the gradient "hidden" of micro-batch 3 from rank '
        '1; rank 1 waits for the activation "hidden" of micro-batch 3 from rank 0.'
    )


def let_go(rank: int) -> tuple[bool, bool]:
    transport = GlooTransport()
    if rank == 1:
        transport.wait(transport.recv(HIDDEN, 5))
        return True, True
    sent = torch.ones(2, 3)
    memory = StorageWeakRef(sent.untyped_storage())
    transport.send(HIDDEN, sent, 5)
    del sent
    is_held = not memory.expired()
    transport.wait_sent(HIDDEN, 5)
    return is_held, memory.expired()


def test_what_gloo_sends_is_held_until_it_was_waited_for() -> None:
    assert run_processes(2, let_go, limit_s=40)[0] == (True, True)
