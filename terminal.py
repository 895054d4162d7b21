"""How plans look on a terminal and in a log: ticks, tables, findings. terminal_train.py: a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.table import Table

from .runtime.plan import TOPICS, Candidate, Finding, Plan, file_hash
from .runtime.schedules import ASYNCHRONOUS
from .runtime.traffic import spec_bytes, traffic
from .runtime.trust import is_trusted
from .terminal_console import SafeConsole

if TYPE_CHECKING:
    from .partitioner.graph_plan import GraphPlan
    from .partitioner.outline import Outline

_DEFAULT = "1f1b"  # what a run takes


def make_console(*, quiet: bool = False) -> Console:
    """A terminal has its width; a log gets lines long enough for the tables."""
    console = SafeConsole(highlight=False, quiet=quiet, soft_wrap=True)
    return console if console.is_terminal else SafeConsole(highlight=False, quiet=quiet, width=200)


# ---------------------------------------------------------------------- a partition


class Ticks:
    """One line a step of the work, written when the step is done; a spinner while it runs, with a
    bar where it tells how far it is."""

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

    def __enter__(self) -> Ticks:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def tick(self, name: str, detail: str, seconds: float, following: str) -> None:
        if self._silent:
            return
        self._console.print(
            f"[green]✓[/] {name:9}{escape(detail)} [dim]{seconds:.1f} s[/]", soft_wrap=True
        )
        if self._bar:
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(following, total=None)

    def progress(self, done: int, total: int) -> None:
        """How far the step is that runs."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)


class _BarOnceKnown(BarColumn):
    """No bar for a step that does not tell how far it is."""

    def __call__(self, task: Task) -> RenderableType:
        return super().__call__(task) if task.total else ""


def print_plan(console: Console, plan: Plan) -> None:
    """The stage table, with each stage's share of the slowest one."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    plain = all(stage.ranks == (stage.index,) for stage in plan.stages)
    for heading in ("stage", "modules") if plain else ("stage", "rank", "modules"):
        table.add_column(heading)
    for heading in ("params", "forward", "backward"):
        table.add_column(heading, justify="right")
    table.add_column("load")
    for heading in ("peak memory", "sends"):
        table.add_column(heading, justify="right")
    slowest = max(stage.forward_ms + stage.backward_ms for stage in plan.stages) or 1.0
    for stage in plan.stages:
        share = (stage.forward_ms + stage.backward_ms) / slowest
        table.add_row(
            str(stage.index),
            *(() if plain else (", ".join(map(str, stage.ranks)),)),
            escape(" ".join(stage.modules)),
            _count(stage.param_bytes // 4),
            f"{stage.forward_ms:.1f} ms",
            f"{stage.backward_ms:.1f} ms",
            f"{'█' * round(20 * share):░<20} {share:4.0%}",
            _bytes(stage.peak_bytes),
            _bytes(sum(_boundary_bytes(plan, boundary) for boundary in stage.sends)) or "-",
        )
    console.print()
    console.print(table)
    console.print()


def print_candidates(console: Console, candidates: Sequence[Candidate], taken: str) -> None:
    """What each method gave, the one taken in bold; nothing where none were compared."""
    if not candidates:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("method")
    numbers = ("stages", "slowest rank", "step", "above bound", "peak memory", "crossing", "in")
    for heading in numbers:
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in candidates:
        if not one.stages:
            table.add_row(escape(one.name), *["-"] * len(numbers), escape(one.note), style="dim")
            continue
        table.add_row(
            escape(one.name),
            str(one.stages),
            f"{one.bottleneck_ms:.2f} ms",
            f"{one.step_ms:.1f} ms",
            f"{max(0.0, one.gap):.1%}",
            _bytes(one.peak_bytes) or "-",
            _bytes(one.crossing_bytes) or "-",
            f"{one.seconds:.2f} s",
            escape(one.note),
            style="bold" if one.name == taken else None,
        )
    console.print(table)
    console.print()


def print_graph_plan(console: Console, plan: GraphPlan) -> None:
    """The stages of a planned cost graph, how good they are, and what other methods gave."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("stage", "rank", "groups"):
        table.add_column(heading)
    for heading in ("forward", "backward"):
        table.add_column(heading, justify="right")
    table.add_column("load")
    for heading in ("peak memory", "sends"):
        table.add_column(heading, justify="right")
    slowest = max(stage.load_ms for stage in plan.stages) or 1.0
    for stage in plan.stages:
        number = len(stage.groups)
        groups = stage.groups[0] if number == 1 else f"{stage.groups[0]} .. {stage.groups[-1]}"
        table.add_row(
            str(stage.index),
            ", ".join(map(str, plan.ranks_of_stage[stage.index])),
            escape(f"{groups} ({number})"),
            f"{stage.forward_ms:.2f} ms",
            f"{stage.backward_ms:.2f} ms",
            f"{'█' * round(20 * stage.load_ms / slowest):░<20} {stage.load_ms:.2f} ms",
            _bytes(stage.peak_bytes) or "-",
            _bytes(sum(one.forward_bytes * len(one.targets) for one in stage.sends)) or "-",
        )
    console.print()
    console.print(table)
    console.print()
    print_candidates(console, plan.candidates, plan.method)
    proved = "proved the least" if plan.optimal else f"at most {plan.gap:.1%} above the least"
    console.print(
        f"{escape(plan.name)} · {plan.method} · slowest rank {plan.bottleneck_ms:.2f} ms (bound "
        f"{plan.lower_bound_ms:.2f} ms) · step {plan.step_ms:.1f} ms (bound "
        f"{plan.step_bound_ms:.1f} ms), {proved} · planned in {plan.seconds:.2f} s",
        soft_wrap=True,
    )
    for note in plan.explanation:
        console.print(escape(f"note    {note}"), soft_wrap=True)


def print_outline(console: Console, outline: Outline) -> None:
    """The graph by module; the headings of modules stand out."""
    console.print()
    for line in str(outline).splitlines():
        style = "bold" if " · " in line else None
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_facts(console: Console, plan: Plan) -> None:
    """How good the plan is and what a run of it would be."""
    from .runtime.forecast import describe_forecast

    ratio = plan.even_split_ms / plan.bottleneck_ms if plan.bottleneck_ms else 1.0
    slower = f": {ratio:.2f}× as slow" if ratio >= 1 else ""
    lines = (
        f"slowest {plan.slowest} {plan.bottleneck_ms:.1f} ms, no cut can be below "
        f"{plan.lower_bound_ms:.1f} ms; an even split of the blocks has "
        f"{plan.even_split_ms:.1f} ms{slower}",
        describe_forecast(plan),
        *(f"note    {note}" for note in (*plan.notes, *plan.explanation)),
    )
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The explanation of a plan by topic, each sentence below what it is about."""
    for topic, heading in TOPICS.items():
        of_topic = [finding for finding in findings if finding.topic == topic]
        if of_topic:
            console.print(f"[bold]{heading}[/]")
        for about, same in groupby(of_topic, key=lambda finding: finding.about):
            console.print(f"  {escape(about)}", soft_wrap=True)
            for finding in same:
                console.print(f"    [dim]{escape(finding.text)}[/]", soft_wrap=True)
    console.print()


def print_next(console: Console, plan: Plan, folder: Path) -> None:
    print_facts(console, plan)
    console.print(escape(f"weights {plan.weights}"))
    console.print()
    planned = plan.setting.schedule
    under = f" --schedule {planned}" if planned not in (*ASYNCHRONOUS, _DEFAULT) else ""
    under += "" if is_trusted(folder) else " --trust"
    console.print(f"next    [bold]asyncpipe-train {escape(shlex.quote(str(folder)))}{under}[/]")
    last = len(plan.stages) - 1
    console.print(escape(f"read    {folder}/stage_0.py" + f" .. stage_{last}.py" * (last > 0)))
    console.print(escape(f"report  {folder}/report.html"))


def print_folder(console: Console, plan: Plan, folder: Path) -> None:
    """What a generated folder holds: its stages, boundaries, tied weights and edited files."""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    head = f"{plan.name}: {plan.model} in {len(plan.stages)} stages ({sizes})"
    console.print(escape(head))
    console.print(escape(f"made by {plan.command}"), soft_wrap=True)
    print_plan(console, plan)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("boundary", "from", "to", "shape", "gradient"):
        table.add_column(heading)
    for boundary in plan.boundaries:
        table.add_row(
            escape(boundary.tensor.name),
            f"stage {boundary.source}",
            "stage " + ", ".join(map(str, boundary.targets)),
            escape(str(boundary.tensor)),
            "yes" if boundary.tensor.requires_grad else "no",
        )
    console.print(table)
    if plan.if_sent:
        for flow in traffic(plan):
            console.print(
                f"sent    stage {flow.source} to {flow.target}: {_bytes(flow.sent) or 0} a "
                f"micro-batch; {_bytes(flow.if_sent)} if nothing were computed again"
            )
    for shared in plan.shared:
        holders = ", ".join(f"{name} in stage {stage}" for stage, name in shared.holders)
        console.print(escape(f"tied    {holders}"))
    for spec in plan.stages:
        if (folder / spec.file).is_file() and file_hash(folder / spec.file) != spec.sha256:
            console.print(f"edited  {spec.file} is not as generated; it is used as it is")
    if not is_trusted(folder):
        console.print("foreign not made on this machine: its code is shown, and run with --trust")
    console.print(escape(f"\ncode    asyncpipe-inspect {shlex.quote(str(folder))} --stage 0"))


# ---------------------------------------------------------------------------- numbers


def _boundary_bytes(plan: Plan, boundary: Any) -> int:
    return spec_bytes(boundary.tensor, plan.sizes) * len(boundary.targets)


def _bytes(count: float) -> str:
    if not count:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
