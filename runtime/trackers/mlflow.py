"""`--log mlflow`: a run of MLflow, in the experiment that the generated folder is called.

Its environment variables hold: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the others. The
extra installs what talks to a server; the whole mlflow package keeps a database of its own too.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..run_report.records import CONFIG
from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Ending, Tracker, facts_of, project_of

_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlFlow(Tracker):
    """Metrics by step, the options as parameters and as the file that repeats the run."""

    def __init__(self, mlflow: Any, settings: Settings, folder: Path) -> None:
        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or project_of(settings))
        mlflow.start_run(run_name=folder.name)
        given = {name: value for name, value in asdict(settings).items() if value is not None}
        mlflow.log_params(given)
        mlflow.log_artifact(str(folder / CONFIG))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        self._mlflow.end_run(_STATES[ending])

    def on_start(self, start: StartRecord) -> None:
        self._mlflow.set_tag("mlflow.note.content", facts_of(start))


def open_tracker(settings: Settings, folder: Path) -> MlFlow:
    """The tracker of one run."""
    import mlflow

    return MlFlow(mlflow, settings, folder)
