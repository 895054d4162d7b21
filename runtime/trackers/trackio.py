"""`--log trackio`: a run on Trackio's local dashboard, `trackio show`, without an account."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Ending, Tracker, project_of


class Trackio(Tracker):
    """Numbers by step; the options and facts as configuration, once the run begins. What it says
    is kept off standard output, which is the run's own."""

    def __init__(self, trackio: Any, settings: Settings, folder: Path) -> None:
        self._trackio, self._settings, self._folder = trackio, settings, folder
        self._run: Any = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()

    def on_start(self, start: StartRecord) -> None:
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or project_of(self._settings),
                name=self._folder.name,
                config=asdict(self._settings) | {"facts": dict(start.facts)},
            )


def open_tracker(settings: Settings, folder: Path) -> Trackio:
    """The tracker of one run."""
    import trackio

    return Trackio(trackio, settings, folder)
