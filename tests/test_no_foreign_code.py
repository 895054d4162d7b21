"""No input decides which code runs: no pickle, by whatever name, and no eval of a file.

ruff looks for the general cases (`S` in pyproject.toml); this file has those that ruff misses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for pattern in ("*.py", "runtime/**/*.py", "partitioner/**/*.py", "templates/**/*.py")
    for path in ROOT.glob(pattern)
)
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {
    "eval": "runs a text",
    "exec": "runs a text",
    "compile": "makes code of a text",
    "sympify": "runs a text",
    "parse_expr": "runs a text",
    "system": "runs a shell",
    "popen": "runs a shell",
    "all_gather_object": "pickles",
    "gather_object": "pickles",
    "broadcast_object_list": "pickles",
    "scatter_object_list": "pickles",
    "send_object_list": "pickles",
    "recv_object_list": "pickles",
    "load": "may unpickle",
    "__import__": "imports",
    "import_module": "imports",
    "exec_module": "imports",
    "run_module": "imports",
    "run_path": "imports",
    "SourceFileLoader": "reads bytecode",
}
_OF_TORCH = {"torch", "np", "numpy"}
_OF_MPI = {"send", "isend", "recv", "irecv", "bcast", "ibcast", "gather", "scatter", "allgather"}
ALLOWED = {
    ("partitioner/capture/values.py", "eval"): "a size that the capture itself has written",
    ("partitioner/capture/values.py", "compile"): "the same",
    ("runtime/user_code.py", "import_module"): "code that the user has named",
    ("runtime/user_code.py", "exec_module"): "a file that the user has named or trusts",
    ("runtime/import_path.py", "sys.path"): "the one place that says where modules come from",
    ("partitioner/loaded_code.py", "sys.path"): "names of files that could be imported, unread",
    ("__init__.py", "import_module"): "public names of our own",
    ("cli.py", "import_module"): "our commands",
    ("runtime/launch/functions.py", "cloudpickle"): "what a notebook and its own ranks exchange",
    ("runtime/launch/worker.py", "import_module"): "a module that the starting process names",
    ("runtime/communication/session.py", "import_module"): "a task of the table",
    ("runtime/data/tokens.py", "import_module"): "a module of Python",
    ("runtime/optimizers/facts.py", "import_module"): "an optimizer of the table",
    ("partitioner/codegen/constants.py", "sympify"): "a number or an expression of sympy",
} | {
    ("runtime/communication/collectives.py", name): "the operation that is timed"
    for name, reason in CALLS.items()
    if reason == "pickles"
}


def suspicious(source: str) -> Iterator[str]:
    """What in a file could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if _root(each.name) in PICKLERS)
        elif isinstance(node, ast.ImportFrom) and _root(node.module or "") in PICKLERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _calls(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            yield "sys.path"


def _root(name: str) -> str:
    return name.partition(".")[0]


def _calls(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    owner, _, last = name.rpartition(".")
    if last == "load" and owner not in _OF_TORCH:
        return  # a method of ours, or of a plan
    if last == "compile" and owner:
        return  # re.compile, torch.compile
    if last == "eval" and owner:
        return  # a module's mode
    if name == "platform.system":
        return
    if last in CALLS:
        yield last
    if owner.endswith(("world", "comm", "COMM_WORLD")) and last in _OF_MPI:
        yield f"{owner}.{last}"
    shell = [each for each in node.keywords if each.arg == "shell"]
    if any(not isinstance(each.value, ast.Constant) or each.value.value for each in shell):
        yield "shell=True"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = {each for each in suspicious(path.read_text()) if (name, each) not in ALLOWED}
    assert not found


def test_everything_allowed_is_still_there() -> None:
    for name, call in ALLOWED:
        assert call in set(suspicious((ROOT / name).read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from yaml import safe_load",
        "import joblib.numpy_pickle",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "dist.all_gather_object(parts, own)",
        "mpi.COMM_WORLD.bcast(value)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "importlib.import_module(text)",
        "spec.loader.exec_module(module)",
        "sys.path.insert(0, folder)",
    ],
)
def test_what_runs_what_it_reads_is_found(line: str) -> None:
    assert list(suspicious(line))


@pytest.mark.parametrize(
    "line",
    ["re.compile(text)", "model.eval()", "world.Ibcast([place, mpi.BYTE])", "json.loads(t)"],
)
def test_what_does_not_is_not(line: str) -> None:
    assert not list(suspicious(line))
