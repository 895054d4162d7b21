"""A job -> what would end it in its first seconds, found before anything is started or written.

A run and a dry run both ask, so that a dry run refuses what a run refuses. Nothing of the user's
code is run: of `file.py:name` it is known whether there is such a file.
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.location import Location, is_url
from ..checkpoint.resuming import CONFIGURATION, resumed_run
from ..errors import DataError
from ..tensors import check_weights
from ..training.async_clipping import check_ranks
from ..training.criterion import check_name
from ..training.export import check_exportable
from ..training.segments import make_segment
from ..training.settings import SettingsError
from ..training.setup import Job
from ..training.sources import needs_encoding, open_data
from ..user_code import check_own_file, names_object
from .interfaces import check_interface


def check_job(job: Job) -> None:
    """Raises the AsyncPipeError that a rank would raise when it sets up."""
    settings = job.settings
    schedule = make_segment(job.plan, settings, steps=1)
    check_ranks(settings, schedule.stages, len(schedule.ranks))
    if settings.export_hf:
        check_exportable(Path(settings.folder), settings.export_hf)
    if settings.criterion is not None:
        check_name(settings.criterion)
        check_own_file(settings.criterion, "--criterion", SettingsError)
    check_own_file(str(settings.data), "--data", DataError)
    if settings.init_from is not None and not is_url(settings.init_from):
        check_weights(Path(settings.init_from))
    if settings.save_to is not None:
        Location(settings.save_to).check_name()
    if settings.interface is not None:
        check_interface(settings.interface)


def check_unstarted(job: Job) -> None:
    """The same for what a run finds when it makes its folder and opens its data; a text that is to
    be tokenised is left alone, since that takes long."""
    check_folder(job)
    settings = job.settings
    if not names_object(str(settings.data)) and not needs_encoding(settings):
        open_data(settings, job.task, job.plan, job.folder)


def check_folder(job: Job) -> None:
    """Raises SettingsError where the run's folder is of another run, or is no folder."""
    settings, folder = job.settings, job.folder
    if settings.resume is not None and folder == resumed_run(settings):
        return
    if (folder / CONFIGURATION).exists():
        raise SettingsError(
            f"--output {folder} already holds a run.", "Choose another folder, or remove it."
        )
    if folder.exists() and not folder.is_dir():
        raise not_of_a_run(str(folder))


def not_of_a_run(place: str) -> SettingsError:
    """The sentence about a file where a folder of a run should be."""
    return SettingsError(
        f"{place} is there already, and is not of a run.", "--output with another folder."
    )
