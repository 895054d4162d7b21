"""What every rank tells of itself, every second -> a stall is reported, and ended, with its cause.

A thread of each rank leaves what the rank does in a small file of the run's folder. Once a rank
has finished nothing for `stall_s`, its thread looks at what the others do; when they have not
either, it leaves the rank's stacks, and rank 0 tells who waits for whom. After `timeout_s` the
first rank that is able to puts that down as the run's error and ends: the main thread may be
inside C code that nothing interrupts. That limit does not hold while a rank does something else
than its actions, such as loading its stages; who waits for it has a limit of its own.

A rank that is stopped, or that keeps the interpreter to itself, says nothing. The system is asked
what it does, and a signal that faulthandler handles makes it leave its stack. (faulthandler's own
timer is no way: it reads the stacks of threads that run.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from ..activity import Activities
from ..launching.failure import RankFolder, end_process, is_consequence
from ..launching.world import World
from ..training.settings import Settings
from .stacks import format_stacks
from .stall import RankState, Sighting, StallError, culprits, describe_stall, usual_cause

_BEAT_S = 1.0
_SILENT_S = 4.0
"""A rank whose last word is older is asked after."""

_STACK_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

SAYS_NOTHING = "says nothing"
_TROUBLES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "D": "hangs in the system, on a disk or a network,",
}


class Watchdog:
    """Watches one rank while it is entered; `tell` shows a report on rank 0.

    An error for want of another rank that comes after `timeout_s` leaves as a StallError. Nothing
    is watched while a debugger may hold a rank.
    """

    def __init__(
        self, settings: Settings, folder: Path, world: World, activities: Activities
    ) -> None:
        self.tell: Callable[[str], None] = lambda text: None
        self._settings = settings
        self._left = RankFolder(folder)
        self._world = world
        self._activities = activities
        self._finished, self._since_s = -1, time.monotonic()
        self._has_told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._held: IO[str] | None = None

    def __enter__(self) -> Watchdog:
        if self._settings.debug is None:
            self._held = self._path("held").open("w", encoding="utf-8")
            faulthandler.register(_STACK_SIGNAL, self._held, all_threads=False)
            self._publish()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._held is None:
            return
        self._thread.join()
        faulthandler.unregister(_STACK_SIGNAL)
        self._held.close()
        waited_s = self._activities.now[1]
        if error is not None and is_consequence(error) and waited_s > self._limit_s - _BEAT_S:
            self._publish()
            detail = "".join(traceback.format_exception(error))
            if (verdict := self._judge(waited_s, detail)) is not None:
                verdict.add_note(detail)
                raise verdict from None

    @property
    def _limit_s(self) -> float:
        return self._settings.patience_s

    def _watch(self) -> None:
        beat_s = min(_BEAT_S, (self._settings.stall_s or self._limit_s) / 4)
        while not self._ended.wait(beat_s):
            idle_s = self._publish()
            stall_s = self._settings.stall_s or self._limit_s
            if idle_s < min(stall_s, self._limit_s):
                self._has_told = False
                continue
            if self._left.verdict() is not None:
                end_process(1)
            seen = self._look()
            stalled_s = min(sighting.idle_s for sighting in seen.values())
            is_loading = any(sighting.is_elsewhere for sighting in seen.values())
            if stalled_s >= stall_s and self._settings.stall_s and not self._has_told:
                self._has_told = True
                self._report(seen, stalled_s)
            # Who comes first in line and can still act ends the run.
            if not is_loading and stalled_s >= self._limit_s + self._world.rank * beat_s:
                self._end(stalled_s)

    def _publish(self) -> float:
        """Leaves this rank's state; the seconds since it last finished anything."""
        now_s, finished = time.monotonic(), self._activities.finished
        if finished != self._finished:
            self._finished, self._since_s = finished, now_s
        activity, for_s = self._activities.now
        state = RankState(
            self._world.rank,
            os.getpid(),
            socket.gethostname(),
            activity.kind,
            str(activity),
            activity.peer,
            for_s,
            finished,
            now_s - self._since_s,
        )
        path = self._path("state")
        with contextlib.suppress(OSError):  # A full disk is told by who writes results.
            _write(path, json.dumps(asdict(state)))
        return state.idle_s

    def _look(self) -> dict[int, Sighting]:
        """What is known of every rank that has told anything."""
        seen = {}
        now_s = self._path("state").stat().st_mtime  # The clock of the folder's disk.
        for rank in range(self._world.ranks):
            path = self._path("state", rank)
            if not path.is_file():
                continue
            state = RankState(**json.loads(path.read_text(encoding="utf-8")))
            silent_s = max(0.0, now_s - path.stat().st_mtime)
            trouble = _trouble(state) if silent_s > _SILENT_S else ""
            seen[rank] = Sighting(state, silent_s if trouble else 0.0, trouble)
        return seen

    def _report(self, seen: dict[int, Sighting], stalled_s: float) -> None:
        self._leave_stacks(seen)
        if self._world.rank != 0:
            return
        what, cure = self._words(seen, stalled_s)
        ends = f"The run ends after {self._limit_s:g} s (--timeout-s)."
        self.tell(f"{what}\n{cure}\n{ends}")

    def _words(self, seen: dict[int, Sighting], stalled_s: float) -> tuple[str, str]:
        what = describe_stall(seen, stalled_s, self._left.last_step() + 1)
        first = culprits(seen)[0]
        stacks = [str(path) for rank in culprits(seen) if (path := self._stacks(rank)).is_file()]
        parts = [f"stacks: {', '.join(stacks)}"] if stacks else []
        parts.append(usual_cause(seen[first]))
        if stalled_s >= self._limit_s:
            parts.append(f"longer limit: --timeout-s {2 * self._limit_s:g}")
        return what, " · ".join(parts)

    def _leave_stacks(self, seen: dict[int, Sighting], ended_by: str = "") -> None:
        """Leaves this rank's stacks, or the trace of what ended it, and the stacks of ranks of this
        host that cannot do so."""
        text = ended_by or format_stacks(without=[threading.get_ident()])
        _write(self._stacks(self._world.rank), text)
        able = [rank for rank, sighting in seen.items() if not sighting.trouble]
        silent = [rank for rank, sighting in seen.items() if sighting.trouble == SAYS_NOTHING]
        if self._world.rank == min(able, default=-1):
            for rank in silent:
                if seen[rank].state.host == socket.gethostname():
                    with contextlib.suppress(OSError):
                        os.kill(seen[rank].state.pid, _STACK_SIGNAL)
        time.sleep(_BEAT_S)  # The others leave theirs meanwhile.
        for rank in silent:
            held = self._path("held", rank).read_text(encoding="utf-8")
            if held and self._world.rank == min(able):
                _write(self._stacks(rank), held)

    def _judge(self, stalled_s: float, ended_by: str = "") -> StallError | None:
        """The error of the run, if no other rank has put one down already."""
        seen = self._look()
        self._leave_stacks(seen, ended_by)
        error = StallError(*self._words(seen, max(stalled_s, self._limit_s)))
        if not self._left.put_verdict(error):
            return None
        for sighting in seen.values():
            if "stopped" in sighting.trouble and sighting.state.host == socket.gethostname():
                # A stopped process takes no other signal.
                with contextlib.suppress(OSError):
                    os.kill(sighting.state.pid, signal.SIGKILL)
        return error

    def _end(self, stalled_s: float) -> None:
        """Ends this process, whose main thread may never come back."""
        if (error := self._judge(stalled_s)) is not None:
            sys.stderr.write(f"error: {error}\n")
        end_process(1)

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._left.path / f"{self._world.rank if rank is None else rank}.{kind}"

    def _stacks(self, rank: int) -> Path:
        return self._left.path.parent / f"stacks-rank{rank}.txt"


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all: the process may be ended at any moment."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _trouble(state: RankState) -> str:
    """What the system says of a process that tells nothing any more."""
    if state.host != socket.gethostname():
        return SAYS_NOTHING
    status = Path(f"/proc/{state.pid}/stat")
    try:
        letter = status.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended" if Path("/proc/self/stat").exists() else SAYS_NOTHING
    return _TROUBLES.get(letter, SAYS_NOTHING)
