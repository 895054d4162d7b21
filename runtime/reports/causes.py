"""Why ranks are slow: checks of single causes, and those of a run from its records.

A run's records divide its idle time; each part of it is a cause with a cure of its own. The
sentence is that of the largest part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from ..errors import DataError
from ..formatting import Column, Table, counted, write_bytes, write_ms, write_share
from ..monitoring.run_files import RunRecords, numbers, part
from ..serialization import Origin, parse_json, read_text
from .measures import rank_idle, sent_bytes, step_times

LARGE_SHARE = 0.1
"""The share of a step from which a part of the idle time is a cause; the parts of two repeats of a
run on a busy machine differ by half of it."""

Verdict = Literal["ok", "fault", "not used"]


@dataclass(frozen=True, slots=True)
class Check:
    """One cause and whether it was found.

    cause: its name.
    measured: the measurement, in words.
    verdict: ok, fault, or not used if the cause cannot apply to the ranks.
    sentence: the cause and its cure, for a fault.
    """

    cause: str
    measured: str
    verdict: Verdict = "ok"
    sentence: str = ""


def fault(cause: str, measured: str, sentence: str) -> Check:
    """A check that found its cause."""
    return Check(cause, measured, "fault", sentence)


def conclusion(checks: Sequence[Check]) -> str:
    """The sentence of the first fault."""
    faults = (check.sentence for check in checks if check.verdict == "fault")
    return next(faults, "Nothing found: none of these causes slows the ranks down.")


def check_table(checks: Sequence[Check]) -> Table:
    """A row for each cause."""
    columns = Column("cause", "text"), Column("measured", "text"), Column("verdict", "text")
    rows = ((check.cause, check.measured, check.verdict) for check in checks)
    return Table(columns, tuple(rows))


@dataclass(frozen=True, slots=True)
class LinkWait:
    """The time in which a rank waits for tensors of another, in a step of a trace."""

    rank: int
    source: int
    wait_ms: float


def longest_wait(trace: Path) -> LinkWait | None:
    """The link with the longest waits in a trace of a run; None without a trace or a wait.

    Raises DataError for a file that is not a trace.
    """
    if not trace.is_file():
        return None
    origin = Origin(str(trace), DataError)
    content: Any = parse_json(read_text(trace, origin), origin)
    waits_us: dict[tuple[int, int], float] = defaultdict(float)
    steps = set()
    try:
        for event in content["traceEvents"]:
            about = event.get("args", {})
            if event.get("cat") == "receive":
                waits_us[event["pid"], about["source"]] += event["dur"]
            elif event.get("cat") == "S":
                steps.add(about["step"])
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{trace} is not a trace of a run.", "Remove it.") from error
    if not waits_us:
        return None
    (rank, source), longest_us = max(waits_us.items(), key=lambda item: item[1])
    return LinkWait(rank, source, longest_us / 1e3 / max(1, len(steps)))


PARTS = {
    "communication": ("communication", "sending"),
    "exchange": ("exchange",),
    "waiting": ("bubble", "imbalance", "waiting"),
    "writing": ("writing",),
    "data": ("data",),
    "overhead": ("overhead",),
}
"""Cause -> its parts of the idle time. An unfinished run counts all waits as `waiting`."""


def checks_of_run(run: RunRecords, wait: LinkWait | None = None) -> list[Check]:
    """A check for each part of a run's idle time, the largest part first.

    Raises DataError for a run without steps.
    """
    if not run.steps:
        raise DataError(
            f"{run.folder} has no record of a step.", "Diagnose a run that has trained some steps."
        )
    of_ranks = [rank.parts for rank in rank_idle(run)]
    shares = {
        cause: sum(mean(parts.get(name, 0.0) for parts in of_ranks) for name in names)
        for cause, names in PARTS.items()
        if any(name in parts for parts in of_ranks for name in names)
    }
    checks = []
    for cause in sorted(shares, key=lambda name: -shares[name]):
        share_ms = shares[cause] * step_times(run).measured
        measured = f"{write_share(shares[cause])} of a step, {write_ms(share_ms)}"
        about = _about(cause, run, wait)
        if about:
            measured += f"; {about}"
        if shares[cause] < LARGE_SHARE:
            checks.append(Check(cause, measured))
        else:
            checks.append(fault(cause, measured, _sentence(cause, measured, run)))
    return checks


def _about(cause: str, run: RunRecords, wait: LinkWait | None) -> str:
    """Further facts of the records about a cause, in words."""
    if cause == "communication":
        words = str(part(run.start, "facts").get("ranks", "")).split(" · ")[1:2]
        if sent := sum(sent_bytes(run).values()):
            words.append(f"{write_bytes(sent)} sent")
        if wait is not None:
            who = f"rank {wait.rank} for rank {wait.source}"
            words.append(f"longest waits in the trace: {who}, {write_ms(wait.wait_ms)} a step")
        return ", ".join(words)
    if cause == "writing":
        saved = sum(event.kind == "checkpoint" for event in run.events)
        return f"{counted(saved, 'checkpoint')} in {counted(run.last_step, 'step')}"
    return ""


def _sentence(cause: str, measured: str, run: RunRecords) -> str:
    """The sentence about a large part of the idle time."""
    takes, _, about = measured.partition("; ")
    details = f" ({about})" if about else ""
    match cause:
        case "communication":
            ranks = len(numbers(run.steps[-1], "idle")) or 2
            return (
                f"Communication takes {takes}{details}: asyncpipe-comm diagnose with {ranks} ranks "
                "where the run was finds which link or process it is."
            )
        case "exchange" if run.start.get("tensor_ranks", 1) > 1:
            return (
                f"Sums over tensor ranks and replicas take {takes}: use a smaller "
                "--tensor-parallel, fewer --replicas, or a larger --micro-batch-size."
            )
        case "exchange":
            return (
                f"The sum of gradients over replicas takes {takes}: use fewer --replicas, or more "
                "--micro-batches per step."
            )
        case "waiting":
            return (
                f"Waits that the schedule and unequal stages cause take {takes}: use more "
                "--micro-batches, --schedule interleaved or async-1f1b, or partition again with "
                "measured costs."
            )
        case "writing":
            return (
                f"Checkpoints and records take {takes}{details}: write less often (--save-every, "
                "--log-every), or to a faster folder (--output)."
            )
        case "data":
            return f"The ranks read data for {takes}: read ahead with --workers."
        case _:
            return (
                f"The executor takes {takes} between two actions: use a larger --micro-batch-size."
            )
