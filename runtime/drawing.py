"""A schedule -> a grid of text, a clock a column; a timeline -> bars for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from .dependencies import Edge
from .schedule import Action, Schedule
from .simulate import Costs, simulate
from .timeline import Timeline

_BARS = {"F": "░", "B": "▓", "W": "▒", "S": "█"}


def draw_grid(
    schedule: Schedule, edges: Iterable[Edge] | None = None, *, backward_clocks: int | None = None
) -> str:
    """What each rank does at each clock, when a forward takes one clock and a step one.

    A backward takes one too, or of a schedule with W two, one for either part, unless
    `backward_clocks` says otherwise (an even number, with W); what is longer is drawn on with
    dashes. Versions are shown where they change within the schedule, stages where a rank has
    several.

    >>> from asyncpipe.runtime.schedules import one_f_one_b
    >>> print(draw_grid(one_f_one_b(3, 4)))
    rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 S1
    rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 S1 .
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 S1 .  .
    """
    clocks = backward_clocks or (2 if schedule.split else 1)
    costs = Costs.equal(schedule.stages, backward_ms=clocks, step_ms=1)
    timeline = simulate(schedule, costs, edges)
    rows = [["."] * round(timeline.makespan_ms) for _ in range(timeline.ranks)]
    for event in timeline.events:
        begin, end = round(event.start_ms), round(event.end_ms)
        dashes = ["-"] * (end - begin - 1)
        rows[event.rank][begin:end] = [_label(event.action, schedule), *dashes]
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(
        f"rank {rank} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    )


def _label(action: Action, schedule: Schedule) -> str:
    stage = action.stage if schedule.stages > len(schedule.ranks) else ""
    version = "" if schedule.synchronous or action.version is None else f"@v{action.version}"
    return f"{stage}{action.kind}{action.index}{version}"


def draw_timeline(timeline: Timeline, *, width: int = 72) -> str:
    """One bar a rank, with its idle share, over an axis of milliseconds.

    An optimizer step is drawn even where it is shorter than a column.

    >>> from asyncpipe.runtime.schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(3, 4), Costs.equal(3, step_ms=1))
    >>> print(draw_timeline(timeline, width=38))
    rank 0 |░░░░░░        ▓▓▓▓░░▓▓▓▓  ▓▓▓▓  ▓▓▓▓██|  32% idle
    rank 1 |  ░░░░    ▓▓▓▓░░▓▓▓▓░░▓▓▓▓  ▓▓▓▓██    |  32% idle
    rank 2 |    ░░▓▓▓▓░░▓▓▓▓░░▓▓▓▓░░▓▓▓▓██        |  32% idle
            ░ forward  ▓ backward  █ step    19 ms
    """
    bars = [[" "] * width for _ in range(timeline.ranks)]
    columns_per_ms = width / timeline.makespan_ms if timeline.makespan_ms else 0.0
    for event in sorted(timeline.events, key=lambda event: event.action.kind == "S"):
        begin = round((event.start_ms - timeline.start_ms) * columns_per_ms)
        end = round((event.end_ms - timeline.start_ms) * columns_per_ms)
        if event.action.kind == "S":
            begin = min(begin, width - 1)
            end = max(end, begin + 1)
        bars[event.rank][begin:end] = [_BARS[event.action.kind]] * (end - begin)
    lines = [
        f"rank {rank} |{''.join(bar)}| {idle:4.0%} idle"
        for rank, (bar, idle) in enumerate(zip(bars, timeline.idle_shares, strict=True))
    ]
    end_ms = f"{timeline.makespan_ms:.0f} ms"
    has_weights = any(event.action.kind == "W" for event in timeline.events)
    weights = "▒ its weights  " if has_weights else ""
    legend = f"░ forward  ▓ backward  {weights}█ step"
    lines.append(f"{' ' * 8}{legend.ljust(width - len(end_ms) - 1)} {end_ms}")
    return "\n".join(lines)
