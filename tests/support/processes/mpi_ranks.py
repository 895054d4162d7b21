"""Ranks that mpiexec starts, for tests: `processes.py` for MPI.

`python -m asyncpipe.tests.support.processes.mpi_ranks FOLDER` is such a rank: it finds what to call
in the folder, and leaves there what that gives.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from inspect import getfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from asyncpipe.runtime.launch.rank import watched
from asyncpipe.runtime.transports.mpi import forget_segments, leave_mpi, load_mpi, mpiexec
from asyncpipe.tests.support.processes.gloo_ranks import RankError
from asyncpipe.tests.support.processes.quick_python import bin_folder


def run_mpi(
    world_size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0
) -> list[Any]:
    """`function(rank, *arguments)` on each rank of an MPI world; the results in rank order.

    A rank that raises gives its exception's text instead of a result, one that dies gives None;
    nothing is left running.
    """
    with TemporaryDirectory() as folder:
        call = getfile(function), function.__name__, arguments
        torch.save(call, Path(folder) / "call.pt")
        rank = [
            bin_folder() / "python",
            "-m",
            "asyncpipe.tests.support.processes.mpi_ranks",
            folder,
        ]
        start = subprocess.Popen(
            [mpiexec(), "-n", str(world_size), *watched(Path(folder)), *rank],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            start.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(start)
        return [_read(Path(folder) / f"{rank}.pt") for rank in range(world_size)]


def stop(start: subprocess.Popen[Any]) -> None:
    """Ends mpiexec, which ends its ranks."""
    if start.poll() is None:
        start.send_signal(signal.SIGTERM)
        try:
            start.wait(10)
        except subprocess.TimeoutExpired:
            start.kill()
            start.wait()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    file, function, arguments = torch.load(Path(folder) / "call.pt", weights_only=False)
    world = load_mpi().COMM_WORLD
    rank = world.Get_rank()
    world.Barrier()
    forget_segments()
    try:
        result = runpy.run_path(file)[function](rank, *arguments)
    except Exception:
        result = RankError(traceback.format_exc())
    torch.save(result, Path(folder) / f"{rank}.part")
    (Path(folder) / f"{rank}.part").rename(Path(folder) / f"{rank}.pt")
    if isinstance(result, RankError):
        leave_mpi(1)
    # All leave together, but not through MPI_Finalize, which waits for what a test left open.
    end = world.Ibarrier()
    while not end.Test():
        time.sleep(0.001)
    os._exit(0)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.is_file() else None


if __name__ == "__main__":
    main(sys.argv[1])
