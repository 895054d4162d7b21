"""Schedules as text: a file with one line a rank, grids, and bars for a terminal.

    name: 1f1b
    synchronous: yes
    in flight: 2 1
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0B1@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1

Only the ranks' lines are required. Versions that are left out are counted, and so is `in flight`; a
schedule whose stages step once is synchronous unless it says no. A stage that is on several ranks
has replicas there. Lines that begin with # are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from ..errors import ScheduleError
from ..formatting import write_ms, write_share
from .dependencies import Edge
from .schedule import Action, Kind, Schedule, count_in_flight, count_versions, parse_action
from .simulate import ActionCosts, Timeline, simulate
from .validation import validate

_NUMBER = re.compile(r"[0-9]{1,9}")


def to_text(schedule: Schedule) -> str:
    """The file that `from_text` reads back as an equal schedule."""
    return (
        f"name: {schedule.name}\n"
        f"synchronous: {'yes' if schedule.synchronous else 'no'}\n"
        f"in flight: {' '.join(map(str, schedule.in_flight))}\n"
        f"{schedule}\n"
    )


def from_text(
    text: str,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    shared_stages: Iterable[Sequence[int]] = (),
) -> Schedule:
    """The schedule in `text`, validated for the given edges (as for `DependencyRule`).

    Raises ScheduleError with the line that cannot be read, or with the error of `validate`.

    >>> from_text("rank 0: 0F0 0B0 0S1 0F1 0B1 0S2").step_every
    1
    """
    heads: dict[str, str] = {}
    rows: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        head, _, rest = line.partition(":")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if head.strip() == f"rank {len(rows)}":
            rows.append([parse_action(word) for word in rest.split()])
        elif head.strip() in ("name", "synchronous", "in flight"):
            heads[head.strip()] = rest.strip()
        else:
            raise ScheduleError(
                f"line {number} of the schedule is {line.strip()[:60]!r}, "
                f"where the actions of rank {len(rows)} should be.",
                f"Write: rank {len(rows)}: 0F0 0B0 0S1",
            )
    schedule = _assemble(heads, rows)
    validate(schedule, edges, grad_edges=grad_edges, shared_stages=shared_stages)
    return schedule


def _assemble(heads: dict[str, str], rows: Sequence[Sequence[Action]]) -> Schedule:
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    replicas = _replicas(rows)
    rank_of.update((stage, ranks[0]) for stage, ranks in enumerate(replicas))
    stages = max(rank_of, default=-1) + 1
    micro_batches, steps = _last(rows, "F") + 1, max(0, _last(rows, "S"))
    if len(rank_of) < stages or not micro_batches or not steps:
        raise ScheduleError(
            f"the schedule has {len(rank_of)} of {stages} stages, {micro_batches} micro-batches "
            f"and {steps} optimizer steps: every stage needs F, B and S.",
            "Write: rank 0: 0F0 0B0 0S1",
        )
    if micro_batches % steps:
        raise ScheduleError(
            f"the schedule has {micro_batches} micro-batches and {steps} optimizer steps: "
            "every step must see as many.",
            f"Use {micro_batches - micro_batches % steps + steps} micro-batches.",
        )
    synchronous = heads.get("synchronous", "yes" if steps == 1 else "no")
    counted = count_in_flight(rows, stages)
    in_flight = heads.get("in flight", " ".join(map(str, counted))).split()
    if synchronous not in ("yes", "no"):
        raise ScheduleError(
            f"synchronous is {synchronous[:60]!r} in the schedule: write yes or no."
        )
    if len(in_flight) != stages or not all(map(_NUMBER.fullmatch, in_flight)):
        raise ScheduleError(
            f"in flight is {' '.join(in_flight)[:60]!r} in the schedule, "
            f"not one number for each of {stages} stages.",
            "Leave the line out: it is counted.",
        )
    return Schedule(
        name=heads.get("name", "custom"),
        stages=stages,
        micro_batches=micro_batches,
        step_every=micro_batches // steps,
        synchronous=synchronous == "yes",
        ranks=tuple(tuple(map(_versioned, row, count_versions(row))) for row in rows),
        rank_of_stage=tuple(rank_of[stage] for stage in range(stages)),
        in_flight=tuple(map(int, in_flight)),
        replicas=replicas,
    )


def _replicas(rows: Sequence[Sequence[Action]]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage, in the order of their first micro-batches, if every rank has one
    stage and some stage is on several ranks."""
    if any(len({action.stage for action in row}) != 1 for row in rows):
        return ()
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(range(len(rows)), key=lambda rank: _first(rows[rank])):
        ranks_of.setdefault(rows[rank][0].stage, []).append(rank)
    replicas = tuple(tuple(ranks_of[stage]) for stage in sorted(ranks_of))
    return replicas if len(rows) > len(replicas) else ()


def _first(row: Sequence[Action]) -> float:
    return min((action.index for action in row if action.kind == "F"), default=inf)


def _last(rows: Sequence[Sequence[Action]], kind: Kind) -> int:
    return max((a.index for row in rows for a in row if a.kind == kind), default=-1)


def _versioned(written: Action, counted: Action) -> Action:
    return counted if written.version is None else written


_BARS = {"F": "░", "B": "▓", "W": "▒", "S": "█"}


def draw_grid(
    schedule: Schedule, edges: Iterable[Edge] | None = None, *, backward_clocks: int | None = None
) -> str:
    """The action of each rank at each clock, if a forward and a step take one clock each.

    A backward takes one too, or two in a schedule with W, one for either part, unless
    `backward_clocks` says otherwise (an even number, with W); dashes continue a longer action.
    Versions are shown where they change within the schedule, stages where a rank has several.

    >>> from asyncpipe.runtime.schedule.builders import one_f_one_b
    >>> print(draw_grid(one_f_one_b(3, 4)))
    rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 S1
    rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 S1 .
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 S1 .  .
    """
    clocks = backward_clocks or (2 if schedule.split else 1)
    costs = ActionCosts.equal(schedule.stages, backward_ms=clocks, step_ms=1)
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

    >>> from asyncpipe.runtime.schedule.builders import one_f_one_b
    >>> timeline = simulate(one_f_one_b(3, 4), ActionCosts.equal(3, step_ms=1))
    >>> print(draw_timeline(timeline, width=38))
    rank 0 |░░░░░░        ▓▓▓▓░░▓▓▓▓  ▓▓▓▓  ▓▓▓▓██|  32% idle
    rank 1 |  ░░░░    ▓▓▓▓░░▓▓▓▓░░▓▓▓▓  ▓▓▓▓██    |  32% idle
    rank 2 |    ░░▓▓▓▓░░▓▓▓▓░░▓▓▓▓░░▓▓▓▓██        |  32% idle
            ░ forward  ▓ backward  █ step 19.00 ms
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
        f"rank {rank} |{''.join(bar)}| {write_share(idle):>4} idle"
        for rank, (bar, idle) in enumerate(zip(bars, timeline.idle_shares, strict=True))
    ]
    end_ms = write_ms(timeline.makespan_ms)
    has_weights = any(event.action.kind == "W" for event in timeline.events)
    weights = "▒ its weights  " if has_weights else ""
    legend = f"░ forward  ▓ backward  {weights}█ step"
    lines.append(f"{' ' * 8}{legend.ljust(width - len(end_ms) - 1)} {end_ms}")
    return "\n".join(lines)
