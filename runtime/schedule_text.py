"""A schedule <-> a text file: one line a rank, its actions separated by spaces.

    name: 1f1b
    synchronous: yes
    in flight: 2 1
    rank 0: 0F0@v0 0F1@v0 0B0@v0 0B1@v0 0S1
    rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1

Only the ranks' lines must be there. A version that is left out is counted, and so is what is in
flight; a schedule whose stages step once is synchronous unless it says no. A stage that is on
several ranks has replicas there. Lines that begin with # are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from .dependencies import Edge
from .errors import ScheduleError
from .schedule import Action, Kind, Schedule, count_in_flight, count_versions, parse_action
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
    """The schedule that `text` holds, validated for the given edges (as for `Rule`).

    Raises ScheduleError with the line that cannot be read, or with what `validate` found.

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
    """The ranks of each stage, where every rank has one and some stage is on several: in the order
    of their first micro-batches."""
    if any(len({action.stage for action in row}) != 1 for row in rows):
        return ()
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(range(len(rows)), key=lambda rank: _first(rows[rank])):
        ranks_of.setdefault(rows[rank][0].stage, []).append(rank)
    found = tuple(tuple(ranks_of[stage]) for stage in sorted(ranks_of))
    return found if len(rows) > len(found) else ()


def _first(row: Sequence[Action]) -> float:
    return min((action.index for action in row if action.kind == "F"), default=inf)


def _last(rows: Sequence[Sequence[Action]], kind: Kind) -> int:
    return max((a.index for row in rows for a in row if a.kind == kind), default=-1)


def _versioned(written: Action, counted: Action) -> Action:
    return counted if written.version is None else written
