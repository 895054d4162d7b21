"""`--log wandb`: a run of Weights & Biases, in the project that the generated folder is called.

Its environment variables hold: WANDB_PROJECT, WANDB_NAME, WANDB_MODE=offline and the others.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..signals import STOPPED
from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Ending, Tracker, facts_of, project_of

_CODES = {"finished": 0, "stopped": STOPPED, "failed": 1}


class WeightsAndBiases(Tracker):
    """Numbers by step, the options as configuration, the facts as notes of the run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()  # or an exit code other than 0 is a failure
        self._run.finish(exit_code=_CODES[ending])

    def on_start(self, start: StartRecord) -> None:
        self._run.notes = facts_of(start)
        self._run.config.update({"environment": dict(start.environment)})


def open_tracker(settings: Settings, folder: Path) -> WeightsAndBiases:
    """The tracker of one run."""
    import wandb

    return WeightsAndBiases(
        wandb.init(
            project=os.environ.get("WANDB_PROJECT") or project_of(settings),
            name=os.environ.get("WANDB_NAME") or folder.name,
            dir=str(folder),
            config=asdict(settings),
            settings=wandb.Settings(silent=settings.quiet or settings.json),
        )
    )
