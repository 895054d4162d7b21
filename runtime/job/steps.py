"""A job -> the commands that carry it out, as a user would type them.

JOB/data           the data of a `uri` with mode = "file"
JOB/devices.toml   the devices of [resources] instances, if their type is known
JOB/plan           the generated folder
JOB/made-from.json the command and files that the plan was made from
JOB/run            the folder of the run, unless [storage] checkpoints names another
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.segments import make_segment
from ..config.settings import Settings
from ..distributed.grid import grid_of
from ..distributed.ranks import find_rank_info
from ..launch.job import make_job
from ..launch.slurm import train_command
from ..user_code import command_line, file_hash, names_object
from .instances import devices_file, instance_type
from .job_file import JobDescription, JobError, flag_words
from .transfers import MADE_FROM

DATA_VARIABLE = "ASYNCPIPE_DATA"
"""The environment variable that tells a data function of the user where the data are."""


_OF_DEVICES = {"devices", "hosts", "device", "ranks"}
"""Options of [plan] that name devices themselves."""


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job on this machine."""

    path: Path
    job: JobDescription

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def plan(self) -> Path:
        return self.path / "plan"

    @property
    def devices(self) -> Path:
        return self.path / "devices.toml"

    @property
    def devices_text(self) -> str | None:
        """The content of `devices`; None unless the plan is made for known instances."""
        own = self.job.instances
        kind = instance_type(own.type)
        is_given = self.job.distribution.pipeline is not None or _OF_DEVICES & self.job.plan.keys()
        if own.type is None or kind is None or is_given:
            return None
        return devices_file(own.type, kind, own.count)

    @property
    def made_from(self) -> Path:
        return self.path / MADE_FROM

    @property
    def run(self) -> Path:
        own = self.job.storage.checkpoints
        return self.path / "run" if own is None else Path(own)

    @property
    def is_fetched(self) -> bool:
        """True if the data are copied to this machine before the run."""
        data = self.job.data
        return data.uri is not None and data.mode == "file" and local_path(data.uri) is None

    @property
    def data_place(self) -> str | None:
        """Where a run finds the data of a `uri`: a file or folder, or the URL itself."""
        data = self.job.data
        if data.uri is None or data.mode == "pipe":
            return data.uri
        if not self.is_fetched:
            return local_path(data.uri)
        files = [path for path in self.data.glob("*") if not path.name.startswith(".")]
        return str(files[0] if len(files) == 1 and files[0].is_file() else self.data)


def local_path(url: str) -> str | None:
    """The path of a file:// URL; None for other URLs."""
    return url.removeprefix("file://") if url.startswith("file://") else None


def partition_words(folder: JobFolder) -> list[str]:
    """The command that makes the plan."""
    job = folder.job
    plan = dict(job.plan)
    own = job.distribution
    for key, number, name in (
        ("pipeline", own.pipeline, "ranks" if "stages" in plan else "stages"),
        ("tensor", own.tensor, "tensor_parallel"),
    ):
        if number is not None and str(plan.setdefault(name, number)) != str(number):
            raise JobError(
                f"{job.file}: [plan] {name} is {plan[name]}, but [distribution] {key} is {number}.",
                "Leave one out.",
            )
    if folder.devices_text is not None:
        plan["devices"] = str(folder.devices)
    words = flag_words({**job.model, **plan})
    return ["asyncpipe-partition", *words, "--output", str(folder.plan)]


def made_from(folder: JobFolder) -> dict[str, Any]:
    """The facts that decide the plan of a job: its command, and the content of the files in it."""
    name, *words = partition_words(folder)
    places = {word.rpartition(":")[0] if names_object(word) else word for word in words}
    files = {place: Path(place) for place in sorted(places - {str(folder.plan)})}
    return {
        "command": command_line(name, words),
        "files": {place: file_hash(path) for place, path in files.items() if path.is_file()},
    }


def train_settings(folder: JobFolder, *, trust: bool = False) -> Settings:
    """The options of the run. Raises SettingsError for those that do not fit each other."""
    job = folder.job
    options: dict[str, Any] = dict(job.train)
    own = job.distribution
    for name, number in (("replicas", own.replicas), ("tensor_parallel", own.tensor)):
        if number is not None:
            options[name] = number
    if job.data.uri is not None and not names_object(options.get("data") or ""):
        if "data" in options:
            raise JobError(
                f'{job.file}: [train] data is "{options["data"]}", but [data] uri is '
                f"{job.data.uri}.",
                "Leave one out, or name a function of yours that reads $ASYNCPIPE_DATA.",
            )
        options["data"] = folder.data_place
    if job.storage.checkpoints_uri is not None:
        options["save_to"] = job.storage.checkpoints_uri
    if job.distribution.launcher == "mpi":
        options.setdefault("transport", "mpi")
    return Settings(folder=str(folder.plan), output=str(folder.run), trust=trust, **options)


def train_words(folder: JobFolder, *, trust: bool = False) -> list[str]:
    """The command that trains; with its launcher, unless this process is one of its ranks."""
    settings = train_settings(folder, trust=trust)
    words = run_words(settings)
    launcher = folder.job.distribution.launcher
    if launcher is None or find_rank_info(os.environ) is not None:
        return words
    own = folder.job.distribution
    if (folder.plan / "plan.json").is_file():
        ranks = str(ranks_of(settings))
    else:  # to be shown
        ranks = str(own.processes or "RANKS")
    return {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", ranks, "--no-python"],
        "mpi": ["mpirun", "-n", ranks],
        "srun": ["srun", "--ntasks", ranks],
    }[launcher] + words


def run_words(settings: Settings) -> list[str]:
    """The command of a rank, or of all that asyncpipe-train starts."""
    return [*train_command(settings), "--resume", "auto"]


def ranks_of(settings: Settings) -> int:
    """The processes of a run, whose plan exists."""
    job = make_job(settings)
    schedule = make_segment(job.plan, job.config, steps=1)
    return grid_of(schedule, job.config.pipelines, job.config.tensor_ranks).processes


def variables(folder: JobFolder) -> Mapping[str, str]:
    """The variables that a run finds in its environment."""
    place = folder.data_place
    return {} if place is None else {DATA_VARIABLE: place}


def check_plan(folder: JobFolder) -> None:
    """Raises JobError if the plan of the job has not been made."""
    if not (folder.plan / "plan.json").is_file():
        words = ["asyncpipe-job", "run", folder.job.file, *folder.job.overrides]
        raise JobError(
            f"{folder.plan} has no plan of {folder.job.file}.",
            f"{shlex.join([*words, '--only', 'prepare'])} makes it.",
        )
