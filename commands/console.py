"""The output of commands: plans, comparisons, sweeps, finished runs, and the facts of a machine.

`print_table` prints all tables. `SafeConsole` is a terminal that shows names and texts of others
unchanged, without markup.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.segment import Segment
from rich.text import Text

from ..runtime.formatting import (
    Column,
    Table,
    in_terminal,
    visible,
    write_bytes,
    write_duration,
    write_gap,
    write_loss,
    write_ms,
    write_ratio,
)
from ..runtime.plan.findings import TOPICS, BestLayout, Candidate, Finding
from ..runtime.plan.forecast import traffic
from ..runtime.plan.plan import Plan
from ..runtime.plan.stage_table import bar, stage_table, write_bytes_if_any
from ..runtime.plan.trust import is_trusted
from ..runtime.schedule.asynchronous import ASYNCHRONOUS
from ..runtime.user_code import file_hash

if TYPE_CHECKING:
    from ..partitioner.outline import Outline
    from ..partitioner.planning.planner import GraphPlan
    from ..runtime.experiments.batch_search import Trial
    from ..runtime.experiments.compare import MethodComparison
    from ..runtime.experiments.method_rows import ComparedRun
    from ..runtime.experiments.sweep import Sweep
    from ..runtime.experiments.swept_runs import SweptRun
    from ..runtime.reports.comparison import RunComparison


def print_run(console: Console, run: ComparedRun, number: int, of: int, *, as_json: bool) -> None:
    """One line of a run that is done."""
    if as_json:
        print_text(run.to_json())
        return
    loss = f"loss {write_loss(run.curve.last)}" if math.isfinite(run.curve.last) else run.curve.end
    console.print(
        f"{number:{len(str(of))}}/{of}  {run.name} {run.optimizer}  lr {run.lr:g}  "
        f"seed {run.seed}  {loss}",
        markup=False,
        soft_wrap=True,
    )


def print_comparison(console: Console, comparison: MethodComparison) -> None:
    """The table, and where the files are."""
    from ..runtime.experiments.method_rows import method_table

    console.print()
    print_table(console, method_table(comparison.rows))
    folder = escape(str(comparison.folder))
    console.print(
        f"[green]✓[/] {comparison.made} runs made, {comparison.repeated} known from before\n"
        f"  report     {folder}/comparison.html\n"
        f"  curves     {folder}/curves.svg\n"
        f"  table      {folder}/table.md\n"
        f"  runs       {folder}/runs.jsonl",
        soft_wrap=True,
    )


def print_run_comparison(console: Console, comparison: RunComparison) -> None:
    """Prints the results of the runs and their differences."""
    for table in comparison.tables:
        print_table(console, table)
    for sentence in comparison.sentences:
        print_words(console, f"{escape(sentence)}\n")


def print_page(console: Console, page: Path) -> None:
    console.print(f"[green]✓[/] {escape(str(page))}", soft_wrap=True)


def print_info(
    console: Console, sections: Mapping[str, Mapping[str, str]], *, as_json: bool
) -> None:
    """Prints each section under its heading."""
    if as_json:
        print_text(json.dumps(sections, indent=1))
        return
    width = max(len(name) for rows in sections.values() for name in rows)
    for heading, rows in sections.items():
        console.print(f"[bold]{escape(heading)}[/]")
        for name, text in rows.items():
            console.print(f"  [dim]{escape(name):{width}}[/]  {escape(text)}", soft_wrap=True)


def print_table(console: Console, table: Table, styles: Mapping[int, str] | None = None) -> None:
    """Prints a table and an empty line; nothing without rows. What does not fit the width is left
    out or printed below (`Table.fitted`). `styles` has those of single rows."""
    if not table.rows:
        return
    for shown in in_terminal(table, console.width, styles):
        console.print(shown, soft_wrap=False)
        console.print()


def print_trial(console: Console, strategy: str, size: int, trial: Trial) -> None:
    """Prints one line for a size that was tried."""
    needs = "" if math.isnan(trial.needed) else f" ({write_bytes(int(trial.needed))})"
    text = "fits" if trial.fits else "does not fit"
    console.print(f"{escape(strategy)}: {size} samples a micro-batch: {text}{needs}")


def print_swept_run(console: Console, run: SweptRun, number: int, of: int) -> None:
    """Prints one line for a finished run."""
    loss = f"{run.state}: {run.error}" if run.loss is None else f"loss {write_loss(run.loss)}"
    time = "" if run.seconds is None else f"  {write_duration(run.seconds)}"
    console.print(
        f"{number:{len(str(of))}}/{of}  {escape(run.name)}  {escape(loss)}{time}", soft_wrap=True
    )


def print_sweep(console: Console, sweep: Sweep) -> None:
    """The table, the best first, and where the files are."""
    from ..runtime.experiments.swept_runs import advice, tables_of

    for table in tables_of(sweep.ranked):
        console.print()
        print_table(console, table)
    best = sweep.ranked[0]
    if sentence := advice(sweep.ranked):
        console.print()
        print_words(console, sentence)
    elif best.loss is not None:
        console.print(f"[green]✓[/] best       {escape(str(sweep.folder / best.name))}")
    console.print(f"  table      {escape(str(sweep.folder / 'sweep.md'))}", soft_wrap=True)


class SafeConsole(Console):
    """Spells out what would hide a text, or steer the terminal: only styles may do so."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if style is not None and style.link:  # a text may not lead anywhere else
                style = style.update_link(None)
            yield segment if control else Segment(visible(text), style)

    def on_broken_pipe(self) -> None:
        """Continues without printing."""
        self.quiet = True
        _drop_output(self.file)


def print_words(console: Console, text: str, *, indent: int = 0) -> None:
    """Prints a sentence. A terminal breaks it between words, and further lines are indented; a log
    has it in one line."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    lines = console.render_str(text).wrap(console, console.width - indent)
    for position, line in enumerate(lines):
        console.print(Text(" " * indent * (position > 0)) + line, soft_wrap=True)


def print_text(text: str) -> None:
    """Prints a text as it is, at once, and ends its line. If the reader is gone, as after
    `| head`, the command continues without printing."""
    try:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
    except BrokenPipeError:
        _drop_output(sys.stdout)


def _drop_output(file: IO[str]) -> None:
    """Drops the unwritten output of the file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


_DEFAULT = "1f1b"  # what a run takes


def make_console(*, quiet: bool = False) -> Console:
    """A terminal has its width; a log gets lines long enough for the tables."""
    console = SafeConsole(highlight=False, quiet=quiet, soft_wrap=True)
    return console if console.is_terminal else SafeConsole(highlight=False, quiet=quiet, width=200)


# ---------------------------------------------------------------------- a partition


class PhaseDisplay:
    """Prints one line for each finished step, and a spinner during a step, with a bar if the step
    reports its progress."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console = console
        self._silent = silent
        self._bar: Progress | None = None
        if console.is_terminal and not silent:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                _BarOnceKnown(bar_width=32),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("load", total=None)

    def __enter__(self) -> PhaseDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def end_phase(self, name: str, detail: str, seconds: float, following: str) -> None:
        if self._silent:
            return
        self._console.print(
            f"[green]✓[/] {name:9}{escape(detail)} [dim]\\[{write_duration(seconds)}][/]",
            soft_wrap=True,
        )
        if self._bar:
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(following, total=None)

    def progress(self, done: int, total: int) -> None:
        """Shows the progress of the current step."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)


class _BarOnceKnown(BarColumn):
    """A bar that is hidden until a step reports its progress."""

    def __call__(self, task: Task) -> RenderableType:
        return super().__call__(task) if task.total else ""


def print_plan(console: Console, plan: Plan) -> None:
    """The stage table, with each stage's share of the slowest one."""
    console.print()
    print_table(console, stage_table(plan))


def print_candidates(console: Console, candidates: Sequence[Candidate], chosen: str) -> None:
    """Prints the result of each method, with the chosen one in bold; nothing without a
    comparison."""
    from ..partitioner.report.page import candidate_table

    styles = {
        position: "bold" if candidate.name == chosen else "" if candidate.stages else "dim"
        for position, candidate in enumerate(candidates)
    }
    print_table(console, candidate_table(candidates, timed=True), styles)


def print_layouts(console: Console, layouts: Sequence[BestLayout]) -> None:
    """The fastest layout of each number of devices; nothing where none were compared."""
    from ..partitioner.report.page import layout_table

    print_table(console, layout_table(layouts), {})


def print_graph_plan(console: Console, plan: GraphPlan) -> None:
    """The stages of a planned cost graph, how good they are, and what other methods gave."""
    slowest = max(stage.load_ms for stage in plan.stages) or 1.0
    columns = (
        *(Column(heading, "text") for heading in ("stage", "rank", "groups")),
        *map(Column, ("forward", "backward", "load")),
        Column("", "bar", leave_out=3),
        Column("peak memory", leave_out=1),
        Column("sends", leave_out=2),
    )
    rows = []
    for stage in plan.stages:
        number = len(stage.groups)
        sent = sum(boundary.forward_bytes * len(boundary.targets) for boundary in stage.sends)
        groups = stage.groups[0] if number == 1 else f"{stage.groups[0]} .. {stage.groups[-1]}"
        rows.append(
            (
                str(stage.index),
                ", ".join(map(str, plan.ranks_of_stage[stage.index])),
                f"{groups} ({number})",
                write_ms(stage.forward_ms),
                write_ms(stage.backward_ms),
                write_ms(stage.load_ms),
                bar(stage.load_ms / slowest),
                write_bytes_if_any(stage.peak_bytes),
                write_bytes_if_any(sent),
            )
        )
    console.print()
    print_table(console, Table(columns, tuple(rows)))
    print_candidates(console, plan.candidates, plan.method)
    proven = "proven optimal" if plan.optimal else f"{write_gap(plan.gap)} above the optimum"
    console.print(
        f"{escape(plan.name)} · {plan.method} · {proven} · bottleneck rank "
        f"{write_ms(plan.bottleneck_ms)} (lower bound {write_ms(plan.lower_bound_ms)}) · step "
        f"{write_ms(plan.step_ms)} (lower bound {write_ms(plan.step_bound_ms)}) · planned in "
        f"{write_duration(plan.seconds)}",
        soft_wrap=True,
    )
    for note in plan.explanation:
        print_words(console, escape(f"note    {note}"), indent=8)


def print_outline(console: Console, outline: Outline) -> None:
    """The graph by module; the headings of modules stand out."""
    console.print()
    for line in str(outline).splitlines():
        style = "bold" if " · " in line else None
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_facts(console: Console, plan: Plan) -> None:
    """How good the plan is and what a run of it would be."""
    from ..runtime.plan.forecast import describe_forecast

    ratio = plan.even_split_ms / plan.bottleneck_ms if plan.bottleneck_ms else 1.0
    even = f"would take {write_ms(plan.even_split_ms)}"
    if ratio >= 1:
        even = f"{even} ({write_ratio(ratio)} slower)" if ratio >= 1.005 else "is as fast"
    lines = (
        f"bottleneck {plan.slowest} {write_ms(plan.bottleneck_ms)} (lower bound "
        f"{write_ms(plan.lower_bound_ms)}); an even split of the blocks {even}",
        describe_forecast(plan),
        *(f"note    {note}" for note in (*plan.notes, *plan.explanation)),
    )
    for line in lines:
        print_words(console, escape(line), indent=8 * line.startswith("note"))


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The explanation of a plan by topic, each sentence below what it is about."""
    for topic, heading in TOPICS.items():
        of_topic = [finding for finding in findings if finding.topic == topic]
        if of_topic:
            console.print(f"[bold]{heading}[/]")
        for about, same in groupby(of_topic, key=lambda finding: finding.about):
            console.print(f"  {escape(about)}", soft_wrap=True)
            for finding in same:
                print_words(console, f"    [dim]{escape(finding.text)}[/]", indent=4)
    console.print()


def print_next(console: Console, plan: Plan, folder: Path) -> None:
    print_facts(console, plan)
    console.print(escape(f"weights: {plan.weights}"))
    console.print()
    planned = plan.setting.schedule
    under = f" --schedule {planned}" if planned not in (*ASYNCHRONOUS, _DEFAULT) else ""
    under += "" if is_trusted(folder) else " --trust"
    console.print(f"next    [bold]asyncpipe-train {escape(shlex.quote(str(folder)))}{under}[/]")
    last = len(plan.stages) - 1
    console.print(escape(f"read    {folder}/stage_0.py" + f" .. stage_{last}.py" * (last > 0)))
    console.print(escape(f"report  {folder}/report.html"))


def print_folder(console: Console, plan: Plan, folder: Path) -> None:
    """Prints a generated folder: its stages, boundaries, tied weights and edited files."""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    head = f"{plan.name}: {plan.model} in {len(plan.stages)} stages ({sizes})"
    console.print(escape(head))
    console.print(escape(f"made by {plan.command}"), soft_wrap=True)
    print_plan(console, plan)
    headings = ("boundary", "from", "to", "shape", "gradient")
    rows = (
        (
            boundary.tensor.name,
            f"stage {boundary.source}",
            "stage " + ", ".join(map(str, boundary.targets)),
            str(boundary.tensor),
            "yes" if boundary.tensor.requires_grad else "no",
        )
        for boundary in plan.boundaries
    )
    columns = tuple(Column(heading, "text") for heading in headings)
    print_table(console, Table(columns, tuple(rows)))
    if plan.if_sent:
        for flow in traffic(plan):
            console.print(
                f"sent    stage {flow.source} to {flow.target}: {write_bytes(flow.sent)} per "
                f"micro-batch ({write_bytes(flow.if_sent)} without recomputation)"
            )
    for shared in plan.shared:
        holders = ", ".join(f"{name} in stage {stage}" for stage, name in shared.holders)
        console.print(escape(f"tied    {holders}"))
    for spec in plan.stages:
        if (folder / spec.file).is_file() and file_hash(folder / spec.file) != spec.sha256:
            edited = f"edited  {spec.file} was edited by hand; your version is used"
            console.print(edited, markup=False)
    if not is_trusted(folder):
        console.print("untrusted: generated on another machine; pass --trust to run it")
    console.print(escape(f"\ncode    asyncpipe-inspect {shlex.quote(str(folder))} --stage 0"))
