"""A command -> its ranks, started and ended by mpiexec, for a run that was not started under it.

What rank 0 prints is shown; what mpiexec and the other ranks say goes to the run's logs.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..transports.mpi import mpiexec
from .failure import RankFolder

_RULER = b"====="
"""What MPICH's mpiexec begins its report with, on standard output too."""


def run_over_mpi(
    arguments: Sequence[str], ranks: int, left: RankFolder, stages: Mapping[int, str]
) -> None:
    """Runs the interpreter with `arguments` on every rank of an MPI world, to the end.

    Raises RankError with the first cause when a rank fails; `stages` names the stages of each.
    """
    logs = left.path.parent / "logs"
    logs.mkdir(exist_ok=True)
    command = [mpiexec(), "-n", str(ranks), sys.executable, *arguments]
    with (logs / "mpiexec.txt").open("w+b") as log:
        # mpiexec ends its ranks when it ends; Ctrl-C is for this process alone.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            _show(process, log.fileno())
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        report = log.read().decode(errors="replace")
    if code:
        killed = killed_ranks(report, {left.process_of(rank): rank for rank in range(ranks)})
        raise left.first_cause(killed or {0: code}, stages)


def keep_output(logs: Path, rank: int) -> None:
    """Sends what this rank prints to a file; what rank 0 prints on standard output is the run's."""
    logs.mkdir(exist_ok=True)
    file = os.open(logs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 2)
    if rank:
        os.dup2(file, 1)


def die_with_parent() -> None:
    """Lets Linux kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _show(process: subprocess.Popen[bytes], log: int) -> None:
    assert process.stdout is not None
    is_report = False
    for line in process.stdout:
        is_report = is_report or line.startswith(_RULER)
        if is_report:
            os.write(log, line)
        else:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def killed_ranks(report: str, rank_of_process: Mapping[int, int]) -> dict[int, int]:
    """The rank that ended by a signal, and minus that, if mpiexec says so.

    >>> killed_ranks("PID 17 RUNNING AT a ... EXIT STRING: Killed (signal 9)", {17: 3})
    {3: -9}
    """
    process, number = re.search(r"PID (\d+)", report), re.search(r"signal (\d+)", report)
    if process is None or number is None or int(process[1]) not in rank_of_process:
        return {}
    return {rank_of_process[int(process[1])]: -int(number[1])}
