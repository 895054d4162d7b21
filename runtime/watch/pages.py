"""The folders of runs -> the parts of the pages that follow them, as HTML.

Each page consists of named parts. `refresh` renders again what has changed; all parts come from the
templates of the reports, so a finished run looks here as in its report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AsyncPipeError
from ..formatting import Column, Table, write_duration
from ..monitoring.run_files import METRICS, RunRecords, gathered, number
from ..monitoring.tail import Tail
from ..plan.plan import Plan, read_plan
from ..reports.comparison import compare_runs, comparison_values
from ..reports.gantt import Drawing, Window
from ..reports.measures import title_of
from ..reports.memory_over_time import MemoryDrawing, memory_over_time
from ..reports.page import run_values, step_drawings
from ..reports.planned_steps import planned_steps
from ..reports.rendering import render
from ..schedule.asynchronous import ASYNCHRONOUS
from .ranks_seen import OVER, RanksSeen, see_ranks

RUN_PARTS = (
    "header", "ranks", "failure", "curves", "others", "step", "idle", "tables", "events", "setup",
)  # fmt: skip
"""The parts of the page of one run, from top to bottom."""
SEVERAL_PARTS = ("header", "runs", "compared")
"""The parts of the page of several runs."""

_TEMPLATES = {
    "header": "page_header.html.j2",
    "ranks": "watch_ranks.html.j2",
    "step": "watch_step.html.j2",
    "runs": "watch_runs.html.j2",
    "compared": "compared_runs.html.j2",
}
_MANY = 1_000_000


def _rendered(name: str, values: Mapping[str, Any]) -> str:
    return render(_TEMPLATES.get(name, f"run_{name}.html.j2"), **values).strip()


class RunPage:
    """The page of one run."""

    names = RUN_PARTS

    def __init__(self, folder: Path) -> None:
        self._folder, self._tail = folder, Tail(folder / METRICS)
        self._parts: dict[str, str] = {}
        self._planned: _Planned | None = None
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
        values: dict[str, Any] = {"why": self.seen.why, "ranks": _rank_table(self.seen)}
        names: Sequence[str] = ("ranks",)
        if self._rendered != self.version:
            names, values = self.names, self._values() | values
            self._rendered = self.version
        self._parts |= {name: _rendered(name, values) for name in names}
        return self._parts

    def _values(self) -> dict[str, Any]:
        run = self.run
        values = run_values(run)
        if self._planned is None and run.start:
            self._planned = _Planned.of(run)
        return values | {
            "status": status_line(run, self.seen),
            "is_good": self.seen.standing == "ended",
            "trace": "",
            "figures": _figures(run, self._planned, values["trace"]),
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
    asked = number(run.config, "steps")
    of = f" of {asked:g}" if asked > 0 else ""
    if seen.standing == "ended":
        return f"✓ {run.last_step} steps"
    if seen.standing == "starting" and not run.last_step:
        return "starting"
    between = " after" if seen.standing in OVER else ":"
    return f"{seen.standing}{between} step {run.last_step}{of}"


def _rank_table(seen: RanksSeen) -> Table:
    columns = (
        Column("rank"),
        Column("process"),
        Column("now", "note"),
        Column("waits for"),
        Column("for"),
        Column("without progress for"),
    )
    rows = []
    for rank, sighting in sorted(seen.ranks.items()):
        state = sighting.state
        peer = "" if state.peer is None or not sighting.is_waiting else f"rank {state.peer}"
        doing = f"{sighting.trouble}, when it was last seen: {state.text}"
        rows.append(
            (
                str(rank),
                str(state.pid),
                doing if sighting.trouble else state.text,
                peer,
                write_duration(state.for_s + sighting.silent_s),
                write_duration(sighting.idle_s),
            )
        )
    return Table(columns, tuple(rows))


@dataclass(frozen=True, slots=True)
class _Planned:
    """One step as the plan predicts it for a run.

    plan: the plan, if it can still be read.
    is_async: True for an asynchronous schedule.
    drawing, memory, summary: the predicted step; None where the plan does not know the schedule.
    """

    plan: Plan
    is_async: bool
    drawing: Drawing | None
    memory: MemoryDrawing | None
    summary: str

    @classmethod
    def of(cls, run: RunRecords) -> _Planned | None:
        """None if the generated folder is gone, or cannot be read."""
        for folder in _folders(run):
            with contextlib.suppress(AsyncPipeError, OSError):
                return cls._with(read_plan(folder), run)
        return None

    @classmethod
    def _with(cls, plan: Plan, run: RunRecords) -> _Planned:
        count = number(run.start, "micro_batches")
        micro_batches = int(count) if 1 <= count < _MANY else None
        named = run.config.get("schedule") or plan.setting.schedule
        try:
            (step,) = planned_steps(plan, (str(named),), micro_batches)
        except (AsyncPipeError, ValueError, KeyError, IndexError):
            # such as a schedule from a file
            return cls(plan, False, None, None, "")
        return cls(plan, named in ASYNCHRONOUS, step.drawing, step.memory, step.summary)


def _folders(run: RunRecords) -> list[Path]:
    """The places where a run's generated folder may be, whose path may be relative to the folder in
    which the run was started."""
    named = run.config.get("folder")
    if not isinstance(named, str) or "\0" in named:
        return []
    return [Path(named), *(parent / named for parent in run.folder.resolve().parents)]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The drawings of one step, on one time axis each.

    heading: their heading.
    note: how to get more; "" if there is all.
    steps: drawings with a sentence about each.
    memory, memory_note: the memory of the ranks in the first of them, and a sentence about it.
    """

    heading: str
    note: str
    steps: tuple[tuple[Drawing, str], ...]
    memory: MemoryDrawing | None
    memory_note: str

    @property
    def has_cut(self) -> bool:
        return any(drawing.has_cut for drawing, _ in self.steps)


_LATER = (
    "This is the plan's prediction. A run records a step near its end, and draws it here then; "
    "asyncpipe-train --trace 3 also keeps the last three steps."
)
_PLANNED_MEMORY = "Memory by the plan's sizes, over the predicted step; all ranks have one scale."
_MEASURED_MEMORY = "Memory by the plan's sizes, over the measured step; all ranks have one scale."


def _figures(run: RunRecords, planned: _Planned | None, trace: str) -> StepFigures | None:
    drawn = step_drawings(run)
    if drawn is None or run.drawn is None:
        if planned is None or planned.drawing is None:
            return None
        steps = ((planned.drawing, planned.summary),)
        note = _LATER if not run.end else ""
        return StepFigures("One step, predicted", note, steps, planned.memory, _PLANNED_MEMORY)
    memory, note = None, _MEASURED_MEMORY
    timeline = run.drawn.measured
    stages = {event.action.stage for event in timeline.events}
    fits = planned is not None and max(stages) < len(planned.plan.stages)
    if planned is not None and planned.is_async:
        # Its step begins and ends with activations whose forwards or backwards are in others.
        memory, note = planned.memory, _PLANNED_MEMORY
    elif planned is not None and fits:
        window = Window(timeline, timeline.start_ms, timeline.end_ms)
        memory = memory_over_time(planned.plan, window, drawn.measured)
    kept = f" All recorded steps are in {trace}, for ui.perfetto.dev." if trace else ""
    return StepFigures(
        "One step, measured above predicted",
        "",
        (
            (drawn.measured, drawn.measured_summary + kept),
            (drawn.simulated, f"{drawn.simulated_summary} Both have one scale."),
        ),
        memory,
        note,
    )
