"""`--log trackio`: a run on Trackio's local dashboard, `trackio show`, without an account."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import trackio

from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Tracker, project_of


class Trackio(Tracker):
    """Numbers by step; the options and facts as configuration, once the run begins."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._run: trackio.Run | None = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert self._run is not None
        self._run.log(numbers, step=step)

    def finish(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish()

    def on_start(self, start: StartRecord) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or project_of(self._settings),
            name=self._folder.name,
            config=asdict(self._settings) | {"facts": dict(start.facts)},
        )


def open_tracker(settings: Settings, folder: Path) -> Trackio:
    """The tracker of one run."""
    return Trackio(settings, folder)
