"""A function of the user's -> one process for each rank, from a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
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

_TRIAL_S = 60.0


def launch(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Calls `function(*arguments)` in as many new processes as there are ranks, and returns what it
    returns, by rank.

    Each process finds its rank in its environment, as under torchrun, so that
    `asyncpipe.Pipeline(...)` joins the others; all connections are on this machine. The processes
    import a script again to find its function, so the script calls `launch` under
    `if __name__ == "__main__":`. A function of a notebook runs in forks of it, or in processes that
    get it by value with all that it refers to, where forks cannot train: a notebook that has used a
    GPU, or has run a backward beside one. Arguments and results travel as pickles between these
    processes alone.

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
    call, forks = _sent(partial(function, *arguments))
    with tempfile.TemporaryDirectory(prefix="asyncpipe-") as folder:
        left = RankFolder(Path(folder))
        left.path.mkdir()
        meeting = Loopback()
        spec = WorkerSpec(
            role="ranks",
            local_world_size=ranks,
            rdzv_handler=meeting,
            entrypoint=_run,
            args=(call, folder, forks, os.getpid()),
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


def _run(call: Callable[[], Any], folder: str, is_fork: bool, starter: int) -> Any:
    """Runs one rank; leaves its error in the folder. It ends with the process that started it."""
    die_with(starter)
    if is_fork:
        # The threads that torch had before the fork are not in it, and their pool would wait.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        with exits_as_errors():
            return call()
    except BaseException as error:
        left = RankFolder(Path(folder))
        left.write(failure_of(error, rank, "", None))
        raise


def _sent(call: partial[Any]) -> tuple[Any, bool]:
    """The call as its ranks get it, and if they are forks."""
    has_file = hasattr(sys.modules["__main__"], "__file__")
    if has_file or getattr(call.func, "__module__", "") != "__main__":
        return call, False
    if _forks_can_train():
        return call, True
    return _ByValue(partial(_returned_by_value, call)), False


class _ByValue:
    """An object that pickles with the functions and classes of a notebook, which no other process
    could import, and that is the object itself where it arrives."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return cloudpickle.loads, (cloudpickle.dumps(self._value),)


def _returned_by_value(call: Callable[[], Any]) -> _ByValue:
    return _ByValue(call())


def _forks_can_train() -> bool:
    """Tries it: forks of a process that has used a GPU cannot use one, and those of a process in
    which torch has started threads for the backward of GPUs can run no backward."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    trial = multiprocessing.get_context("fork").Process(target=_run_backward)
    trial.start()
    trial.join(_TRIAL_S)
    if trial.exitcode is None:
        trial.kill()
    return trial.exitcode == 0


def _run_backward() -> None:
    torch.set_num_threads(1)
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        os._exit(1)  # without a traceback
    os._exit(0)
