"""A timeline -> the drawing of one step in SVG units: a row for each rank, a box for each action.

Drawings of one scale are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..formatting import write_ms, write_share
from ..schedule.simulate import Event, Timeline
from .charts import ticks_up_to

GANTT_WIDTH, GANTT_LEFT, GANTT_RIGHT = 1060, 128, 1046
_ROW = 28
_TICKS, _APART = 10, 48  # the maximum number, and the minimum distance
_LETTER, _AROUND = 7, 3  # the width of a digit in a box, and of its margin
_ROUNDED_MS = 1e-6
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights", "S": "step"}


@dataclass(frozen=True, slots=True)
class ActionBox:
    """One action of a rank.

    label: the number of the micro-batch in its step, if there is room
    is_cut: the action begins before the step or ends after it
    """

    kind: str
    x: float
    y: float
    width: float
    label: str
    title: str
    is_cut: bool


@dataclass(frozen=True, slots=True)
class RankRow:
    y: float
    text_y: float
    label: str
    idle: str


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The rows of a step, from GANTT_LEFT to `end_x`.

    scale: units per millisecond
    """

    height: int
    scale: float
    end_x: float
    rows: tuple[RankRow, ...]
    boxes: tuple[ActionBox, ...]
    ticks: tuple[Tick, ...]
    width: ClassVar[int] = GANTT_WIDTH
    left: ClassVar[int] = GANTT_LEFT

    @property
    def has_cut(self) -> bool:
        """Some action begins before the step or ends after it."""
        return any(box.is_cut for box in self.boxes)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a timeline that is drawn."""

    timeline: Timeline
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        return self.end_ms - self.start_ms


def scale_of(longest_ms: float) -> float:
    """SVG units per millisecond, so that the longest of several windows fills the width."""
    return (GANTT_RIGHT - GANTT_LEFT) / (longest_ms or 1.0)


def draw(
    window: Window, scale: float, micro_batches: int, *, labels: Sequence[str], several: bool
) -> Drawing:
    """Every event in the window, cut off at its ends.

    labels: the rows' names.
    micro_batches: the micro-batches of a step.
    several: True if ranks have more than one stage.
    """
    timeline = window.timeline
    boxes = [
        _box(event, window, scale, micro_batches, several=several)
        for event in timeline.events
        if _is_in(event, window)
    ]
    rows = tuple(
        RankRow(
            y=rank * _ROW,
            text_y=rank * _ROW + 16,
            label=label,
            idle=write_share(_idle_share(timeline.of_rank(rank), window)),
        )
        for rank, label in enumerate(labels)
    )
    return Drawing(
        height=len(rows) * _ROW + 24,
        scale=scale,
        end_x=round(GANTT_LEFT + window.length_ms * scale, 2),
        rows=rows,
        boxes=tuple(sorted(boxes, key=lambda box: box.kind == "S")),  # narrow steps last
        ticks=time_ticks(window.length_ms, scale),
    )


def time_ticks(length_ms: float, scale: float) -> tuple[Tick, ...]:
    """Marks of a horizontal axis of milliseconds that begins at GANTT_LEFT."""
    count = min(_TICKS, max(1, int(length_ms * scale / _APART)))
    return tuple(
        Tick(round(GANTT_LEFT + ms * scale, 2), f"{ms:g}") for ms in ticks_up_to(length_ms, count)
    )


def _is_in(event: Event, window: Window) -> bool:
    if event.action.kind == "S":
        return window.start_ms < event.end_ms <= window.end_ms
    return event.end_ms > window.start_ms and event.start_ms < window.end_ms


def _box(
    event: Event, window: Window, scale: float, micro_batches: int, *, several: bool
) -> ActionBox:
    action = event.action
    start = max(event.start_ms, window.start_ms) - window.start_ms
    end = min(event.end_ms, window.end_ms) - window.start_ms
    width = max((end - start) * scale, 3.0 if action.kind == "S" else 0.0)
    name = f"{_NAMES[action.kind]} {action.index}" + (f" of stage {action.stage}" * several)
    label = str(action.index % micro_batches) if action.kind != "S" else ""
    from_ms, to_ms = event.start_ms - window.start_ms, event.end_ms - window.start_ms
    return ActionBox(
        kind=action.kind,
        x=round(GANTT_LEFT + min(start * scale, GANTT_RIGHT - GANTT_LEFT - width), 2),
        y=event.rank * _ROW,
        width=round(width, 2),
        label=label if width >= _LETTER * len(label) + _AROUND else "",
        title=f"rank {event.rank}, {name}: {write_ms(from_ms)} to {write_ms(to_ms)}",
        is_cut=event.start_ms < window.start_ms - _ROUNDED_MS
        or event.end_ms > window.end_ms + _ROUNDED_MS,
    )


def _idle_share(events: Sequence[Event], window: Window) -> float:
    busy_ms = sum(
        max(0.0, min(event.end_ms, window.end_ms) - max(event.start_ms, window.start_ms))
        for event in events
    )
    return max(0.0, 1 - busy_ms / window.length_ms) if window.length_ms else 0.0
