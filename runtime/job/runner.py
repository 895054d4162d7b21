"""Runs a job on this machine: data, plan, training, upload, each as its command.

    prepare    fetch the data; make the plan unless it is here, or complete at the checkpoints' URL
    train      asyncpipe-train with --resume auto
    upload     weights, metrics, report and plan to [storage] output

A signal that asks the job to stop, and the end of `max_run`, are forwarded to the command that
runs; training then ends with a checkpoint. A job that was killed continues when it is started
again, on the same machine or on a new one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from ..checkpoint.folders import FolderLock
from ..config.execution_options import seconds_of
from ..launch.local import ended_after
from ..plan.trust import STATE_VARIABLE, is_trusted, remember, state_folder
from ..process import STOPPED, STOPPING, Ended, die_with_parent, handled
from .job_file import JobDescription, JobError, check_code_of, remember_code_named_by
from .ray_ranks import RayRanks
from .steps import (
    JobFolder,
    check_plan,
    made_from,
    partition_words,
    ranks_of,
    run_words,
    train_settings,
    train_words,
    variables,
)
from .transfers import (
    fetch,
    fetch_plan,
    read_made_from,
    upload,
    upload_plan,
    write_made_from,
)

PREPARE, TRAIN, UPLOAD = STEPS = ("prepare", "train", "upload")
"""The steps of a job on this machine."""

_RESULTS = ("weights", "report.html", "metrics.jsonl", "config.toml")


@dataclass(frozen=True)
class JobRun:
    """A job on this machine.

    folder: the folder of the job.
    scripts: the folder of our commands.
    trust: code that the job's file names, and a plan from elsewhere, may run.
    say: prints a line.
    """

    folder: JobFolder
    scripts: Path
    trust: bool
    say: Callable[[str], None]

    @property
    def job(self) -> JobDescription:
        return self.folder.job


def run_job(run: JobRun, steps: Sequence[str] = STEPS, *, on_ray: bool = False) -> int:
    """Runs these steps; returns the exit code of the first command that fails, else 0.

    on_ray: the ranks are actors of the Ray cluster that this process has joined.

    Raises Ended after a signal that came while no command ran, and AsyncPipeError.
    """
    job = run.job
    check_code_of(job, str(run.folder.plan), trust=run.trust)
    remember_code_named_by(job)
    if job.hosts > 1 and not on_ray:
        run.say(f"note    this machine runs all processes, not {job.hosts} hosts")
    limit = job.resources.max_run
    with ExitStack() as stack:
        commands = stack.enter_context(_Commands(run))
        stack.enter_context(ended_after(None if limit is None else seconds_of(limit)))
        if PREPARE in steps:
            lock = stack.enter_context(FolderLock("job"))
            lock.take(run.folder.path)
            if code := _prepare(run, commands):
                return code
        if TRAIN in steps:
            check_plan(run.folder)
            if code := (commands.run_on_ray() if on_ray else commands.train()):
                return code
        if UPLOAD in steps and job.storage.output is not None:
            _upload(run, job.storage.output)
    return 0


def shown_steps(folder: JobFolder, *, trust: bool) -> list[str]:
    """The steps of a job on this machine, in lines: its commands begin with `$`."""
    job, lines = folder.job, []
    if folder.is_fetched:
        lines.append(f"fetch   {job.data.uri} to {folder.data}")
    if (devices := folder.devices_text) is not None:
        lines.append(f"write   {folder.devices}: {devices.splitlines()[0].removeprefix('# ')}")
    lines.append(f"$ {shlex.join(partition_words(folder))}")
    lines += [f"$ export {name}={shlex.quote(text)}" for name, text in variables(folder).items()]
    lines.append(f"$ {shlex.join(train_words(folder, trust=trust))}")
    if job.resources.max_run is not None:
        lines.append(f"limit   SIGTERM to the command that runs after {job.resources.max_run}")
    if job.storage.output is not None:
        lines.append(f"upload  {', '.join(_RESULTS)} and plan.json to {job.storage.output}")
    return lines


def _prepare(run: JobRun, commands: _Commands) -> int:
    job, folder = run.job, run.folder
    if folder.is_fetched:
        assert job.data.uri is not None
        run.say(f"fetch   {job.data.uri}: {fetch(job.data.uri, folder.data)}")
    if folder.devices_text is not None:
        folder.devices.write_text(folder.devices_text, encoding="utf-8")
    wanted, uri = made_from(folder), job.storage.checkpoints_uri
    if read_made_from(folder.made_from) == wanted and _is_usable(run, folder.plan, folder.plan):
        run.say(f"plan    {folder.plan} is here")
        return 0
    copies = None if uri is None else f"{uri.rstrip('/')}/plan"
    if copies is not None and _restored(run, copies, wanted):
        return 0
    folder.made_from.unlink(missing_ok=True)
    if code := commands.run(partition_words(folder)):
        return code
    write_made_from(folder.made_from, wanted)
    if copies is not None:
        done = upload_plan(folder.plan, folder.made_from, copies)
        run.say(f"copy    {folder.plan} to {copies}: {done}")
    return 0


def _is_usable(run: JobRun, plan: Path, place: object) -> bool:
    """True if there is a plan in a folder, and it may run here. `place` is where it is from."""
    if not (plan / "plan.json").is_file():
        return False
    if run.trust:
        remember(plan)
    if is_trusted(plan):
        return True
    run.say(
        f"plan    {place} was made on another machine and is made again here; --trust uses it, so "
        "that a run continues to the last bit"
    )
    return False


def _restored(run: JobRun, copies: str, wanted: object) -> bool:
    """True if the plan of this job was copied from its URL."""
    folder = run.folder
    plan, aside, noted = folder.plan, folder.path / ".plan.part", folder.path / ".made-from.part"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if not fetch_plan(copies, aside, noted) or read_made_from(noted) != wanted:
            return False
        if not _is_usable(run, aside, copies):
            return False
        shutil.rmtree(plan, ignore_errors=True)
        aside.replace(plan)
        noted.replace(folder.made_from)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        noted.unlink(missing_ok=True)
    run.say(f"plan    {plan} from {copies}")
    return True


def _upload(run: JobRun, output: str) -> None:
    own, plan = run.folder.run, run.folder.plan
    found = [
        file
        for name in _RESULTS
        for file in ([own / name] if (own / name).is_file() else sorted((own / name).rglob("*")))
        if file.is_file()
    ]
    if not any(file.parent.name == "weights" for file in found):
        raise JobError(f"{own} has no weights: the run has not ended.", "Train first.")
    run.say(f"upload  {output}: {upload(found, own, output)}")
    upload([plan / "plan.json"], plan, output)


class _Process(Protocol):
    """A process, or several on a cluster."""

    def wait(self) -> int: ...

    def send_signal(self, number: signal.Signals, /) -> None: ...


class _Commands:
    """Runs commands one after the other, and forwards signals to the one that runs."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._process: _Process | None = None
        self._is_stopped = False
        self._handled = handled(STOPPING, self._stop)

    def __enter__(self) -> _Commands:
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handled.__exit__(None, None, None)

    def train(self) -> int:
        """Trains on this machine; returns the exit code."""
        return self.run(train_words(self._run.folder, trust=self._run.trust))

    def run_on_ray(self) -> int:
        """Trains on a Ray cluster; returns the exit code of the first rank that fails, else 0."""
        folder, trust = self._run.folder, self._run.trust
        settings = train_settings(folder, trust=trust)
        words, ranks = run_words(settings), ranks_of(settings)
        self._run.say(f"$ {shlex.join(words)}  # in {ranks} actors of Ray")
        # What is trusted here is trusted by the ranks, on hosts that share the marks.
        marks = state_folder()
        own = {} if marks is None else {STATE_VARIABLE: str(marks)}
        return self._follow(RayRanks(words, settings, ranks, {**self._environment, **own}))

    def run(self, words: Sequence[str]) -> int:
        """Runs a command to its end; returns its exit code."""
        self._run.say(f"$ {shlex.join(words)}")
        environment = self._environment
        program = shutil.which(words[0], path=environment["PATH"])
        if program is None:
            raise JobError(f"{words[0]} is not installed.", "Choose another launcher.")
        # Ctrl-C is for this process alone, which passes it on.
        process = subprocess.Popen(
            [program, *words[1:]],
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        code = self._follow(process)
        # torchrun answers with 1 where its ranks, which it stopped, answered with 143.
        return STOPPED if code and self._is_stopped and words[0] == "torchrun" else code

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{self._run.scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**variables(self._run.folder), "PATH": path}

    def _follow(self, process: _Process) -> int:
        """Waits for a process, which gets the signals meanwhile; returns its exit code."""
        self._process = process
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            self._process = None
        return 128 - code if code < 0 else code

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            raise Ended(STOPPED)
        self._is_stopped = True
        self._process.send_signal(signal.SIGTERM)
