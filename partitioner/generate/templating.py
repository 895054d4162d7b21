"""The templates of the generated files: they hold layout, the modules around hold decisions."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = Environment(
    loader=PackageLoader("asyncpipe", "templates"),
    undefined=StrictUndefined,
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
