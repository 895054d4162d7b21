"""Options and lists of values -> a run of each combination, and the table of their results.

    runs/gpt2_4p/sweep/sweep.json           the record of each run
    runs/gpt2_4p/sweep/sweep.md             the table, the best first
    runs/gpt2_4p/sweep/lr=0.001,seed=1      a run's folder
    runs/gpt2_4p/sweep/lr=0.001,seed=1.toml all its options
    runs/gpt2_4p/sweep/lr=0.001,seed=1.log  what it printed

Each run is a separate process: the same command with its own file of options. A finished run is not
repeated; an unfinished one continues from its last checkpoint or starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.folders import FolderLock, checkpoints_in
from ..config.option_files import code_of, settings_from
from ..config.settings import RunConfig, SettingsError
from ..distributed.cpu_affinity import read_topology
from ..distributed.ranks import find_rank_info
from ..errors import AsyncPipeError, DataError
from ..formatting import Column, Table, write_accuracy, write_duration, write_loss
from ..launch.job import make_job
from ..launch.local import ended_after
from ..monitoring.run_files import read_run
from ..plan.plan import Plan
from ..plan.trust import is_trusted, remember, untrusted
from ..process import Interrupted
from ..serialization import Origin, parse_json, read_text, shaped
from ..training.setup import Job
from .variants import (
    Child,
    ended_by_signals,
    in_words,
    name_of,
    run_children,
    share_machine,
    variants,
)

FILE = "sweep.json"
WAITING, FINISHED, FAILED = "waiting", "finished", "failed"


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep."""

    name: str
    """The name of its folder."""
    values: Mapping[str, Any]
    """The values of the varied options."""
    key: str
    """A hash of everything that decides its losses."""
    state: str = WAITING
    loss: float | None = None
    """The loss of its last evaluation, or of its last step if it made none."""
    train_loss: float | None = None
    accuracy: float | None = None
    seconds: float | None = None
    error: str = ""
    """The message of a failed run."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Record:
    runs: tuple[SweptRun, ...]


def read_record(folder: Path) -> dict[str, SweptRun]:
    """The runs of a sweep's folder by name; empty for a folder without a record.

    Raises DataError for a record that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    cure = "Remove it, or give another folder with --output."
    origin = Origin(f"{path} is not a record of a sweep: it", DataError, cure)
    record = shaped(_Record, parse_json(read_text(path, origin), origin, finite=False), origin)
    return {run.name: run for run in record.runs}


def write_record(folder: Path, runs: Mapping[str, SweptRun]) -> None:
    """Writes the record atomically."""
    lines = ",\n  ".join(run.to_json() for run in runs.values())
    aside = folder / f".{FILE}"
    aside.write_text(f'{{"runs": [\n  {lines}\n]}}\n', encoding="utf-8")
    aside.replace(folder / FILE)


def with_outcome(run: SweptRun, folder: Path, code: int, log: Path) -> SweptRun:
    """The run with the result of its process: an exit code, metrics in its folder, and a log."""
    if code != 0:
        return replace(run, state=FAILED, error=_last_error(log) or f"ended with exit code {code}")
    end = read_run(folder).end
    evaluated = end["eval_loss"]
    return replace(
        run,
        state=FINISHED,
        loss=end["last_loss"] if evaluated is None else evaluated,
        train_loss=end["last_loss"],
        accuracy=end["accuracy"],
        seconds=round(end["seconds"], 3),
        error="",
    )


def _last_error(log: Path) -> str:
    errors = re.findall(r"^error: (.*)", log.read_text(encoding="utf-8", errors="replace"), re.M)
    return str(errors[-1]) if errors else ""


def sweep_table(runs: Sequence[SweptRun]) -> Table:
    """The options that differ, then the results; the lowest loss first."""
    accuracy = ("accuracy",) if any(run.accuracy is not None for run in runs) else ()
    names = (*runs[0].values, "loss", *accuracy, "train loss", "time")
    leave_out = {"time": 2, "train loss": 1}
    return Table(
        (*(Column(name, leave_out=leave_out.get(name, 0)) for name in names), Column("", "text")),
        tuple((*(_cell(run, name) for name in names), _state(run)) for run in ranked(runs)),
    )


def ranked(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """The lowest loss first; runs without a loss last, in their order."""
    return sorted(runs, key=lambda run: (run.loss is None, run.loss or 0.0))


def _cell(run: SweptRun, column: str) -> str:
    match column:
        case "loss" | "train loss":
            number = run.loss if column == "loss" else run.train_loss
            return "" if number is None else write_loss(number)
        case "accuracy":
            return "" if run.accuracy is None else write_accuracy(run.accuracy)
        case "time":
            return "" if run.seconds is None else write_duration(run.seconds)
    return in_words(_hashable(run.values[column]))


def _state(run: SweptRun) -> str:
    return "" if run.state == FINISHED else f"{run.state} {run.error}".strip()


def _hashable(value: object) -> object:
    """JSON has lists where options have tuples."""
    return tuple(value) if isinstance(value, list) else value


class SweepError(AsyncPipeError):
    """A sweep with failed runs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep, by name."""

    folder: Path
    """The folder of all runs."""
    runs: Mapping[str, SweptRun]
    jobs: Mapping[str, Job]
    """All options of each run."""
    others: Mapping[str, SweptRun]
    """Runs of the folder with values that this sweep does not have."""

    @property
    def waiting(self) -> list[str]:
        """The names of the unfinished runs."""
        return [name for name, run in self.runs.items() if run.state != FINISHED]

    @property
    def ranked(self) -> list[SweptRun]:
        """All runs, the best first."""
        return ranked(tuple(self.runs.values()))


def plan_sweep(options: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> Sweep:
    """The runs of all combinations of `lists`, each with the other options, and their states.
    Nothing is run or written.

    Raises AsyncPipeError when the options of a run do not fit each other or its plan, or its folder
    holds another run.
    """
    info = find_rank_info(os.environ)
    if info is not None and info.ranks > 1:
        raise SettingsError(
            f"a sweep starts its runs itself, but this is one of {info.ranks} ranks.",
            "Start it without a launcher, or each of its runs under one.",
        )
    jobs: dict[str, Job] = {}
    given = options.get("output")
    folder = None if given is None else Path(given)
    for values in variants(lists):
        settings = settings_from({**options, **values, "output": None})
        folder = folder or Path("runs") / Path(settings.folder).resolve().name / "sweep"
        name = name_of(values)
        if settings.save_to is not None:
            settings = replace(settings, save_to=f"{settings.save_to.rstrip('/')}/{name}")
        if settings.export_hf is not None:
            raise SettingsError(
                f"all runs of a sweep would export to {settings.export_hf}.",
                "Leave --export-hf out, and repeat the best with --config and it.",
            )
        try:
            jobs[name] = make_job(settings, folder / name)
        except AsyncPipeError as error:
            raise SettingsError(f"{name}: {error.what}", error.cure) from error
    assert folder is not None
    known = read_record(folder)
    runs = {}
    for values, (name, job) in zip(variants(lists), jobs.items(), strict=True):
        before, run = known.pop(name, None), SweptRun(name, values, _key(job))
        same = before is not None and before.key == run.key
        if job.folder.exists() and not same:
            raise SettingsError(
                f"{job.folder} holds a run of other options or other stages.",
                "--output with another folder, or remove this one.",
            )
        runs[name] = before if before is not None and same else run
    return Sweep(folder, runs, jobs, known)


def run_sweep(
    sweep: Sweep,
    command: Sequence[str],
    *,
    at_once: int = 1,
    on_run: Callable[[SweptRun], None] = lambda run: None,
) -> Sweep:
    """Runs the unfinished runs, `at_once` at a time, and returns the sweep with their results.

    Each process is `command` followed by the options of its run; `on_run` is called with each
    finished run. A run that fails does not end the others. Raises SettingsError when another
    process works in the same folder or concurrent runs do not have a GPU each, TrustError for an
    untrusted generated folder; KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM, when
    all runs have ended.
    """
    # The options of the command are equal in all runs.
    command_options = next(iter(sweep.jobs.values())).config
    for model in {job.config.folder for job in sweep.jobs.values()}:
        if command_options.trust:
            remember(model)
        elif not is_trusted(model):
            raise untrusted(model)
    runs = dict(sweep.runs)
    shares = share_machine(
        min(at_once, max(1, len(sweep.waiting))),
        read_topology(),
        ranks=max(_ranks(job.config, job.plan) for job in sweep.jobs.values()),
        gpus=_gpus(sweep),
    )
    children = (_child(sweep.jobs[name], command) for name in sweep.waiting)
    try:
        with (
            FolderLock("sweep") as lock,
            ended_by_signals(),
            ended_after(command_options.max_run_s),
            closing(run_children(children, shares)) as ended,
        ):
            lock.take(sweep.folder)
            _write(sweep, runs)
            for child, code in ended:
                folder = sweep.jobs[child.name].folder
                run = runs[child.name] = with_outcome(runs[child.name], folder, code, child.log)
                _write(sweep, runs)
                on_run(run)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted · {sweep.folder} · the same command continues") from None
    return Sweep(sweep.folder, runs, sweep.jobs, sweep.others)


def check_finished(sweep: Sweep) -> None:
    """Raises SweepError when runs failed."""
    failed = [run for run in sweep.runs.values() if run.state == FAILED]
    if failed:
        raise SweepError(
            f"{len(failed)} of {len(sweep.runs)} runs failed: {failed[0].name}: {failed[0].error}",
            f"Their output is in {sweep.folder}/*.log; the same command runs them again.",
        )


def _child(job: Job, command: Sequence[str]) -> Child:
    """The process of a run: from its last checkpoint, or from the start in a cleared folder."""
    is_resumed = bool(checkpoints_in(job.folder))
    if not is_resumed:
        shutil.rmtree(job.folder, ignore_errors=True)
    options = _beside(job.folder, ".toml")
    options.write_text(job.config.to_toml(), encoding="utf-8")
    own = ["--config", str(options), "--output", str(job.folder)]
    for option in dict(code_of(asdict(job.config))):  # known here, as no file can say
        own += [f"--{option}", str(getattr(job.config, option))]
    resumed = ("--resume", "auto") if is_resumed else ()
    return Child(job.folder.name, (*command, *own, *resumed), _beside(job.folder, ".log"))


def _beside(folder: Path, suffix: str) -> Path:
    """A file next to the folder. Not `with_suffix`: names such as lr=0.1 contain a point."""
    return folder.with_name(folder.name + suffix)


def _write(sweep: Sweep, runs: Mapping[str, SweptRun]) -> None:
    write_record(sweep.folder, {**sweep.others, **runs})
    (sweep.folder / "sweep.md").write_text(
        sweep_table(tuple(runs.values())).to_markdown(), encoding="utf-8"
    )


def _key(job: Job) -> str:
    content = [job.config.to_toml(), [stage.sha256 for stage in job.planned.stages]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _ranks(config: RunConfig, plan: Plan) -> int:
    """The most ranks of a run."""
    alone = config.schedule == "single"
    ranks = 1 if alone else config.ranks or len(plan.stages)
    return ranks * config.pipelines


def _gpus(sweep: Sweep) -> list[str] | None:
    """The GPUs for concurrent runs to divide; None if no run uses a GPU."""
    if not any(job.config.device == "cuda" for job in sweep.jobs.values()):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())]
