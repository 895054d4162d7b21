"""The stages of a plan as a table: in a terminal, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO

from ..formatting import (
    Column,
    Table,
    counted,
    in_terminal,
    visible,
    write_bytes,
    write_large_count,
    write_ms,
    write_share,
)
from .forecast import boundary_bytes
from .plan import Plan

TEXT_WIDTH = 100
"""Columns of the table in `str(plan)`."""


def stage_table(plan: Plan) -> Table:
    """The modules and costs of each stage, with its load as a share of the largest. Names of
    modules are without the module that they are all in."""
    names = [stage.modules for stage in plan.stages]
    inside = common_module([name for of_stage in names for name in of_stage])
    if not inside:
        return _table(plan, names, "modules")
    inner = [[name.removeprefix(f"{inside}.") for name in of_stage] for of_stage in names]
    return _table(plan, inner, f"modules ({inside}.*)")


def common_module(names: Sequence[str]) -> str:
    """The path of the module that holds all modules with a dot in their names; "" if there is none
    or if names would be ambiguous without it. No name is left that begins with a number.

    >>> common_module(["transformer.wte", "transformer.h.0-3", "transformer.h.4", "lm_head"])
    'transformer'
    >>> common_module(["bert.layer.0-3", "bert.layer.4", "head"])
    'bert'
    >>> common_module(["model.lm_head", "lm_head"]), common_module(["encoder.0", "decoder.0"])
    ('', '')
    """
    paths = [name.split(".") for name in names if "." in name]
    shared = 0
    shortest = min(map(len, paths), default=1) - 1
    while shared < shortest and len({path[shared] for path in paths}) == 1:
        shared += 1
    while shared and any(path[shared][0].isdigit() for path in paths):
        shared -= 1
    inner = {".".join(path[shared:]) for path in paths}
    is_clear = inner.isdisjoint(name for name in names if "." not in name)
    return ".".join(paths[0][:shared]) if shared and is_clear else ""


def bar(share: float) -> str:
    """A bar of 20 blocks.

    >>> bar(0.5)
    '██████████░░░░░░░░░░'
    """
    return f"{'█' * round(20 * share):░<20}"


def write_bytes_if_any(num_bytes: float) -> str:
    """The bytes; "-" for none."""
    return write_bytes(num_bytes) if num_bytes else "-"


def as_text(plan: Plan) -> str:
    """The plan as `str(plan)` has it: a heading and the stage table."""
    from rich.console import Console

    text = StringIO()
    console = Console(file=text, width=TEXT_WIDTH, color_system=None)
    for part in in_terminal(stage_table(plan), TEXT_WIDTH):
        console.print(part)
    return "\n".join(map(str.rstrip, visible(f"{_heading(plan)}\n{text.getvalue()}").splitlines()))


def as_html(plan: Plan) -> str:
    """The plan as a notebook shows it: a heading and the stage table."""
    table = stage_table(plan)

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{"right" if column.kind == "number" else "left"}">'
            f"{escape(visible(cell))}</{tag}>"
            for column, cell in zip(table.columns, cells, strict=True)
        )

    head = row("th", [column.heading for column in table.columns])
    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in table.rows)
    return (
        f"<table><caption>{escape(visible(_heading(plan)))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _heading(plan: Plan) -> str:
    return (
        f"{plan.name}: {counted(len(plan.stages), 'stage')}, bottleneck {plan.slowest} "
        f"{write_ms(plan.bottleneck_ms)} (lower bound {write_ms(plan.lower_bound_ms)})"
    )


def _table(plan: Plan, modules: Sequence[Sequence[str]], heading: str) -> Table:
    is_plain = all(stage.ranks == (stage.index,) for stage in plan.stages)
    slowest = max(stage.load_ms for stage in plan.stages) or 1.0
    columns = (
        Column("stage", "text"),
        *(() if is_plain else (Column("rank", "text"),)),
        Column(heading, "text"),
        Column("params", leave_out=1),
        Column("forward"),
        Column("backward"),
        Column("load"),
        Column("", "bar", leave_out=4),
        Column("peak memory", leave_out=2),
        Column("sends", leave_out=3),
    )
    rows = []
    for stage, names in zip(plan.stages, modules, strict=True):
        share = stage.load_ms / slowest
        sent = sum(boundary_bytes(boundary, plan.sizes) for boundary in stage.sends)
        rows.append(
            (
                str(stage.index),
                *(() if is_plain else (", ".join(map(str, stage.ranks)),)),
                " ".join(names),
                write_large_count(stage.param_bytes // 4),
                write_ms(stage.forward_ms),
                write_ms(stage.backward_ms),
                write_share(share),
                bar(share),
                write_bytes(stage.peak_bytes),
                write_bytes_if_any(sent),
            )
        )
    return Table(columns, tuple(rows))
