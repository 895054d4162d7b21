"""What ranks did, and when -> boxes in rows, in SVG units; those of one scale compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..timeline import Event, Timeline
from ..wording import write_ms, write_share
from .ticks import ticks_up_to

LEFT, RIGHT = 52, 1000
_ROW = 28
_TICKS, _APART = 10, 48  # at most, and at least so far from each other
_LETTER, _AROUND = 7, 3  # the width of a digit in a box, and what is beside it
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights", "S": "step"}


@dataclass(frozen=True, slots=True)
class Box:
    """One action of a rank; its label is the place of the micro-batch in its optimizer step,
    where there is room for it."""

    kind: str
    x: float
    y: float
    width: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
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
    """Rows from LEFT to `end_x`."""

    height: int
    end_x: float
    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a timeline that is drawn, in its milliseconds."""

    timeline: Timeline
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        return self.end_ms - self.start_ms


def scale_of(longest_ms: float) -> float:
    """Units a millisecond, so that the longest of several windows goes from LEFT to RIGHT."""
    return (RIGHT - LEFT) / (longest_ms or 1.0)


def draw(
    window: Window, scale: float, micro_batches: int, *, labels: Sequence[str], several: bool
) -> Drawing:
    """Every event in the window, those that reach beyond it cut off.

    `labels` are the rows' names; `micro_batches` are those of a step, and `several` says that ranks
    have more than one stage.
    """
    timeline = window.timeline
    boxes = [
        _box(event, window, scale, micro_batches, several=several)
        for event in timeline.events
        if _is_in(event, window)
    ]
    rows = tuple(
        Row(
            y=rank * _ROW,
            text_y=rank * _ROW + 16,
            label=label,
            idle=write_share(_idle_share(timeline.of_rank(rank), window)),
        )
        for rank, label in enumerate(labels)
    )
    count = min(_TICKS, max(1, int(window.length_ms * scale / _APART)))
    return Drawing(
        height=len(rows) * _ROW + 24,
        end_x=round(LEFT + window.length_ms * scale, 2),
        rows=rows,
        boxes=tuple(sorted(boxes, key=lambda box: box.kind == "S")),  # steps, the narrow ones, last
        ticks=tuple(
            Tick(round(LEFT + ms * scale, 2), f"{ms:g}")
            for ms in ticks_up_to(window.length_ms, count)
        ),
    )


def _is_in(event: Event, window: Window) -> bool:
    if event.action.kind == "S":
        return window.start_ms < event.end_ms <= window.end_ms
    return event.end_ms > window.start_ms and event.start_ms < window.end_ms


def _box(event: Event, window: Window, scale: float, micro_batches: int, *, several: bool) -> Box:
    action = event.action
    start = max(event.start_ms, window.start_ms) - window.start_ms
    end = min(event.end_ms, window.end_ms) - window.start_ms
    width = max((end - start) * scale, 3.0 if action.kind == "S" else 0.0)
    what = f"{_NAMES[action.kind]} {action.index}" + (f" of stage {action.stage}" * several)
    label = str(action.index % micro_batches) if action.kind != "S" else ""
    from_ms, to_ms = event.start_ms - window.start_ms, event.end_ms - window.start_ms
    return Box(
        kind=action.kind,
        x=round(LEFT + min(start * scale, RIGHT - LEFT - width), 2),
        y=event.rank * _ROW,
        width=round(width, 2),
        label=label if width >= _LETTER * len(label) + _AROUND else "",
        title=f"rank {event.rank}, {what}: {write_ms(from_ms)} to {write_ms(to_ms)}",
    )


def _idle_share(events: Sequence[Event], window: Window) -> float:
    busy_ms = sum(
        max(0.0, min(event.end_ms, window.end_ms) - max(event.start_ms, window.start_ms))
        for event in events
    )
    return max(0.0, 1 - busy_ms / window.length_ms) if window.length_ms else 0.0
