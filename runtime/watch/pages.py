"""The folders of runs -> the parts of the pages that follow them, as HTML.

Each page consists of named parts. `refresh` renders again what has changed; all parts come from the
templates of the reports, so a finished run looks here as in its report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..formatting import Column, Table, write_duration
from ..monitoring.run_files import METRICS, RunRecords, gathered, number
from ..monitoring.tail import Tail
from ..reports.comparison import compare_runs, comparison_values
from ..reports.measures import status_of, title_of
from ..reports.page import run_values
from ..reports.rendering import render
from ..reports.run_drawings import RunPlan
from .ranks_seen import OVER, RanksSeen, see_ranks

RUN_PARTS = (
    "header", "ranks", "curves", "others", "cut", "step", "idle", "tables", "events",
    "setup",
)  # fmt: skip
"""The parts of the page of one run, from top to bottom."""
SEVERAL_PARTS = ("header", "runs", "compared")
"""The parts of the page of several runs."""

_DRAWN = ("cut", "step", "setup")
"""Parts that do not change with each step."""

_TEMPLATES = {
    "header": "page_header.html.j2",
    "ranks": "watch_ranks.html.j2",
    "runs": "watch_runs.html.j2",
    "compared": "compared_runs.html.j2",
}


def _rendered(name: str, values: Mapping[str, Any]) -> str:
    return render(_TEMPLATES.get(name, f"run_{name}.html.j2"), **values).strip()


class RunPage:
    """The page of one run."""

    names = RUN_PARTS

    def __init__(self, folder: Path) -> None:
        self._folder, self._tail = folder, Tail(folder / METRICS)
        self._parts: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._drawn: object = None
        self._planned: RunPlan | None = None
        self._rendered = -1
        self.version = 0
        self._tail.read()
        self.run = gathered(self._folder, self._tail)
        self.seen = see_ranks(self.run)

    @property
    def title(self) -> str:
        return title_of(self.run)

    @property
    def is_over(self) -> bool:
        return self.seen.is_over

    def look(self) -> None:
        """Reads what the run has left since the last time."""
        has_more = self._tail.read()
        if has_more:
            self.run = gathered(self._folder, self._tail)
        before, self.seen = self.seen, see_ranks(self.run)
        self.version += has_more or before.standing != self.seen.standing

    def refresh(self) -> Mapping[str, str]:
        """The parts of the page as of the last look."""
        names: Sequence[str] = ("header", "ranks")
        if self._rendered != self.version:
            self._values = self._values_of_run()
            self._rendered = self.version
            drawn = self._planned, self.run.drawn, self.run.start, bool(self.run.end)
            names = [name for name in self.names if name not in _DRAWN or drawn != self._drawn]
            self._drawn = drawn
        values = self._values | {"ranks": _rank_table(self.seen)}
        values["why"] = self.run.failure or self.seen.why
        self._parts |= {name: _rendered(name, values) for name in names}
        return self._parts

    def _values_of_run(self) -> dict[str, Any]:
        if self._planned is None and self.run.start:
            self._planned = RunPlan.of(self.run)
        return run_values(self.run, self._planned) | {
            "status": status_line(self.run, self.seen),
            "is_good": self.seen.standing == "ended",
            "is_linked": False,
        }


class SeveralPage:
    """The page that compares several runs."""

    names = SEVERAL_PARTS
    title = "runs"

    def __init__(self, pages: Sequence[RunPage]) -> None:
        self._pages = pages
        self._parts: dict[str, str] = {}
        self._rendered: tuple[int, ...] = ()
        self._run_names: tuple[str, ...] = ()

    def refresh(self) -> Mapping[str, str]:
        """The parts of the page as of the last look at its runs."""
        versions = tuple(page.version for page in self._pages)
        if self._rendered != versions:
            comparison = compare_runs([page.run for page in self._pages])
            self._run_names, self._rendered = comparison.names, versions
            values = comparison_values(comparison)
            self._parts |= {name: _rendered(name, values) for name in ("header", "compared")}
        states = [
            (place, name, status_line(page.run, page.seen), page.run.failure or page.seen.why)
            for place, (name, page) in enumerate(zip(self._run_names, self._pages, strict=True))
        ]
        self._parts["runs"] = _rendered("runs", {"runs": states})
        return self._parts


def status_line(run: RunRecords, seen: RanksSeen) -> str:
    """How far a run is: `running: step 40 of 100`."""
    steps = number(run.config, "steps")
    of = f" of {steps:g}" if steps > 0 else ""
    if seen.standing == "ended":
        return status_of(run)
    if seen.standing == "starting" and not run.last_step:
        return "starting"
    between = " after" if seen.standing in OVER else ":"
    return f"{seen.standing}{between} step {run.last_step}{of}"


def _rank_table(seen: RanksSeen) -> Table:
    columns = (
        Column("rank"),
        Column("process"),
        Column("activity", "note"),
        Column("for"),
        Column("waits for", "text"),
        Column("no progress for"),
    )
    rows = []
    for rank, sighting in sorted(seen.ranks.items()):
        state = sighting.state
        peer = "" if state.peer is None or not sighting.is_waiting else f"rank {state.peer}"
        doing = f"{sighting.trouble}; last seen: {state.text}"
        rows.append(
            (
                str(rank),
                str(state.pid),
                doing if sighting.trouble else state.text,
                write_duration(state.for_s + sighting.silent_s),
                peer,
                write_duration(sighting.idle_s),
            )
        )
    return Table(columns, tuple(rows))
