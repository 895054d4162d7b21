"""Records of a run -> report.html, the whole page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ..pages.cards import Card
from ..pages.templating import in_script, render
from ..wording import (
    counted,
    known,
    write_bytes,
    write_count,
    write_duration,
    write_ms,
    write_share,
)
from .drawings import (
    idle_bars,
    loss_charts,
    more_charts,
    other_charts,
    speed_charts,
    step_drawings,
)
from .measures import (
    Compared,
    idle_shares,
    rank_memory,
    rate_field,
    rate_of,
    stage_times,
    step_times,
)
from .records import RunRecords, number, part
from .summary import UNITS, last, last_evaluation, status_of, title_of, to_json

TRACE = "trace.json"
_YEAR_3000_S = 32_503_680_000


def render_run(run: RunRecords) -> str:
    """The page. It refers to nothing but files of the run's own folder, and needs no script; its
    numbers are in a JSON block, `run`, and those of every step in metrics.jsonl.
    """
    facts = [(str(name), str(text)) for name, text in part(run.start, "facts").items()]
    return render(
        "run_report.html.j2",
        title=title_of(run),
        status=status_of(run),
        is_good=bool(run.end),
        command="",
        facts=facts,
        cards=_cards(run),
        failure=run.failure,
        damaged=run.damaged,
        loss=loss_charts(run),
        speed=speed_charts(run),
        more=more_charts(run),
        idle=idle_bars(run),
        step=step_drawings(run),
        trace=TRACE if (run.folder / TRACE).is_file() else "",
        step_rows=[
            ("a step", *_beside(step_times(run), write_ms)),
            ("ranks idle", *_beside(idle_shares(run), write_share)),
        ],
        stages=[
            (
                f"stage {times.stage}",
                *_beside(times.forward, write_ms),
                *_beside(times.backward, write_ms),
                known(times.optimizer_ms, write_ms),
            )
            for times in stage_times(run)
        ],
        memory=[
            (
                f"rank {row.rank}",
                *_beside(row.stages, write_bytes),
                write_bytes(row.process_bytes),
            )
            for row in rank_memory(run)
        ],
        others=other_charts(run),
        staleness=_numbers(part(run.end, "staleness")),
        events=[
            (event.step, known(event.elapsed_s, write_duration), event.kind, event.text)
            for event in run.events
        ],
        config=[(str(name), json.dumps(value, default=str)) for name, value in run.config.items()],
        environment=environment_rows(run),
        run_json=in_script(to_json(run)),
    )


def environment_rows(run: RunRecords) -> list[tuple[str, str]]:
    """When and where the run was made, and with what."""
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
        rows.insert(0, ("begun", f"{datetime.fromtimestamp(began_s, UTC):%Y-%m-%d %H:%M:%S} UTC"))
    return [(name, text) for name, text in rows if text]


def _cards(run: RunRecords) -> list[Card]:
    step, idle, rate = step_times(run), idle_shares(run), rate_field(run)
    losses = [number(record, "loss") for record in run.steps] or [math.nan]
    evaluated = last_evaluation(run)
    details = f"from {known(losses[0], '{:.4f}'.format)}"
    if math.isfinite(evaluated):
        details += f", evaluated {evaluated:.4f}"
    memory = [row.process_bytes for row in rank_memory(run)]
    return [
        _card("Training loss", losses[-1], "{:.4f}".format, details),
        _card(
            "Throughput",
            rate_of(run),
            write_count,
            f"{UNITS.get(rate, rate)}, after the first step",
        ),
        _card("A step", step.measured, write_ms, _simulated(step, write_ms)),
        _card("Ranks idle", idle.measured, write_share, _simulated(idle, write_share)),
        _card("Fullest rank", max(memory, default=math.nan), write_bytes, "the whole process"),
        _card("Time", last(run, "elapsed_s"), write_duration, _length(run)),
    ]


def _length(run: RunRecords) -> str:
    """`60 steps, 1.2 epochs`."""
    epochs = known(last(run, "epoch"), ", {:.3g} epochs".format)
    return counted(run.last_step, "step") + epochs


def _card(heading: str, value: float, write: Callable[[float], str], detail: str) -> Card:
    return Card(heading, known(value, write) or "unknown", detail)


def _simulated(compared: Compared, write: Callable[[float], str]) -> str:
    return f"simulated: {known(compared.predicted, write) or 'unknown'}"


def _beside(compared: Compared, write: Callable[[float], str]) -> Sequence[str]:
    """Predicted, measured, and how many times the one the other is."""
    ratio = known(compared.ratio, "{:.2f}×".format)
    return known(compared.predicted, write), known(compared.measured, write), ratio


def _numbers(record: object) -> list[tuple[str, str]]:
    """The fields that are numbers, whatever they are called."""
    if not isinstance(record, dict):
        return []
    return [
        (str(name).replace("_", " "), f"{number(record, name):.6g}")
        for name in record
        if math.isfinite(number(record, name))
    ]
