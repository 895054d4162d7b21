"""Settings -> a job: every gap filled for the plan at hand, and a folder for what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..data.task import architecture_of
from ..errors import AsyncPipeError
from ..plan import read_plan
from ..replication.grid import grid_of
from ..trackers.choose import check_log
from ..training.loop import Job, train
from ..training.resolve import resolve, sized_plan
from ..training.segments import make_segment
from ..training.settings import Settings, SettingsError
from ..training.sources import default_data
from ..user_code import import_object
from ..watching.debugger import check_debugger
from ..watching.metrics import Reporter
from .failure import RankFolder
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


def reporter_factory(spec: str) -> Callable[[Settings], Reporter]:
    """What `module:function` names."""
    made: Callable[[Settings], Reporter] = import_object(spec, "reporter", AsyncPipeError)
    return made


def _next_folder(settings: Settings) -> Path:
    """The folder that was asked for, or the first free `runs/<name>/<number>`."""
    if settings.output is not None:
        return Path(settings.output)
    runs = Path("runs") / Path(settings.folder).resolve().name
    taken = [int(path.name) for path in runs.glob("*") if path.name.isdigit()]
    return runs / str(max(taken, default=0) + 1)
