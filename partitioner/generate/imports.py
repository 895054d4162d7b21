"""The text of a file -> the imports that it needs, as import sorters order them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from ...runtime.errors import PlanError
from .quoting import is_path

_STANDARD = ("collections", "math", "operator", "random", "typing")
_SHORT = {"numpy": "np"}


def write_imports(source: str, extra: Iterable[tuple[str, str]]) -> list[str]:
    """Lines that import `torch`, `nn`, `F` and the like where `source` uses them, and the pairs
    `(module, name)` in `extra`; without a name the module itself."""
    extra = list(extra)
    for module, name in extra:
        if not is_path(module) or not (is_path(name) or name == ""):
            raise PlanError(
                f"generated code cannot import {name} of {module}.",
                "Give the class or the function a name that Python can import.",
            )
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    plain = ("math", "operator", "torch")
    modules: dict[str, str] = {name: f"import {name}" for name in plain if name in used}
    if "F" in used:
        modules["torch.nn.functional"] = "import torch.nn.functional as F"
    names_of: dict[str, set[str]] = defaultdict(set)
    names_of["torch"] |= {"Tensor", "nn"} & used
    for module, name in extra:
        if name:
            names_of[module].add(name.partition(".")[0])
        else:
            short = f" as {_SHORT[module]}" if module in _SHORT else ""
            modules[module] = f"import {module}{short}"
    sections = []
    for is_standard in (True, False):
        lines = [modules[name] for name in sorted(modules) if (name in _STANDARD) == is_standard]
        lines += [
            f"from {module} import {', '.join(sorted(names, key=_classes_first))}"
            for module, names in sorted(names_of.items())
            if (module in _STANDARD) == is_standard
        ]
        sections += [lines] if lines else []
    return "\n\n".join("\n".join(lines) for lines in sections).split("\n")


def _classes_first(name: str) -> tuple[bool, str]:
    return (not name[0].isupper(), name)
