"""A process that is started -> one that ends with the process that started it.

Linux kills it when its parent ends. A parent that ended before it was asked to is found out by its
number. Nothing here imports more than Python has, so that a rank can do it first of all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def die_with_parent() -> None:
    """Lets Linux kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def die_with(command: int) -> None:
    """Ends this process with its parent, and at once if the process `command`, which had it
    started, has ended already."""
    die_with_parent()
    if not is_alive(command):
        os._exit(1)


def is_alive(process: int) -> bool:
    """Whether a process of this machine has not ended; True where no system tells."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()
    return state not in ("Z", "X")
