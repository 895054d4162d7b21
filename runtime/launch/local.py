"""A job -> its ranks as processes of this machine, from the first attempt to the last.

When a rank fails all ranks end, and the files of the failed ones give the cause. If restarts are
left, the run then starts again, through torch's elastic agent or mpiexec.

SIGTERM and SIGUSR1 ask a run to write a checkpoint and exit (Slurm sends them before it kills). The
process that started the ranks forwards the first such signal to them and waits for their end; ranks
that are still running after a timeout are killed. With `--max-run` a process sends itself SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ..checkpoint.resuming import how_to_go_on, with_way_on
from ..config.resolve import check_devices
from ..config.segments import make_segment
from ..distributed.connections import expect_transport
from ..distributed.failure import RankError, RankFolder
from ..distributed.grid import Grid, grid_of
from ..distributed.rendezvous import Loopback
from ..errors import disk_error
from ..import_path import ISOLATED
from ..process import STOPPING, Ended, Interrupted, handled
from ..reports.page import reported
from ..schedule.schedule import Schedule
from ..training.checkpointing import Stopped
from ..training.setup import Job
from .job import make_folder
from .rank import run_over_mpi

_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals at which the agent ends all ranks."""
_SETTLE_S = 0.3
"""Seconds between the first failure and the look at all exit codes."""


class RankAgent(LocalElasticAgent):
    """torch's elastic agent: starts the ranks as processes, ends all when one fails, and restarts
    them unless `on_failure` raises.

    Arguments:
    arguments: the arguments of this interpreter.
    ranks: the number of processes.
    logs: the folder of their output, except rank 0's standard output.
    restarts: how often the ranks may be restarted.
    on_failure: called with the exit codes of the failed ranks, once all have ended.
    unfinished: returns the ranks with exit code 0 that left their work unfinished.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        logs: Path,
        *,
        restarts: int,
        on_failure: Callable[[Mapping[int, int]], None],
        unfinished: Callable[[], Mapping[int, int]],
    ) -> None:
        redirects = {rank: Std.ERR if rank == 0 else Std.ALL for rank in range(ranks)}
        self._meeting = Loopback()
        spec = WorkerSpec(
            role="ranks",
            local_world_size=ranks,
            rdzv_handler=self._meeting,
            entrypoint=sys.executable,
            args=tuple(arguments),
            max_restarts=restarts,
            local_addr="127.0.0.1",
        )
        super().__init__(spec, DefaultLogsSpecs(str(logs), redirects=redirects))
        self._on_failure, self._unfinished = on_failure, unfinished

    @property
    def processes(self) -> list[int]:
        """The process ids of the ranks that have been started."""
        return [
            worker.id for worker in self.get_worker_group().workers if isinstance(worker.id, int)
        ]

    def finish(self) -> None:
        """Waits until all ranks have completed. Raises the errors of `on_failure`, and
        SignalException for a signal that ends the run."""
        try:
            with quiet_agent():
                self.run()
        finally:
            self._meeting.shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Checks the ranks before torch's agent does: the agent would end the others with SIGTERM,
        which asks a rank to stop with all others, and would then count their exits as failures of
        their own."""
        ranks = self._pcontext
        assert isinstance(ranks, SubprocessContext)
        codes = _exit_codes(ranks)
        if any(code and code > 0 for code in codes.values()):
            time.sleep(_SETTLE_S)  # a killed rank ends after its peers have seen it go
            codes = _exit_codes(ranks)
        failed = {rank: code for rank, code in codes.items() if code}
        if 0 in codes.values():
            failed |= {rank: 0 for rank in self._unfinished() if codes[rank] == 0}
        if failed:
            ranks.close(signal.SIGKILL)
            self._on_failure(failed)
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def _exit_codes(ranks: SubprocessContext) -> dict[int, int | None]:
    """The exit code of each rank; None while it runs."""
    return {rank: handler.proc.poll() for rank, handler in ranks.subprocess_handlers.items()}


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Silences the agent's own log and lets it handle the signals that end the ranks; removes its
    handlers afterwards."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _ENDING}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    before = os.environ.get(_SIGNALS)
    os.environ[_SIGNALS] = ",".join(number.name for number in _ENDING)
    try:
        yield
    finally:
        os.environ.pop(_SIGNALS)
        if before is not None:
            os.environ[_SIGNALS] = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


_BEAT_S = 0.2


class SignalForwarder:
    """Forwards the first SIGTERM or SIGUSR1 to all `processes()`, including those that start later,
    and kills the remaining ones after `limit_s`. A context manager for the main thread, which alone
    receives signals."""

    def __init__(self, limit_s: float) -> None:
        self.processes: Callable[[], Collection[int]] = tuple
        self.asked_by: signal.Signals | None = None
        self.is_overdue = False
        self._limit_s = limit_s
        self._handled = handled(STOPPING, self._ask)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="signals", daemon=True)

    def __enter__(self) -> SignalForwarder:
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._handled.__exit__(None, None, None)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked_by is None:
            self.asked_by = signal.Signals(number)
            self._thread.start()

    def _forward(self) -> None:
        assert self.asked_by is not None
        notified: set[int] = set()
        end_s = time.monotonic() + self._limit_s
        while not self.is_overdue:
            self.is_overdue = time.monotonic() > end_s
            processes = {*self.processes()}
            _send(processes - notified, self.asked_by)
            _send(processes if self.is_overdue else (), signal.SIGKILL)
            notified |= processes
            if self._ended.wait(_BEAT_S):
                return


def _send(processes: Collection[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


WORKER = "asyncpipe.runtime.launch.worker"


def worker_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The interpreter's arguments for a process that calls `run(*arguments)` of a module, and ends
    when this process ends."""
    return (*ISOLATED, "-m", WORKER, str(os.getpid()), module, *arguments)


def start_ranks(job: Job, reporter: str, on_launch: Callable[[int], None]) -> Path:
    """Runs the job to its end; returns the run's folder.

    `on_launch` is called with the number of processes before they are started.

    Raises RankError with the first cause when a rank fails and no restart is left, Stopped when a
    signal asked the run to stop, Interrupted after Ctrl-C.
    """
    schedule = make_segment(job.plan, job.config, steps=1)
    grid = grid_of(schedule, job.config.pipelines, job.config.tensor_ranks)
    check_devices(job.config, job.plan, range(grid.processes), torch.cuda.device_count())
    expect_transport(job.config, job.plan, grid.in_replica)
    job = make_folder(job)
    on_launch(grid.processes)
    with reported(job.folder):
        _run_ranks(job, reporter, stages_of_ranks(schedule, grid))
    return job.folder


def _run_ranks(job: Job, reporter: str, stages: Mapping[int, str]) -> None:
    left = RankFolder(job.folder)
    # Each rank resolves them again; trust was checked before.
    settings = asdict(replace(job.settings or job.config, trust=True))
    options = json.dumps({"settings": settings, "code": dict(job.code)})
    command = worker_command(f"{__package__}.rank", options, str(job.folder), reporter)
    try:
        with SignalForwarder(job.config.patience_s) as signals, _sets_in_order(job.config.seed):
            attempts = _Attempts(job, stages, signals)
            if job.config.transport == "mpi":
                attempts.over_mpi(command)
            else:
                attempts.by_agent(command)
    except SignalException as signalled:
        if signalled.sigval is not signal.SIGINT:
            raise Ended(128 + signalled.sigval) from None
        raise Interrupted(interruption(left)) from None
    except KeyboardInterrupt:
        raise Interrupted(interruption(left)) from None
    except OSError as error:
        raise disk_error(error, job.folder) or error from None
    has_stopped = left.has_stopped
    shutil.rmtree(left.path)
    if has_stopped:
        raise Stopped


@contextmanager
def _sets_in_order(seed: int) -> Iterator[None]:
    """Within it, the iteration order of sets of strings in started processes depends on the seed
    alone, unless the user has set PYTHONHASHSEED."""
    name = "PYTHONHASHSEED"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(seed % (1 << 32))
    try:
        yield
    finally:
        del os.environ[name]


class _Attempts:
    """The attempts of one job; all ranks of an attempt end before the next one begins."""

    def __init__(self, job: Job, stages: Mapping[int, str], signals: SignalForwarder) -> None:
        self._left = RankFolder(job.folder)
        self._config = job.config
        self._stages = stages
        self._signals = signals
        self._restarts = 0

    def by_agent(self, command: tuple[str, ...]) -> None:
        agent = RankAgent(
            command,
            len(self._stages),
            self._left.path.parent / "logs",
            restarts=self._config.restarts,
            on_failure=self._failed,
            unfinished=lambda: self._left.unfinished(len(self._stages)),
        )
        self._signals.processes = lambda: agent.processes
        agent.finish()

    def over_mpi(self, command: tuple[str, ...]) -> None:
        ranks = len(self._stages)
        self._signals.processes = self._left.processes
        while True:
            try:
                return run_over_mpi(command, ranks, self._left, self._stages)
            except RankError as cause:
                self._after(cause)

    def _failed(self, codes: Mapping[int, int]) -> None:
        if -signal.SIGINT in codes.values():
            raise KeyboardInterrupt
        self._after(self._left.first_cause(codes, self._stages))

    def _after(self, cause: RankError) -> None:
        """Prepares the folder for another attempt, or raises the error that ends the run."""
        if (number := self._signals.asked_by) is not None:
            raise self._not_stopped(number, cause)
        if self._restarts == self._config.restarts or cause.comes_again:
            raise with_way_on(cause, self._left.path.parent)
        self._restarts += 1
        times = f"{self._restarts} of {self._config.restarts}"
        self._left.begin_again(f"{cause.what} Restarted ({times}).")

    def _not_stopped(self, number: signal.Signals, cause: RankError) -> BaseException:
        """The error of a run that was asked to stop but whose ranks ended otherwise."""
        if self._signals.is_overdue:
            limit_s = f"{self._config.patience_s:g} s"
            return RankError(
                f"ranks did not stop within {limit_s} after {number.name} and were killed.",
                "--timeout-s allows more time.",
            )
        if self._left.last_step() > 0:
            return with_way_on(cause, self._left.path.parent)
        stopped = Stopped()
        stopped.add_note(f"stopped by {number.name} before the first step")
        return stopped


def run_command(
    arguments: Sequence[str], ranks: int, folder: Path, *, over_mpi: bool = False
) -> None:
    """Runs this interpreter with `arguments` in every rank, to the end; `folder` receives what the
    ranks leave, and their output.

    Raises RankError with the first cause when a rank fails, KeyboardInterrupt after Ctrl-C.
    """
    left = RankFolder(folder)
    left.path.mkdir()

    def fail(codes: Mapping[int, int]) -> NoReturn:
        if -signal.SIGINT in codes.values():
            raise Interrupted
        raise left.first_cause(codes, {})

    try:
        if over_mpi:
            run_over_mpi(arguments, ranks, left, {})
        else:
            RankAgent(
                arguments,
                ranks,
                folder / "logs",
                restarts=0,
                on_failure=fail,
                unfinished=lambda: left.unfinished(ranks),
            ).finish()
    except SignalException as signalled:
        if signalled.sigval is not signal.SIGINT:
            raise Ended(128 + signalled.sigval) from None
        raise Interrupted from None


def interruption(left: RankFolder) -> str:
    """The line that is shown after Ctrl-C."""
    run = left.path.parent
    return f"interrupted at step {left.last_step()} · {run}{how_to_go_on(run)}"


def stages_of_ranks(schedule: Schedule, grid: Grid) -> dict[int, str]:
    """Rank -> ` (stage 2)` or ` (stages 0, 1 of replica 1)`, as a suffix to its number."""
    names = {}
    for rank in range(grid.processes):
        own = [str(stage) for stage in grid.stages_of(rank, schedule)]
        stages = f"stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        names[rank] = f" ({stages}{grid.whose(rank)})"
    return names


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Sends this process SIGTERM if the block runs for so many seconds; None: never."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
