"""`--log tensorboard`: event files in the run's folder, for `tensorboard --logdir runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..training.settings import Settings
from ..watching.metrics import StartRecord
from .tracker import Ending, Tracker, facts_of

FOLDER = "tensorboard"
_FLUSH_S = 10
"""A run that is killed loses the numbers of so many seconds."""


class TensorBoard(Tracker):
    """Scalars by step; facts, notes and warnings as text."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._step = 0

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, ending: Ending) -> None:
        self._writer.close()

    def on_start(self, start: StartRecord) -> None:
        self._writer.add_text("run", facts_of(start), 0)

    def on_note(self, about: str, text: str) -> None:
        self._writer.add_text(about, text, self._step)

    def on_warning(self, text: str) -> None:
        self._writer.add_text("warning", text, self._step)


def open_tracker(settings: Settings, folder: Path) -> TensorBoard:
    """The tracker of one run."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter
    return TensorBoard(writer(str(folder / FOLDER), flush_secs=_FLUSH_S))
