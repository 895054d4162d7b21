"""What a process does at a signal, for as long as a block lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(SystemExit):
    """A process ends because a signal asked it to, with an exit code that says so."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and where it is known what it interrupted."""


STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""Those that ask a run to write a checkpoint and end."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of what was asked so, whatever the signal: the one that batch systems know."""


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """In the block these signals call `handler`; only a main thread can have them do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
