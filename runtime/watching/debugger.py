"""`--debug RANKS` -> those ranks wait for a debugger, each on a port of its own.

debugpy speaks the Debug Adapter Protocol, as VS Code, PyCharm and Emacs do. A rank listens on
loopback only, and goes on when a debugger has attached; nothing then ends a wait, for a rank may
stand still at a breakpoint.
"""

from __future__ import annotations

import importlib.util
import os
import struct

from ..launching.world import World
from ..training.settings import Settings, SettingsError
from .metrics import Reporter

FIRST_PORT = 5678
"""Rank r listens on FIRST_PORT + r, or where there is a free port if that is taken."""


def check_debugger(settings: Settings, ranks: int) -> None:
    """Raises SettingsError when debugpy is missing, or when there is no such rank."""
    if settings.debug is None:
        return
    if importlib.util.find_spec("debugpy") is None:
        raise SettingsError(
            f"--debug {settings.debug} needs debugpy, which is not installed.",
            'pip install "asyncpipe[debug]"',
        )
    named = [] if settings.debug == "all" else [int(rank) for rank in settings.debug.split(",")]
    for rank in named:
        if rank >= ranks:
            last = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"
            raise SettingsError(f"--debug {settings.debug}, but the run has {last}.", "--debug all")


def wait_for_debugger(settings: Settings, world: World, reporter: Reporter | None) -> None:
    """Tells, on rank 0, where each rank waits; returns when a debugger has attached to this one.
    Every rank calls it."""
    is_debugged = settings.is_debugged(world.rank)
    port = _listen(world.rank) if is_debugged else 0
    ports = [struct.unpack("<q", told)[0] for told in world.gathered(struct.pack("<q", port))]
    if reporter is not None:
        for rank, of_rank in enumerate(ports):
            if of_rank:
                text = f"rank {rank} waits for a debugger to attach at 127.0.0.1:{of_rank}"
                reporter.on_note("debugger", text)
    if is_debugged:
        import debugpy

        debugpy.wait_for_client()


def _listen(rank: int) -> int:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules
    import debugpy

    for port in (FIRST_PORT + rank, 0):
        try:
            _, found = debugpy.listen(("127.0.0.1", port))
            return int(found)
        except RuntimeError:  # The port is taken.
            continue
    raise SettingsError(f"--debug {rank}: no port of 127.0.0.1 is free for a debugger.")
