"""Strategies -> the largest micro-batch of each whose stages fit into the memory of a rank.

A size is tried by a few steps of training, in which the optimizer gets its state and batches are
read ahead. It fits if the memory that the stages took on the fullest rank is within the limit. From
the plan's size the search goes to the largest doubling that should fit by the plan's activations,
doubles or halves from there until the limit is between two sizes, and halves the interval down to
an eighth of the size. No step has more samples than the data.

    runs/gpt2_4p/sweep/batches/1f1b,micro_batch_size=64.json     what a size needed
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.folders import FolderLock
from ..config.settings import SettingsError
from ..errors import DataError
from ..formatting import write_bytes
from ..monitoring.diagnostics import free_and_total_bytes
from ..monitoring.run_files import number, read_run
from ..plan.plan import Plan
from ..reports.measures import most_memory
from ..serialization import Origin, parse_json, read_text, shaped
from ..training.setup import Job
from .strategies import STRATEGY, Strategy
from .sweep import Sweep, check_trusted, child_of, in_folder, plan_job, ranks_of
from .swept_runs import (
    OUT_OF_MEMORY,
    Figures,
    SweptRun,
    error_in,
    ran_out_of_memory,
    step_samples,
)
from .variants import Share, ended_by_signals, name_of, run_children

_LARGEST = 2**16
_STEPS = 5
_LEFT_OUT = ("samples", "epochs", "save_every", "save_to", "trace")
"""Options of a run that its trials do not have."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying a size.

    fits: the steps ran within the limit.
    needed: the bytes of the fullest rank; NaN if the run ended before they were known.
    epochs: the epochs that the steps made; NaN if unknown.
    """

    fits: bool
    needed: float = math.nan
    epochs: float = math.nan


@dataclass(frozen=True, slots=True)
class Searched:
    """The results of a search.

    fits: the largest size that fits; 0 if none fits.
    too_large: the smallest size that was too large; None if none was.
    """

    fits: int
    too_large: int | None
    needed: float = math.nan
    """The bytes of the fullest rank at the size that is too large."""


def largest(trial: Callable[[int], Trial], start: int, most: int = _LARGEST) -> Searched:
    """The largest size up to `most` that fits, to an eighth.

    >>> largest(lambda size: Trial(size <= 77), start=16).fits
    72
    >>> largest(lambda size: Trial(size <= 5), start=16).fits
    5
    >>> largest(lambda size: Trial(False), start=4)
    Searched(fits=0, too_large=1, needed=nan)
    """
    fits, too_large, needed = 0, most + 1, math.nan
    size = min(start, most)
    while fits < size < too_large:
        tried = trial(size)
        if tried.fits:
            fits = size
        else:
            too_large, needed = size, tried.needed
        if too_large > most:
            size = min(2 * fits, most)
        elif too_large - fits > max(1, fits // 8):
            size = (fits + too_large) // 2
        else:
            break
    return Searched(fits, too_large if too_large <= most else None, needed)


def search_batches(
    sweep: Sweep,
    options: Mapping[str, Any],
    strategies: Sequence[Strategy],
    command: Sequence[str],
    *,
    limit: int | None = None,
    on_trial: Callable[[str, int, Trial], None] = lambda name, size, trial: None,
) -> tuple[tuple[Strategy, ...], list[SweptRun]]:
    """Each strategy with its largest micro-batch, and a row for each size that is too large.

    sweep, options: the strategies as `plan_sweep` has checked them, and the options of all runs.
    command: as for `run_sweep`.
    limit: the bytes that the stages of a rank may take, by default those of the plan's devices, or
        the free memory divided among the ranks.

    A trial that was made before is not repeated. Raises SettingsError where one sample does not fit
    or a run fails by another cause, TrustError for an untrusted generated folder.
    """
    check_trusted(sweep)
    found, rows = [], []
    with FolderLock("sweep") as lock, ended_by_signals():
        lock.take(sweep.folder)
        folder = sweep.folder / "batches"
        folder.mkdir(exist_ok=True)
        for strategy in strategies:
            job = plan_job(options, strategy, strategy.name)
            bytes_of_rank = limit or _limit(job)
            search = _Search(job.planned, strategy, options, folder, command, bytes_of_rank)
            searched = search.largest(partial(on_trial, strategy.name))
            if searched.too_large is not None:
                rows.append(search.row(searched))
            if searched.fits:
                found.append(strategy.with_micro_batch(searched.fits))
    if not found:
        raise SettingsError(
            "one sample fits under none of the strategies.",
            "Give a larger --memory-limit, or --recompute all.",
        )
    return tuple(found), rows


@dataclass(frozen=True, slots=True)
class _Search:
    """The trials of a strategy, in a folder of its own."""

    planned: Plan
    strategy: Strategy
    options: Mapping[str, Any]
    folder: Path
    command: Sequence[str]
    limit: int

    def job(self, size: int) -> Job:
        own = self.strategy.with_micro_batch(size)
        kept = {name: value for name, value in self.options.items() if name not in _LEFT_OUT}
        few = {**kept, "steps": _STEPS, "eval_batches": 1}
        name = name_of({"micro_batch_size": size}, self.strategy.name)
        return in_folder(plan_job(few, own, name), self.folder)

    def largest(self, on_trial: Callable[[int, Trial], None]) -> Searched:
        """Searches from the plan's size on, and calls `on_trial` with each trial."""
        tried: dict[int, Trial] = {}

        def trial(size: int) -> Trial:
            if size not in tried:
                tried[size] = self.trial(size)
                on_trial(size, tried[size])
            return tried[size]

        size = start = max(1, self.planned.sizes.get("batch", 1))
        first = trial(size)
        # A step of the largest size is one epoch.
        most = int(size * _STEPS / first.epochs) if first.epochs > 0 else _LARGEST
        while 2 * start <= most and first.needed + self._growth(size, 2 * start) <= self.limit:
            start *= 2
        return largest(trial, start, max(size, min(most, _LARGEST)))

    def _growth(self, size: int, larger: int) -> float:
        """The bytes by which activations grow on the fullest rank, by the plan."""
        of_stage = [
            (larger / size - 1) * (stage.memory.activations + stage.memory.transport)
            for stage in self.planned.stages
        ]
        is_whole = self.job(size).config.schedule == "single"
        return sum(of_stage) if is_whole else max(of_stage)

    def trial(self, size: int) -> Trial:
        job = self.job(size)
        record = job.folder.with_name(job.folder.name + ".json")
        key = job.config.to_toml()
        if (known := _known(record, key)) is not None:
            return Trial(known.needed <= self.limit, known.needed, known.epochs)
        child = child_of(job, self.command)
        with closing(run_children([child], [Share()])) as ended:
            _, code = next(ended)
        if code == 0:
            run = read_run(job.folder)
            needed = most_memory(run)
            made = _Record(key, needed, number(run.end, "epoch"))
            record.write_text(json.dumps(asdict(made)), encoding="utf-8")
            shutil.rmtree(job.folder, ignore_errors=True)
            return Trial(needed <= self.limit, needed, made.epochs)
        if ran_out_of_memory(error := error_in(child.log)):
            return Trial(False)
        raise SettingsError(f"{job.folder.name}: {error}", f"Its output is in {child.log}.")

    def row(self, searched: Searched) -> SweptRun:
        """The row of the size that is too large."""
        assert searched.too_large is not None
        job = self.job(searched.too_large)
        needs = "" if math.isnan(searched.needed) else f"needs {write_bytes(int(searched.needed))}"
        return SweptRun(
            job.folder.name,
            {STRATEGY: self.strategy.name},
            "",
            OUT_OF_MEMORY,
            error=f"{needs} of {write_bytes(self.limit)}" if needs else "",
            figures=Figures(samples=step_samples(job)),
        )


@dataclass(frozen=True, slots=True)
class _Record:
    options: str
    needed: float
    epochs: float


def _known(path: Path, key: str) -> _Record | None:
    """The record of the same trial; None if it was not made before."""
    if not path.is_file():
        return None
    origin = Origin(f"{path} is not a record of a trial: it", DataError, "Remove it.")
    record = shaped(_Record, parse_json(read_text(path, origin), origin, finite=False), origin)
    return record if record.options == key else None


def _limit(job: Job) -> int:
    """The memory of the smallest device of the plan, or a rank's share of what is free."""
    planned = [rank.memory_bytes for rank in job.planned.setting.ranks]
    known = [size for size in (*planned, job.planned.setting.memory_limit) if size]
    if known:
        return min(known)
    free, _ = free_and_total_bytes(job.config.device)
    shares = 1 if job.config.device == "cuda" else ranks_of(job.config, job.plan)
    return free // shares
