"""Behavior specific to ranks that share the memory of a host."""

import os
import resource
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import Channel, ShmTransport, peers
from asyncpipe.runtime.transports.peers import SharedMemory, Slots, create_memory
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (512, 512))
DONE = replace(HIDDEN, name="done", source_rank=1, target_rank=0, tag=1, shape=(1,))
MEBIBYTE = 2**20
DEPTH = 4


def test_the_last_slot_given_back_is_the_next_one_used() -> None:
    slots = Slots(MEBIBYTE)
    places = [slots.take(1000) for _ in range(3)]
    assert len(set(places)) == 3 and slots.used_bytes == 3 * 1024
    slots.give_back(places[0])
    slots.give_back(places[2])
    assert [slots.take(513), slots.take(1024)] == [places[2], places[0]]
    assert slots.take(1) == 3 * 1024
    assert slots.take(2000) % 64 == 0


def test_a_message_that_the_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(TransportError, match="of 5000 bytes does not fit into the 4096 bytes of"):
        Slots(4096).take(5000)


def test_shared_memory_has_no_name_and_no_other_user_can_open_it() -> None:
    descriptor = create_memory()
    state = os.fstat(descriptor)
    assert stat.S_IMODE(state.st_mode) == 0o600 and state.st_nlink == 0
    with pytest.raises(PermissionError):  # A peer that shrank it would end us by SIGBUS.
        os.ftruncate(descriptor, 0)
    memory = SharedMemory(descriptor)
    assert memory.size == state.st_size and state.st_blocks == 0
    memory.bytes_at(memory.size - 8, 8)[:] = 7
    assert memory.bytes_at(memory.size - 8, 8).tolist() == [7] * 8


def resident_shared_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssShmem")).split()[1])


def keep_some(rank: int, keep: int) -> int:
    transport = ShmTransport(timeout_s=20, depth=DEPTH)
    kept: list[Tensor] = []
    for i in range(400):
        if rank == 0:
            transport.send(HIDDEN, torch.full(HIDDEN.shape, float(i)), i)
        else:
            kept = [*kept, transport.wait(transport.recv(HIDDEN, i))][-keep:]
    assert all(float(x[3, 3]) == 400 - len(kept) + n for n, x in enumerate(kept))
    shared = resident_shared_bytes()
    transport.close()
    return shared


@pytest.mark.parametrize("keep", [1, 20])
def test_slots_are_used_again_however_many_tensors_are_kept(keep: int) -> None:
    sender, receiver = run_processes(2, keep_some, keep)
    assert MEBIBYTE <= sender <= 4 * DEPTH * MEBIBYTE
    assert 0 < receiver <= 4 * DEPTH * MEBIBYTE


def keep_after_close(rank: int) -> bool:
    transport = ShmTransport(timeout_s=20)
    if rank == 0:
        transport.send(HIDDEN, torch.full(HIDDEN.shape, 3.0), 0)
        transport.wait(transport.recv(DONE, 0))
        transport.close()
        return True
    kept = transport.wait(transport.recv(HIDDEN, 0))
    transport.send(DONE, torch.ones(1), 0)
    transport.close()
    del transport
    return bool((kept == 3).all()) and float(kept.add_(1)[0, 0]) == 4


def test_a_received_tensor_outlives_its_transport() -> None:
    assert run_processes(2, keep_after_close) == [True, True]


def places_of_messages(rank: int) -> list[int]:
    channels = [
        Channel("activation", f"h_{size}", 0, 1, 0, 1, tag, torch.float32, (size,))
        for tag, size in enumerate((1, 3, 50, 2000, 2048, 2049, 5000))
    ]
    transport = ShmTransport(timeout_s=20)
    found = []
    for channel in channels:
        for index in range(3):
            if rank == 0:
                transport.send(channel, torch.ones(channel.shape), index)
            else:
                found.append(transport.wait(transport.recv(channel, index)).data_ptr() % 64)
    transport.close()
    return found


def test_what_is_received_begins_where_sums_are_the_same_in_every_run() -> None:
    _, places = run_processes(2, places_of_messages)
    assert places == [0] * 21


def send_and_die(rank: int) -> str:
    transport = ShmTransport(timeout_s=20)
    if rank == 0:
        for i in range(3):
            transport.send(HIDDEN, torch.full(HIDDEN.shape, float(i)), i)
        os.kill(os.getpid(), signal.SIGKILL)
    # What the peer never reads must not take away what it sent.
    transport.send(DONE, torch.ones(1), 0)
    time.sleep(0.5)
    for i in range(3):
        assert float(transport.wait(transport.recv(HIDDEN, i))[0, 0]) == i
    with pytest.raises(TransportError, match="micro-batch 3 from rank 0, but rank 0 is gone."):
        transport.wait(transport.recv(HIDDEN, 3))
    return "told"


def test_what_a_peer_sent_before_it_was_killed_arrives() -> None:
    assert run_processes(2, send_and_die) == [None, "told"]


def disagree(rank: int) -> str:
    transport = ShmTransport(timeout_s=20)
    if rank == 0:
        transport.send(HIDDEN, torch.zeros(HIDDEN.shape), 0)
        time.sleep(1)
        return ""
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(replace(HIDDEN, shape=(2, 2)), 0))
    return str(raised.value)


def test_ranks_that_disagree_about_a_size_are_told_both() -> None:
    assert (
        'rank 1 waits for the activation "hidden" of micro-batch 0 from rank 0 as 16 bytes, '
        "but 1048576 were sent." in run_processes(2, disagree)[1]
    )


def limited(rank: int) -> str | None:
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
    return peers.obstacle()


def test_too_little_address_space_is_seen_beforehand() -> None:
    for reason in run_processes(2, limited):
        assert reason == "rank 1 cannot map a memory file of Linux's (memfd, ulimit -v)"


def elsewhere(rank: int, host: bytes) -> str:
    if rank == 1:
        peers._host = lambda: host
    with pytest.raises(TransportError) as raised:
        ShmTransport(timeout_s=20)
    return str(raised.value)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (b"another host, you", "ranks 0 and 1 are not on one host"),
        (bytes(16), "rank 1 cannot map a memory file"),
    ],
)
def test_ranks_that_cannot_share_memory_are_all_told_why(host: bytes, reason: str) -> None:
    for text in run_processes(2, elsewhere, host[:16]):
        assert reason in text and "Use --transport gloo." in text


def crowd(rank: int) -> list[float]:
    """Every rank sends to every other, more than a socket's buffer takes, before it receives."""
    transport = ShmTransport(timeout_s=20, depth=64)
    ranks = range(6)
    channels = {
        (a, b): replace(HIDDEN, source_rank=a, target_rank=b, tag=n, shape=(2000,))
        for n, (a, b) in enumerate((a, b) for a in ranks for b in ranks)
    }
    for i in range(64):
        for other in ranks:
            if other != rank:
                transport.send(channels[rank, other], torch.full((2000,), float(rank)), i)
    found = [
        float(transport.wait(transport.recv(channels[other, rank], i))[-1])
        for other in ranks
        for i in range(64)
        if other != rank
    ]
    transport.close()
    return found


def test_all_ranks_may_send_before_any_receives() -> None:
    for rank, found in enumerate(run_processes(6, crowd)):
        assert found == [float(other) for other in range(6) if other != rank for _ in range(64)]


def burst_then_sleep(rank: int) -> tuple[float, float]:
    """Core seconds of a second in which the rank waits, after a time when a socket was full, and
    of one in which it spins."""
    transport = ShmTransport(timeout_s=20, depth=400)
    small = replace(HIDDEN, shape=(2000,))
    waited_s = spun_s = 0.0
    if rank == 0:
        for i in range(400):
            transport.send(small, torch.zeros(2000), i)
        transport.wait(transport.recv(DONE, 0))
        waited_s = core_seconds(lambda: transport.wait(transport.recv(DONE, 1)))
        spun_s = core_seconds(spin)
    else:
        time.sleep(0.5)
        for i in range(400):
            transport.wait(transport.recv(small, i))
        transport.send(DONE, torch.ones(1), 0)
        time.sleep(1.0)
        transport.send(DONE, torch.ones(1), 1)
    transport.close()
    return waited_s, spun_s


def core_seconds(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


def spin() -> None:
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        pass


def test_a_rank_that_waits_uses_no_core() -> None:
    """Relative to the processor time of a rank that spins, so that a busy machine passes too."""
    used = run_processes(2, burst_then_sleep)[0]
    assert isinstance(used, tuple), used
    waited_s, spun_s = used
    assert waited_s < 0.1 * spun_s
