"""A plan and a simulated step -> the memory of each rank over the step, stacked, in SVG units.

Parameters, gradients, optimizer state and buffers are there all the time. The activations of a
micro-batch are kept from the begin of its forward to the end of its backward, and an operation's
additional memory while the rank computes. Boundary tensors count as the planner counts them: as
many as can be on the way at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..formatting import write_bytes
from ..plan.plan import Plan, StageSpec
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.schedule import is_backward_end, split_backwards
from ..schedule.simulate import Event
from .gantt import GANTT_LEFT, GANTT_WIDTH, Drawing, Tick, Window

KINDS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "versions": "V",
    "buffers": "U",
    "transport": "R",
    "activations": "A",
    "transient": "X",
}
"""The uses of memory from bottom to top, with the letter of each; no time has one of them."""

MEANINGS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "versions": "older or predicted weights",
    "buffers": "buffers",
    "transport": "boundary tensors sent, or to be received",
    "activations": "activations of all micro-batches in flight",
    "transient": "the most that one operation needs in addition",
}

_CHANGING = ("activations", "transient")
_ROW, _GAP, _SMALL_ROW, _MANY = 58, 10, 34, 6
_LETTER = 12  # the height of a letter with its margin


@dataclass(frozen=True, slots=True)
class Layer:
    """One use of a rank's memory: the area between the layers below and above it.

    letter, letter_y: its letter and the base line of the letter; "" if the area is too small
    """

    kind: str
    path: str
    letter: str
    letter_y: float
    title: str


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of a rank over a step.

    y, height: its place
    label, peak: the name of the rank, and the most memory that it has in the step
    peak_bytes: the same as a number
    """

    y: float
    height: float
    label: str
    peak: str
    peak_bytes: int
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class MemoryDrawing:
    """The rows of all ranks, on one scale of bytes and the scale of time of the step's drawing.

    scale: units per millisecond
    legend: style, letter and meaning of each use that occurs
    """

    height: int
    scale: float
    end_x: float
    rows: tuple[MemoryRow, ...]
    ticks: tuple[Tick, ...]
    legend: tuple[tuple[str, str, str], ...]
    width: ClassVar[int] = GANTT_WIDTH
    left: ClassVar[int] = GANTT_LEFT


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of each use of a rank's memory from `start_ms` on."""

    start_ms: float
    sizes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def memory_over_time(plan: Plan, window: Window, drawing: Drawing) -> MemoryDrawing:
    """The memory of every rank in the window, below the same step as `drawing`."""
    timeline = window.timeline
    ranks = [
        tuple(rank_memory_over_time(plan, timeline.of_rank(rank), window))
        for rank in range(timeline.ranks)
    ]
    most = max(moment.total for moments in ranks for moment in moments) or 1
    height = _ROW if len(ranks) <= _MANY else _SMALL_ROW
    rows = []
    for rank, (moments, row) in enumerate(zip(ranks, drawing.rows, strict=True)):
        peak_bytes = max(moment.total for moment in moments)
        y = rank * (height + _GAP)
        area = _Area(drawing, window, y + height, height / most)
        layers = tuple(_layers(row.label, moments, area))
        peak = write_bytes(peak_bytes)
        rows.append(MemoryRow(y, height, row.label, peak, peak_bytes, layers))
    seen = {layer.kind for row in rows for layer in row.layers}
    return MemoryDrawing(
        height=len(rows) * (height + _GAP) + 18,
        scale=drawing.scale,
        end_x=drawing.end_x,
        rows=tuple(rows),
        ticks=drawing.ticks,
        legend=tuple((kind, KINDS[kind], MEANINGS[kind]) for kind in KINDS if kind in seen),
    )


def rank_memory_over_time(plan: Plan, events: Sequence[Event], window: Window) -> Iterator[Moment]:
    """The memory of the rank with these events, from the begin of the window, at each change."""
    stages = sorted({event.action.stage for event in events})
    fixed = dict.fromkeys(KINDS, 0)
    for stage in stages:
        memory = plan.stages[stage].memory
        for kind in KINDS:
            if kind not in _CHANGING:
                fixed[kind] += getattr(memory, kind)
    if window.timeline.name not in ASYNCHRONOUS:
        fixed["versions"] = 0
    changes = _changes(plan, events)
    changing: Counter[str] = Counter()
    begin = Moment(window.start_ms, {**fixed})
    for at_ms in sorted(changes):
        if at_ms >= window.end_ms:
            break
        changing.update(changes[at_ms])
        moment = Moment(
            max(at_ms, window.start_ms), fixed | {kind: changing[kind] for kind in _CHANGING}
        )
        if at_ms > window.start_ms:
            yield begin
        begin = moment
    yield begin


def _changes(plan: Plan, events: Sequence[Event]) -> dict[float, Counter[str]]:
    """By how many bytes activations and additional memory change, by time."""
    changes: dict[float, Counter[str]] = {}

    def change(at_ms: float, kind: str, size: int) -> None:
        changes.setdefault(at_ms, Counter())[kind] += size

    split = split_backwards([[event.action for event in events]])
    for event in events:
        stage = plan.stages[event.action.stage]
        saved, again = _activation_bytes(stage)
        change(event.start_ms, "transient", stage.memory.transient)
        change(event.end_ms, "transient", -stage.memory.transient)
        if event.action.kind == "F":
            change(event.start_ms, "activations", saved)
        elif event.action.kind == "B":
            change(event.start_ms, "activations", again)
            change(event.end_ms, "activations", -again)
        if is_backward_end(event.action, split):
            change(event.end_ms, "activations", -saved)
    return changes


def _activation_bytes(stage: StageSpec) -> tuple[int, int]:
    """Bytes that a micro-batch keeps until its backward, and those of a recomputed forward."""
    again = stage.activation_bytes if stage.recompute else 0
    return (stage.memory.activations - again) // max(1, stage.in_flight), again


@dataclass(frozen=True, slots=True)
class _Area:
    """Milliseconds and bytes -> positions in a row, whose bottom is at `bottom`.

    scale: units per byte
    """

    drawing: Drawing
    window: Window
    bottom: float
    scale: float

    def x(self, at_ms: float) -> float:
        return round(GANTT_LEFT + (at_ms - self.window.start_ms) * self.drawing.scale, 2)

    def y(self, size: float) -> float:
        return round(self.bottom - size * self.scale, 2)

    def path(self, starts_ms: Sequence[float], lower: Sequence[int], upper: Sequence[int]) -> str:
        """The area between two step functions."""
        xs = [self.x(at_ms) for at_ms in starts_ms] + [self.drawing.end_x]
        top = [f"V{self.y(size)}H{end}" for size, end in zip(upper, xs[1:], strict=True)]
        bottom = [
            f"V{self.y(size)}H{start}"
            for size, start in zip(reversed(lower), reversed(xs[:-1]), strict=True)
        ]
        return f"M{xs[0]} {self.y(lower[0])}" + "".join(top + bottom) + "Z"


def _layers(label: str, moments: Sequence[Moment], area: _Area) -> Iterator[Layer]:
    lower = [0] * len(moments)
    for kind, letter in KINDS.items():
        sizes = [moment.sizes[kind] for moment in moments]
        upper = [below + size for below, size in zip(lower, sizes, strict=True)]
        if any(sizes):
            runs = _runs(moments, lower, upper)
            has_room = sizes[0] * area.scale >= _LETTER
            most = write_bytes(max(sizes))
            yield Layer(
                kind,
                area.path(*runs),
                letter if has_room else "",
                round(area.y((lower[0] + upper[0]) / 2) + 4, 2),
                f"{label}: {MEANINGS[kind]} "
                + (most if min(sizes) == max(sizes) else f"{write_bytes(min(sizes))} to {most}"),
            )
        lower = upper


def _runs(
    moments: Sequence[Moment], lower: Sequence[int], upper: Sequence[int]
) -> tuple[list[float], list[int], list[int]]:
    """Starts, lower and upper ends of a layer, without moments in which neither changes."""
    changes = [
        at
        for at in range(len(moments))
        if not at or (lower[at], upper[at]) != (lower[at - 1], upper[at - 1])
    ]
    return (
        [moments[at].start_ms for at in changes],
        [lower[at] for at in changes],
        [upper[at] for at in changes],
    )
