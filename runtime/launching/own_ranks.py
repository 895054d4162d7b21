"""A job -> its ranks as processes of this machine, started and watched by torch's elastic launcher.

It ends all when one fails; what the failed ones left says why.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..checkpoint.resuming import how_to_go_on
from ..replication.grid import grid_of
from ..run_report.writing import reported
from ..schedule import Schedule
from ..training.resolve import check_devices
from ..training.segments import make_segment
from ..training.setup import Job
from ..training.transport import expect_transport
from . import loopback
from .failure import RankFolder
from .jobs import make_folder
from .mpi_ranks import run_over_mpi

WORKER = "asyncpipe.runtime.launching.worker"


def start_ranks(job: Job, reporter: str) -> None:
    """Runs the job to its end. Raises RankError with the first cause when a rank fails."""
    schedule = make_segment(job.plan, job.settings, steps=1)
    grid = grid_of(schedule, job.settings.replicas)
    ranks, stages = grid.processes, stages_of_ranks(schedule, job.settings.replicas)
    check_devices(job.settings, job.plan, ranks, torch.cuda.device_count())
    expect_transport(job.settings, job.plan, grid.ranks)
    job = make_folder(job)
    with reported(job.folder):
        _run_ranks(job, reporter, ranks, stages)


def _run_ranks(job: Job, reporter: str, ranks: int, stages: Mapping[int, str]) -> None:
    left = RankFolder(job.folder)
    options = json.dumps(asdict(replace(job.settings, trust=True)))  # or nobody had come here
    command = ("-m", WORKER, options, str(job.folder), reporter)
    if job.settings.transport == "mpi":
        try:
            run_over_mpi(command, ranks, left, stages)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(interruption(left)) from None
        shutil.rmtree(left.path)
        return
    # Rank 0 shows the run on this terminal; all else that ranks print goes to files.
    redirects = {rank: Std.ERR if rank == 0 else Std.ALL for rank in range(ranks)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ranks",
        rdzv_backend=loopback.BACKEND,
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(str(job.folder / "logs"), redirects=redirects),
    )
    try:
        with _quiet_launcher():
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if -signal.SIGINT in codes.values():
            raise KeyboardInterrupt(interruption(left)) from None
        raise left.first_cause(codes, stages) from None
    except SignalException as stopped:
        if stopped.sigval is not signal.SIGINT:
            raise SystemExit(128 + stopped.sigval) from None
        raise KeyboardInterrupt(interruption(left)) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(interruption(left)) from None
    shutil.rmtree(left.path)


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


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher's own log is silent and its signal handlers are gone afterwards."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    levels = [logger.level for logger in loggers]
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in signals}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
