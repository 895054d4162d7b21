"""Records of a run -> the numbers that are told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .records import Record, RunRecords, number, numbers, part

IDLE_PARTS = ("bubble", "imbalance", "communication", "data", "overhead")
TIME_PARTS = ("waiting", "sending", "data", "overhead")
_TOLD = frozenset(
    {
        *("event", "step", "loss", "lr", "grad_norm", "step_ms", "elapsed_s", "mem_bytes"),
        *(
            "epoch",
            "idle",
            "idle_share",
            "mem_bytes_by_rank",
            "base_bytes_by_rank",
            "loss_scale",
            "skipped",
        ),
    }
)
"""Fields of a step that have a place of their own; other numbers are told as they are called."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction beside what was measured; NaN where there is none."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Milliseconds of a micro-batch at a stage, and of its optimizer's step, which no plan knows.
    A backward has both of its parts in it."""

    stage: int
    forward: Compared
    backward: Compared
    optimizer_ms: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank at its peak: planned, what it had when its stages were loaded and more came,
    and the whole process with all that was there before."""

    rank: int
    stages: Compared
    process_bytes: float


@dataclass(frozen=True, slots=True)
class RankIdle:
    """Where the time of a rank went: shares of its time, by what for; the rest it computed."""

    rank: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rate_field(run: RunRecords) -> str:
    """The field of a step that has the throughput: `tok_per_s` or `samples_per_s`; "" if none."""
    names = (name for record in run.steps[:1] for name in record if name.endswith("_per_s"))
    return next(names, "")


def rate_of(run: RunRecords) -> float:
    """The throughput that the end tells, or else that of a usual step; the first one left out."""
    told = number(run.end, "rate")
    return told if told > 0 else usual(run, rate_field(run))


def usual(run: RunRecords, name: str) -> float:
    """The median over the recorded steps; of several the first is left out, in which memory and
    caches are new."""
    found = [number(record, name) for record in run.steps[1:] or run.steps]
    known = [value for value in found if not math.isnan(value)]
    return median(known) if known else math.nan


def other_series(run: RunRecords) -> dict[str, list[tuple[tuple[float, float], ...]]]:
    """All other numbers of the steps, such as delays, by name: a series each, or one for each
    place of a list."""
    told = _TOLD | {rate_field(run)}
    names = dict.fromkeys(name for record in run.steps for name in record)
    found: dict[str, list[tuple[tuple[float, float], ...]]] = {}
    for name in names:
        if name in told or name.endswith("_shares"):
            continue
        if single := run.series(name):
            found[name] = [single]
            continue
        rows = [(number(record, "step"), numbers(record, name)) for record in run.steps]
        places = range(max((len(values) for _, values in rows), default=0))
        lists = [tuple((x, row[at]) for x, row in rows if len(row) > at) for at in places]
        if lists:
            found[name] = lists
    return found


def step_times(run: RunRecords) -> Compared:
    """Milliseconds of a step. The prediction is that of the end, with the optimizer as measured,
    or else that of the start, without one."""
    predicted = number(run.end, "simulated_step_ms")
    if math.isnan(predicted):
        predicted = number(part(run.start, "predicted"), "step_ms")
    measured = number(run.end, "step_ms")
    return Compared(predicted, usual(run, "step_ms") if math.isnan(measured) else measured)


def idle_shares(run: RunRecords) -> Compared:
    """The idle share over all ranks."""
    predicted = number(run.end, "simulated_idle")
    if math.isnan(predicted):
        predicted = number(part(run.start, "predicted"), "idle_share")
    measured = number(run.end, "idle")
    return Compared(predicted, usual(run, "idle_share") if math.isnan(measured) else measured)


def stage_times(run: RunRecords) -> list[StageTimes]:
    """Of every stage, the median of the recorded steps."""
    predicted = part(run.start, "predicted")
    forward, backward = numbers(predicted, "forward_ms"), numbers(predicted, "backward_ms")
    taken = {kind: _usual_of_stages(run, kind) for kind in "FBWS"}
    stages = max(len(forward), *(len(times) for times in taken.values()))

    def at(values: Sequence[float], stage: int) -> float:
        return values[stage] if stage < len(values) else math.nan

    return [
        StageTimes(
            stage,
            Compared(at(forward, stage), at(taken["F"], stage)),
            Compared(
                at(backward, stage),
                at(taken["B"], stage) + (at(taken["W"], stage) if taken["W"] else 0.0),
            ),
            at(taken["S"], stage),
        )
        for stage in range(stages)
    ]


def rank_memory(run: RunRecords) -> list[RankMemory]:
    """Of every rank, after the last recorded step; replicas have the first one's prediction."""
    last: Record = run.steps[-1] if run.steps else {}
    planned = numbers(part(run.start, "predicted"), "peak_bytes")
    peaks, bases = numbers(last, "mem_bytes_by_rank"), numbers(last, "base_bytes_by_rank")
    return [
        RankMemory(
            rank,
            Compared(
                planned[rank % len(planned)] if planned else math.nan,
                peak - bases[rank] if rank < len(bases) else math.nan,
            ),
            peak,
        )
        for rank, peak in enumerate(peaks)
    ]


def rank_idle(run: RunRecords) -> list[RankIdle]:
    """Why each rank was idle, as the end has it, or else how it was, in the recorded steps."""
    told = run.end.get("idle_parts_by_rank")
    rows = told if isinstance(told, list) else []
    found = [
        RankIdle(rank, {name: number(row, name) for name in IDLE_PARTS})
        for rank, row in enumerate(rows)
        if isinstance(row, dict) and all(not math.isnan(number(row, name)) for name in IDLE_PARTS)
    ]
    if found:
        return found
    shares = {name: _usual_of_lists(run, f"{name}_shares") for name in TIME_PARTS}
    ranks = min(len(values) for values in shares.values())
    return [
        RankIdle(rank, {name: values[rank] for name, values in shares.items()})
        for rank in range(ranks)
    ]


def _usual_of_stages(run: RunRecords, kind: str) -> list[float]:
    rows = [numbers(part(record, "action_ms"), kind) for record in run.steps[1:] or run.steps]
    return _medians(rows)


def _usual_of_lists(run: RunRecords, name: str) -> list[float]:
    return _medians([numbers(record, name) for record in run.steps[1:] or run.steps])


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each place, over the rows that have it."""
    places = range(max(map(len, rows), default=0))
    return [median(row[at] for row in rows if len(row) > at) for at in places]
