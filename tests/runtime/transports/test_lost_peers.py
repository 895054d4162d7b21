"""The other ranks name a rank that fails to do its part, over every transport."""

import os
import select
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.transports import Transport
from asyncpipe.tests.support.processes.messages import (
    BACK,
    HIDDEN,
    LARGE,
    LARGE_BACK,
    content,
    every_process_kind,
)
from asyncpipe.tests.support.processes.transports import (
    PROCESS_KINDS,
    open_transport,
    run_ranks,
    same_bits,
)

# --- When a rank does not do its part -----------------------------------------------------------


LIMIT_S = 0.5


def sleep_until(mark: Path) -> tuple[str, float]:
    end_s = time.monotonic() + 20
    while not mark.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    return "", 0.0


def wait_in_vain(rank: int, kind: str, over: Path) -> tuple[str, float]:
    transport = open_transport(kind, timeout_s=60.0 if rank == 0 else LIMIT_S)
    if rank == 0:
        return sleep_until(over)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(HIDDEN, 5))
    waited_s = time.monotonic() - start_s
    over.touch()
    return str(raised.value), waited_s


@every_process_kind
def test_a_wait_has_a_time_out_that_says_who_waits_for_whom(kind: str, tmp_path: Path) -> None:
    text, waited_s = run_ranks(kind, 2, wait_in_vain, tmp_path / "over", limit_s=30)[1]
    assert 'rank 1 waits for the activation "hidden" of micro-batch 5 from rank 0 (0.5 s)' in text
    assert "See what rank 0 does, or allow more time with --timeout-s." in text
    assert 0.9 * LIMIT_S < waited_s < LIMIT_S + 1.5


def send_in_vain(rank: int, kind: str, count: int, over: Path) -> tuple[str, float]:
    transport = open_transport(kind, timeout_s=LIMIT_S if rank == 0 else 60.0, depth=1)
    if rank == 1:
        return sleep_until(over)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        for i in range(count):
            transport.send(LARGE, content(LARGE, i), i)
        transport.close()
    waited_s = time.monotonic() - start_s
    over.touch()
    return str(raised.value), waited_s


@pytest.mark.parametrize("count", [1, 2], ids=["closing", "sending"])
@every_process_kind
def test_closing_and_sending_wait_for_the_peer_but_not_for_ever(
    kind: str, count: int, tmp_path: Path
) -> None:
    text, waited_s = run_ranks(kind, 2, send_in_vain, count, tmp_path / "over", limit_s=30)[0]
    assert 'rank 0 waits for rank 1 to take the activation "large" of micro-batch 0 (0.5 s)' in text
    assert 0.9 * LIMIT_S < waited_s < LIMIT_S + 1.5


def end_like(how: str) -> None:
    if how == "exit":
        os._exit(9)
    if how == "raised":
        raise ValueError("no such luck")
    if how == "forked and killed" and os.fork() == 0:
        time.sleep(3.0)  # A worker that holds what its parent held.
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_peer(rank: int, kind: str, how: str, waits: str, mark: Path) -> tuple[str, float]:
    """The error on the remaining rank, and its delay after the end of the peer."""
    transport = open_transport(kind, timeout_s=50.0, depth=1)
    if rank == 0:
        mark.write_text(str(os.getpid()))
        transport.send(HIDDEN, content(HIDDEN, 0), 0)
        while not mark.with_suffix(".watched").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        mark.touch()
        if how == "raised":
            transport.close()
        end_like(how)
    assert same_bits(transport.wait(transport.recv(HIDDEN, 0)), content(HIDDEN, 0))
    ends_s: list[float] = []
    peer = os.pidfd_open(int(mark.read_text()))
    Thread(target=note_end, args=(peer, ends_s), daemon=True).start()
    mark.with_suffix(".watched").touch()
    with pytest.raises(TransportError) as raised:
        if waits == "receive":
            transport.wait(transport.recv(HIDDEN, 5))
        else:
            for i in range(9):
                transport.send(LARGE_BACK, content(LARGE_BACK, i), i)
            transport.close()
    told_s = time.monotonic()
    return str(raised.value), told_s - ends_s[0] if ends_s else 0.0


def note_end(process: int, ends_s: list[float]) -> None:
    select.select([process], [], [])
    ends_s.append(time.monotonic())


@pytest.mark.parametrize("waits", ["receive", "send"])
@pytest.mark.parametrize("how", ["exit", "raised", "killed"])
@every_process_kind
def test_a_peer_that_ends_is_named_within_two_seconds(
    kind: str, how: str, waits: str, tmp_path: Path
) -> None:
    mine = run_ranks(kind, 2, lose_peer, how, waits, tmp_path / "mark", limit_s=40)[1]
    if PROCESS_KINDS[kind].end_together:
        assert mine is None
        assert time.time() - (tmp_path / "mark").stat().st_mtime < 10
        return
    assert isinstance(mine, tuple), mine
    text, waited_s = mine
    if waits == "receive":
        assert 'waits for the activation "hidden" of micro-batch 5 from rank 0, but rank' in text
    else:
        assert 'rank 1 waits for rank 0 to take the gradient "large" of micro-batch' in text
    assert "but rank 0 is gone" in text
    assert waited_s < 2.0


def test_a_killed_peer_is_noticed_though_a_process_that_it_forked_lives(tmp_path: Path) -> None:
    how = "forked and killed"
    mine = run_ranks("shm", 2, lose_peer, how, "receive", tmp_path / "mark", limit_s=40)[1]
    assert isinstance(mine, tuple), mine
    assert "but rank 0 is gone" in mine[0] and mine[1] < 2.0


# --- What is left behind ------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:" in line or "/dev/shm/" in line]


def talk(transport: Transport, numbers: range) -> None:
    for i in numbers:
        for there, back in ((HIDDEN, BACK), (LARGE, LARGE_BACK)):
            if transport.rank == 0:
                transport.send(there, torch.zeros(there.shape), i)
                transport.wait(transport.recv(back, i))
            else:
                transport.wait(transport.recv(there, i))
                transport.send(back, torch.zeros(back.shape), i)


def talk_long(rank: int, kind: str) -> tuple[int, list[str]]:
    of_others = shared_mappings()
    transport = open_transport(kind, depth=2)
    talk(transport, range(20))
    early = open_files()
    talk(transport, range(20, 520))
    grown = open_files() - early
    transport.close()
    del transport
    return grown, [mapping for mapping in shared_mappings() if mapping not in of_others]


@every_process_kind
def test_two_thousand_messages_open_no_file_and_leave_no_memory_behind(kind: str) -> None:
    assert run_ranks(kind, 2, talk_long) == [(0, []), (0, [])]
