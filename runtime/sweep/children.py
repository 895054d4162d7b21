"""Commands -> processes, so many at a time; all are ended when the one that started them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..launching.parent import die_with_parent
from ..signals import STOPPED, STOPPING, Ended, handled
from .shares import Share

GRACE_S = 60.0
"""How long a process may take to end when it was asked to: it may write a checkpoint."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run, and the file that it prints to."""

    name: str
    command: tuple[str, ...]
    log: Path


def run_children(
    children: Iterable[Child], shares: Sequence[Share], *, grace_s: float = GRACE_S
) -> Generator[tuple[Child, int]]:
    """Runs as many at once as there are shares; yields each with its exit code (-N: signal N) when
    it has ended.

    When the block that reads this ends early, all that run are ended: by SIGINT after Ctrl-C, else
    by SIGTERM, and by SIGKILL if they have not ended `grace_s` seconds later.
    """
    waiting = iter(children)
    running: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}
    last_words = signal.SIGTERM
    try:
        while True:
            for slot, share in enumerate(shares):
                if slot not in running and (child := next(waiting, None)) is not None:
                    running[slot] = child, _start(child, share)
            if not running:
                return
            ended = {slot for slot, (_, process) in running.items() if process.poll() is not None}
            for slot in sorted(ended):
                child, process = running.pop(slot)
                yield child, process.returncode
            if not ended:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        last_words = signal.SIGINT
        raise
    finally:
        _end([process for _, process in running.values()], last_words, grace_s)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In the block SIGTERM and SIGUSR1 raise Ended with the exit code of what was stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Ended(STOPPED)

    with handled(STOPPING, stop):
        yield


def _start(child: Child, share: Share) -> subprocess.Popen[bytes]:
    own = os.sched_getaffinity(0) if share.cpus else None
    with child.log.open("wb") as log:
        if share.cpus:
            os.sched_setaffinity(0, share.cpus)
        try:
            # Ctrl-C is for this process alone, which ends all.
            return subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **share.environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            if own is not None:
                os.sched_setaffinity(0, own)


def _end(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals, s: float) -> None:
    for process in processes:
        process.send_signal(number)
    end_s = time.monotonic() + s
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
