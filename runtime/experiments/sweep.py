"""Options, lists of values and strategies -> a run of each combination, and their results.

    runs/gpt2_4p/sweep/sweep.json           the record of each run
    runs/gpt2_4p/sweep/sweep.md             the table, the best first
    runs/gpt2_4p/sweep/lr=0.001,seed=1      a run's folder
    runs/gpt2_4p/sweep/lr=0.001,seed=1.toml all its options
    runs/gpt2_4p/sweep/lr=0.001,seed=1.log  what it printed

Each run is a separate process: the same command with its own file of options. A finished run is not
repeated; an unfinished one continues from its last checkpoint or starts again. A run without enough
memory is a result like others.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from ..errors import AsyncPipeError
from ..launch.job import make_job
from ..launch.local import ended_after
from ..plan.plan import Plan
from ..plan.trust import is_trusted, remember, untrusted
from ..process import Interrupted
from ..training.setup import Job
from .strategies import STRATEGY, Strategy
from .swept_runs import (
    FAILED,
    FINISHED,
    OUT_OF_MEMORY,
    SweptRun,
    advice,
    ranked,
    read_record,
    tables_of,
    with_outcome,
    write_record,
)
from .variants import (
    Child,
    ended_by_signals,
    name_of,
    run_children,
    share_machine,
    variants,
)


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
    too_large: tuple[SweptRun, ...] = ()
    """Rows of runs that were tried with batches that need too much memory."""

    @property
    def waiting(self) -> list[str]:
        """The names of the unfinished runs."""
        ended = FINISHED, OUT_OF_MEMORY
        return [name for name, run in self.runs.items() if run.state not in ended]

    @property
    def ranked(self) -> list[SweptRun]:
        """All runs and rows, the best first."""
        return ranked((*self.runs.values(), *self.too_large))

    @property
    def text(self) -> str:
        """The tables in Markdown, and for strategies which one to take."""
        tables = [table.to_markdown() for table in tables_of(self.ranked)]
        return "\n".join([*tables, *filter(None, [advice(self.ranked)])])


def plan_sweep(
    options: Mapping[str, Any],
    lists: Mapping[str, Sequence[Any]],
    strategies: Sequence[Strategy] = (),
    too_large: Sequence[SweptRun] = (),
) -> Sweep:
    """The runs of all combinations of `lists`, for each strategy, with the other options, and their
    states. Nothing is run or written. `too_large` are rows of runs without enough memory.

    Raises AsyncPipeError when the options of a run do not fit each other or its plan, or its folder
    holds another run.
    """
    info = find_rank_info(os.environ)
    if info is not None and info.ranks > 1:
        raise SettingsError(
            f"a sweep starts its runs itself, but this is one of {info.ranks} ranks.",
            "Start it without a launcher, or each of its runs under one.",
        )
    given = options.get("output")
    folder = None if given is None else Path(given)
    jobs: dict[str, Job] = {}
    values_of: dict[str, Mapping[str, Any]] = {}
    for strategy in strategies or (Strategy(""),):
        for varied in variants(lists):
            named = {STRATEGY: strategy.name} if strategies else {}
            name = name_of(varied, strategy.name)
            job = plan_job({**options, **varied}, strategy, name)
            folder = folder or Path("runs") / Path(job.config.folder).resolve().name / "sweep"
            jobs[name], values_of[name] = in_folder(job, folder), {**named, **varied}
    assert folder is not None
    known = read_record(folder)
    runs = {}
    for name, job in jobs.items():
        before, run = known.pop(name, None), SweptRun(name, values_of[name], _key(job))
        same = before is not None and before.key == run.key
        if job.folder.exists() and not same:
            raise SettingsError(
                f"{job.folder} holds a run of other options or other stages.",
                "--output with another folder, or remove this one.",
            )
        runs[name] = before if before is not None and same else run
    return Sweep(folder, runs, jobs, known, tuple(too_large))


def plan_job(options: Mapping[str, Any], strategy: Strategy, name: str) -> Job:
    """The job of a run with these options under a strategy, in a folder of this name. Raises
    AsyncPipeError when they do not fit each other or the plan."""
    settings = settings_from({**options, **strategy.options, "output": None})
    if settings.save_to is not None:
        settings = replace(settings, save_to=f"{settings.save_to.rstrip('/')}/{name}")
    if settings.export_hf is not None:
        raise SettingsError(
            f"all runs of a sweep would export to {settings.export_hf}.",
            "Leave --export-hf out, and repeat the best with --config and it.",
        )
    try:
        return make_job(settings, Path(name))
    except AsyncPipeError as error:
        raise SettingsError(f"{name}: {error.what}", error.cure) from error


def in_folder(job: Job, folder: Path) -> Job:
    """The job with its own folder in this one."""
    return replace(job, folder=folder / job.folder.name)


def run_sweep(
    sweep: Sweep,
    command: Sequence[str],
    *,
    at_once: int = 1,
    on_run: Callable[[SweptRun], None] = lambda run: None,
) -> Sweep:
    """Runs the unfinished runs, `at_once` at a time, and returns the sweep with their results.

    Each process is `command` followed by the options of its run; `on_run` is called with each
    finished run. If a run fails, the others continue. Raises SettingsError when another
    process works in the same folder or concurrent runs do not have a GPU each, TrustError for an
    untrusted generated folder; KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM, when
    all runs have ended.
    """
    check_trusted(sweep)
    # The options of the command are equal in all runs.
    command_options = next(iter(sweep.jobs.values())).config
    runs = dict(sweep.runs)
    shares = share_machine(
        min(at_once, max(1, len(sweep.waiting))),
        read_topology(),
        ranks=max(ranks_of(job.config, job.plan) for job in sweep.jobs.values()),
        gpus=_gpus(sweep),
    )
    children = (child_of(sweep.jobs[name], command) for name in sweep.waiting)
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
                job = sweep.jobs[child.name]
                run = runs[child.name] = with_outcome(runs[child.name], job, code, child.log)
                _write(sweep, runs)
                on_run(run)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted · {sweep.folder} · the same command continues") from None
    return replace(sweep, runs=runs)


def check_trusted(sweep: Sweep) -> None:
    """Raises TrustError for an untrusted generated folder; trusts those that the command does."""
    for model in {job.config.folder for job in sweep.jobs.values()}:
        if next(iter(sweep.jobs.values())).config.trust:
            remember(model)
        elif not is_trusted(model):
            raise untrusted(model)


def check_finished(sweep: Sweep) -> None:
    """Raises SweepError when runs failed."""
    failed = [run for run in sweep.runs.values() if run.state == FAILED]
    if failed:
        raise SweepError(
            f"{len(failed)} of {len(sweep.runs)} runs failed: {failed[0].name}: {failed[0].error}",
            f"Their output is in {sweep.folder}/*.log; the same command runs them again.",
        )


def child_of(job: Job, command: Sequence[str]) -> Child:
    """The process of a run: from its last checkpoint, or from the start in a cleared folder."""
    is_resumed = bool(checkpoints_in(job.folder))
    if not is_resumed:
        shutil.rmtree(job.folder, ignore_errors=True)
    options = _beside(job.folder, ".toml")
    options.write_text(job.repeating.to_toml(), encoding="utf-8")
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
    text = replace(sweep, runs=runs).text
    (sweep.folder / "sweep.md").write_text(text, encoding="utf-8")


def _key(job: Job) -> str:
    content = [job.config.to_toml(), [stage.sha256 for stage in job.planned.stages]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def ranks_of(config: RunConfig, plan: Plan) -> int:
    """The most ranks of a run."""
    alone = config.schedule == "single"
    ranks = 1 if alone else config.ranks or len(plan.stages)
    return ranks * config.pipelines * config.tensor_ranks


def _gpus(sweep: Sweep) -> list[str] | None:
    """The GPUs for concurrent runs to divide; None if no run uses a GPU."""
    if not any(job.config.device == "cuda" for job in sweep.jobs.values()):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())]
