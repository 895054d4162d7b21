"""Settings -> a job: the RunConfig for the plan, checks before the start, and the run's folder.

A run and a dry run make the same checks, so that both refuse the same settings. The checks run no
user code: for `file.py:name` they only test that the file exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoint.folders import FolderInUse, checkpoints_in
from ..checkpoint.remote import Location, bring
from ..checkpoint.resuming import CONFIGURATION, resumed_run, runs_of
from ..checkpoint.storage import check_exportable
from ..config.asynchronous_options import with_epochs
from ..config.option_files import remember_code_of
from ..config.resolve import resolve, sized_plan
from ..config.segments import make_segment
from ..config.settings import RunConfig, Settings, SettingsError
from ..data.streams import UNKNOWN_LENGTH
from ..data.task import Task, architecture_of
from ..data.tokens import tokenizer_of
from ..distributed.failure import RankFolder
from ..distributed.grid import grid_of
from ..distributed.interfaces import check_interface
from ..distributed.process_groups import World
from ..errors import AsyncPipeError, DataError, disk_error
from ..executor.compiled import check_compiler
from ..executor.loading import ChangedCodeError
from ..limits import flag_of
from ..locations import is_url
from ..monitoring.diagnostics import check_debugger
from ..monitoring.records import Reporter
from ..monitoring.run_files import METRICS, read_run
from ..monitoring.trackers import check_log
from ..plan.plan import Plan, read_plan
from ..plan.trust import code_hashes
from ..tensor_files import check_weights
from ..training.batches import needs_encoding, open_data, prepare_data
from ..training.clipping import check_clipping_ranks
from ..training.evaluation import check_name
from ..training.phases import check_elastic, train
from ..training.setup import Job
from ..user_code import check_own_file, exits_as_errors, import_object, names_object

_PLAN = "plan.json"


def check_job(job: Job) -> None:
    """Raises the AsyncPipeError that a rank would raise during its setup."""
    config = job.config
    check_elastic(job)
    schedule = make_segment(job.plan, config, steps=1)
    check_clipping_ranks(config, schedule.stages, len(schedule.ranks))
    if config.compile:
        check_compiler(config.device, schedule)
    if config.export_hf:
        check_exportable(Path(config.folder), config.export_hf)
    if config.criterion is not None:
        check_name(config.criterion)
    check_own_file(config.data, "--data", DataError)
    for option in ("criterion", "optimizer", "lr_schedule", "metric", "callbacks"):
        check_own_file(getattr(config, option) or "", flag_of(option), SettingsError)
    if config.init_from is not None and not is_url(config.init_from):
        check_weights(Path(config.init_from))
    if config.save_to is not None:
        Location(config.save_to).check_name()
    if config.interface is not None:
        check_interface(config.interface)


def check_unstarted(job: Job) -> Job:
    """The job with its steps counted. Raises the errors of creating the run's folder and opening
    its data, except for text that has to be tokenized, which takes long."""
    check_folder(job)
    config = job.config
    if not names_object(config.data) and not needs_encoding(config):
        length = _samples_of(job)
        return job if config.epochs is None else _with_steps(job, length)
    if config.epochs is not None:
        raise SettingsError(
            f"--dry-run leaves {config.data} unread, so the steps of --epochs {config.epochs:g} "
            "are unknown.",
            "Give --steps or --samples.",
        )
    return job


def check_folder(job: Job) -> None:
    """Raises SettingsError when the run's folder belongs to another run, or is a file. A run that
    ended before its first step is in nobody's way."""
    config, folder = job.config, job.folder
    if config.resume is not None and folder == resumed_run(config):
        return
    if (folder / CONFIGURATION).exists() and not _made_no_step(folder):
        raise SettingsError(
            f"--output {folder} already contains a run.", "Choose another folder, or remove it."
        )
    if folder.exists() and not folder.is_dir():
        raise not_of_a_run(str(folder))


def _made_no_step(folder: Path) -> bool:
    """True for the folder of a run that failed or was killed before its first step."""
    if not (folder / CONFIGURATION).exists() or checkpoints_in(folder):
        return False
    ranks = RankFolder(folder)
    # A complete run leaves no ranks; the losses of a step are recorded some time after it.
    if not ranks.path.is_dir() or ranks.last_step():
        return False
    run = read_run(folder) if (folder / METRICS).is_file() else None
    return run is None or not (run.losses or run.evals)


def not_of_a_run(place: str) -> SettingsError:
    """The error for a file in place of a run's folder."""
    return SettingsError(
        f"{place} already exists and is not a run's folder.", "Choose another --output."
    )


def make_job(
    settings: Settings, folder: Path | None = None, code: Mapping[str, str] | None = None
) -> Job:
    """The job for the plan that the settings name, with all options resolved.

    `folder` is the run's; `code` are the hashes of the stages' files if they were already checked,
    for a rank also that of the plan.

    Raises AsyncPipeError when settings and plan do not fit, and ChangedCodeError for another plan
    than the one that was checked: a plan may name a criterion, which is code.
    """
    planned = read_plan(settings.folder)
    own = hashlib.sha256(planned.to_json().encode()).hexdigest()
    if code is None:
        code = {**code_hashes(settings.folder), _PLAN: own}
    elif code.get(_PLAN, own) != own:
        raise ChangedCodeError(Path(settings.folder) / _PLAN, code[_PLAN], own)
    config, task = _resolved(settings, planned)
    if config.debug is not None:
        schedule = make_segment(sized_plan(planned, config), config, steps=1)
        check_debugger(config, grid_of(schedule, config.pipelines, config.tensor_ranks).processes)
    check_log(config)
    return Job(config, task, planned, folder or _next_folder(settings), code, settings)


def _resolved(settings: Settings, planned: Plan) -> tuple[RunConfig, Task]:
    architecture, tokenizer = architecture_of(settings.folder), tokenizer_of(settings.folder)
    return resolve(settings, planned, architecture=architecture, tokenizer=tokenizer)


def with_steps_of_epochs(job: Job, world: World) -> Job:
    """The job with the steps that its epochs make of the data, which rank 0 opens. Collective.
    Raises DataError on all ranks if the data cannot be read."""
    if job.config.epochs is None:
        return job
    length, error = 0, ""
    if world.rank == 0:
        try:
            with exits_as_errors():
                prepare_data(job.config, job.task, job.folder)
                length = _samples_of(job)
        except AsyncPipeError as refused:
            error = json.dumps({"what": refused.what, "cure": refused.cure})
    length_of_all, _, error = world.text_of_first(f"{length} {error}").partition(" ")
    if error:
        raise DataError(**json.loads(error))
    job = _with_steps(job, int(length_of_all))
    if world.rank == 0:
        _write_configuration(job.config, job.folder)
    return job


def _samples_of(job: Job) -> int:
    return len(open_data(job.config, job.task, job.plan, job.folder).train)


def _with_steps(job: Job, length: int) -> Job:
    """The job with the steps that its epochs make of data of `length` samples."""
    assert job.settings is not None
    if length == UNKNOWN_LENGTH:
        raise DataError(
            f"--epochs {job.config.epochs:g}, but {job.config.data} has no length.",
            "Give --steps or --samples, or its iterable a __len__.",
        )
    config, task = _resolved(with_epochs(job.settings, length), job.planned)
    given = {name: getattr(job.config, name) for name in ("epochs", "remainder")}
    return replace(job, config=replace(config, **given), task=task)


def run_rank(job: Job, world: World, reporter: str) -> None:
    """Runs one rank's part of a run whose folder exists."""
    folder = RankFolder(job.folder)
    job = with_steps_of_epochs(job, world)
    train(job, world, reporter_factory(reporter), lambda step: folder.mark_step(world.rank, step))


def make_folder(job: Job) -> Job:
    """Creates and locks the run's folder, or locks that of the resumed run, and writes the settings
    that repeat the run."""
    try:
        job = _alone(job)
        ranks = RankFolder(job.folder).path
        check_folder(job)
        resumes = job.config.resume is not None and job.folder == resumed_run(job.config)
        unstarted = _made_no_step(job.folder)
        if resumes or unstarted:
            shutil.rmtree(ranks, ignore_errors=True)
        if unstarted:
            (job.folder / METRICS).unlink(missing_ok=True)  # the other files are written over
        with contextlib.suppress(OSError):
            ranks.rmdir()  # left by a run that ended before it began
        ranks.mkdir()
    except FileExistsError as error:
        raise not_of_a_run(str(error.filename)) from None
    except OSError as error:
        raise disk_error(error, job.folder) or error from None
    try:
        bring(job.config, job.folder)
        _write_configuration(job.repeating, job.folder)
        remember_code_of(job.config)
    except (AsyncPipeError, OSError) as error:
        shutil.rmtree(job.folder / "ranks")
        raise (disk_error(error, job.folder) or error) from None
    return job


def _write_configuration(settings: Settings, folder: Path) -> None:
    """Writes the settings that repeat the run, whole or not at all."""
    new = folder / f"{CONFIGURATION}.new"
    try:
        new.write_text(settings.to_toml(), encoding="utf-8")
        new.replace(folder / CONFIGURATION)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def reopen_folder(job: Job) -> Job:
    """Prepares the run's folder for another attempt of a restarted process; creates it if the last
    attempt ended before that."""
    left = RankFolder(job.folder)
    if not left.path.is_dir():
        return make_folder(job)
    job.lock.take(job.folder)
    cause = left.reported_cause()
    left.begin_again(f"{cause.what if cause else 'a rank was killed.'} Restarted.")
    return job


def _alone(job: Job) -> Job:
    """The job with its folder locked: the user's folder, or the next free one."""
    while True:
        try:
            job.lock.take(job.folder)
        except FolderInUse:
            if (other := _next_folder(job.config)) == job.folder:
                raise
            job = replace(job, folder=other)
        else:
            return job


def reporter_factory(spec: str) -> Callable[[RunConfig], Reporter]:
    """The object that `module:function` names."""
    factory: Callable[[RunConfig], Reporter] = import_object(spec, "reporter", AsyncPipeError)
    return factory


def _next_folder(settings: Settings) -> Path:
    """The requested folder, that of the resumed run, or the first free `runs/<name>/<number>`."""
    if settings.output is not None:
        return Path(settings.output)
    if (run := resumed_run(settings)) is not None:
        return run
    runs = runs_of(settings.folder)
    numbers = [int(path.name) for path in runs.glob("*") if path.name.isdigit()]
    return runs / str(max(numbers, default=0) + 1)
