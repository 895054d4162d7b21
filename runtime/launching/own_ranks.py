"""A job -> its ranks as processes of this machine, from the first attempt to the last.

When a rank fails all end, and what the failed ones left says why. Then the run begins again, if it
may: torch's elastic agent starts the ranks anew, or mpiexec does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch
from torch.distributed.elastic.multiprocessing import SignalException

from ..checkpoint.resuming import how_to_go_on
from ..import_path import ISOLATED
from ..replication.grid import grid_of
from ..run_report.writing import reported
from ..schedule import Schedule
from ..signals import Ended, Interrupted
from ..training.resolve import check_devices
from ..training.segments import make_segment
from ..training.setup import Job
from ..training.stopping import Stopped
from ..training.transport import expect_transport
from .agent import RankAgent
from .asking import HandingOn
from .disk import disk_error
from .failure import RankError, RankFolder, with_way_on
from .jobs import make_folder
from .mpi_ranks import run_over_mpi

WORKER = "asyncpipe.runtime.launching.worker"


def start_ranks(job: Job, reporter: str) -> None:
    """Runs the job to its end.

    Raises RankError with the first cause when a rank fails and the run may not begin again,
    Stopped when a signal asked it to stop, Interrupted after Ctrl-C.
    """
    schedule = make_segment(job.plan, job.settings, steps=1)
    grid = grid_of(schedule, job.settings.replicas)
    check_devices(job.settings, job.plan, grid.processes, torch.cuda.device_count())
    expect_transport(job.settings, job.plan, grid.ranks)
    job = make_folder(job)
    with reported(job.folder):
        _run_ranks(job, reporter, stages_of_ranks(schedule, job.settings.replicas))


def _run_ranks(job: Job, reporter: str, stages: Mapping[int, str]) -> None:
    left = RankFolder(job.folder)
    options = json.dumps(asdict(replace(job.settings, trust=True)))  # or nobody had come here
    command = (*ISOLATED, "-m", WORKER, str(os.getpid()), options, str(job.folder), reporter)
    try:
        with HandingOn(job.settings.patience_s) as signals, _sets_in_order(job.settings.seed):
            attempts = _Attempts(job, stages, signals)
            if job.settings.transport == "mpi":
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
    """Within, processes are started in which sets of texts have an order that depends on the seed
    alone, unless the user has said so already."""
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
    """The attempts of one job, of which each ends all its ranks before the next begins."""

    def __init__(self, job: Job, stages: Mapping[int, str], signals: HandingOn) -> None:
        self._left = RankFolder(job.folder)
        self._settings = job.settings
        self._stages = stages
        self._signals = signals
        self._restarts = 0

    def by_agent(self, command: tuple[str, ...]) -> None:
        agent = RankAgent(
            command,
            len(self._stages),
            self._left.path.parent / "logs",
            restarts=self._settings.restarts,
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
        """Prepares the folder for another attempt, or raises why there is none."""
        if (number := self._signals.asked_by) is not None:
            raise self._not_stopped(number, cause)
        if self._restarts == self._settings.restarts or cause.comes_again:
            raise with_way_on(cause, self._left.path.parent)
        self._restarts += 1
        times = f"{self._restarts} of {self._settings.restarts}"
        self._left.begin_again(f"{cause.what} Begun again ({times}).")

    def _not_stopped(self, number: signal.Signals, cause: RankError) -> BaseException:
        """What becomes of a run that was asked to stop, and whose ranks ended otherwise."""
        if self._signals.is_overdue:
            limit_s = f"{self._settings.patience_s:g} s"
            return RankError(
                f"ranks that were asked to stop by {number.name} had not after {limit_s}, and were "
                "killed.",
                "More time: --timeout-s.",
            )
        if self._left.last_step() > 0:
            return with_way_on(cause, self._left.path.parent)
        stopped = Stopped()
        stopped.add_note(f"stopped by {number.name} before the first step")
        return stopped


def interruption(left: RankFolder) -> str:
    """The one line after Ctrl-C."""
    run = left.path.parent
    return f"interrupted at step {left.last_step()} · {run}{how_to_go_on(run)}"


def stages_of_ranks(schedule: Schedule, replicas: int | None = None) -> dict[int, str]:
    """Rank -> ` (stage 2)` or ` (stages 0, 1 of replica 1)`, to be put behind its number."""
    grid = grid_of(schedule, replicas)
    names = {}
    for rank in range(grid.processes):
        own = [str(stage) for stage in grid.stages_of(rank, schedule)]
        stages = f"stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        names[rank] = f" ({stages}{grid.whose(rank)})"
    return names
