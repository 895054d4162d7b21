"""How runs that are over look on a terminal, and what there is here for one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .runtime.run_report.comparison import Comparison


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What the runs reached, and in what they differ."""
    _print_table(console, comparison.names, comparison.rows)
    _print_table(console, comparison.names, comparison.differences)


def print_page(console: Console, page: Path) -> None:
    console.print(f"[green]✓[/] {escape(str(page))}", soft_wrap=True)


def print_info(
    console: Console, sections: Mapping[str, Mapping[str, str]], *, as_json: bool
) -> None:
    """A heading a section, below it what there is."""
    if as_json:
        print(json.dumps(sections, indent=1))
        return
    width = max(len(name) for found in sections.values() for name in found)
    for heading, found in sections.items():
        console.print(f"[bold]{escape(heading)}[/]")
        for name, text in found.items():
            console.print(f"  [dim]{escape(name):{width}}[/]  {escape(text)}", soft_wrap=True)


def _print_table(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A column a run; nothing where there are no rows."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print()
