"""The budget of the house: how large a folder, a module and a function may be.

`EXCEPTIONS` has the few places that may be larger, each with its reason. A place in it that fits
the budget again is an error too, so the table stays as short as it can be.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("partitioner", "runtime", "commands", "templates", "cli.py", "__init__.py")

FOLDER, MODULE, FUNCTION, PARAMETERS = (
    "modules in the folder",
    "lines in the module",
    "lines in the function",
    "parameters besides self",
)
BUDGET = {FOLDER: 24, MODULE: 450, FUNCTION: 60, PARAMETERS: 8}
CURES = {
    FOLDER: "Give the modules that belong together a folder of their own.",
    MODULE: "Move one of its ideas to another module.",
    FUNCTION: "Make each of its phases a function, with a frozen dataclass between them.",
    PARAMETERS: "Put the parameters that belong together into a frozen dataclass.",
}

_OPTIONS = "a public entry point with keyword options, each with a default"
EXCEPTIONS = {
    ("partitioner/capture/__init__.py capture", PARAMETERS): _OPTIONS,
    ("partitioner/planning/planner.py plan_graph", PARAMETERS): _OPTIONS,
    ("partitioner/profile/profiler.py profile", PARAMETERS): _OPTIONS,
    ("runtime/schedule/builders.py make_schedule", PARAMETERS): _OPTIONS,
    ("runtime/executor/executor.py Executor.__init__", PARAMETERS): _OPTIONS,
    ("commands/train.py predict_command", PARAMETERS): "the options of a command",
    ("runtime/reports/charts.py chart", PARAMETERS): "keyword options of a drawing, with defaults",
    ("runtime/training/optimizer_step.py OptimizerStepper.__init__", PARAMETERS): (
        "it joins the parts of a rank, which are made one by one"
    ),
}


class Measure(NamedTuple):
    """One number that the budget limits: of a folder, a module or a function."""

    place: str
    what: str
    amount: int


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All functions with their names, which begin with those of the classes around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def parameters(arguments: ast.arguments) -> int:
    """The parameters that a caller gives, *args and **kwargs not counted."""
    positional = [*arguments.posonlyargs, *arguments.args]
    own = positional[:1] and positional[0].arg in ("self", "cls")
    return len(positional) + len(arguments.kwonlyargs) - bool(own)


def measures(sources: dict[str, str]) -> Iterator[Measure]:
    """The numbers of all folders, modules and functions; `sources` has the modules by path."""
    for folder, count in Counter(str(Path(path).parent) for path in sources).items():
        yield Measure(folder, FOLDER, count)
    for path, text in sources.items():
        yield Measure(path, MODULE, text.count("\n"))
        for name, node in functions(ast.parse(text)):
            place = f"{path} {name}"
            yield Measure(place, FUNCTION, (node.end_lineno or 0) - node.lineno + 1)
            yield Measure(place, PARAMETERS, parameters(node.args))


def faults(sources: dict[str, str], exceptions: dict[tuple[str, str], str]) -> list[str]:
    """A sentence for each place over the budget, and for each exception without need."""
    over = [each for each in measures(sources) if each.amount > BUDGET[each.what]]
    known = {(each.place, each.what) for each in over}
    return [
        f"{each.place} has {each.amount} {each.what}; the budget is {BUDGET[each.what]}. "
        f"{CURES[each.what]}"
        for each in over
        if (each.place, each.what) not in exceptions
    ] + [
        f"{place} needs no exception for {what}: it is gone or within the budget of "
        f"{BUDGET[what]}. Remove it from EXCEPTIONS."
        for place, what in exceptions
        if (place, what) not in known
    ]


def product() -> dict[str, str]:
    """The modules of the product by path."""
    found = [path for name in PRODUCT for path in [ROOT / name, *(ROOT / name).rglob("*.py")]]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(found)
        if path.is_file()
    }


def test_the_product_is_within_its_budget() -> None:
    assert faults(product(), EXCEPTIONS) == []


def long_function(lines: int) -> str:
    return "def long():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        (
            {f"many/m{number}.py": "" for number in range(25)},
            "many has 25 modules in the folder; the budget is 24. Give the modules",
        ),
        ({"a/m.py": "\n" * 451}, "a/m.py has 451 lines in the module; the budget is 450. Move"),
        (
            {"a/m.py": long_function(61)},
            "a/m.py long has 61 lines in the function; the budget is 60. Make each",
        ),
        (
            {"a/m.py": "class A:\n    def f(self, a, b, c, d, *, e, g, h, i, j): ...\n"},
            "a/m.py A.f has 9 parameters besides self; the budget is 8. Put the parameters",
        ),
    ],
)
def test_a_place_over_the_budget_is_named_with_its_numbers_and_a_cure(
    sources: dict[str, str], sentence: str
) -> None:
    (fault,) = faults(sources, {})
    assert fault.startswith(sentence)


def test_what_fits_the_budget_exactly_is_no_fault() -> None:
    exact = "class A:\n    def f(self, a, b, c, d, *, e, g, h, i, **more): ...\n"
    sources = {f"a/m{number}.py": long_function(60) + exact for number in range(24)}
    assert faults({**sources, "b/m.py": "\n" * 450}, {}) == []


def test_an_exception_without_need_is_a_fault() -> None:
    place = ("a/m.py long", FUNCTION)
    assert faults({"a/m.py": long_function(61)}, {place: "a table"}) == []
    (fault,) = faults({"a/m.py": long_function(60)}, {place: "a table"})
    assert fault.startswith("a/m.py long needs no exception for lines in the function")
    assert "Remove it" in fault
