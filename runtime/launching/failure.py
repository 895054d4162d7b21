"""What went wrong on some ranks -> the one sentence that names the first cause.

When a rank fails, its neighbours fail too, a moment later, for want of it. So a rank that fails
for want of another waits before it ends: whoever watches sees the first cause first. A rank
leaves its error as a small JSON file, and its step in another, for the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from ..checkpoint.resuming import how_to_go_on
from ..errors import AsyncPipeError, TransportError, root_of
from ..transports.mpi import leave_mpi
from ..user_code import own_line
from .disk import disk_error, disk_is_tight, unwritable
from .parent import is_alive

E = TypeVar("E", bound=AsyncPipeError)

GRACE_S = 2.0
"""How long a rank that misses another waits at most before it ends."""


_LOOK_S = 0.05
_END = b"."

CANNOT_WRITE = 74
"""The exit code of a rank that could not even leave its error."""


class RankError(AsyncPipeError):
    """A rank that ended before its time."""

    def __init__(self, what: str, cure: str = "", *, comes_again: bool = False) -> None:
        super().__init__(what, cure)
        self.comes_again = comes_again


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of one rank; `consequence` when it is for want of another rank, `comes_again` when
    the same run would come to it again."""

    rank: int
    what: str
    cure: str
    consequence: bool
    time_s: float
    trace: str
    comes_again: bool = False


class RankFolder:
    """Where one run's ranks leave their steps and errors.

    What only serves to tell of an end is not left on a full disk, which must not be an end itself.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "ranks"

    def begin_again(self, why: str) -> None:
        """Forgets all that was left, but for why there is another attempt."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        (self.path / "again.txt").write_text(why, encoding="utf-8")

    @property
    def why_again(self) -> str:
        """Why this is not the first attempt; "" if it is."""
        path = self.path / "again.txt"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def mark_step(self, rank: int, step: int) -> None:
        """Leaves the step that a rank has made."""
        path = self.path / f"{rank}.step"
        with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
            file.write(b"%9d" % step)  # over the last, for which a full disk has room

    def mark_end(self, rank: int) -> None:
        """Leaves behind its step that a rank has done all that it was to do."""
        with contextlib.suppress(OSError), (self.path / f"{rank}.step").open("ab") as file:
            file.write(_END)

    def step_of(self, rank: int) -> int:
        """The last step that a rank has made; 0 before the first."""
        text = self._left_step(rank).rstrip(_END).strip()
        return int(text) if text.isdigit() else 0

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has done all that it was to do."""
        return self._left_step(rank).endswith(_END)

    def unfinished(self, ranks: int) -> dict[int, int]:
        """Of ranks that all ended with exit code 0, those that had more to do, with that code."""
        return {rank: 0 for rank in range(ranks) if not self.has_ended(rank)}

    def _left_step(self, rank: int) -> bytes:
        path = self.path / f"{rank}.step"
        return path.read_bytes() if path.is_file() else b""

    def mark_process(self, rank: int) -> None:
        """Leaves the number of a rank's process."""
        with contextlib.suppress(OSError):
            (self.path / f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")

    def process_of(self, rank: int) -> int:
        """The number of a rank's process; -1 if it left none."""
        path = self.path / f"{rank}.pid"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def processes(self) -> list[int]:
        """The numbers of all ranks' processes, as far as they have left them."""
        left = (self.process_of(int(path.stem)) for path in self.path.glob("*.pid"))
        return [process for process in left if process > 0]

    def exit_codes(self) -> dict[int, int]:
        """The exit codes, or minus the signals, of the ranks whose end a shell has left here, in
        the order of their ends."""
        ended = sorted(self.path.glob("*.code"), key=lambda path: path.stat().st_mtime_ns)
        texts = {int(path.stem): path.read_text(encoding="utf-8").strip() for path in ended}
        codes = {rank: int(text) for rank, text in texts.items() if text.isdigit()}
        return {rank: 128 - code if code > 128 else code for rank, code in codes.items()}

    def wait_until_gone(self) -> None:
        """Returns when no rank's process of this machine is left, or after GRACE_S."""
        end_s = time.monotonic() + GRACE_S
        while any(map(is_alive, self.processes())) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def last_step(self) -> int:
        """The last step that any rank has made."""
        ranks = [int(path.stem) for path in self.path.glob("*.step")]
        return max(map(self.step_of, ranks), default=0)

    def put_verdict(self, error: AsyncPipeError) -> bool:
        """Leaves the error that stands for the whole run; False when there is one already."""
        try:
            with (self.path / "verdict.json").open("x", encoding="utf-8") as file:
                json.dump([error.what, error.cure], file)
        except FileExistsError:
            return False
        return True

    def verdict(self) -> RankError | None:
        """The error that a rank put down for the whole run."""
        path = self.path / "verdict.json"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return RankError(*json.loads(text)) if text else None

    def mark_stopped(self) -> None:
        """Leaves that the ranks have stopped because they were asked to."""
        (self.path / "stopped").touch()

    @property
    def has_stopped(self) -> bool:
        return (self.path / "stopped").exists()

    def write(self, failure: Failure) -> bool:
        """Whether there was room for it."""
        text = json.dumps(asdict(failure), indent=1) + "\n"
        new = self.path / f"{failure.rank}.error.new"
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(new.with_suffix(".json"))
        except OSError:
            new.unlink(missing_ok=True)
            return False
        return True

    def wait_for_cause(self) -> None:
        """Returns when there is more to be seen of an end than that ranks miss each other: an error
        of its own, or a process that is gone; else after GRACE_S."""
        end_s = time.monotonic() + GRACE_S
        while time.monotonic() < end_s:
            if any(not failure.consequence for failure in self.failures()):
                return
            if not all(map(is_alive, self.processes())):
                return
            time.sleep(_LOOK_S)

    def failures(self) -> list[Failure]:
        """All failures, the earliest first."""
        found = [
            Failure(**json.loads(path.read_text(encoding="utf-8")))
            for path in self.path.glob("*.error.json")
        ]
        return sorted(found, key=lambda failure: failure.time_s)

    def first_cause(self, exit_codes: Mapping[int, int], stages: Mapping[int, str]) -> RankError:
        """The error to show, from the exit codes of the ranks that ended by themselves and from
        what they left; `stages` names the stages of each rank."""
        if (verdict := self.verdict()) is not None:
            return verdict
        for rank, code in exit_codes.items():
            if code < 0:
                return self._killed(rank, code, stages.get(rank, ""))
            if code == 0:
                return RankError(
                    f"rank {rank}{stages.get(rank, '')} ended with exit code 0 at step "
                    f"{self.step_of(rank) + 1}, before the run was over.",
                    "Code of a stage, a criterion, the data or a tracker has ended the process.",
                    comes_again=True,
                )
        if (told := self.told_cause()) is not None:
            return told
        ended = sorted(exit_codes.items(), key=lambda each: each[1] != CANNOT_WRITE)
        rank, code = next(iter(ended), (0, 1))
        who = f"rank {rank}{stages.get(rank, '')}"
        if code == CANNOT_WRITE:
            disk = unwritable(self.path) or disk_is_tight(self.path)
            what = f"{who}, step {self.step_of(rank) + 1}: {disk.what}"
            return RankError(what, disk.cure, comes_again=True)
        return RankError(
            f"{who} ended with exit code {code} before it could begin.",
            f"Its output is in {self.path.parent / 'logs'}.",
        )

    def told_cause(self) -> RankError | None:
        """What the ranks themselves say, if they could: the first that was no consequence."""
        if (verdict := self.verdict()) is not None:
            return verdict
        failures = self.failures()
        causes = [failure for failure in failures if not failure.consequence]
        for failure in causes or failures:
            error = RankError(failure.what, failure.cure, comes_again=failure.comes_again)
            error.add_note(f"On rank {failure.rank}:\n{failure.trace}")
            return error
        return None

    def _killed(self, rank: int, code: int, stages: str) -> RankError:
        name = signal.Signals(-code).name
        hint = "Linux kills so when memory runs out: dmesg | tail" if name == "SIGKILL" else ""
        return RankError(
            f"rank {rank}{stages} was killed by {name} at step {self.step_of(rank) + 1}.", hint
        )


def failure_of(
    error: BaseException, rank: int, stages: str, step: int, folder: Path | None = None
) -> Failure:
    """What to tell of an exception; an AsyncPipeError has its sentence already. `folder` is the
    run's, to which a write may have failed."""
    known = root_of(error)
    who, cure, comes_again = f"rank {rank}{stages}", "", False
    if isinstance(known, AsyncPipeError):
        what, cure, comes_again = known.what, known.cure, known.comes_again
    elif folder is not None and (disk := disk_error(error, folder)) is not None:
        what, cure = f"{who}, step {step + 1}: {disk.what}", disk.cure
        comes_again = disk.comes_again
    else:
        at = f" ({place})" if (place := own_line(error)) else ""
        what = f"{who} failed at step {step + 1}: {type(error).__name__}: {error}{at}"
    return Failure(
        rank,
        what,
        cure,
        is_consequence(error),
        time.time(),
        "".join(traceback.format_exception(error)),
        comes_again,
    )


def with_way_on(error: E, run: Path) -> E:
    """The error, whose cure also says from which checkpoint the run can go on."""
    error.cure = f"{error.cure}{how_to_go_on(run)}".removeprefix(" · ")
    return error


def is_consequence(error: BaseException) -> bool:
    """Whether the cause may lie with another rank that ended."""
    if isinstance(error, TransportError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text)


def end_process(code: int) -> NoReturn:
    """Ends at once, without the interpreter's own end.

    A thread of gloo that lets go of a tensor while the interpreter ends is ended in a place where
    C++ allows no exception, and aborts the process: seen once in some hundred runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # The disk is full, or nobody reads any more.
            stream.flush()
    leave_mpi(code)
    os._exit(code)
