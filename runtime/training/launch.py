"""Settings -> a finished run: starts the ranks, or joins those that a launcher started.

Run by itself the command starts a process a rank through torch's elastic launcher, which ends
all when one fails. Under torchrun, srun or mpirun it is one of the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..data.task import architecture_of
from ..errors import AsyncPipeError
from ..plan import Plan, read_plan
from ..schedule import Schedule
from ..schedule_text import to_text
from ..user_code import import_object
from .debugger import check_debugger
from .facts import announce, find_machine, forecast_run
from .failure import GRACE_S, RankError, RankFolder, failure_of, is_consequence, root_of
from .half import find_boundary_dtypes
from .loop import Job, train
from .metrics import Reporter
from .mpi_ranks import run_over_mpi
from .resolve import check_devices, check_ranks, gpu_of_rank, resolve, sized_plan
from .segments import make_segment
from .settings import Settings, SettingsError
from .sources import default_data
from .transport import expect_transport
from .world import ALONE, Place, World, find_place, join, leave

WORKER = "asyncpipe.runtime.training.worker"


def run(settings: Settings, reporter: str) -> int:
    """Trains a generated model to the end; 0.

    `reporter` is the `module:function` that makes a Reporter of settings, in the process of rank
    0. Raises AsyncPipeError with the first cause when a rank fails, when all ranks have ended;
    KeyboardInterrupt, with the step, after Ctrl-C.
    """
    job = make_job(settings)
    place = find_place(os.environ)
    alone = job.settings.schedule == "single"
    if settings.dry_run:
        _show(job, _reporter_factory(reporter)(job.settings))
    elif place is not None and (place.ranks > 1 or not alone):
        _join(job, place, reporter)
    elif alone:
        _run_alone(job, reporter)
    else:
        _start_ranks(job, reporter)
    return 0


def schedule_text(settings: Settings) -> str:
    """The schedule of a run, for the plan and sizes that the settings name, as a text file."""
    job = make_job(settings)
    return to_text(make_segment(job.plan, job.settings, steps=1).compute)


def run_rank(job: Job, world: World, reporter: str) -> None:
    """One rank's part of a run whose folder exists."""
    folder = RankFolder(job.folder)
    train(job, world, _reporter_factory(reporter), lambda step: folder.mark_step(world.rank, step))


def make_job(settings: Settings, folder: Path | None = None) -> Job:
    """Settings with every gap filled for the plan that they name; `folder` is the run's.

    Raises AsyncPipeError when settings and plan do not fit.
    """
    planned = read_plan(settings.folder)
    architecture = architecture_of(settings.folder)
    resolved, task = resolve(settings, planned, architecture=architecture)
    if resolved.data is None:
        data = default_data(task, sized_plan(planned, resolved))
        resolved = replace(resolved, data=data)
    if resolved.debug is not None:
        ranks = make_segment(sized_plan(planned, resolved), resolved, steps=1).ranks
        check_debugger(resolved, len(ranks))
    return Job(resolved, task, planned, folder or _next_folder(settings))


def stages_of_ranks(schedule: Schedule) -> dict[int, str]:
    """Rank -> ` (stage 2)` or ` (stages 0, 1)`, to be put behind its number."""
    names = {}
    for rank in range(len(schedule.ranks)):
        own = [str(stage) for stage, at in enumerate(schedule.rank_of_stage) if at == rank]
        names[rank] = f" (stage{'s' if len(own) > 1 else ''} {', '.join(own)})"
    return names


def _next_folder(settings: Settings) -> Path:
    """The folder that was asked for, or the first free `runs/<name>/<number>`."""
    if settings.output is not None:
        return Path(settings.output)
    runs = Path("runs") / Path(settings.folder).resolve().name
    taken = [int(path.name) for path in runs.glob("*") if path.name.isdigit()]
    return runs / str(max(taken, default=0) + 1)


def _make_folder(job: Job) -> Job:
    """Makes the run's folder and leaves the settings in it that repeat the run."""
    if (job.folder / "config.toml").exists():
        raise SettingsError(
            f"--output {job.folder} already holds a run.", "Choose another folder, or remove it."
        )
    while True:
        try:
            (job.folder / "ranks").mkdir(parents=True)
            break
        except FileExistsError:
            if job.settings.output is not None:
                raise SettingsError(
                    f"--output {job.folder} is being written by another run.", "Choose another."
                ) from None
            job = replace(job, folder=_next_folder(job.settings))
    (job.folder / "config.toml").write_text(job.settings.to_toml(), encoding="utf-8")
    return job


def _show(job: Job, reporter: Reporter) -> None:
    """A dry run: everything is checked and said, nothing is started or written."""
    settings, plan = job.settings, job.plan
    schedule = make_segment(plan, settings, steps=1)
    _check_devices(settings, plan, len(schedule.ranks))
    machine = find_machine(settings, len(schedule.ranks))
    forecast = forecast_run(plan, job.planned, settings, machine.cores, schedule)
    data = f"{settings.data} ({settings.tokenizer})" if settings.tokenizer else str(settings.data)
    announce(
        reporter,
        plan,
        settings,
        job.task,
        schedule,
        machine,
        transport=expect_transport(settings, plan, len(schedule.ranks)),
        data=data,
        output=job.folder,
        forecast=forecast,
        dtypes=find_boundary_dtypes(settings, plan),
    )


def _run_alone(job: Job, reporter: str) -> None:
    _check_devices(job.settings, job.plan, 1)
    job = _make_folder(job)
    ranks = RankFolder(job.folder)
    try:
        run_rank(job, World(ALONE), reporter)
    except AsyncPipeError as error:
        raise root_of(error) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interruption(ranks)) from None
    shutil.rmtree(ranks.path)


def _join(job: Job, place: Place, reporter: str) -> None:
    settings = job.settings
    check_ranks(job.planned, make_segment(job.plan, settings, steps=1), place.ranks)
    _check_devices(settings, job.plan, place.local_ranks)
    try:
        world = join(place, settings.patience_s, settings.transport)
        if place.rank == 0:
            job = _make_folder(job)
        job = replace(job, folder=Path(world.text_of_first(str(job.folder))))
        run_rank(job, world, reporter)
        world.meet()
        if place.rank == 0:
            shutil.rmtree(RankFolder(job.folder).path)
        leave()
    except Exception as error:
        if is_consequence(error):
            time.sleep(GRACE_S)  # the launcher ends this rank when it sees the first cause
        if isinstance(error, AsyncPipeError):
            raise root_of(error) from None
        step = RankFolder(job.folder).step_of(place.rank)
        failure = failure_of(error, place.rank, "", step)
        raise RankError(failure.what, failure.cure) from error


def _start_ranks(job: Job, reporter: str) -> None:
    schedule = make_segment(job.plan, job.settings, steps=1)
    ranks = len(schedule.ranks)
    _check_devices(job.settings, job.plan, ranks)
    expect_transport(job.settings, job.plan, ranks)
    job = _make_folder(job)
    left = RankFolder(job.folder)
    options = json.dumps(asdict(job.settings))
    command = ("-m", WORKER, options, str(job.folder), reporter)
    if job.settings.transport == "mpi":
        try:
            run_over_mpi(command, ranks, left, stages_of_ranks(schedule))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_interruption(left)) from None
        shutil.rmtree(left.path)
        return
    # Rank 0 shows the run on this terminal; all else that ranks print goes to files.
    redirects = {rank: Std.ERR if rank == 0 else Std.ALL for rank in range(ranks)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
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
            raise KeyboardInterrupt(_interruption(left)) from None
        raise left.first_cause(codes, stages_of_ranks(schedule)) from None
    except SignalException as stopped:
        if stopped.sigval is not signal.SIGINT:
            raise SystemExit(128 + stopped.sigval) from None
        raise KeyboardInterrupt(_interruption(left)) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interruption(left)) from None
    shutil.rmtree(left.path)


def _interruption(left: RankFolder) -> str:
    return f"interrupted at step {left.last_step()} · {left.path.parent}"


def _reporter_factory(spec: str) -> Callable[[Settings], Reporter]:
    made: Callable[[Settings], Reporter] = import_object(spec, "reporter", AsyncPipeError)
    return made


def _check_devices(settings: Settings, plan: Plan, ranks: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    needed = len(set(gpu_of_rank(plan, ranks)))
    check_devices(settings.device, needed, torch.cuda.device_count(), visible)


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
