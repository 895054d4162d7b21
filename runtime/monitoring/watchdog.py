"""The state of every rank, once a second -> a report of a stall with its cause, and the end of the
run.

A thread of each rank writes the rank's current activity to a small file of the run's folder. When a
rank has completed nothing for `stall_s`, its thread reads the other files. If no rank has made
progress, each rank writes its stacks, and rank 0 reports which rank waits for which. After
`timeout_s` the first rank that can writes this as the run's error and exits: the main thread may be
in C code that nothing interrupts. There is no such limit for other work of a rank, such as loading
its stages; the ranks that wait for it have timeouts of their own.

A process that is stopped, or that never releases the interpreter, writes nothing. Its state then
comes from the operating system, and a signal that faulthandler handles makes it write its stack.
(faulthandler's own timer is no alternative, because it reads the stacks of running threads.)
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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from ..config.execution_options import ExecutionOptions
from ..distributed.failure import RankFolder, end_process, is_consequence
from ..distributed.process_groups import World
from ..errors import AsyncPipeError
from ..executor.instrumented import NOTHING, Activities

_PAST = {
    "is": "was",
    "waits": "waited",
    "reads": "read",
    "takes": "took",
    "loads": "loaded",
    "prepares": "prepared",
    "writes": "wrote",
    "sends": "sent",
    "compares": "compared",
    "tells": "told",
    "copies": "copied",
    "reports": "reported",
}


class StallError(AsyncPipeError):
    """No rank makes progress any more."""

    comes_again = False


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, in its own words.

    rank, pid, host: the rank, its process and its host.
    kind, text: its current activity; `text` follows the rank's number in a sentence.
    peer: the rank that it waits for, if any.
    for_s: the duration of the activity.
    finished: the number of activities that it has completed.
    idle_s: the time since it completed the last of them.
    """

    rank: int
    pid: int
    host: str
    kind: str
    text: str
    peer: int | None
    for_s: float
    finished: int
    idle_s: float


_WAITS = ("receive", "send", "taken", "meet", "exchange")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A rank's state as another rank sees it.

    state: its state.
    silent_s: the time since it was written.
    trouble: the operating system's view of a process that no longer writes, such as `is stopped`.
    """

    state: RankState
    silent_s: float = 0.0
    trouble: str = ""

    @property
    def idle_s(self) -> float:
        """The time since the rank completed anything, as far as known."""
        return self.state.idle_s + self.silent_s

    @property
    def is_waiting(self) -> bool:
        return not self.trouble and self.state.kind in _WAITS

    @property
    def is_elsewhere(self) -> bool:
        """True while the rank does something before, between or after its actions that has no time
        limit; ranks that wait for it have one."""
        return (
            not self.trouble
            and self.state.kind in ("other", "writing")
            and self.state.text != str(NOTHING)
        )


def describe_stall(sightings: Mapping[int, Sighting], seconds: float, step: int) -> str:
    """Which rank waits for which and for what, and the activities of the ranks that wait for none.

    `sightings` are the states of the known ranks, by rank.
    """
    waiting = {rank: seen for rank, seen in sightings.items() if seen.is_waiting}
    active = {rank: seen for rank, seen in sightings.items() if rank not in waiting}
    parts = []
    of_peer: dict[int | None, list[int]] = defaultdict(list)
    for rank, seen in waiting.items():
        if seen.state.kind == "exchange":  # which names the replicas that it waits for
            parts.append(f"rank {rank} {seen.state.text}")
        else:
            of_peer[seen.state.peer].append(rank)
    for peer in sorted(of_peer, key=lambda peer: (peer not in active, peer is None, peer)):
        first, *others = of_peer[peer]
        parts.append(f"rank {first} {waiting[first].state.text}")
        if peer in active:
            parts.append(_doing(peer, active.pop(peer)))
        if others:
            whom = "all ranks" if peer is None else f"rank {peer}"
            parts.append(f"{_ranks(others)} for {whom}")
    parts += [_doing(rank, seen) for rank, seen in active.items()]
    return f"no progress for {seconds:.0f} s at step {step}. {'; '.join(parts)}."


def culprits(sightings: Mapping[int, Sighting]) -> list[int]:
    """The ranks that wait for no other rank; all if each waits for another."""
    ranks = [rank for rank, seen in sightings.items() if not seen.is_waiting]
    return ranks or list(sightings)


def usual_cause(seen: Sighting) -> str:
    """The most frequent cause of this state."""
    state = seen.state
    if "stopped" in seen.trouble:
        return f"continue it with: kill -CONT {state.pid} (on {state.host})"
    if seen.trouble:
        return f"see: py-spy dump --pid {state.pid} (on {state.host})"
    if state.kind == "data":
        return "usual cause: the data loader, or the disk or network it reads from"
    if state.kind in ("F", "B", "W", "S"):
        return "usual cause: the code of the stage, or too little memory"
    if seen.is_waiting:
        return "usual cause: a network that lost a message"
    return "usual cause: a slow disk"


def _doing(rank: int, seen: Sighting) -> str:
    for_s = f"for {seen.state.for_s + seen.silent_s:.0f} s"
    if not seen.trouble:
        return f"rank {rank} {seen.state.text} {for_s}"
    did = in_the_past(seen.state.text)
    return f"rank {rank} {seen.trouble} for {seen.silent_s:.0f} s, when it {did}"


def in_the_past(text: str) -> str:
    """An activity's text in the past tense.

    >>> in_the_past("waits for all ranks: the norm of all gradients")
    'waited for all ranks: the norm of all gradients'
    """
    verb, _, rest = text.partition(" ")
    return f"{_PAST.get(verb, verb)} {rest}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]} waits"
    return f"ranks {', '.join(numbers)} wait"


def format_stacks(*, without: Collection[int] = ()) -> str:
    """The stacks of all threads, the main thread's first, without some thread ids."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for thread in sorted(frames, key=lambda thread: thread != main):
        if thread not in without:
            # A frame may advance while it is read; its line is then slightly later.
            stack = "".join(traceback.format_stack(frames[thread]))
            parts.append(f"thread {names.get(thread, thread)}, the innermost call last:\n{stack}")
    return "\n".join(parts)


_BEAT_S = 1.0
SILENT_S = 4.0
"""The age of a rank's state from which on the operating system is asked."""

_TELLING_S = 5.0
_STACK_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

SAYS_NOTHING = "says nothing"
_TROUBLES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "D": "hangs in the system, on a disk or a network,",
}


def _end_later() -> NoReturn:
    """Ends this process when another rank has had time to tell the run's error: a launcher ends all
    ranks as soon as one has ended."""
    time.sleep(_TELLING_S)
    end_process(1)


class Watchdog:
    """Watches one rank, as a context manager; `tell` shows a report on rank 0.

    An error that another rank caused becomes a StallError if it comes after `timeout_s`. Nothing is
    watched while a debugger may hold a rank.
    """

    def __init__(
        self, options: ExecutionOptions, folder: Path, world: World, activities: Activities
    ) -> None:
        self.tell: Callable[[str], None] = lambda text: None
        self._options = options
        self._left = RankFolder(folder)
        self._world = world
        self._activities = activities
        self._finished, self._since_s = -1, time.monotonic()
        self._has_reported = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stack_file: IO[str] | None = None

    def __enter__(self) -> Watchdog:
        if self._options.debug is None:
            self._stack_file = self._path("held").open("w", encoding="utf-8")
            faulthandler.register(_STACK_SIGNAL, self._stack_file, all_threads=False)
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
        if self._stack_file is None:
            return
        self._thread.join()
        faulthandler.unregister(_STACK_SIGNAL)
        self._stack_file.close()
        waited_s = self._activities.now[1]
        if error is not None and is_consequence(error) and waited_s > self._limit_s - _BEAT_S:
            self._publish()
            detail = "".join(traceback.format_exception(error))
            if (verdict := self._judge(waited_s, detail)) is not None:
                verdict.add_note(detail)
                raise verdict from None

    @property
    def _limit_s(self) -> float:
        return self._options.patience_s

    def _watch(self) -> None:
        beat_s = min(_BEAT_S, (self._options.stall_s or self._limit_s) / 4)
        while not self._ended.wait(beat_s):
            idle_s = self._publish()
            stall_s = self._options.stall_s or self._limit_s
            if idle_s < min(stall_s, self._limit_s):
                self._has_reported = False
                continue
            if self._left.verdict() is not None:
                _end_later()
            seen = self._look()
            stalled_s = min(sighting.idle_s for sighting in seen.values())
            is_loading = any(sighting.is_elsewhere for sighting in seen.values())
            if stalled_s >= stall_s and self._options.stall_s and not self._has_reported:
                self._has_reported = True
                self._report(seen, stalled_s)
            # The lowest rank that can still act ends the run.
            if not is_loading and stalled_s >= self._limit_s + self._world.rank * beat_s:
                self._end(stalled_s)

    def _publish(self) -> float:
        """Writes this rank's state; returns the seconds since it last completed anything."""
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
        with contextlib.suppress(OSError):  # A full disk is reported where results are written.
            _write(path, json.dumps(asdict(state)))
        return state.idle_s

    def _look(self) -> dict[int, Sighting]:
        """The states of all ranks that have written one."""
        seen = {}
        now_s = self._path("state").stat().st_mtime  # The clock of the folder's disk.
        for rank in range(self._world.ranks):
            path = self._path("state", rank)
            if not path.is_file():
                continue
            state = RankState(**json.loads(path.read_text(encoding="utf-8")))
            silent_s = max(0.0, now_s - path.stat().st_mtime)
            trouble = trouble_of(state) if silent_s > SILENT_S else ""
            seen[rank] = Sighting(state, silent_s if trouble else 0.0, trouble)
        return seen

    def _report(self, seen: dict[int, Sighting], stalled_s: float) -> None:
        self._leave_stacks(seen)
        if self._world.rank != 0:
            return
        message, cure = self._words(seen, stalled_s)
        ends = f"The run ends after {self._limit_s:g} s (--timeout-s)."
        self.tell(f"{message}\n{cure}\n{ends}")

    def _words(self, seen: dict[int, Sighting], stalled_s: float) -> tuple[str, str]:
        message = describe_stall(seen, stalled_s, self._left.last_step() + 1)
        first = culprits(seen)[0]
        stacks = [str(path) for rank in culprits(seen) if (path := self._stacks(rank)).is_file()]
        parts = [f"stacks: {', '.join(stacks)}"] if stacks else []
        parts.append(usual_cause(seen[first]))
        if stalled_s >= self._limit_s:
            parts.append(f"longer limit: --timeout-s {2 * self._limit_s:g}")
        return message, " · ".join(parts)

    def _leave_stacks(self, seen: dict[int, Sighting], ended_by: str = "") -> None:
        """Writes this rank's stacks, or the traceback that ended it, and the stacks of ranks of
        this host that cannot do so themselves."""
        text = ended_by or format_stacks(without=[threading.get_ident()])
        _write(self._stacks(self._world.rank), text)
        able = [rank for rank, sighting in seen.items() if not sighting.trouble]
        silent = [rank for rank, sighting in seen.items() if sighting.trouble == SAYS_NOTHING]
        if self._world.rank == min(able, default=-1):
            for rank in silent:
                if seen[rank].state.host == socket.gethostname():
                    with contextlib.suppress(OSError):
                        os.kill(seen[rank].state.pid, _STACK_SIGNAL)
        time.sleep(_BEAT_S)  # The others write theirs meanwhile.
        for rank in silent:
            dump = self._path("held", rank).read_text(encoding="utf-8")
            if dump and self._world.rank == min(able):
                _write(self._stacks(rank), dump)

    def _judge(self, stalled_s: float, ended_by: str = "") -> StallError | None:
        """The error of the run, unless another rank has recorded one already."""
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
        """Ends this process, whose main thread may never return."""
        if (error := self._judge(stalled_s)) is None:
            _end_later()
        sys.stderr.write(f"error: {error}\n")
        end_process(1)

    def _path(self, kind: str, rank: int | None = None) -> Path:
        return self._left.path / f"{self._world.rank if rank is None else rank}.{kind}"

    def _stacks(self, rank: int) -> Path:
        return self._left.path.parent / f"stacks-rank{rank}.txt"


def _write(path: Path, text: str) -> None:
    """Writes a file atomically, as the process may end at any moment."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def trouble_of(state: RankState) -> str:
    """The operating system's view of a process that no longer writes."""
    if state.host != socket.gethostname():
        return SAYS_NOTHING
    status = Path(f"/proc/{state.pid}/stat")
    try:
        letter = status.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended" if Path("/proc/self/stat").exists() else SAYS_NOTHING
    return _TROUBLES.get(letter, SAYS_NOTHING)
