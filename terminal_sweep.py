"""How a sweep looks on a terminal: a line a run that is over, then the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .runtime.sweep.record import SweptRun
    from .runtime.sweep.sweep import Sweep


def print_swept_run(console: Console, run: SweptRun, number: int, of: int) -> None:
    """One line of a run that is over."""
    loss = f"{run.state}: {run.error}" if run.loss is None else f"loss {run.loss:.4f}"
    time = "" if run.seconds is None else f"  {run.seconds:.1f} s"
    console.print(
        f"{number:{len(str(of))}}/{of}  {escape(run.name)}  {escape(loss)}{time}", soft_wrap=True
    )


def print_sweep(console: Console, sweep: Sweep) -> None:
    """The table, the best first, and where the files are."""
    from .runtime.sweep.table import columns, rows

    runs = tuple(sweep.runs.values())
    table = Table(box=None, pad_edge=False)
    for column in columns(runs):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows(runs):
        table.add_row(*map(escape, row))
    console.print()
    console.print(table)
    best = sweep.ranked[0]
    if best.loss is not None:
        console.print(f"\n[green]✓[/] best       {escape(str(sweep.folder / best.name))}")
    console.print(f"  table      {escape(str(sweep.folder / 'sweep.md'))}", soft_wrap=True)
