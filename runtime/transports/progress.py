"""MPI requests under way -> requests that are over, while the rank computes or waits.

MPI moves large messages only while a process is inside one of its calls, and it cannot wake a
process that sleeps. So somebody has to ask again and again: the rank itself while it waits for a
message, a thread while it computes. Ranks share cores, so neither spins: a nap between two
questions is a tenth of the time in which nothing happened, which is what a message may be late by,
and with nothing under way the thread sleeps until there is something.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

SHORTEST_NAP_S = 50e-6
LONGEST_NAP_S = 1e-3

EAGER_S = 200e-6
"""How long a rank that begins to wait only yields its core before it naps."""


class Message:
    """A send or a receive. It is handed to MPI by `start` as soon as `may_start`, which is at
    once but for memory of a GPU that is still being written. MPI reads or writes `buffer` until
    the message is over, so that it lives as long, whoever else lets it go."""

    __slots__ = ("buffer", "is_over", "may_start", "request", "start")

    def __init__(
        self, buffer: Tensor, start: Callable[[], Any], may_start: Callable[[], bool] | None
    ) -> None:
        self.buffer = buffer
        self.start = start
        self.may_start = may_start
        self.request: Any = None
        self.is_over = False


class Progress:
    """Looks after the messages under way. `test_some` is MPI.Request.Testsome."""

    def __init__(self, test_some: Callable[[list[Any]], list[int] | None]) -> None:
        self._test_some = test_some
        self._asking = threading.Lock()
        self._new: deque[Message] = deque()
        self._under_way: list[Message] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._waits = False  # the rank itself asks
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="mpi progress", daemon=True)
        self._thread.start()

    def add(self, message: Message) -> None:
        """Takes a message; its request is made now if it can be."""
        if message.may_start is None:
            message.request = message.start()
        self._new.append(message)
        self._wake.set()

    def wait(self, message: Message, timeout_s: float) -> None:
        """Returns when the message is over. Raises TimeoutError, or what MPI raised."""
        self._waits = True
        try:
            start_s = time.monotonic()
            while not message.is_over:
                self.ask()
                if self._error is not None:
                    raise self._error
                waited_s = time.monotonic() - start_s
                if message.is_over:
                    break
                if waited_s > timeout_s:
                    raise TimeoutError
                if waited_s < EAGER_S:
                    os.sched_yield()
                else:
                    time.sleep(_nap_s(waited_s))
        finally:
            self._waits = False
            if self._new or self._under_way:
                self._wake.set()

    def ask(self) -> bool:
        """Asks MPI once; whether anything was new."""
        with self._asking:
            known = len(self._under_way)
            while self._new:
                self._under_way.append(self._new.popleft())
            is_new = len(self._under_way) > known
            for message in self._under_way:
                if message.request is None and (message.may_start is None or message.may_start()):
                    message.request = message.start()
            started = [message for message in self._under_way if message.request is not None]
            over = self._test_some([message.request for message in started]) if started else None
            for position in over or ():
                started[position].is_over = True
            if over:
                self._under_way = [message for message in self._under_way if not message.is_over]
            return is_new or bool(over)

    def close(self) -> None:
        """Ends the thread, and takes back the receives that nothing came for."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        for message in (*self._under_way, *self._new):
            if message.request is not None:
                message.request.Cancel()
                message.request.Wait()

    def _look_after(self) -> None:
        last_s = time.monotonic()
        while not self._is_closed:
            if self._waits or not (self._new or self._under_way):
                self._wake.wait()
                self._wake.clear()
                last_s = time.monotonic()
                continue
            try:
                if self.ask():
                    last_s = time.monotonic()
            except BaseException as error:  # told to the rank when it waits
                self._error = error
                return
            time.sleep(_nap_s(time.monotonic() - last_s))


def _nap_s(quiet_s: float) -> float:
    return min(max(quiet_s / 10, SHORTEST_NAP_S), LONGEST_NAP_S)
