"""A function of the user's -> one process for each rank, from a script or a notebook."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from ..config.settings import SettingsError
from ..distributed.failure import RankFolder, failure_of
from ..distributed.ranks import find_rank_info
from ..distributed.rendezvous import Loopback
from ..process import die_with
from ..user_code import exits_as_errors
from .local import quiet_agent


def launch(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Calls `function(*arguments)` in as many new processes as there are ranks, and returns what it
    returns, by rank.

    Each process finds its rank in its environment, as under torchrun, so that
    `asyncpipe.Pipeline(...)` joins the others; all connections are on this machine. The processes
    import a script again to find its function, so the script calls `launch` under
    `if __name__ == "__main__":`. A function of a notebook runs in forks of it. Arguments and
    results travel as pickles between these processes alone.

    function: called in every process.
    arguments: its arguments.
    ranks: the number of processes.

    Raises RankError with the first cause when a rank fails, and KeyboardInterrupt after Ctrl-C,
    once all ranks have ended.
    """
    if ranks < 1:
        raise SettingsError(f"ranks is {ranks}.", "Give 1 or more.")
    if find_rank_info(os.environ) is not None:
        raise SettingsError(
            "launch was called in a process that is a rank already.",
            "Call the function itself, or start the script without a launcher.",
        )
    has_file = hasattr(sys.modules["__main__"], "__file__")
    forks = getattr(function, "__module__", "") == "__main__" and not has_file
    if forks and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SettingsError(
            "this notebook uses CUDA already, so its forks cannot.",
            "Restart it and call launch first, or put the function into a file of its own.",
        )
    with tempfile.TemporaryDirectory(prefix="asyncpipe-") as folder:
        left = RankFolder(Path(folder))
        left.path.mkdir()
        meeting = Loopback()
        spec = WorkerSpec(
            role="ranks",
            local_world_size=ranks,
            rdzv_handler=meeting,
            entrypoint=_run,
            args=(function, arguments, folder, forks, os.getpid()),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
        )
        logs = DefaultLogsSpecs(str(left.path.parent / "logs"))
        agent = LocalElasticAgent(spec, logs, start_method="fork" if forks else "spawn")
        try:
            with quiet_agent():
                result = agent.run()
        except SignalException as ended:
            if ended.sigval is signal.SIGINT:
                raise KeyboardInterrupt from ended
            raise
        finally:
            meeting.shutdown()
        if result.is_failed():
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            raise left.first_cause(codes, {})
        return [result.return_values[rank] for rank in range(ranks)]


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: str,
    is_fork: bool,
    starter: int,
) -> Any:
    """Runs one rank; leaves its error in the folder. It ends with the process that started it."""
    die_with(starter)
    if is_fork:
        # The threads that torch had before the fork are not in it, and their pool would wait.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        if is_fork:
            _check_backward()
        with exits_as_errors():
            return function(*arguments)
    except BaseException as error:
        left = RankFolder(Path(folder))
        left.write(failure_of(error, rank, "", None))
        raise


def _check_backward() -> None:
    """Raises SettingsError if this fork can run no backward."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SettingsError(
            "this notebook has run a backward, and torch has started threads for its GPUs, so its "
            "forks cannot run one.",
            "Restart it and call launch first, or put the function into a file of its own.",
        ) from error
