"""The display of a run on a terminal and in a log: its facts, progress, end and timeline."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..runtime.formatting import (
    counted,
    write_accuracy,
    write_bytes,
    write_duration,
    write_loss,
    write_ms,
    write_rate,
    write_share,
)
from ..runtime.monitoring.records import Reporter
from .console import make_console, print_text, print_words

if TYPE_CHECKING:
    from ..runtime.config.settings import RunConfig, Settings
    from ..runtime.monitoring.idle import IdleSplit
    from ..runtime.monitoring.records import EvalRecord, StartRecord, StepRecord, Summary
    from ..runtime.schedule.simulate import Timeline

_SPEED_PERIOD_S = 300.0
"""The steps of this time give the estimate of the time left."""
_WIDTH = 72
"""Columns of the longer of two timelines."""


def make_reporter(config: RunConfig) -> Reporter:
    """The reporter of a run: JSON lines, nothing, a progress bar or one line per interval."""
    if config.json:
        return _JsonReporter()
    console = make_console(quiet=config.quiet)
    look = _BarReporter if console.is_terminal else _LineReporter
    return look(console, draws=config.trace is not None)


def print_starting(settings: Settings, ranks: int) -> None:
    """Prints, on a terminal, that processes are being started: the first facts follow when all of
    them have met, seconds later."""
    console = make_console(quiet=settings.quiet or settings.json)
    if console.is_terminal:
        console.print(f"[dim]{'starting':11}[/] {counted(ranks, 'rank')} ..", soft_wrap=True)


class _JsonReporter(Reporter):
    """Prints every event as one JSON line; timelines are in the trace."""

    def on_start(self, start: StartRecord) -> None:
        print_text(start.to_json())

    def on_warning(self, text: str) -> None:
        print_text(json.dumps({"event": "warning", "text": text}))

    def on_note(self, about: str, text: str) -> None:
        print_text(json.dumps({"event": "note", "about": about, "text": text}))

    def on_step(self, record: StepRecord) -> None:
        print_text(record.to_json())

    def on_eval(self, record: EvalRecord) -> None:
        print_text(record.to_json())

    def on_end(self, summary: Summary) -> None:
        print_text(summary.to_json())


class _LineReporter(Reporter):
    """Prints the facts, then one line per interval, as for a log file; with `draws`, also timelines
    at the end of the run."""

    def __init__(self, console: Console, *, draws: bool) -> None:
        self._console = console
        self._draws = draws
        self._drawn: list[tuple[str, Timeline]] = []

    def _print(self, text: str) -> None:
        print_words(self._console, text)

    def on_start(self, start: StartRecord) -> None:
        for label, text in start.facts:
            self.on_note(label, text)

    def on_warning(self, text: str) -> None:
        self._print(f"[yellow]warning:[/] {escape(text)}")

    def on_note(self, about: str, text: str) -> None:
        print_words(self._console, f"[dim]{about:11}[/] {escape(text)}", indent=12)

    def on_step(self, record: StepRecord) -> None:
        if record.logged:
            place = f"step {record.step:{len(str(record.steps))}}/{record.steps}"
            self._print(f"{place}  {_measures(record, self._console.width - len(place) - 2)}")

    def on_eval(self, record: EvalRecord) -> None:
        accuracy = ""
        if record.accuracy is not None:
            accuracy = f"  accuracy {write_accuracy(record.accuracy)}"
        own = "".join(f"  {escape(name)} {value:.4g}" for name, value in record.metrics.items())
        self._print(
            f"eval at step {record.step}  loss {write_loss(record.loss)}{accuracy}{own}  "
            f"on {record.samples:,} of {record.length:,} samples"
        )

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        self._drawn = [(f"predicted from {costs}", simulated), ("measured", measured)]

    def on_end(self, summary: Summary) -> None:
        for line in _ending(summary):
            self._print(line)
        if self._draws:
            self._draw()

    def _draw(self) -> None:
        from ..runtime.schedule.text import draw_timeline

        longest = max((timeline.makespan_ms for _, timeline in self._drawn), default=0.0) or 1.0
        for title, timeline in self._drawn:
            width = max(1, round(_WIDTH * timeline.makespan_ms / longest))
            self._print(f"\n{title}")
            self._console.print(escape(draw_timeline(timeline, width=width)), no_wrap=True)


class _BarReporter(_LineReporter):
    """Prints the same lines above a progress bar with the step, the loss and the time left."""

    def __init__(self, console: Console, *, draws: bool) -> None:
        super().__init__(console, draws=draws)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _TimeColumn(compact=True),
        )
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            expand=True,
            speed_estimate_period=_SPEED_PERIOD_S,
        )
        self._task = self._progress.add_task("waiting for the first step", total=None)

    def on_start(self, start: StartRecord) -> None:
        super().on_start(start)
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        self._progress.update(
            self._task,
            completed=record.step,
            total=record.steps,
            description=f"step {record.step}/{record.steps}  loss {write_loss(record.loss)}",
        )

    def on_end(self, summary: Summary) -> None:
        self._progress.stop()
        super().on_end(summary)

    def on_failure(self, text: str) -> None:
        self._progress.stop()


class _TimeColumn(TimeRemainingColumn):
    """The time that the remaining steps take at the pace of the last minutes; empty before two
    steps have been made."""

    def render(self, task: Task) -> Text:
        if task.time_remaining is None:
            return Text("")
        return Text(f"{super().render(task)} left", style="progress.remaining")


def _measures(record: StepRecord, width: int) -> str:
    """The figures of a step; those that a narrow terminal has no room for are left out."""
    norm, hits = record.grad_norm, record.cache_hits
    figures = {
        "loss": f"loss {write_loss(record.loss)}",
        "norm": f"grad {norm:.2f}" if norm is not None else "",
        "lr": f"lr {record.lr:.1e}",
        "rate": write_rate(record.rate, record.unit),
        "ms": write_ms(record.step_ms),
        "idle": f"idle {write_share(record.idle_share)}",
        "frozen": f"frozen {record.frozen[0]} of {record.frozen[1]}" if record.frozen else "",
        "cached": f"cached {write_share(hits)}" if hits is not None else "",
    }
    for name in (
        "",
        "ms",
        "lr",
        "norm",
        "idle",
        "cached",
        "frozen",
        "rate",
    ):  # the least important first
        figures.pop(name, None)
        line = "  ".join(filter(None, figures.values()))
        if len(line) <= width:
            break
    return line


def _ending(summary: Summary) -> list[str]:
    evaluation = f" · eval {write_loss(summary.eval_loss)}" if summary.eval_loss is not None else ""
    accuracy = (
        f" (accuracy {write_accuracy(summary.accuracy)})" if summary.accuracy is not None else ""
    )
    lines = [
        f"[green]✓[/] {summary.steps} steps in {write_duration(summary.seconds)} · loss "
        f"{write_loss(summary.first_loss)} → {write_loss(summary.last_loss)}{evaluation}{accuracy}",
        f"  measured   {write_ms(summary.step_ms)} per step, {write_share(summary.idle)} idle",
        f"  idle       {_parts(summary.idle_parts)}",
        f"  throughput {write_rate(summary.rate, summary.unit)} (excluding step 1) · "
        f"{summary.epoch:.3g} epochs",
        *_accounts(summary),
        f"  output     {escape(summary.output)}",
    ]
    if late := summary.staleness:
        delays = (
            f"mean {late.delay_mean:.2g}, max {counted(late.delay_max, 'step')} (as expected for "
            "this schedule)"
        )
        if late.unexpected:
            delays = f"{late.unexpected} of {late.passages} delays differ from the expected ones"
        lines.insert(2, f"  staleness  {delays}")
    if summary.simulated_step_ms is not None and summary.simulated_idle is not None:
        lines.insert(
            2,
            f"  predicted  {write_ms(summary.simulated_step_ms)} per step with the measured "
            f"optimizer time, {write_share(summary.simulated_idle)} idle",
        )
    if summary.trace:
        lines.append(f"  trace      {escape(summary.trace)}, for ui.perfetto.dev")
    if summary.weights:
        lines.append(f"  weights    {escape(summary.weights)}")
    if summary.exported:
        lines.append(f"  exported   {escape(summary.exported)}")
    return lines


def _accounts(summary: Summary) -> list[str]:
    """The epochs in a second after the warm-up, and the bytes that a step sends."""
    lines = []
    if pace := summary.pace:
        lines.append(
            f"  pace       {pace.epochs:.6g} epochs in {write_duration(pace.seconds)} = "
            f"{pace.epoch_per_s:.3g} epoch/s (excluding step {pace.warm_up})"
        )
    if sent := summary.sent_bytes:
        parts = " · ".join(f"{write_bytes(size)} {name}" for name, size in sent.items())
        lines.append(f"  sent       {write_bytes(sum(sent.values()))} per step: {parts}")
    return lines


def _parts(split: IdleSplit) -> str:
    """`9% bubble · 4% imbalance · ..`, the largest first."""
    parts = sorted(asdict(split).items(), key=lambda part: -part[1])
    return " · ".join(f"{write_share(share)} {name}" for name, share in parts if share)
