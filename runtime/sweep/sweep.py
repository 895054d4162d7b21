"""Options and lists of values -> a run of each combination, and what came of all.

    runs/gpt2_4p/sweep/sweep.json           what is known of each run
    runs/gpt2_4p/sweep/sweep.md             the table, the best first
    runs/gpt2_4p/sweep/lr=0.001,seed=1      a run's folder
    runs/gpt2_4p/sweep/lr=0.001,seed=1.toml all its options
    runs/gpt2_4p/sweep/lr=0.001,seed=1.log  what it printed

Each run is a process of its own, the same command with its file of options. What is finished is not
repeated; what is not, goes on from its last checkpoint or begins again.
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

from ..checkpoint.folders import checkpoints_in
from ..errors import AsyncPipeError
from ..launching.folder_lock import FolderLock
from ..launching.jobs import make_job
from ..launching.launchers import find_place
from ..launching.max_run import ended_after
from ..launching.topology import read_topology
from ..plan import Plan
from ..signals import Interrupted
from ..training.named_code import code_of
from ..training.settings import Settings, SettingsError, settings_from
from ..training.setup import Job
from ..trust import is_trusted, remember, untrusted
from .children import Child, ended_by_signals, run_children
from .record import FAILED, FINISHED, SweptRun, read_record, with_outcome, write_record
from .shares import share_machine
from .table import markdown, ranked
from .variants import name_of, variants


class SweepError(AsyncPipeError):
    """A sweep of which runs failed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep by name, and their folder. `jobs` have all options of each, `others` are
    runs of the same folder with values that are not asked for now."""

    folder: Path
    runs: Mapping[str, SweptRun]
    jobs: Mapping[str, Job]
    others: Mapping[str, SweptRun]

    @property
    def waiting(self) -> list[str]:
        """The names of those that are to be made."""
        return [name for name, run in self.runs.items() if run.state != FINISHED]

    @property
    def ranked(self) -> list[SweptRun]:
        """All, the best first."""
        return ranked(tuple(self.runs.values()))


def plan_sweep(options: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> Sweep:
    """The runs of all combinations of `lists`, each with the other options beside, and which of
    them are finished. Nothing is run or written.

    Raises AsyncPipeError, before anything runs, when the options of one do not fit each other or
    its plan, or its folder holds another run.
    """
    place = find_place(os.environ)
    if place is not None and place.ranks > 1:
        raise SettingsError(
            f"a sweep starts its runs itself, but this is one of {place.ranks} ranks.",
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
    """Makes the runs that are not finished, `at_once` at a time, each by `command` with its own
    options behind; `on_run` is told each that is over. The sweep with what came of them.

    A run that fails does not end the others. Raises SettingsError when another process works in
    the same folder or runs at once have no GPU of their own, TrustError when a generated folder
    came from elsewhere and nobody trusts it; KeyboardInterrupt after Ctrl-C and SystemExit after
    SIGTERM, when all runs have ended.
    """
    one = next(iter(sweep.jobs.values())).settings  # of all alike: what concerns the command
    for model in {job.settings.folder for job in sweep.jobs.values()}:
        if one.trust:
            remember(model)
        elif not is_trusted(model):
            raise untrusted(model)
    runs = dict(sweep.runs)
    shares = share_machine(
        min(at_once, max(1, len(sweep.waiting))),
        read_topology(),
        ranks=max(_ranks(job.settings, job.plan) for job in sweep.jobs.values()),
        gpus=_gpus(sweep),
    )
    children = (_child(sweep.jobs[name], command) for name in sweep.waiting)
    try:
        with (
            FolderLock("sweep") as lock,
            ended_by_signals(),
            ended_after(one.max_run_s),
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
        raise Interrupted(
            f"interrupted · {sweep.folder} · the same command once more goes on"
        ) from None
    return Sweep(sweep.folder, runs, sweep.jobs, sweep.others)


def check_finished(sweep: Sweep) -> None:
    """Raises SweepError when runs failed."""
    failed = [run for run in sweep.runs.values() if run.state == FAILED]
    if failed:
        raise SweepError(
            f"{len(failed)} of {len(sweep.runs)} runs failed: {failed[0].name}: {failed[0].error}",
            f"What they printed is in {sweep.folder}/*.log; the same command makes them anew.",
        )


def _child(job: Job, command: Sequence[str]) -> Child:
    """The process that makes a run: from its last checkpoint, or from its beginning in a folder
    without what is left of an attempt before."""
    goes_on = bool(checkpoints_in(job.folder))
    if not goes_on:
        shutil.rmtree(job.folder, ignore_errors=True)
    options = _beside(job.folder, ".toml")
    options.write_text(job.settings.to_toml(), encoding="utf-8")
    own = ["--config", str(options), "--output", str(job.folder)]
    for option in dict(code_of(asdict(job.settings))):  # known here, as no file can say
        own += [f"--{option}", str(getattr(job.settings, option))]
    resumed = ("--resume", "auto") if goes_on else ()
    return Child(job.folder.name, (*command, *own, *resumed), _beside(job.folder, ".log"))


def _beside(folder: Path, suffix: str) -> Path:
    """No `with_suffix`: a name such as lr=0.1 has a point of its own."""
    return folder.with_name(folder.name + suffix)


def _write(sweep: Sweep, runs: Mapping[str, SweptRun]) -> None:
    write_record(sweep.folder, {**sweep.others, **runs})
    (sweep.folder / "sweep.md").write_text(markdown(tuple(runs.values())), encoding="utf-8")


def _key(job: Job) -> str:
    content = [job.settings.to_toml(), [stage.sha256 for stage in job.planned.stages]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _ranks(settings: Settings, plan: Plan) -> int:
    """How many ranks a run has at most."""
    alone = settings.schedule == "single"
    ranks = 1 if alone else settings.ranks or len(plan.stages)
    return ranks * (settings.replicas or 1)


def _gpus(sweep: Sweep) -> list[str] | None:
    """The GPUs that runs at once are to share out; None where no run computes on one."""
    if not any(job.settings.device == "cuda" for job in sweep.jobs.values()):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())]
