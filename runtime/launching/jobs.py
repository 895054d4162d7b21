"""Settings -> a job: every gap filled for the plan at hand, and a folder for what comes of it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..checkpoint.elsewhere import bring
from ..checkpoint.resuming import CONFIGURATION, resumed_run, runs_of
from ..data.task import architecture_of
from ..errors import AsyncPipeError
from ..plan import read_plan
from ..replication.grid import grid_of
from ..trackers.choose import check_log
from ..training.loop import train
from ..training.named_code import remember_code_of
from ..training.resolve import resolve, sized_plan
from ..training.segments import make_segment
from ..training.settings import Settings
from ..training.setup import Job
from ..training.sources import default_data
from ..user_code import import_object
from ..watching.debugger import check_debugger
from ..watching.metrics import Reporter
from .beforehand import check_folder, not_of_a_run
from .disk import disk_error
from .failure import RankFolder
from .folder_lock import FolderInUse
from .world import World


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
        schedule = make_segment(sized_plan(planned, resolved), resolved, steps=1)
        check_debugger(resolved, grid_of(schedule, resolved.replicas).processes)
    check_log(resolved)
    return Job(resolved, task, planned, folder or _next_folder(settings))


def run_rank(job: Job, world: World, reporter: str) -> None:
    """One rank's part of a run whose folder exists."""
    folder = RankFolder(job.folder)
    train(job, world, reporter_factory(reporter), lambda step: folder.mark_step(world.rank, step))


def make_folder(job: Job) -> Job:
    """Makes the run's folder, or takes the one of the run that is resumed, and leaves the settings
    in it that repeat the run. It is this run's alone from then on."""
    try:
        job = _alone(job)
        ranks = RankFolder(job.folder).path
        if job.settings.resume is not None and job.folder == resumed_run(job.settings):
            shutil.rmtree(ranks, ignore_errors=True)
        check_folder(job)
        with contextlib.suppress(OSError):
            ranks.rmdir()  # of a run that ended before it began
        ranks.mkdir()
    except FileExistsError as error:
        raise not_of_a_run(str(error.filename)) from None
    except OSError as error:
        raise disk_error(error, job.folder) or error from None
    new = job.folder / f"{CONFIGURATION}.new"
    try:
        bring(job.settings, job.folder)
        new.write_text(job.settings.to_toml(), encoding="utf-8")
        new.replace(job.folder / CONFIGURATION)
        remember_code_of(job.settings)
    except (AsyncPipeError, OSError) as error:
        shutil.rmtree(job.folder / "ranks")
        new.unlink(missing_ok=True)
        raise (disk_error(error, job.folder) or error) from None
    return job


def reopen_folder(job: Job) -> Job:
    """Makes the run's folder ready for another attempt, which another process has begun; makes it
    if the last one did not come so far."""
    left = RankFolder(job.folder)
    if not left.path.is_dir():
        return make_folder(job)
    job.lock.take(job.folder)
    cause = left.told_cause()
    left.begin_again(f"{cause.what if cause else 'a rank was killed.'} Begun again.")
    return job


def _alone(job: Job) -> Job:
    """The job with a folder that no other run has; the next, where the user has named none."""
    while True:
        try:
            job.lock.take(job.folder)
        except FolderInUse:
            if (other := _next_folder(job.settings)) == job.folder:
                raise
            job = replace(job, folder=other)
        else:
            return job


def reporter_factory(spec: str) -> Callable[[Settings], Reporter]:
    """What `module:function` names."""
    made: Callable[[Settings], Reporter] = import_object(spec, "reporter", AsyncPipeError)
    return made


def _next_folder(settings: Settings) -> Path:
    """The folder that was asked for, that of the run that is resumed, or the first free
    `runs/<name>/<number>`."""
    if settings.output is not None:
        return Path(settings.output)
    if (run := resumed_run(settings)) is not None:
        return run
    runs = runs_of(settings.folder)
    taken = [int(path.name) for path in runs.glob("*") if path.name.isdigit()]
    return runs / str(max(taken, default=0) + 1)
