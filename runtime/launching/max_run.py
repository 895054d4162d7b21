"""`--max-run`: a process asks itself to end, as SIGTERM from outside would."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Sends this process SIGTERM when the block has run for so many seconds; None: never."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
