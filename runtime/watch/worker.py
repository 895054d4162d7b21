"""The viewer of one run as a process of its own, which `--watch` starts.

The run opens the socket and hands it on, so the address is known at once, and the run waits for
nothing. The viewer has a session of its own and the lowest priority; it ends by itself a while
after the end of the run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from ..import_path import ISOLATED

_MODULE = "asyncpipe.runtime.watch.worker"
_IDLE_S = 300.0
"""Seconds for which nobody has looked before the viewer of a run that is over ends."""


def start_viewer(folder: Path) -> str:
    """Starts the viewer of a run; returns the address of its page. Raises ViewError."""
    from .server import address_of, make_token, open_socket

    token = make_token()
    with open_socket() as listening:
        number = listening.fileno()
        process = subprocess.Popen(
            (sys.executable, *ISOLATED, "-m", _MODULE, str(number), str(folder.resolve())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(f"{token}\n")
        process.stdin.close()
        process.returncode = 0  # nobody waits for it
        return address_of(listening, token)


def _step_back() -> None:
    """Leaves the processor to all others."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(19)


def main() -> None:
    """Serves the run whose folder, and the socket whose number, the arguments name; the token comes
    by standard input, for arguments are visible to other users."""
    _step_back()
    from .server import Viewer

    number, folder = sys.argv[1:]
    token = sys.stdin.readline().strip()
    Viewer([Path(folder)], socket.socket(fileno=int(number)), token).serve(idle_s=_IDLE_S)


if __name__ == "__main__":
    main()
