"""A signal that asks a run to stop -> the same at each of its ranks, and an end in bounded time.

SIGTERM and SIGUSR1 ask a run to write a checkpoint and end (Slurm sends them before it kills). The
process that started ranks hands the first on to them, and waits for their end as for any other. A
rank that does not take it in time is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType

from ..signals import STOPPING, handled

_BEAT_S = 0.2


class HandingOn:
    """While entered, hands the first such signal on to all `processes()`, those too that start
    later, and kills what is left of them `limit_s` later. Only a main thread has signals."""

    def __init__(self, limit_s: float) -> None:
        self.processes: Callable[[], Collection[int]] = tuple
        self.asked_by: signal.Signals | None = None
        self.is_overdue = False
        self._limit_s = limit_s
        self._handled = handled(STOPPING, self._ask)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hand_on, name="handing on", daemon=True)

    def __enter__(self) -> HandingOn:
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._handled.__exit__(None, None, None)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked_by is None:
            self.asked_by = signal.Signals(number)
            self._thread.start()

    def _hand_on(self) -> None:
        assert self.asked_by is not None
        told: set[int] = set()
        end_s = time.monotonic() + self._limit_s
        while not self.is_overdue:
            self.is_overdue = time.monotonic() > end_s
            processes = {*self.processes()}
            _send(processes - told, self.asked_by)
            _send(processes if self.is_overdue else (), signal.SIGKILL)
            told |= processes
            if self._ended.wait(_BEAT_S):
                return


def _send(processes: Collection[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
