"""Values -> pages and files, by the templates of asyncpipe.

Templates contain layout, modules contain decisions.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..errors import DataError
from ..formatting import in_markdown, visible
from ..plan.trust import write_here

TEMPLATES = Environment(
    loader=PackageLoader("asyncpipe", "templates"),
    undefined=StrictUndefined,
    autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["markdown"] = in_markdown
_NO_CHARACTERS = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(
        f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000)
    )
    + "]"
)


def render(template: str, **values: object) -> str:
    """The page that a template makes of values. Characters that HTML forbids, such as
    control characters, are replaced, and those that would hide text are spelled out: texts come
    from records and names of others."""
    page = TEMPLATES.get_template(template).render(**values)
    return visible(_NO_CHARACTERS.sub("\ufffd", page))


def in_script(text: str) -> Markup:
    """JSON that is safe within a script element."""
    return Markup(text.replace("<", "\\u003c"))


def write_page(file: Path, page: str, cure: str = "Choose another file with --output.") -> Path:
    """Writes a page whole or not at all. Raises DataError, with `cure`, if it cannot."""
    new = file.with_name(f".{file.name}.made")
    try:
        write_here(new, page)
        new.replace(file)
    except OSError as error:
        raise DataError(
            f"{file} cannot be written: {(error.strerror or str(error)).lower()}.",
            cure,
        ) from error
    return file
