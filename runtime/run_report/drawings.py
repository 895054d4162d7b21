"""Records of a run -> its charts, the bars of idle time, and one step, all in SVG units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pages.bars import Bar, segment
from ..pages.chart import Chart, Series, chart
from ..pages.gantt import Drawing, Window, draw, scale_of
from ..timeline import Timeline
from ..wording import write_count, write_ms, write_share
from .measures import RankIdle, other_series, rank_idle, rate_field
from .records import RunRecords, number, points
from .summary import UNITS

_LOOKS = {
    "bubble": "transfers",
    "imbalance": "backward",
    "communication": "activations",
    "data": "buffers",
    "overhead": "versions",
    "waiting": "transfers",
    "sending": "activations",
}
"""What a rank was idle for -> the look of that part of its bar."""

_MANY = 1_000_000

Charts = Sequence[tuple[Chart, str]]
"""Charts, and what the axis below each counts."""


@dataclass(frozen=True, slots=True)
class StepDrawings:
    """One step as it was measured and as it was simulated, on one scale."""

    measured: Drawing
    measured_summary: str
    simulated: Drawing
    simulated_summary: str


@dataclass(frozen=True, slots=True)
class IdleBars:
    """A bar for each rank, and the letter of what is in them by its look."""

    rows: tuple[Bar, ...]
    key: tuple[tuple[str, str, str], ...]


def loss_charts(run: RunRecords) -> Charts:
    """Training and evaluation loss against steps, and against the time that they took."""
    found = []
    for by, axis, unit in (("step", "by steps", "step"), ("elapsed_s", "by seconds", "s")):
        series = [
            Series("training", run.series("loss", by)),
            Series("evaluation", points(run.evals, "loss", by)),
        ]
        found.append((chart("Loss", series, x_unit=unit, write="{:.4g}".format), axis))
    return _drawn(found)


def speed_charts(run: RunRecords) -> Charts:
    """Throughput and idle share against steps."""
    rate = rate_field(run)
    series = Series(UNITS.get(rate, rate), run.series(rate))
    idle = Series("all ranks", run.series("idle_share"))
    return _drawn(
        [
            (chart(f"Throughput, {series.label}", [series], x_unit="step", write=write_count,
                   floor=0.0), "by steps"),
            (chart("Idle share", [idle], x_unit="step", write=write_share, floor=0.0), "by steps"),
        ]
    )  # fmt: skip


def more_charts(run: RunRecords) -> Charts:
    """Gradient norm, learning rate, loss scale and memory, as far as the run has them."""
    told = {"grad_norm": "Gradient norm", "lr": "Learning rate", "loss_scale": "Loss scale"}
    return _drawn(
        [
            (chart(heading, [Series(heading, run.series(name))], x_unit="step"), "by steps")
            for name, heading in told.items()
        ]
    )


def other_charts(run: RunRecords) -> Charts:
    """Whatever other numbers the steps have, such as delays; a line for each place of a list."""
    found = []
    for name, rows in other_series(run).items():
        labels = [name] if len(rows) == 1 else [f"{name} {place}" for place in range(len(rows))]
        series = [Series(label, row) for label, row in zip(labels, rows, strict=True)]
        found.append((chart(name, series, x_unit="step", floor=0.0), "by steps"))
    return _drawn(found)


def _drawn(found: Sequence[tuple[Chart | None, str]]) -> Charts:
    return [(drawn, axis) for drawn, axis in found if drawn is not None]


def idle_bars(run: RunRecords) -> IdleBars:
    """Of each rank the parts of its time in which it did not compute."""
    rows = rank_idle(run)
    parts = rows[0].parts if rows else {}
    names = [name for name in parts if any(row.parts[name] for row in rows)]
    return IdleBars(
        tuple(_idle_bar(row) for row in rows),
        tuple((_LOOKS[name], name[0].upper(), name) for name in names),
    )


def _idle_bar(row: RankIdle) -> Bar:
    return Bar(
        label=f"rank {row.rank}",
        segments=tuple(
            segment(_LOOKS[name], name[0].upper(), share, f"{name} {write_share(share)}")
            for name, share in row.parts.items()
            if share > 0
        ),
        value=write_share(row.total),
        title=f"idle, {write_share(max(0.0, 1 - row.total))} computing",
    )


def step_drawings(run: RunRecords) -> StepDrawings | None:
    """The measured step and the simulated one; None where none was recorded."""
    if run.drawn is None:
        return None
    measured, simulated = run.drawn.measured, run.drawn.simulated
    scale = scale_of(max(measured.makespan_ms, simulated.makespan_ms))
    count = number(run.start, "micro_batches")
    micro_batches = int(count) if 1 <= count < _MANY else 1

    def drawing(timeline: Timeline) -> Drawing:
        stages = {event.action.stage for event in timeline.events}
        return draw(
            Window(timeline, timeline.start_ms, timeline.end_ms),
            scale,
            micro_batches,
            labels=[f"rank {rank}" for rank in range(timeline.ranks)],
            several=len(stages) > timeline.ranks,
        )

    def summary(timeline: Timeline, how: str) -> str:
        idle = write_share(timeline.idle_share)
        return f"{how}: {write_ms(timeline.makespan_ms)}, ranks idle {idle}."

    return StepDrawings(
        drawing(measured),
        summary(measured, "Measured"),
        drawing(simulated),
        summary(simulated, f"Simulated with {run.drawn.costs}"),
    )
