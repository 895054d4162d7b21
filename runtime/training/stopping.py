"""SIGTERM or SIGUSR1 on any rank -> the last step, the same on all ranks.

A rank asks before it does anything of a step that it has not begun; that costs a comparison. When
one was told to stop, a thread of each rank closes its gate: no step beyond the furthest that it
has begun, until all have said which that is. The furthest of all is the last. No rank has begun a
later one, and every rank can make it, for none holds back what others wait for. So it is the next
step of a synchronous run, or the one after it; in an asynchronous one, which goes on for many
steps without a stop, what is left of the segment's actions is cut off there.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType

from ..errors import TransportError
from ..signals import STOPPED, STOPPING, Ended, handled
from .board import Board


class Stopped(Ended):
    """The run was told to stop, and what it has is written."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class Stopping:
    """One rank's part in it, while it is entered; its thread looks every `beat_s` whether another
    was told. `last` is the last step, None while nobody was told to stop, and `reason` the signal's
    name."""

    def __init__(self, board: Board, *, patience_s: float, beat_s: float = 0.2) -> None:
        self.last: int | None = None
        self.reason = ""
        self._board, self._patience_s, self._beat_s = board, patience_s, beat_s
        self._begun = 0
        self._is_open, self._lock = True, threading.Lock()
        self._signal = ""
        self._told, self._ended, self._agreed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._watch, name="stopping", daemon=True)
        self._handled = handled(STOPPING, self._hear)

    def __enter__(self) -> Stopping:
        self._handled.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._told.set()
        # Where the store is out of reach the thread waits for it, and the error is not to.
        self._thread.join(None if error is None else 2 * self._beat_s)
        self._handled.__exit__(None, None, None)

    def may(self, step: int) -> bool:
        """Whether this rank is to make a step, counted from 1; one that it may, it has begun.

        Raises TransportError where another rank does not say how far it is.
        """
        if step <= self._begun:
            return True
        with self._lock:
            if self._is_open:
                self._begun = step
                return True
        if not self._agreed.wait(self._patience_s):
            raise TransportError(
                f"the run was told to stop ({self.reason}), and not all ranks say how far they are."
            )
        assert self.last is not None
        self._begun = self.last
        return step <= self.last

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        self._told.set()

    def _watch(self) -> None:
        # The main thread tells of a rank that is gone.
        with contextlib.suppress(RuntimeError, TransportError):
            while not self._ended.is_set():
                if self._signal:
                    self._board.post("stop", self._signal)
                if (reason := self._board.read("stop")) is not None:
                    self._agree(reason)
                    return
                self._told.wait(self._beat_s)

    def _agree(self, reason: str) -> None:
        self.reason = reason
        with self._lock:
            self._is_open = False
        self._board.post_own("begun", str(self._begun))
        told = self._board.gathered("begun", wait_s=self._patience_s, is_over=self._ended.is_set)
        if told:
            self.last = max(map(int, told))
            self._agreed.set()
