"""`--log mlflow`: a run of MLflow, in the experiment that the generated folder is called.

Its environment variables hold: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the others; without
the first it keeps runs in the folder of the command.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import mlflow

from ..run_report.records import CONFIG
from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Tracker, facts_of, project_of


class MlFlow(Tracker):
    """Metrics by step, the options as parameters and as the file that repeats the run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or project_of(settings))
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({k: v for k, v in asdict(settings).items() if v is not None})
        mlflow.log_artifact(str(folder / CONFIG))

    def log(self, numbers: dict[str, float], step: int) -> None:
        mlflow.log_metrics(numbers, step=step)

    def finish(self, *, failed: bool) -> None:
        mlflow.end_run("FAILED" if failed else "FINISHED")

    def on_start(self, start: StartRecord) -> None:
        mlflow.set_tag("mlflow.note.content", facts_of(start))


def open_tracker(settings: Settings, folder: Path) -> MlFlow:
    """The tracker of one run."""
    return MlFlow(settings, folder)
