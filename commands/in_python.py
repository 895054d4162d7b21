"""`asyncpipe.train`: the command asyncpipe-train as a function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from ..runtime.checkpoint.resuming import with_options_of_run
from ..runtime.config.option_files import check_code, settings_from
from ..runtime.launch.launch import run
from ..runtime.monitoring.run_files import RunRecords, number, read_run
from ..runtime.training.joining import PipelineKeywords, check_keywords
from .run_display import print_starting
from .running import REPORTER


class TrainKeywords(PipelineKeywords, total=False):
    """The options of asyncpipe-train by name, with the types of their values."""

    data: str | None
    tokenizer: str | None
    workers: int | None
    prefetch: int | None
    samples: int | None
    epochs: float | None
    lr_schedule: str | None
    ema: float | None
    elastic: bool
    grow: str
    scale_lr: str
    compile: bool
    metric: str | None
    early_stop: int
    callbacks: str | None
    remainder: str | None
    global_batch_size: int | None
    criterion: str | None
    check_replicas: int
    zero: int | None
    resume: str | None
    save_every: int
    keep_last: int
    keep_best: int
    save_to: str | None
    trust: bool
    export_hf: str | None
    output: str | None
    eval_every: int
    eval_batches: int | None
    log_every: int
    log: str | None
    trace: str | None
    restarts: int
    max_run: str | None
    json: bool
    quiet: bool
    watch: bool


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    folder: the run's folder, with its weights, records and report.
    losses: the loss of each recorded step, by step.
    evaluations: the loss of each evaluation, by step.
    records: all that the run has recorded.
    """

    folder: Path
    losses: dict[int, float]
    evaluations: dict[int, float]
    records: RunRecords

    @property
    def weights(self) -> Path:
        """The folder of the trained weights."""
        return self.folder / "weights"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.folder / "report.html"


def train(folder: str | Path, **options: Unpack[TrainKeywords]) -> RunResult:
    """Trains a generated folder as `asyncpipe-train FOLDER` does with these options, and waits for
    the end.

    folder: the generated folder.
    options: the options of the command by name. With `resume`, those of the run that is resumed
        apply where none are given.

    The ranks are processes of their own, so data and loss are named (`data="my_file.py:function"`).
    Raises AsyncPipeError where options and folder do not fit, and with the first cause when a rank
    fails.
    """
    check_keywords("train", options, TrainKeywords)
    given = {**options, "folder": str(folder)}
    all_options = with_options_of_run(given)
    settings = settings_from(all_options)
    if not settings.dry_run:
        check_code(all_options, given, f"resume={options.get('resume')}")
    run_folder = run(settings, REPORTER, partial(print_starting, settings))
    records = read_run(run_folder)
    return RunResult(
        run_folder,
        {int(number(step, "step")): number(step, "loss") for step in records.steps},
        {int(number(record, "step")): number(record, "loss") for record in records.evals},
        records,
    )
