"""A signal to the process that started ranks reaches each of them, and they end in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from asyncpipe.runtime.launch.local import SignalForwarder

DEAF = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print(flush=True)\n"
LISTENING = (
    "import signal, sys, time; signal.signal({}, lambda *_: sys.exit(7)); print(flush=True)\n"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(program: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", f"{program}time.sleep(60)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_handed_on_to_ranks_that_start_later_too(
    number: signal.Signals, started: list[subprocess.Popen[bytes]]
) -> None:
    before = signal.getsignal(number)
    with SignalForwarder(60.0) as signals:
        signals.processes = lambda: [process.pid for process in started]
        started.append(start(LISTENING.format(int(number))))
        os.kill(os.getpid(), number)
        assert started[0].wait(10) == 7
        started.append(start(LISTENING.format(int(number))))
        assert started[1].wait(10) == 7
        assert signals.asked_by is number and not signals.is_overdue
    assert signal.getsignal(number) is before


def test_a_rank_that_does_not_end_in_time_is_killed(
    started: list[subprocess.Popen[bytes]],
) -> None:
    started.append(start(DEAF))
    with SignalForwarder(0.5) as signals:
        signals.processes = lambda: [started[0].pid]
        asked_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert started[0].wait(60) == -signal.SIGKILL
        assert time.monotonic() - asked_s >= 0.5
        assert signals.is_overdue
