"""Records of a run -> report.html, which every run writes at its end."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import DataError, why_ended
from ..formatting import (
    Column,
    Table,
    counted,
    known,
    write_bytes,
    write_count,
    write_duration,
    write_loss,
    write_ms,
    write_ratio,
    write_share,
)
from ..monitoring.records import append_line
from ..monitoring.run_files import METRICS, RunRecords, number, part, read_run
from ..plan.trust import write_here
from .charts import Bar, Card, segment
from .measures import (
    UNITS,
    Compared,
    RankIdle,
    epoch_per_s,
    idle_shares,
    last,
    last_evaluation,
    options_of,
    rank_idle,
    rank_memory,
    rate_field,
    rate_of,
    sent_bytes,
    stage_times,
    status_of,
    step_times,
    title_of,
    title_of_field,
    to_json,
    unplanned_freezing,
    usual,
)
from .rendering import in_script, render, write_page
from .run_drawings import (
    RunPlan,
    loss_charts,
    more_charts,
    other_charts,
    speed_charts,
    step_figures,
)

_LOOKS = {
    "bubble": "transfers",
    "imbalance": "backward",
    "communication": "activations",
    "data": "buffers",
    "overhead": "versions",
    "waiting": "transfers",
    "sending": "activations",
    "exchange": "transport",
    "writing": "optimizer",
}
"""The reason of idle time -> the style of that part of a bar."""

_LETTERS = {
    "bubble": "E",
    "imbalance": "I",
    "communication": "C",
    "data": "D",
    "overhead": "H",
    "waiting": "W",
    "sending": "S",
    "exchange": "M",
    "writing": "L",
}
"""Letters that no drawing of times or memory uses."""

_REASONS = {
    "bubble": "empty pipeline (bubble)",
    "imbalance": "unequal stages",
    "communication": "communication",
    "data": "reading data",
    "overhead": "overhead of the runtime",
    "waiting": "waiting for other ranks",
    "sending": "sending",
    "exchange": "summing over replicas and tensor ranks",
    "writing": "writing checkpoints and records",
}


@dataclass(frozen=True, slots=True)
class IdleBars:
    """The idle time of ranks.

    rows: a bar for each rank.
    key: the style, letter and name of each part.
    """

    rows: tuple[Bar, ...]
    key: tuple[tuple[str, str, str], ...]


def idle_bars(run: RunRecords) -> IdleBars:
    """The parts of each rank's time in which it did not compute."""
    rows = rank_idle(run)
    parts = rows[0].parts if rows else {}
    names = [name for name in parts if any(row.parts[name] for row in rows)]
    return IdleBars(
        tuple(_idle_bar(row) for row in rows),
        tuple((_LOOKS[name], _LETTERS[name], _REASONS[name]) for name in names),
    )


def _idle_bar(row: RankIdle) -> Bar:
    return Bar(
        label=f"rank {row.rank}",
        segments=tuple(
            segment(_LOOKS[name], _LETTERS[name], share, f"{_REASONS[name]} {write_share(share)}")
            for name, share in row.parts.items()
            if share > 0
        ),
        value=write_share(row.total),
        title=f"idle, {write_share(max(0.0, 1 - row.total))} computing",
    )


TRACE = "trace.json"
_FACTS = {
    "ranks": "processes",
    "predicted": "predicted step",
    "memory": "predicted memory",
    "versions": "weight versions",
}
"""Names of facts in the records -> those that the page has."""
_YEAR_3000_S = 32_503_680_000


def render_run(run: RunRecords) -> str:
    """The page. It needs no script and refers only to files of the run's own folder; its numbers
    are in a JSON block, `run`, and those of every step in metrics.jsonl."""
    values = run_values(run, RunPlan.of(run))
    return render("run_report.html.j2", **values, run_json=in_script(to_json(run)))


def run_values(run: RunRecords, planned: RunPlan | None) -> dict[str, Any]:
    """The values of the parts of the page, for their templates."""
    facts = [
        (_FACTS.get(str(name), str(name)), str(text))
        for name, text in part(run.start, "facts").items()
    ]
    return dict(
        title=title_of(run),
        status=status_of(run),
        is_good=bool(run.end),
        command="",
        facts=facts,
        cards=_cards(run),
        why=run.failure,
        damaged=run.damaged,
        loss=loss_charts(run),
        speed=speed_charts(run),
        more=more_charts(run),
        idle=idle_bars(run),
        strip=planned.strip if planned else None,
        figures=step_figures(run, planned),
        trace=TRACE if (run.folder / TRACE).is_file() else "",
        is_linked=True,
        step_table=_step_table(run),
        step_note=_step_note(run),
        stages=_stage_table(run),
        memory=_memory_table(run),
        memory_note=_memory_note(run),
        others=other_charts(run),
        staleness=_numbers(part(run.end, "staleness")),
        events=_event_table(run),
        config=list(options_of(run).items()),
        environment=environment_rows(run),
    )


def _step_table(run: RunRecords) -> Table:
    return _table(
        ("predicted", "measured", "ratio"),
        [
            ("step time", *_beside(step_times(run), write_ms)),
            ("idle", *_beside(idle_shares(run), write_share)),
            *_account_rows(run),
        ],
    )


def _account_rows(run: RunRecords) -> Iterator[tuple[str, ...]]:
    """The bytes that a step sent, its sums and its writing."""
    for name, size in sent_bytes(run).items():
        yield f"sent: {name}", "", write_bytes(size), ""
    if math.isfinite(summed := last(run, "summed_elements")):
        yield "elements summed over replicas", "", f"{summed:,.0f}", ""
        yield (
            "sums over replicas in a second",
            "",
            known(usual(run, "syncs_per_s"), "{:.4g}".format),
            "",
        )
    if math.isfinite(pace := epoch_per_s(run)):
        yield "epochs in a second", "", f"{pace:.4g}", ""


def _stage_table(run: RunRecords) -> Table:
    compared = ("measured", "ratio")
    return _table(
        ("forward predicted", *compared, "backward predicted", *compared, "optimizer"),
        [
            (
                f"stage {times.stage}",
                *_beside(times.forward, write_ms),
                *_beside(times.backward, write_ms),
                known(times.optimizer_ms, write_ms),
            )
            for times in stage_times(run)
        ],
    )


def _memory_table(run: RunRecords) -> Table:
    return _table(
        ("predicted", "measured (without base)", "ratio", "whole process"),
        [
            (f"rank {row.rank}", *_beside(row.stages, write_bytes), write_bytes(row.process_bytes))
            for row in rank_memory(run)
        ],
    )


_LONGER = 1.5
_FIXED_BYTES = 256 << 20


def _step_note(run: RunRecords) -> str:
    """A reason why the measured step is another one than the simulated one; "" if it is not."""
    if frozen := unplanned_freezing(run):
        return f"{frozen} Measured times are the medians of all recorded steps."
    if not step_times(run).ratio > _LONGER:
        return ""
    cores = number(part(run.start, "environment"), "cpus")
    ranks = len(rank_memory(run))
    shared = (
        f": {counted(ranks, 'rank')} ran on {cores:g} cores"
        if ranks and math.isfinite(cores)
        else ""
    )
    return (
        "The plan assumes that each stage has the machine to itself. A measured step takes longer "
        f"when ranks share CPU cores or memory bandwidth{shared}."
    )


def _memory_note(run: RunRecords) -> str:
    """Why small stages need several times their planned memory; "" if no rank does."""
    if not any(
        row.stages.ratio > _LONGER and row.stages.measured - row.stages.predicted < _FIXED_BYTES
        for row in rank_memory(run)
    ):
        return ""
    return (
        "The prediction counts tensors. Each process also allocates transport buffers, threads and "
        "the allocator's reserve: tens of MiB for a model of any size. For stages as small as "
        "these they are most of the memory."
    )


def _event_table(run: RunRecords) -> Table:
    return Table(
        (Column("after step"), Column("at"), Column("what", "text"), Column("", "note")),
        tuple(
            (str(event.step), known(event.elapsed_s, write_duration), event.kind, event.text)
            for event in run.events
        ),
    )


def _table(headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Numbers with the name of each row before them."""
    return Table((Column("", "text"), *map(Column, headings)), tuple(rows))


def environment_rows(run: RunRecords) -> list[tuple[str, str]]:
    """The time, machine and software of the run."""
    environment = part(run.start, "environment")
    began_s, memory = number(run.start, "time_s"), number(environment, "memory_bytes")
    rows = [(str(name), str(text)) for name, text in part(environment, "versions").items()]
    rows += [
        (name, str(environment[name]))
        for name in ("host", "system", "cpu", "cpus")
        if name in environment
    ]
    rows.append(("memory", known(memory, write_bytes)))
    gpus = environment.get("gpus")
    rows += [("gpu", str(gpu)) for gpu in (gpus if isinstance(gpus, list) else [])]
    if 0 <= began_s < _YEAR_3000_S:
        rows.insert(0, ("started", f"{datetime.fromtimestamp(began_s, UTC):%Y-%m-%d %H:%M:%S} UTC"))
    return [(name, text) for name, text in rows if text]


def _cards(run: RunRecords) -> list[Card]:
    step, idle, rate = step_times(run), idle_shares(run), rate_field(run)
    losses = [number(record, "loss") for record in run.steps] or [math.nan]
    evaluated = last_evaluation(run)
    details = f"from {known(losses[0], write_loss)}"
    if math.isfinite(evaluated):
        details += f", evaluation loss {write_loss(evaluated)}"
    memory = [row.process_bytes for row in rank_memory(run)]
    return [
        _card("Training loss", losses[-1], write_loss, details),
        _card(
            "Throughput",
            rate_of(run),
            write_count,
            f"{UNITS.get(rate, rate)}, excluding step 1",
        ),
        _card("Step time", step.measured, write_ms, _predicted(step, write_ms)),
        _card("Idle", idle.measured, write_share, _predicted(idle, write_share)),
        _card("Peak memory", max(memory, default=math.nan), write_bytes, "of the largest process"),
        _card("Training time", last(run, "elapsed_s"), write_duration, _length(run)),
    ]


def _length(run: RunRecords) -> str:
    """`60 steps, 1.2 epochs`."""
    epochs = known(last(run, "epoch"), ", {:.3g} epochs".format)
    return counted(run.last_step, "step") + epochs


def _card(heading: str, value: float, write: Callable[[float], str], detail: str) -> Card:
    return Card(heading, known(value, write) or "unknown", detail)


def _predicted(compared: Compared, write: Callable[[float], str]) -> str:
    return f"predicted: {known(compared.predicted, write) or 'unknown'}"


def _beside(compared: Compared, write: Callable[[float], str]) -> Sequence[str]:
    """Predicted, measured, and their ratio."""
    ratio = known(compared.ratio, write_ratio)
    return known(compared.predicted, write), known(compared.measured, write), ratio


def _numbers(record: object) -> list[tuple[str, str]]:
    """The fields that are numbers."""
    if not isinstance(record, dict):
        return []
    return [
        (title_of_field(str(name)), f"{number(record, name):.6g}")
        for name in record
        if math.isfinite(number(record, name))
    ]


REPORT = "report.html"
_TROUBLE = "report-error.txt"


def write_report(run: RunRecords, file: Path | None = None) -> Path:
    """Writes the page about a run, by default into its folder. Raises DataError if it cannot."""
    return write_page(file or run.folder / REPORT, render_run(run))


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Writes the report into a run's folder when the run ends, also by an error, which is then
    among its records. An error of the report itself is written to a file next to it and ends no
    run."""
    try:
        yield
    except BaseException as error:
        _leave(folder, why_ended(error))
        raise
    _leave(folder, "")


def _leave(folder: Path, failure: str) -> None:
    if not (folder / METRICS).is_file():
        return
    try:
        if failure and read_run(folder).failure != failure:
            _add_failure(folder / METRICS, failure)
        write_report(read_run(folder))
    except (OSError, DataError):
        return  # such as a full disk, which the run reports itself
    except Exception:
        write_here(folder / _TROUBLE, traceback.format_exc())


def _add_failure(path: Path, text: str) -> None:
    """Appends a last record, even after a line that a killed process left unfinished."""
    record = {"event": "failure", "text": text, "time_s": round(time.time(), 3)}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        unfinished = file.read() != b"\n"
    append_line(path, "\n" * unfinished + json.dumps(record))
