"""Records of a run -> the numbers of its report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from ..formatting import counted
from ..monitoring.run_files import RunRecords, number, numbers, part, points
from ..monitoring.tail import Record

IDLE_PARTS = ("bubble", "imbalance", "communication", "data", "overhead")
"""The causes of idle time that every run records."""
MORE_PARTS = ("exchange", "writing")
"""The causes that not every run has."""
CAUSES = (*IDLE_PARTS, *MORE_PARTS)
TIME_PARTS = ("waiting", "sending", "data", "overhead")
_FIXED = frozenset(
    {
        *("event", "step", "loss", "lr", "grad_norm", "step_ms", "elapsed_s", "mem_bytes"),
        *(
            "epoch",
            "epoch_per_s",
            "exchange_s",
            "writing_s",
            "summed_elements",
            "syncs_per_s",
            "idle",
            "idle_share",
            "mem_bytes_by_rank",
            "base_bytes_by_rank",
            "loss_scale",
            "skipped",
        ),
    }
)
"""Fields of a step that the report shows in fixed places; other numbers appear by name."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction and a measurement; NaN where unknown."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage in milliseconds.

    forward, backward: of a micro-batch; a split backward counts with both parts.
    optimizer_ms: of an optimizer step, which no plan predicts.
    """

    stage: int
    forward: Compared
    backward: Compared
    optimizer_ms: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak memory of a rank in bytes.

    stages: the planned memory of its stages, and the measured one without that from before they
        were loaded.
    process_bytes: the memory of the whole process.
    """

    rank: int
    stages: Compared
    process_bytes: float


@dataclass(frozen=True, slots=True)
class RankIdle:
    """The idle shares of a rank's time, by reason; it computes in the rest."""

    rank: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rate_field(run: RunRecords) -> str:
    """The field of a step with the throughput: `tok_per_s` or `samples_per_s`; "" if there
    is none."""
    names = (name for record in run.steps[:1] for name in record if name in UNITS)
    return next(names, "")


def rate_of(run: RunRecords) -> float:
    """The throughput in the record of the end, or else that of a typical step without the first. Of
    an elastic run, whose phases differ, it is that of all recorded steps but the first."""
    if run.config.get("elastic") and (times := times_of_records(run)):
        field = rate_field(run)
        made = sum(number(record, field) * ms for record, ms in times)
        return made / sum(ms for _, ms in times)
    rate = number(run.end, "rate")
    return rate if rate > 0 else usual(run, rate_field(run))


def times_of_records(run: RunRecords) -> list[tuple[Record, float]]:
    """The recorded steps but the first, and the milliseconds of the steps that each stands for."""
    pairs = [
        (step, number(step, "step_ms") * (number(step, "step") - number(before, "step")))
        for before, step in pairwise(run.steps)
    ]
    return [(step, time_ms) for step, time_ms in pairs if time_ms > 0]


def epoch_per_s(run: RunRecords) -> float:
    """The epochs in a second after the warm-up, or else those of a typical step."""
    pace = part(run.end, "pace")
    seconds = number(pace, "seconds")
    return number(pace, "epochs") / seconds if seconds > 0 else usual(run, "epoch_per_s")


def usual(run: RunRecords, name: str) -> float:
    """The median over the recorded steps, without the first of several, when memory and caches are
    cold."""
    values = [number(record, name) for record in run.steps[1:] or run.steps]
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def other_series(run: RunRecords) -> dict[str, list[tuple[tuple[float, float], ...]]]:
    """All other numbers of the steps, such as delays, by name: one series, or one per element of a
    list."""
    fixed = _FIXED | {rate_field(run)}
    names = dict.fromkeys(name for record in run.steps for name in record)
    of_field: dict[str, list[tuple[tuple[float, float], ...]]] = {}
    for name in names:
        if name in fixed or name.endswith("_shares"):
            continue
        if single := run.series(name):
            of_field[name] = [single]
            continue
        rows = [(number(record, "step"), numbers(record, name)) for record in run.steps]
        places = range(max((len(values) for _, values in rows), default=0))
        lists = [tuple((x, row[at]) for x, row in rows if len(row) > at) for at in places]
        if lists:
            of_field[name] = lists
    return of_field


def metrics_of_evaluations(run: RunRecords) -> dict[str, tuple[tuple[float, float], ...]]:
    """The accuracy and the user's metrics over steps, by name."""
    names = dict.fromkeys(name for record in run.evals for name in record)
    of_metric = {
        name: points(run.evals, name, "step") for name in names if name not in _OF_EVALUATION
    }
    return {name: series for name, series in of_metric.items() if series}


_OF_EVALUATION = {"event", "step", "loss", "batches", "samples", "length", "elapsed_s"}


def step_times(run: RunRecords) -> Compared:
    """The time of a step in milliseconds. The prediction is that of the end, with the measured
    optimizer, or else that of the start, without one."""
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
    """The times of every stage: medians over the recorded steps."""
    predicted = part(run.start, "predicted")
    forward, backward = numbers(predicted, "forward_ms"), numbers(predicted, "backward_ms")
    measured = {kind: usual_of_stages(run, kind) for kind in "FBWS"}
    stages = max(len(forward), *(len(times) for times in measured.values()))

    def at(values: Sequence[float], stage: int) -> float:
        return values[stage] if stage < len(values) else math.nan

    return [
        StageTimes(
            stage,
            Compared(at(forward, stage), at(measured["F"], stage)),
            Compared(
                at(backward, stage),
                at(measured["B"], stage) + (at(measured["W"], stage) if measured["W"] else 0.0),
            ),
            at(measured["S"], stage),
        )
        for stage in range(stages)
    ]


def rank_memory(run: RunRecords) -> list[RankMemory]:
    """The memory of every rank after the last recorded step; replicas and tensor ranks have the
    first one's prediction."""
    last: Record = run.steps[-1] if run.steps else {}
    planned = numbers(part(run.start, "predicted"), "peak_bytes")
    peaks, bases = numbers(last, "mem_bytes_by_rank"), numbers(last, "base_bytes_by_rank")
    every = run.start.get("tensor_ranks", 1)
    return [
        RankMemory(
            rank,
            Compared(
                planned[rank // every % len(planned)] if planned else math.nan,
                peak - bases[rank] if rank < len(bases) else math.nan,
            ),
            peak,
        )
        for rank, peak in enumerate(peaks)
    ]


def most_memory(run: RunRecords) -> float:
    """The most bytes that the stages of a rank took in any recorded step; an elastic run has other
    stages in later ones."""
    taken = [
        rank.stages.measured
        for step in run.steps
        for rank in rank_memory(replace(run, steps=(step,)))
        if not math.isnan(rank.stages.measured)
    ]
    return max(taken, default=math.nan)


def rank_idle(run: RunRecords) -> list[RankIdle]:
    """The causes of each rank's idle time from the record of the end, or else the kinds of it from
    the recorded steps."""
    recorded = run.end.get("idle_parts_by_rank")
    rows = recorded if isinstance(recorded, list) else []
    causes = [
        RankIdle(rank, _known_numbers(row, (*IDLE_PARTS, *MORE_PARTS)))
        for rank, row in enumerate(rows)
        if isinstance(row, dict) and all(not math.isnan(number(row, name)) for name in IDLE_PARTS)
    ]
    if causes:
        return causes
    shares = {
        name: values
        for name in (*TIME_PARTS, *MORE_PARTS)
        if (values := _usual_of_lists(run, f"{name}_shares")) or name in TIME_PARTS
    }
    ranks = min(len(values) for values in shares.values())
    return [
        RankIdle(rank, {name: values[rank] for name, values in shares.items()})
        for rank in range(ranks)
    ]


def sent_bytes(run: RunRecords) -> dict[str, float]:
    """The bytes that a step sends, by purpose: in the record of the end, or else of the last
    step."""
    recorded = part(run.end, "sent_bytes") or part(run.steps[-1] if run.steps else {}, "sent_bytes")
    return _known_numbers(recorded, tuple(map(str, recorded)))


def _known_numbers(record: Record, names: Sequence[str]) -> dict[str, float]:
    """The fields whose values are numbers."""
    pairs = ((name, number(record, name)) for name in names)
    return {name: value for name, value in pairs if not math.isnan(value)}


def usual_of_stages(run: RunRecords, kind: str) -> list[float]:
    """The milliseconds of an action of a kind at each stage: medians over the recorded steps."""
    rows = [numbers(part(record, "action_ms"), kind) for record in run.steps[1:] or run.steps]
    return _medians(rows)


def _usual_of_lists(run: RunRecords, name: str) -> list[float]:
    return _medians([numbers(record, name) for record in run.steps[1:] or run.steps])


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column, over the rows that have it."""
    places = range(max(map(len, rows), default=0))
    return [median(row[at] for row in rows if len(row) > at) for at in places]


_TITLES = {
    "delay_mean": "Mean delay of the weights in steps",
    "delay_max": "Largest delay of the weights in steps",
    "gap": "Gap: relative change of the weights from forward to backward",
    "grad_norm_by_stage": "Gradient norms, of each stage",
    "gap_by_stage": "Gaps, of each stage",
    "passages": "Backward passes",
    "unexpected": "Backward passes with an unexpected weight version",
    "accuracy": "Accuracy",
    "frozen_blocks": "Frozen blocks",
    "block_norms": "Gradients between two events of freezing, of each block",
    "block_distances": "Change of outputs, relative to the largest one, of each block",
    "cache_hits": "Share of micro-batches that the cache had",
    "cache_bytes": "Bytes of the cache",
}


def title_of_field(name: str) -> str:
    """The name of a field of the records for people.

    >>> title_of_field("delay_mean"), title_of_field("norm_of_update")
    ('Mean delay of the weights in steps', 'Norm of update')
    """
    plain = name.replace("_", " ")
    return _TITLES.get(name, plain[:1].upper() + plain[1:])


def after_first_step(run: RunRecords) -> RunRecords:
    """The run with its training time counted from the end of the first step, in which processes
    start up; the same run if that step was not recorded."""
    first = run.losses[0] if run.losses else {}
    begin_s = number(first, "elapsed_s")
    if number(first, "step") != 1 or not math.isfinite(begin_s):
        return run

    def later(records: Sequence[Record]) -> tuple[Record, ...]:
        return tuple(
            {**record, "elapsed_s": max(0.0, round(number(record, "elapsed_s") - begin_s, 6))}
            if math.isfinite(number(record, "elapsed_s"))
            else record
            for record in records
        )

    return replace(run, steps=later(run.steps), evals=later(run.evals), losses=later(run.losses))


UNITS = {"tok_per_s": "tokens/s", "samples_per_s": "samples/s"}


def title_of(run: RunRecords) -> str:
    """The names of the run's folder and its parent, such as `gpt2_4p/3`."""
    return "/".join(run.folder.resolve().parts[-2:])


def is_without_network(run: RunRecords) -> bool:
    """True for a run with `--transport none`."""
    return run.config.get("transport") == "none"


def status_of(run: RunRecords) -> str:
    """How the run ended, as far as it is recorded."""
    if run.end:
        return f"✓ {run.last_step} steps" + ", network left out" * is_without_network(run)
    steps = number(run.config, "steps")
    of = f" of {steps:g}" if math.isfinite(steps) else ""
    how = "ended after" if run.failure else "not at its end:"
    return f"{how} step {run.last_step}{of}"


def last(run: RunRecords, name: str) -> float:
    """A field of the last recorded step."""
    return number(run.steps[-1], name) if run.steps else math.nan


def unplanned_freezing(run: RunRecords) -> str:
    """A sentence about blocks that froze, which the plan leaves out; "" if none froze."""
    if not last(run, "frozen_blocks") > 0:
        return ""
    return (
        f"{counted(int(last(run, 'frozen_blocks')), 'block')} froze during the run. "
        "Predictions are those of the plan, before any block froze."
    )


def last_evaluation(run: RunRecords, name: str = "loss") -> float:
    """A field of the last evaluation."""
    return number(run.evals[-1], name) if run.evals else math.nan


def to_json(run: RunRecords) -> str:
    """The numbers of a run as text."""
    return json.dumps(summary_of(run), indent=1, default=str)


def summary_of(run: RunRecords) -> dict[str, object]:
    """The numbers of a run, for other programs; unknown ones are omitted."""
    step, idle = step_times(run), idle_shares(run)
    figures = {
        "last_loss": last(run, "loss"),
        "eval_loss": last_evaluation(run),
        "seconds": last(run, "elapsed_s"),
        rate_field(run) or "rate": rate_of(run),
        "epoch": last(run, "epoch"),
        "epoch_per_s": epoch_per_s(run),
        "sent_bytes": sum(sent_bytes(run).values()) or math.nan,
        "step_ms": step.measured,
        "predicted_step_ms": step.predicted,
        "idle_share": idle.measured,
        "predicted_idle_share": idle.predicted,
        "mem_bytes": last(run, "mem_bytes"),
    }
    return {
        "run": str(run.folder),
        "status": status_of(run),
        "failure": run.failure,
        "last_step": run.last_step,
        **{name: value for name, value in figures.items() if math.isfinite(value)},
        "versions": versions_of(run),
        "config": dict(run.config),
    }


def options_of(run: RunRecords) -> dict[str, str]:
    """The options of a run as texts."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in run.config.items()
    }


def versions_of(run: RunRecords) -> dict[str, str]:
    """Packages and their versions, from the record of the start."""
    versions = part(part(run.start, "environment"), "versions")
    return {str(name): str(version) for name, version in versions.items()}
