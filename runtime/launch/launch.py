"""Settings -> a finished run: starts the ranks, or joins those that a launcher started.

Without a launcher, the command starts a process per rank through torch's elastic launcher, which
ends all ranks when one fails. Under torchrun, srun or mpirun the command is one of the ranks.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..checkpoint.resuming import nothing_left_to_do, with_way_on
from ..config.batch_layout import as_started, check_ranks
from ..config.mixed_precision import find_boundary_dtypes
from ..config.segments import make_segment
from ..config.settings import Settings, SettingsError
from ..distributed.connections import expect_transport
from ..distributed.cpu_affinity import find_machine, find_resources
from ..distributed.failure import RankError, RankFolder, failure_of
from ..distributed.grid import grid_of
from ..distributed.process_groups import World, join, leave, stay_alone
from ..distributed.ranks import RankInfo, given_rank_info
from ..errors import (
    LOADER_HAS_ENDED,
    AsyncPipeError,
    DataError,
    disk_error,
    is_of_loader,
    root_of,
)
from ..monitoring.records import Reporter
from ..plan.trust import is_trusted, remember, untrusted
from ..process import Interrupted
from ..reports.page import reported
from ..schedule.text import to_text
from ..training.checkpointing import Stopped
from ..training.run_summary import announce, forecast_run
from ..training.setup import Job
from .job import (
    check_job,
    check_unstarted,
    make_folder,
    make_job,
    reopen_folder,
    reporter_factory,
    run_rank,
)
from .local import ended_after, interruption, stages_of_ranks, start_ranks

_SHARED_FOLDER_S = 10.0
"""How long a network file system may take to show a new folder to another host."""


def run(
    settings: Settings, reporter: str, on_launch: Callable[[int], None] = lambda ranks: None
) -> Path:
    """Trains a generated model to the end; returns the run's folder.

    `reporter` is the `module:function` that creates a Reporter from settings, in the process of
    rank 0. `on_launch` is called with the number of processes before they are started. Raises
    TrustError when the folder's code is not trusted; AsyncPipeError with the first cause, once all
    ranks have ended, when a rank fails; KeyboardInterrupt, with the step, after Ctrl-C.
    """
    info = given_rank_info(settings)
    job = make_job(settings if info is None else as_started(settings, info.ranks))
    check_job(job)
    if settings.trust:
        remember(settings.folder)
    has_one_rank = job.config.schedule == "single" or job.config.ranks == 1
    alone = has_one_rank and job.config.pipelines * job.config.tensor_ranks == 1
    if alone and not settings.has_network:
        raise SettingsError(
            "--transport none, but the run has 1 process and needs no network.",
            "Leave it out, or give more ranks.",
        )
    if settings.dry_run:
        _show(job, reporter_factory(reporter)(job.config))
        return job.folder
    if finished := nothing_left_to_do(job.config, job.folder):
        if info is None or info.rank == 0:
            reporter_factory(reporter)(job.config).on_note("finished", finished)
        return job.folder
    # The end of one rank ends all.
    limit_s = settings.max_run_s if info is None or info.rank == 0 else None
    with ended_after(limit_s), job.lock:
        if info is not None and (info.ranks > 1 or not alone):
            return _join(job, info, reporter)  # trust on one of the hosts is enough
        _check_trust(settings)
        if alone and not job.config.restarts:
            return _run_alone(job, reporter)
        return start_ranks(job, reporter, on_launch)


def schedule_text(settings: Settings) -> str:
    """The schedule of a run, for the plan and sizes in the settings, as a text file."""
    job = make_job(settings)
    return to_text(make_segment(job.plan, job.config, steps=1).compute)


def _check_trust(settings: Settings) -> None:
    """Raises TrustError when the folder's code is not trusted."""
    if not settings.trust and not is_trusted(settings.folder):
        raise untrusted(settings.folder)


def _show(job: Job, reporter: Reporter) -> None:
    """A dry run: checks and reports everything; starts and writes nothing."""
    if job.config.precision != "full" or job.config.zero:  # what is printed depends on the code
        _check_trust(job.config)
    job = check_unstarted(job)
    config, plan = job.config, job.plan
    schedule = make_segment(plan, config, steps=1)
    grid = grid_of(schedule, config.pipelines, config.tensor_ranks)
    resources = (find_resources(config, plan, job.code),) * grid.processes
    machine = find_machine(config, plan, resources, 0)
    dtypes = find_boundary_dtypes(config, plan, job.code)
    forecast = forecast_run(plan, job.planned, config, machine.cores, schedule, dtypes)
    data = f"{config.data} ({config.tokenizer})" if config.tokenizer else config.data
    announce(
        reporter,
        job,
        schedule,
        machine,
        transport=expect_transport(config, plan, grid.in_replica),
        data=data,
        forecast=forecast,
        dtypes=dtypes,
    )


def _run_alone(job: Job, reporter: str) -> Path:
    world = stay_alone(job.config, job.plan, job.code)
    job = make_folder(job)
    ranks = RankFolder(job.folder)
    with reported(job.folder):
        try:
            run_rank(job, world, reporter)
        except Stopped:
            shutil.rmtree(ranks.path)
            raise
        except AsyncPipeError as error:
            known = root_of(error)
            assert isinstance(known, AsyncPipeError)
            if is_of_loader(error):
                known = DataError(known.what, LOADER_HAS_ENDED)
            raise with_way_on(known, job.folder) from None
        except OSError as error:
            raise disk_error(error, job.folder) or error from None
        except RuntimeError as error:
            if not is_of_loader(error):
                raise
            raise with_way_on(DataError(f"{error}", LOADER_HAS_ENDED), job.folder) from error
        except KeyboardInterrupt:
            raise Interrupted(interruption(ranks)) from None
    shutil.rmtree(ranks.path)
    return job.folder


def _join(job: Job, info: RankInfo, reporter: str) -> Path:
    schedule = make_segment(job.plan, job.config, steps=1)
    grid = grid_of(schedule, job.config.pipelines, job.config.tensor_ranks)
    check_ranks(job.planned, schedule, info.ranks, grid.replicas, grid.tensor_ranks)
    _check_restarts(job.config, info)
    left: RankFolder | None = None
    try:
        world = join(info, job.config, job.plan, job.code)
        job = _in_one_folder(job, world)
        left = RankFolder(job.folder)
        stopped: Stopped | None = None
        try:
            with reported(job.folder) if info.rank == 0 else nullcontext():
                run_rank(job, world, reporter)
        except Stopped as asked:
            stopped = asked
        world.meet()
        if info.rank == 0:
            shutil.rmtree(left.path)
        leave()
    except Exception as error:
        stages = stages_of_ranks(schedule, grid)[info.rank]
        raise _own_error(error, info.rank, stages, left) from error
    if stopped is not None:
        raise stopped
    return job.folder


def _check_restarts(settings: Settings, info: RankInfo) -> None:
    if settings.restarts:
        again = f"torchrun --max-restarts {settings.restarts}, with --output FOLDER"
        raise SettingsError(
            f"--restarts {settings.restarts} applies only to ranks that asyncpipe-train starts, "
            f"but these were started by {info.launcher}.",
            again if info.launcher == "torchrun" else "Start the job again.",
        )
    if info.restarts and settings.output is None:
        raise SettingsError(
            f"torchrun --max-restarts {info.restarts} restarts this run, which "
            "needs a fixed folder.",
            "--output FOLDER",
        )


def _in_one_folder(job: Job, world: World) -> Job:
    """The job with the folder that rank 0 creates for all; all ranks raise an error of rank 0."""
    answer: dict[str, str] = {}
    # The agents of several hosts count their attempts independently.
    again = world.sums([float(world.info.attempt)]) != [0.0]
    if world.rank == 0:
        try:
            answer = {"folder": str((reopen_folder if again else make_folder)(job).folder)}
        except AsyncPipeError as refusal:
            answer = {"what": refusal.what, "cure": refusal.cure}
    answer = json.loads(world.text_of_first(json.dumps(answer)))
    if "what" in answer:
        raise SettingsError(**answer)
    job = replace(job, folder=Path(answer["folder"]))
    end_s = time.monotonic() + _SHARED_FOLDER_S
    while not (seen := RankFolder(job.folder).path.is_dir()) and time.monotonic() < end_s:
        time.sleep(0.1)
    if b"0" in (answers := world.gathered(b"1" if seen else b"0")):
        rank, hosts = answers.index(b"0"), world.machine.host_of_rank
        raise SettingsError(
            f"rank {rank} on {hosts[rank]} cannot find {job.folder}, the run's folder, which rank "
            f"0 created on {hosts[0]}.",
            "Give --output with a folder that all hosts share, and start all in the same folder.",
        )
    return job


def _own_error(error: Exception, rank: int, stages: str, left: RankFolder | None) -> AsyncPipeError:
    """Records this rank's failure and returns its error. If another rank caused it, first waits for
    the launcher to see the first cause and end this rank, then names the earlier failure."""
    folder = left.path.parent if left else None
    failure = failure_of(error, rank, stages, left.step_of(rank) if left else 0, folder)
    if left is not None:
        left.write(failure)
    if failure.consequence:
        if left is not None:
            left.wait_for_cause()
        left_by_all = left.failures() if left else []
        causes = [each for each in left_by_all if not each.consequence]
        first = next(iter(causes or left_by_all), failure)
        if first.rank != rank:
            return RankError(
                f"rank {rank}{stages} ends because rank {first.rank} failed: {first.what}"
            )
    own = RankError(failure.what, failure.cure)
    return with_way_on(own, folder) if folder is not None else own
