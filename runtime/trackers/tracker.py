"""What all trackers do: records become named numbers, a run begins, goes on and ends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ..training.settings import Settings
from ..watching.metrics import EvalRecord, Reporter, StartRecord, StepRecord, Summary

Ending = Literal["finished", "stopped", "failed"]
"""With all its steps; because it was told to stop, to go on another time; or for an error."""
_NO_MEASURE = frozenset({"step", "event"})


class Tracker(Reporter):
    """Hands on the numbers of a run; of the steps those that are logged."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """The numbers after a step, by their names."""
        raise NotImplementedError

    def finish(self, ending: Ending) -> None:
        """The run is over: what is under way is written."""
        raise NotImplementedError

    def on_step(self, record: StepRecord) -> None:
        if record.logged:
            self.log(numbers_of("train", record), record.step)

    def on_eval(self, record: EvalRecord) -> None:
        self.log(numbers_of("eval", record), record.step)

    def on_end(self, summary: Summary) -> None:
        self.log(numbers_of("summary", summary), summary.steps)
        self.finish("finished")

    def on_stop(self, text: str) -> None:
        self.finish("stopped")

    def on_failure(self, text: str) -> None:
        self.finish("failed")


def numbers_of(prefix: str, record: StepRecord | EvalRecord | Summary) -> dict[str, float]:
    """All numbers of a record, as `train/loss` and `train/busy_shares/0`."""
    return {
        f"{prefix}/{name}": value
        for name, value in _flat(json.loads(record.to_json()))
        if name not in _NO_MEASURE
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _flat(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, float(value)


def project_of(settings: Settings) -> str:
    """Under what the runs of one model are kept: the name of the generated folder."""
    return Path(settings.folder).resolve().name


def facts_of(start: StartRecord) -> str:
    """The facts of the run as lines of Markdown."""
    return "\n".join(f"- **{name}**: {text}" for name, text in start.facts)
