"""What went wrong on some ranks -> the one sentence that names the first cause.

When a rank fails, its neighbours fail too, a moment later, for want of it. So a rank that fails
for want of another waits before it ends: whoever watches sees the first cause first. A rank
leaves its error as a small JSON file, and its step in another, for the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import AsyncPipeError, TransportError, root_of
from ..transports.mpi import leave_mpi

GRACE_S = 2.0
"""How long a rank that misses another waits before it ends."""


class RankError(AsyncPipeError):
    """A rank that ended before its time."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of one rank; `consequence` when it is for want of another rank."""

    rank: int
    what: str
    cure: str
    consequence: bool
    time_s: float
    trace: str


class RankFolder:
    """Where one run's ranks leave their steps and errors."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "ranks"

    def mark_step(self, rank: int, step: int) -> None:
        """Leaves the step that a rank has made."""
        (self.path / f"{rank}.step").write_text(str(step), encoding="utf-8")

    def step_of(self, rank: int) -> int:
        """The last step that a rank has made; 0 before the first."""
        path = self.path / f"{rank}.step"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return int(text) if text.isdigit() else 0

    def mark_process(self, rank: int) -> None:
        """Leaves the number of a rank's process."""
        (self.path / f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")

    def process_of(self, rank: int) -> int:
        """The number of a rank's process; -1 if it left none."""
        path = self.path / f"{rank}.pid"
        return int(path.read_text(encoding="utf-8")) if path.is_file() else -1

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

    def write(self, failure: Failure) -> None:
        text = json.dumps(asdict(failure), indent=1) + "\n"
        (self.path / f"{failure.rank}.error.json").write_text(text, encoding="utf-8")

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
            # SIGTERM is how the others are ended after the first.
            if code < 0 and code != -signal.SIGTERM:
                return self._killed(rank, code, stages.get(rank, ""))
        failures = self.failures()
        causes = [failure for failure in failures if not failure.consequence]
        for failure in causes or failures:
            error = RankError(failure.what, failure.cure)
            error.add_note(f"On rank {failure.rank}:\n{failure.trace}")
            return error
        rank, code = next(iter(exit_codes.items()), (0, 1))
        return RankError(
            f"rank {rank}{stages.get(rank, '')} ended with exit code {code} before it could begin.",
            f"Its output is in {self.path.parent / 'logs'}.",
        )

    def _killed(self, rank: int, code: int, stages: str) -> RankError:
        name = signal.Signals(-code).name
        hint = "Linux kills so when memory runs out: dmesg | tail" if name == "SIGKILL" else ""
        return RankError(
            f"rank {rank}{stages} was killed by {name} at step {self.step_of(rank) + 1}.", hint
        )


def failure_of(error: BaseException, rank: int, stages: str, step: int) -> Failure:
    """What to tell of an exception; an AsyncPipeError has its sentence already."""
    known = root_of(error)
    if isinstance(known, AsyncPipeError):
        what, cure = known.what, known.cure
    else:
        what = f"rank {rank}{stages} failed at step {step + 1}: {type(error).__name__}: {error}"
        cure = ""
    return Failure(
        rank,
        what,
        cure,
        is_consequence(error),
        time.time(),
        "".join(traceback.format_exception(error)),
    )


def is_consequence(error: BaseException) -> bool:
    """Whether the cause may lie with another rank that ended."""
    if isinstance(error, TransportError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text)


def end_process(code: int) -> None:
    """Ends at once, without the interpreter's own end.

    A thread of gloo that lets go of a tensor while the interpreter ends is ended in a place where
    C++ allows no exception, and aborts the process: seen once in some hundred runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    leave_mpi(code)
    os._exit(code)
