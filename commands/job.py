"""asyncpipe-job: runs the job that a file describes, or writes it for another system."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..runtime.limits import Text, path
from .console import print_text
from .options import limited, make_app, unwrapped
from .running import check_words, usage

if TYPE_CHECKING:
    from ..runtime.job.steps import JobFolder

app = make_app("asyncpipe-job", "Run the job that a file describes, here or on other systems.")


_VALUE = Text("TABLE.KEY=VALUE", "train.lr=1e-3")


@app.command(name="run")
@unwrapped
def run_command(
    file: Annotated[Path, limited(path("job.toml"), "file")],
    /,
    *values: Annotated[str, limited(_VALUE, "values")],
    system: Annotated[
        Literal["local", "ray", "docker", "slurm", "kubernetes", "sagemaker"],
        Parameter(name="--on"),
    ] = "local",
    shown: Annotated[bool, Parameter(name="--print", negative=())] = False,
    only: Literal["prepare", "train", "upload"] | None = None,
    folder: Annotated[Path | None, limited(path("jobs/mine"), "folder")] = None,
    trust: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Run a job: fetch its data, partition its model, train, and upload the results.

    A job that was stopped or killed continues from its newest checkpoint when it is started again,
    also on another machine, if [storage] checkpoints_uri names a place.

    Parameters
    ----------
    file
        Job file: TOML with the tables [model], [plan], [train], [data], [storage], [resources],
        [container] and [distribution] (docs/job-files.md).
    values
        Values that override those of the file, such as train.lr=1e-3.
    system
        System of the job. local runs it on this machine, and ray with its ranks on the Ray cluster
        that this machine belongs to. The others write files into the folder of the job, and print
        the commands that start it. [default: local]
    shown
        Print what would be done or written, and do nothing.
    only
        Single step to run on this machine. [default: all]
    folder
        Folder of the job. [default: jobs/NAME, after the job file]
    trust
        Allow running code that the job file names, and plans from other machines. Remembered.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.job.job_file import read_job
    from ..runtime.job.steps import JobFolder, partition_words, train_settings
    from .partition import app as partition

    job = read_job(file, values)
    own = JobFolder(folder or Path("jobs") / job.name, job)
    check_words(partition, partition_words(own)[1:])
    train_settings(own)
    if system in ("local", "ray"):
        return _run(own, only, on_ray=system == "ray", trust=trust, shown=shown)
    if only is not None:
        raise usage(f"--only {only} applies to --on local and ray.")
    _write(own, system, trust=trust, shown=shown)
    return 0


def _run(folder: JobFolder, only: str | None, *, on_ray: bool, trust: bool, shown: bool) -> int:
    """Runs a job, or prints what it would do."""
    from ..runtime.job.ray_ranks import connect_to_ray
    from ..runtime.job.runner import STEPS, JobRun, run_job, shown_steps

    if shown:
        print_text("\n".join(shown_steps(folder, trust=trust)))
        return 0
    if on_ray:
        connect_to_ray(folder.job)
    run = JobRun(folder, Path(sys.argv[0]).absolute().parent, trust, print_text)
    return run_job(run, (only,) if only else STEPS, on_ray=on_ray)


def _write(folder: JobFolder, system: str, *, trust: bool, shown: bool) -> None:
    """Writes a job for another system, or prints it."""
    from ..runtime.job.targets import WRITERS

    written = WRITERS[system](folder, trust=trust)
    if shown:
        for name, text in written.files.items():
            print_text(f"# {folder.path / name}\n{text}")
    else:
        written.write(folder.path)
        for name in written.files:
            print_text(f"written {folder.path / name}")
    for command in written.commands:
        print_text(f"$ {command}")
