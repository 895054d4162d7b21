"""The other systems that a job can be written for, by their names, and the writer for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from ..config.execution_options import seconds_of
from ..launch.job import make_job
from ..launch.slurm import sbatch_script
from .docker import for_docker
from .kubernetes import for_kubernetes
from .sagemaker import for_sagemaker
from .steps import JobFolder, check_plan, ranks_of, train_settings, variables
from .written import WrittenJob

SCRIPT = "job.sbatch"


def for_slurm(folder: JobFolder, *, trust: bool) -> WrittenJob:
    """The batch script with the job's other steps around the ranks, and the command that submits
    it. Raises JobError without a plan: its hosts and ranks decide about the resources."""
    job = folder.job
    check_plan(folder)
    settings = train_settings(folder, trust=trust)
    if job.hosts > 1:
        settings = replace(settings, nodes=job.hosts)
    if job.resources.max_run is not None:
        settings = replace(settings, time_limit=_as_time(seconds_of(job.resources.max_run) or 0))
    own = ["asyncpipe-job", "run", job.file, *job.overrides, "--folder", str(folder.path)]
    own += ["--trust"] if trust else []
    exports = [f"export {name}={shlex.quote(text)}" for name, text in variables(folder).items()]
    script = sbatch_script(
        settings,
        make_job(settings).plan,
        ranks_of(settings),
        before=[shlex.join([*own, "--only", "prepare"]), *exports],
        after=[shlex.join([*own, "--only", "upload"])],
    )
    return WrittenJob({SCRIPT: script}, (f"sbatch {shlex.quote(str(folder.path / SCRIPT))}",))


def _as_time(seconds: int) -> str:
    """
    >>> _as_time(13800), _as_time(216000)
    ('03:50:00', '2-12:00:00')
    """
    days, rest = divmod(seconds, 86_400)
    time = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{time}" if days else time


class Writer(Protocol):
    """Writes a job for one system."""

    def __call__(self, folder: JobFolder, *, trust: bool) -> WrittenJob: ...


WRITERS: Mapping[str, Writer] = {
    "docker": for_docker,
    "slurm": for_slurm,
    "kubernetes": for_kubernetes,
    "sagemaker": for_sagemaker,
}
