"""Stage graphs -> the files of a generated folder: readable Python, one file a stage.

simplify      leaves out operations that change nothing, resolves names
structure     nodes -> a tree of bodies: operations, module calls, loops
canonical     body -> its structure, and the numbers in it
classes       equal structures -> one class with arguments
members       what a class holds -> the lines of __init__
forward       body -> the lines of forward (reads, folding, function_names, variables, expressions,
              sizes, origins, statements)
stage_file    all of it -> the text of a file
pages         plan -> README.md (report.html: the package report beside this one)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...runtime.pages.templating import TEMPLATES
from ..capture import Capture
from ..split import StageGraph
from .buffers import extra_tensors
from .header import Header, StageCard
from .pages import render_readme
from .quoting import fits_docstring
from .simplify import simplify
from .stage_file import StageWriter

__all__ = [
    "CODES",
    "Header",
    "StageCard",
    "extra_tensors",
    "generate",
    "render_readme",
]


CODES = ("structured", "flat")
"""Forms of generated code: classes and loops as in the original, or a statement a node."""


def generate(
    capture: Capture,
    stage_graphs: Sequence[StageGraph],
    header: Header,
    *,
    code: str = "structured",
) -> dict[str, str]:
    """The files of a generated folder that hold code: `stage_0.py` and so on, `__init__.py`.

    Writes nothing; the same arguments give the same text. Raises PlanError when a module has no
    constructor that can be written, or a function none that can be imported.
    """
    simple, stages = simplify(capture, stage_graphs)
    writer = StageWriter(simple, stages, header, is_flat=code == "flat")
    files: dict[str, str] = {}
    names: dict[fx.Node, str] = {}
    for stage in stages:
        written = writer.write(stage, names)
        files[f"stage_{stage.index}.py"] = written.text
        names |= written.names
    numbers = [stage.index for stage in stages]
    model = header.model if fits_docstring(header.model) else "A model"
    package = TEMPLATES.get_template("package.py.j2")
    files["__init__.py"] = package.render(model=model, numbers=numbers)
    return files
