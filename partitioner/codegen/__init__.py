"""Stage graphs -> the files of a generated folder: readable Python, one file a stage.

canonical       simplifies the graph; a body -> its structure, and the numbers in it
structure       nodes -> a tree of bodies: operations, module calls, loops
classes         equal structures -> one class with arguments
init_method     the members of a class -> the lines of __init__
forward_method  a body -> the lines of forward (with items, methods, names, expressions,
                constants, statements, layout)
stage_file      all of it -> the text of a file
documentation   a plan -> README.md, and the index card of a stage (report.html: the package report)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...runtime.executor.loading import CONSTRUCTED_IN, default_dtype
from ...runtime.reports.rendering import TEMPLATES
from ..capture import Capture
from ..split.split import StageGraph
from .canonical import simplify
from .constants import extra_tensors
from .documentation import Header, StageCard, header_of, render_readme
from .layout import fits_docstring
from .stage_file import StageWriter

__all__ = [
    "CODES",
    "Header",
    "StageCard",
    "extra_tensors",
    "generate",
    "header_of",
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
        with default_dtype(CONSTRUCTED_IN):
            written = writer.write(stage, names)
        files[f"stage_{stage.index}.py"] = written.text
        names |= written.names
    numbers = [stage.index for stage in stages]
    model = header.model if fits_docstring(header.model) else "A model"
    package = TEMPLATES.get_template("package.py.j2")
    files["__init__.py"] = package.render(model=model, numbers=numbers)
    return files
