"""Imports point down: each package imports only from packages that stand before it in LAYERS."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    "runtime",
    "runtime/schedule",
    "runtime/plan",
    "runtime/tensor_parallel",
    "runtime/transports",
    "runtime/data",
    "runtime/optimizers",
    "runtime/staleness",
    "runtime/executor",
    "runtime/freezing",
    "runtime/config",
    "runtime/distributed",
    "runtime/sharding",
    "runtime/monitoring",
    "runtime/checkpoint",
    "runtime/reports",
    "runtime/watch",
    "runtime/control",
    "runtime/training",
    "runtime/launch",
    "runtime/experiments",
    "runtime/communication",
    "runtime/job",
    "partitioner/models",
    "partitioner/capture",
    "partitioner/profile",
    "partitioner/tensor_parallel",
    "partitioner/graph",
    "partitioner/solvers",
    "partitioner/split",
    "partitioner/planning",
    "partitioner/codegen",
    "partitioner/report",
    "partitioner",
    "commands",
    ".",
)
"""Folders of the product, the lowest first."""

# Schedules and plans are read and simulated where torch is not installed.
WITHOUT_TORCH = {"runtime/schedule", "runtime/plan"}
# The compiler runs generated files, times them and draws pages as the runtime does.
USED_BY_THE_PARTITIONER = {
    *("runtime", "runtime/schedule", "runtime/plan", "runtime/executor", "runtime/reports"),
    *("runtime/optimizers", "runtime/freezing", "runtime/tensor_parallel"),
}
FILES = sorted(
    path
    for folder in ("partitioner", "runtime", "commands", "templates")
    for path in (ROOT / folder).rglob("*.py")
) + [ROOT / "__init__.py", ROOT / "cli.py"]


def imports(path: Path, source: str) -> Iterator[tuple[str, ...]]:
    """Everything that `source` imports when it runs, by its path or absolute name."""
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(source)
    for_types_alone = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types_alone:
            continue
        if isinstance(node, ast.Import):
            yield from (("absolute", *alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield ("absolute", *(node.module or "").split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            stem = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*stem, alias.name) for alias in node.names)


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder of the module that an import path names, or of the name in it."""
    while parts and not (ROOT / Path(*parts)).is_dir():
        parts = parts[:-1]
    return "/".join(parts) or "."


def violations(path: Path, source: str) -> list[str]:
    own = str(path.relative_to(ROOT).parent)
    wrong = []
    for parts in imports(path, source):
        if parts[0] == "absolute":
            if parts[1] in ("asyncpipe", "partitioner", "runtime", "commands", "cli"):
                wrong.append(f"{own} imports {'.'.join(parts[1:])} by an absolute name")
            if parts[1] == "torch" and own in WITHOUT_TORCH:
                wrong.append(f"{own} imports torch")
            continue
        used = folder_of(parts)
        if own == used or used == "templates":
            continue
        if LAYERS.index(used) > LAYERS.index(own):
            wrong.append(f"{own} imports {used}, which stands above it")
        if own.startswith("partitioner") and used.startswith("runtime"):
            if used not in USED_BY_THE_PARTITIONER:
                wrong.append(f"{own} imports {used}")
        if own in WITHOUT_TORCH and used not in {"runtime", *WITHOUT_TORCH}:
            wrong.append(f"{own} imports {used}")
    return wrong


def test_the_architecture_lists_the_layers_in_this_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = re.findall(r"^\| `([a-z/_]+)`", text.partition("## The layers")[2], re.MULTILINE)
    assert tuple(listed) == LAYERS[:-1]
    used = text.partition("The compiler may use ")[2].partition(";")[0]
    assert set(re.findall(r"`([a-z/_]+)`", used)) == USED_BY_THE_PARTITIONER


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert violations(path, path.read_text()) == []


def test_every_folder_has_a_layer() -> None:
    folders = {str(path.relative_to(ROOT).parent) for path in FILES} - {"templates"}
    assert folders == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_prints(path: Path) -> None:
    if path.parent.name == "commands":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if getattr(call.func, "id", "") == "print"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("runtime/executor/loading.py", "from ...partitioner.graph.build import build_graph"),
        ("runtime/plan/plan.py", "import torch"),
        ("runtime/schedule/schedule.py", "from ..executor.loading import Pipe"),
        ("runtime/plan/plan.py", "from ..data.task import Task"),
        ("partitioner/planning/solve.py", "from ...runtime.training.phases import train"),
        ("partitioner/planning/solve.py", "from ..compile import partition"),
        ("partitioner/planning/solve.py", "import runtime"),
        ("runtime/executor/loading.py", "from ... import cli"),
        ("runtime/executor/loading.py", "from ...commands.running import run"),
        ("runtime/errors.py", "from .plan import plan"),
        ("partitioner/compile.py", "from ..commands.console import PhaseDisplay"),
    ],
)
def test_an_import_that_points_up_is_found(file: str, line: str) -> None:
    assert violations(ROOT / file, line)
