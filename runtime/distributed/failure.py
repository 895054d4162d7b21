"""Failures of single ranks -> one error that names the first cause.

When a rank fails, its neighbors fail a moment later because it is gone. So a rank that fails
because of another rank waits before it exits, and the first error is the one reported. Each
rank leaves its error in a small JSON file, and its step in another, for the process that started
it.
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
from typing import NoReturn

from torch.distributed import DistNetworkError

from ..errors import (
    LOADER_HAS_ENDED,
    STORE_IS_GONE,
    AsyncPipeError,
    DiskError,
    TransportError,
    cannot_write,
    disk_error,
    is_of_loader,
    root_of,
)
from ..executor.loading import ChangedCodeError
from ..process import is_alive
from ..transports.mpi import leave_mpi
from ..user_code import own_line

GRACE_S = 2.0
"""The longest time that a rank that fails because of another rank waits before it exits."""

_LOOK_S = 0.05
_END = b"."

CANNOT_WRITE = 74
"""The exit code of a rank that could not even write its error."""


class RankError(AsyncPipeError):
    """A rank ended before the run was over."""

    def __init__(self, what: str, cure: str = "", *, comes_again: bool = False) -> None:
        super().__init__(what, cure)
        self.comes_again = comes_again


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of one rank.

    what, cure: the message and its remedy.
    consequence: True if it occurred because another rank failed.
    time_s: when it occurred.
    trace: the traceback.
    comes_again: True if the same run would fail the same way again.
    """

    rank: int
    what: str
    cure: str
    consequence: bool
    time_s: float
    trace: str
    comes_again: bool = False


class RankFolder:
    """The folder in which the ranks of a run leave their steps and errors.

    Steps, process ids and errors are not written on a full disk: reporting must not make a rank
    fail.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "ranks"

    def begin_again(self, why: str) -> None:
        """Deletes everything and records the reason for another attempt."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        (self.path / "again.txt").write_text(why, encoding="utf-8")

    @property
    def why_again(self) -> str:
        """The reason for this attempt; "" for the first."""
        path = self.path / "again.txt"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def mark_step(self, rank: int, step: int) -> None:
        """Records the step that a rank has completed."""
        path = self.path / f"{rank}.step"
        with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:
            file.write(b"%9d" % step)  # over the last, for which a full disk has room

    def mark_end(self, rank: int) -> None:
        """Records, after its step, that a rank has completed all its work."""
        with contextlib.suppress(OSError), (self.path / f"{rank}.step").open("ab") as file:
            file.write(_END)

    def step_of(self, rank: int) -> int:
        """The last step that a rank has completed; 0 before the first."""
        text = self._left_step(rank).rstrip(_END).strip()
        return int(text) if text.isdigit() else 0

    def has_ended(self, rank: int) -> bool:
        """True if a rank has completed all its work."""
        return self._left_step(rank).endswith(_END)

    def unfinished(self, ranks: int) -> dict[int, int]:
        """The exit codes (all 0) of ranks that exited before they had completed their work."""
        return {rank: 0 for rank in range(ranks) if not self.has_ended(rank)}

    def _left_step(self, rank: int) -> bytes:
        path = self.path / f"{rank}.step"
        return path.read_bytes() if path.is_file() else b""

    def mark_process(self, rank: int) -> None:
        """Records the process id of a rank."""
        with contextlib.suppress(OSError):
            (self.path / f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")

    def process_of(self, rank: int) -> int:
        """The process id of a rank; -1 if it recorded none."""
        path = self.path / f"{rank}.pid"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def processes(self) -> list[int]:
        """The process ids that ranks have recorded."""
        left = (self.process_of(int(path.stem)) for path in self.path.glob("*.pid"))
        return [process for process in left if process > 0]

    def exit_codes(self) -> dict[int, int]:
        """The exit codes, or negative signal numbers, that a shell has recorded here, in the order
        in which the ranks ended."""
        ended = sorted(self.path.glob("*.code"), key=lambda path: path.stat().st_mtime_ns)
        texts = {int(path.stem): path.read_text(encoding="utf-8").strip() for path in ended}
        codes = {rank: int(text) for rank, text in texts.items() if text.isdigit()}
        return {rank: 128 - code if code > 128 else code for rank, code in codes.items()}

    def wait_until_gone(self) -> None:
        """Waits until no rank's process is left on this machine, at most GRACE_S."""
        end_s = time.monotonic() + GRACE_S
        while any(map(is_alive, self.processes())) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def last_step(self) -> int:
        """The last step that any rank has completed."""
        ranks = [int(path.stem) for path in self.path.glob("*.step")]
        return max(map(self.step_of, ranks), default=0)

    def put_verdict(self, error: AsyncPipeError) -> bool:
        """Records the error that stands for the whole run; False if there is one already."""
        try:
            with (self.path / "verdict.json").open("x", encoding="utf-8") as file:
                json.dump([error.what, error.cure], file)
        except FileExistsError:
            return False
        return True

    def verdict(self) -> RankError | None:
        """The error that a rank recorded for the whole run."""
        path = self.path / "verdict.json"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return RankError(*json.loads(text)) if text else None

    def mark_stopped(self) -> None:
        """Records that the ranks stopped on request."""
        (self.path / "stopped").touch()

    @property
    def has_stopped(self) -> bool:
        return (self.path / "stopped").exists()

    def write(self, failure: Failure) -> bool:
        """Writes the failure of a rank; False if the disk had no room."""
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
        """Waits until the cause of a failure is visible, at most GRACE_S: an error with no other
        rank as its cause, or a process that is gone."""
        end_s = time.monotonic() + GRACE_S
        while time.monotonic() < end_s:
            if any(not failure.consequence for failure in self.failures()):
                return
            if not all(map(is_alive, self.processes())):
                return
            time.sleep(_LOOK_S)

    def failures(self) -> list[Failure]:
        """All failures, the earliest first."""
        failures = [
            Failure(**json.loads(path.read_text(encoding="utf-8")))
            for path in self.path.glob("*.error.json")
        ]
        return sorted(failures, key=lambda failure: failure.time_s)

    def first_cause(self, exit_codes: Mapping[int, int], stages: Mapping[int, str]) -> RankError:
        """The error to report, from the exit codes of the ranks that ended and the files that they
        left; `stages` names the stages of each rank."""
        if (verdict := self.verdict()) is not None:
            return verdict
        for rank, code in exit_codes.items():
            if code < 0:
                return self._killed(rank, code, stages.get(rank, ""))
            if code == 0:
                return RankError(
                    f"rank {rank}{stages.get(rank, '')} ended with exit code 0 at step "
                    f"{self.step_of(rank) + 1}, before the run was over.",
                    "Code of a stage, a criterion, the data or a tracker ended the process.",
                    comes_again=True,
                )
        if (cause := self.reported_cause()) is not None:
            return cause
        ended = sorted(exit_codes.items(), key=lambda pair: pair[1] != CANNOT_WRITE)
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

    def reported_cause(self) -> RankError | None:
        """The first error that the ranks wrote, preferably one that no other rank caused."""
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
        hint = "Linux does this when memory runs out; see dmesg | tail" if name == "SIGKILL" else ""
        at = f" at step {self.step_of(rank) + 1}" if self._left_step(rank) else ""
        return RankError(f"rank {rank}{stages} was killed by {name}{at}.", hint)


def failure_of(
    error: BaseException, rank: int, stages: str, step: int | None, folder: Path | None = None
) -> Failure:
    """The failure that describes an exception; an AsyncPipeError already has its message.

    `step` is the last completed one, None where steps are not counted. `folder` is the run's
    folder, to which a write may have failed.
    """
    known = root_of(error)
    who, cure, comes_again = f"rank {rank}{stages}", "", False
    when = "" if step is None else f" at step {step + 1}"
    if isinstance(known, AsyncPipeError):
        is_of_rank = isinstance(known, ChangedCodeError)
        what = f"{who}: {known.what}" if is_of_rank else known.what
        cure, comes_again = known.cure, known.comes_again
    elif folder is not None and (disk := disk_error(error, folder)) is not None:
        what, cure = f"{who}{when.replace(' at', ',')}: {disk.what}", disk.cure
        comes_again = disk.comes_again
    elif isinstance(known, DistNetworkError):
        what = f"{who} failed{when}: the process that serves the store is gone ({known})."
        cure = STORE_IS_GONE
    else:
        at = f" ({place})" if (place := own_line(error)) else ""
        what = f"{who} failed{when}: {type(error).__name__}: {str(error).strip()}{at}"
    is_consequent = is_consequence(known)
    if is_of_loader(error):
        cure, comes_again, is_consequent = LOADER_HAS_ENDED, False, False
    return Failure(
        rank,
        what,
        cure,
        is_consequent,
        time.time(),
        "".join(traceback.format_exception(error)),
        comes_again,
    )


def is_consequence(error: BaseException) -> bool:
    """True if the cause may be that another rank ended."""
    if isinstance(error, TransportError | DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text)


def end_process(code: int) -> NoReturn:
    """Exits at once, without the interpreter's own shutdown.

    A thread of gloo that frees a tensor during the interpreter's shutdown is terminated in a place
    where C++ allows no exception, which aborts the process: seen once in a few hundred runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # The disk is full, or nobody reads any more.
            stream.flush()
    leave_mpi(code)
    os._exit(code)


_PROBE = bytes(4096)


def unwritable(folder: Path) -> DiskError | None:
    """The reason why a folder cannot be written, tested with one page; None if it can."""
    probe = folder / "probe"
    try:
        probe.write_bytes(_PROBE)
        probe.unlink()
    except OSError as error:
        probe.unlink(missing_ok=True)
        return cannot_write(folder, os.strerror(error.errno or 0))
    return None


def disk_is_tight(folder: Path) -> DiskError:
    """The error where a process could not write but another one can by now."""
    return cannot_write(folder, "no room, or no right to write")
