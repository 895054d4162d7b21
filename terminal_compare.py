"""How a comparison looks on a terminal: a line a run, then the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .runtime.comparison.compare import Comparison
    from .runtime.comparison.runs import Run


def print_run(console: Console, run: Run, number: int, of: int, *, as_json: bool) -> None:
    """One line of a run that is done."""
    if as_json:
        print(run.to_json(), flush=True)
        return
    loss = f"loss {run.curve.last:.4f}" if math.isfinite(run.curve.last) else run.curve.end
    console.print(
        f"{number:{len(str(of))}}/{of}  {run.name} {run.optimizer}  lr {run.lr:g}  "
        f"seed {run.seed}  {loss}",
        soft_wrap=True,
    )


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The table, and where the files are."""
    from .runtime.comparison.table import COLUMNS, cells

    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if position < 2 else "right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*map(escape, cells(row)))
    console.print()
    console.print(table)
    console.print(
        f"\n[green]✓[/] {comparison.made} runs made, {comparison.repeated} known from before\n"
        f"  curves     {comparison.folder / 'curves.svg'}\n"
        f"  table      {comparison.folder / 'table.md'}\n"
        f"  runs       {comparison.folder / 'runs.jsonl'}",
        soft_wrap=True,
    )
