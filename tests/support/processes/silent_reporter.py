"""A reporter for tests: leaves every event as a line of JSON in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.monitoring.records import Reporter
from asyncpipe.runtime.schedule.text import draw_timeline

FACTORY = f"{Path(__file__).resolve()}:make_reporter"


class SilentReporter(Reporter):
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, event: str, value: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([event, value]) + "\n")

    def on_start(self, start: Any) -> None:
        self._write("start", dict(start.facts))

    def on_warning(self, text: str) -> None:
        self._write("warning", text)

    def on_note(self, about: str, text: str) -> None:
        self._write("note", [about, text])

    def on_step(self, record: Any) -> None:
        self._write("step", json.loads(record.to_json()) | {"logged": record.logged})

    def on_eval(self, record: Any) -> None:
        self._write("eval", json.loads(record.to_json()))

    def on_failure(self, text: str) -> None:
        self._write("failure", text)

    def on_end(self, summary: Any) -> None:
        self._write("end", json.loads(summary.to_json()))

    def on_timelines(self, costs: str, simulated: Any, measured: Any) -> None:
        drawn = [draw_timeline(simulated), draw_timeline(measured)]
        idle = [simulated.idle_shares, measured.idle_shares]
        self._write("timelines", {"costs": costs, "drawn": drawn, "idle_shares": idle})


def make_reporter(settings: Settings) -> SilentReporter:
    return SilentReporter(Path(str(settings.output)).with_suffix(".events"))


def events_of(output: Path, event: str) -> list[Any]:
    lines = output.with_suffix(".events").read_text().splitlines()
    return [value for name, value in map(json.loads, lines) if name == event]
