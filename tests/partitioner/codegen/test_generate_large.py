"""How much code a large model becomes, and that the checkers accept that of published models."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.codegen import CODES, generate
from asyncpipe.partitioner.graph.build import build_graph, stage_of_nodes
from asyncpipe.partitioner.graph.costs import LOCALHOST
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile.profiler import profile_analytic
from asyncpipe.partitioner.split.split import StageGraph, split
from asyncpipe.partitioner.split.ssa import separated
from asyncpipe.tests.partitioner.codegen.test_generate_models import assert_no_findings
from asyncpipe.tests.support.oracles.stage_chain import HEADER


def planned(name: str, stages: int, **model_args: int) -> tuple[Capture, tuple[StageGraph, ...]]:
    """A published model on meta, cut as the command does."""
    source = load_model(name, meta=True, model_args=model_args)
    captured = capture(source.model, source.example_inputs, check=False)
    profile = profile_analytic(captured, source.example_inputs)
    again = Recomputation(captured, Prices.of(profile))
    graph = build_graph(captured, profile, again=again)
    solution = solve(graph, stages=stages, link=LOCALHOST)
    placed = stage_of_nodes(captured, graph, solution.stage_of, again)
    captured, placed = separated(captured, placed)
    return captured, split(captured, placed, Recomputation(captured, Prices.of(profile)))


def lines_of(files: dict[str, str]) -> list[int]:
    return [text.count("\n") for name, text in files.items() if name.startswith("stage_")]


def forward_lines(text: str) -> dict[str, int]:
    """Lines of the forward of every class of a file."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    assert method.end_lineno is not None
                    found[node.name] = method.end_lineno - method.lineno + 1
    return found


@pytest.mark.timeout(600)
def test_six_blocks_of_gpt2_xl_are_read_on_a_few_screens() -> None:
    captured, graphs = planned("gpt2-xl", 3, n_layer=18)
    structured = generate(captured, graphs, HEADER)
    assert max(lines_of(structured)) <= 250
    for name, text in structured.items():
        if "class GPT2Block(" in text:
            block = {
                kind: count
                for kind, count in forward_lines(text).items()
                if not kind.startswith("Stage")
            }
            assert sum(block.values()) <= 40, (name, block)
            assert re.search(r"^        for (block|index) in ", text, re.MULTILINE)
    flat = generate(captured, graphs, HEADER, code="flat")
    assert sum(lines_of(flat)) > 3 * sum(lines_of(structured))
    for text in flat.values():
        assert not any(kind for kind in forward_lines(text) if not kind.startswith("Stage"))


# Of their own widths. Further layers would be further turns of the loops, and lines of flat code
# as the first ones.
PUBLISHED: dict[str, dict[str, int]] = {
    "gpt2": {"stages": 2, "n_layer": 3},
    "t5-small": {"stages": 3, "num_layers": 2, "num_decoder_layers": 2},
    "bert-base-uncased": {"stages": 2, "num_hidden_layers": 3},
    "vit-base": {"stages": 2, "num_hidden_layers": 3},
    "resnet50": {"stages": 3},
    "llama-7b": {"stages": 2, "num_hidden_layers": 3},
}


@pytest.mark.timeout(900)
def test_formatter_linter_and_type_checker_accept_published_models(
    tmp_path: Path, shared_folder: Path
) -> None:
    for name, given in PUBLISHED.items():
        captured, graphs = planned(name, **given)
        for code in CODES:
            for file, text in generate(captured, graphs, HEADER, code=code).items():
                if file != "__init__.py":
                    stem = name.replace("-", "_")
                    (tmp_path / f"{stem}_{code}_{file}").write_text(text)
    assert_no_findings(tmp_path, shared_folder)
