"""A command -> its ranks, started and ended by mpiexec, for a run that was not started under it.

What rank 0 prints is shown; what mpiexec and the other ranks say goes to the run's logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..transports.mpi import mpiexec
from .failure import RankFolder
from .parent import die_with_parent

_RULER = b"====="
"""What MPICH's mpiexec begins its report with, on standard output too."""

_WATCHED = """
"$@"
code=$?
[ $code = 0 ] && exit
echo $code > "$0/${PMI_RANK:-$OMPI_COMM_WORLD_RANK}.code"
kill -KILL $$
"""
"""Runs a rank, and leaves how it ended: mpiexec kills the others then, and may name one of them.

It is sure to do so only after a signal: MPICH 5.0.2 lets the others wait for ever for one that
ends with an exit code, if it reads what that one wrote at the end before it sees the end itself.
"""


def run_over_mpi(
    arguments: Sequence[str], ranks: int, left: RankFolder, stages: Mapping[int, str]
) -> None:
    """Runs the interpreter with `arguments` on every rank of an MPI world, to the end.

    Raises RankError with the first cause when a rank fails; `stages` names the stages of each.
    """
    logs = left.path.parent / "logs"
    logs.mkdir(exist_ok=True)
    command = [mpiexec(), "-n", str(ranks), *watched(left.path), sys.executable, *arguments]
    with (logs / "mpiexec.txt").open("wb") as log:
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
            left.wait_until_gone()
    if code:
        raise left.first_cause(left.exit_codes() or {0: code}, stages)
    if unfinished := left.unfinished(ranks):
        raise left.first_cause(unfinished, stages)


def watched(folder: Path) -> list[str]:
    """What to put before the command of a rank, so that it leaves in `folder` how it ended if that
    was no good end, and the others end with it."""
    return ["sh", "-c", _WATCHED, str(folder)]


def keep_output(logs: Path, rank: int) -> None:
    """Sends what this rank prints to a file; what rank 0 prints on standard output is the run's."""
    logs.mkdir(exist_ok=True)
    file = os.open(logs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 2)
    if rank:
        os.dup2(file, 1)


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
