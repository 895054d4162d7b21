"""Imports point down: cli -> partitioner -> runtime; the lowest floor is pure data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = {
    *("user_code", "import_path", "own_modules", "hidden_text", "reading", "plan_check"),
    *("trust", "limits"),
    *(
        "plan",
        "sizes",
        "structure",
        "errors",
        "schedule",
        "schedules",
        "schedule_text",
        "validation",
        "weight_copies",
    ),
    *("dependencies", "lowering", "simulate", "timeline", "drawing", "forecast", "traffic"),
    *("alternating", "asynchronous", "folding", "delays", "interleaving", "zero_bubble"),
    *("replicated", "scheduler", "activity", "idle", "trace", "pages", "wording"),
    "signals",
}
# The check runs the files and the profile times them as the runtime will, with the same generators;
# weights have one format.
SHARED = {"pipe", "loading", "authors_line", "tensors", "host_memory", "split_backward"}
SHARED |= {"number_generators"}
COMMANDS = {
    "cli",
    "commands",
    "terminal_console",
    "terminal",
    "terminal_compare",
    "terminal_report",
    "terminal_sweep",
    "terminal_train",
}
FILES = sorted(
    path
    for folder in ("partitioner", "runtime", "templates")
    for path in (ROOT / folder).rglob("*.py")
)


def imports(path: Path, source: str) -> Iterator[str]:
    """Absolute dotted names of everything that `source` imports."""
    package = ("asyncpipe", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def violations(path: Path, source: str) -> list[str]:
    parts = path.relative_to(ROOT).parts
    is_pure = parts[0] == "runtime" and Path(parts[1]).stem in PURE
    wrong = []
    for name in imports(path, source):
        match name.split("."):
            case ["asyncpipe", "partitioner", *_] if parts[0] == "runtime":
                wrong.append(f"runtime imports {name}")
            case ["asyncpipe", module, *_] if module in COMMANDS:
                wrong.append(f"{parts[0]} imports {name}")
            case ["asyncpipe", "runtime", module, *_] if parts[0] == "partitioner":
                if module not in PURE | SHARED:
                    wrong.append(f"partitioner imports {name}")
            case ["asyncpipe", "runtime", module, *_] if parts[0] == "runtime":
                if is_pure and module not in PURE:
                    wrong.append(f"{'/'.join(parts)} imports {name}")
            case ["torch", *_] if is_pure:
                wrong.append(f"{'/'.join(parts)} imports torch")
            case ["partitioner" | "runtime" | "cli" | "commands" | "terminal", *_]:
                wrong.append(f"bare import of {name}")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if getattr(call.func, "id", "") == "print"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("runtime/pipe.py", "from ..partitioner.graph import build_graph"),
        ("runtime/plan.py", "import torch"),
        ("runtime/schedule.py", "from .pipe import Pipe"),
        ("partitioner/solve.py", "from ..runtime.pipeline import Pipeline"),
        ("partitioner/solve.py", "import runtime"),
        ("runtime/pipe.py", "from .. import cli"),
        ("runtime/pipe.py", "from ..commands.running import run"),
        ("partitioner/compile.py", "from ..terminal import Ticks"),
    ],
)
def test_an_import_that_points_up_is_found(file: str, line: str) -> None:
    assert len(violations(ROOT / file, line)) == 1
