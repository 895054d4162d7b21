"""Tables at every width: columns left out by importance, cells wrapped between words, never cut."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from asyncpipe.commands.console import print_graph_plan, print_plan, print_table
from asyncpipe.partitioner.report.page import candidate_table
from asyncpipe.runtime.experiments.method_rows import COLUMNS
from asyncpipe.runtime.formatting import Column, Table
from asyncpipe.runtime.plan.findings import Candidate
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.plan.stage_table import common_module, stage_table
from asyncpipe.tests.support.models.hand_plans import chain

MODULES = (
    ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0-1"),
    ("transformer.h.2-6",),
    ("transformer.h.7-11", "transformer.ln_f"),
    ("lm_head",),
)


def gpt2() -> Plan:
    plan = chain(4).plan
    stages = [
        replace(stage, modules=names, forward_ms=89.23, backward_ms=156.3, peak_bytes=650 << 20)
        for stage, names in zip(plan.stages, MODULES, strict=True)
    ]
    return replace(plan, name="gpt2", stages=tuple(stages))


def in_columns(width: int, plan: Plan) -> list[str]:
    console = Console(file=StringIO(), width=width, soft_wrap=True)
    print_plan(console, plan)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def words(lines: list[str]) -> set[str]:
    return {word for line in lines for word in line.split()}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_stage_table_has_whole_words_in_every_width(width: int) -> None:
    lines = in_columns(width, gpt2())
    assert max(map(len, lines)) <= width
    names = {name.removeprefix("transformer.") for stage in MODULES for name in stage}
    assert {"(transformer.*)", *names, "89.23", "156.3", "100%"} <= words(lines)
    assert "…" not in "".join(lines)


def test_at_80_columns_a_stage_is_one_line_without_the_common_module() -> None:
    lines = [line for line in in_columns(80, gpt2()) if line.strip()]
    assert len(lines) == 6
    assert {"stage", "modules", "(transformer.*)", "params"} <= words(lines[:2])
    assert lines[2].startswith("0      wte wpe drop h.0-1 ")
    assert lines[5].startswith("3      lm_head ")
    assert not {"█", "░"} & set("".join(lines))


def test_a_wide_terminal_has_every_column() -> None:
    (table,) = stage_table(gpt2()).fitted(200)
    assert table == stage_table(gpt2())
    assert [column.heading for column in table.columns] == [
        *("stage", "modules (transformer.*)", "params", "forward", "backward", "load", ""),
        *("peak memory", "sends"),
    ]


def test_the_load_of_a_stage_counts_its_transfers_as_the_bottleneck_does() -> None:
    plan = gpt2()
    loads = (260.0, 520.0, 250.0, 245.53)
    stages = [replace(stage, load_ms=ms) for stage, ms in zip(plan.stages, loads, strict=True)]
    rows = stage_table(replace(plan, stages=tuple(stages))).rows
    assert [row[5] for row in rows] == ["50%", "100%", "48%", "47%"]


def test_names_that_would_be_ambiguous_keep_the_module() -> None:
    assert common_module(["a.x", "x"]) == ""
    assert common_module(["a.b.x", "a.b.y", "head"]) == "a.b"
    assert common_module(["a.b.0", "a.b.1-3", "head"]) == "a"
    assert common_module(["lm_head"]) == common_module([]) == ""


def test_the_least_important_columns_are_left_out_first() -> None:
    columns = [Column("a"), Column("b", leave_out=1), Column("c", leave_out=3), Column("d")]
    table = Table(tuple(columns), (("1111", "2222", "3333", "4444"),))
    assert [
        "".join(column.heading for column in part.columns)
        for width in (22, 21, 15, 10)
        for part in table.fitted(width)
    ] == ["abcd", "abd", "ad", "ad"]


def test_columns_that_are_all_needed_are_printed_in_parts_below_the_first() -> None:
    names = [f"run {number}" for number in range(5)]
    table = Table((Column("", "text"), *map(Column, names)), (("loss", *["1.2345"] * 5),))
    console = Console(file=StringIO(), width=24, soft_wrap=True)
    print_table(console, table)
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert re.findall(r"run \d", printed) == names
    assert printed.count("loss") == 3
    assert max(map(len, printed.splitlines())) <= 24


def test_the_tables_of_comparisons_fit_80_columns() -> None:
    cells = ("stash+msnag", "adamw", "0.0003", "3", "12.3456", "0.1234", "0.0123", "0.4%",
             "12 min 3 s", "1.23×", "1.10×")  # fmt: skip
    candidate = Candidate("pipedream", 4, 367.5, 2560.1, 3 << 30, 5 << 20, 0.01, 3.2, "a note")
    for table in (Table(COLUMNS, (cells,)), candidate_table([candidate] * 2, timed=True)):
        (part,) = table.fitted(80)
        assert sum(part.widths(80)) + 2 * (len(part.columns) - 1) <= 80


def test_a_plan_prints_its_stages_and_is_short_in_a_session() -> None:
    plan = gpt2()
    assert repr(plan) == f"<Plan gpt2: 4 stages, bottleneck stage {plan.bottleneck_ms:.4g} ms>"
    first, heading, *rows = str(plan).splitlines()
    assert first.startswith("gpt2: 4 stages, bottleneck stage ")
    assert heading.startswith("stage  modules (transformer.*)")
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]


def test_a_notebook_shows_the_stages_as_html_with_names_escaped() -> None:
    plan = replace(gpt2(), name="<script>")
    page = plan._repr_html_()
    assert page.startswith("<table><caption>&lt;script&gt;: 4 stages")
    assert page.count("<tr>") == 5 and ">h.2-6</td>" in page
    assert "<script>" not in page


def test_a_planned_graph_fits_80_columns() -> None:
    import networkx as nx

    from asyncpipe import plan_graph

    graph = nx.DiGraph(name="five")
    for number in range(5):
        graph.add_node(f"encoder_block_{number}", forward_ms=4, backward_ms=8, output_bytes=4096)
    nx.add_path(graph, list(graph))
    console = Console(file=StringIO(), width=80, soft_wrap=True)
    print_graph_plan(console, plan_graph(graph, stages=2))
    assert isinstance(console.file, StringIO)
    table = console.file.getvalue().splitlines()[1:7]
    assert max(map(len, table)) <= 80
    assert "encoder_block_0 .." in table[2] and "encoder_block" in table[3]
