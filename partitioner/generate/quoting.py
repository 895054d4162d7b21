"""Text that others chose, such as the names of modules -> text within generated Python.

Every text goes through one of these on its way into a file: as a string, as a part of a docstring
or of a comment, or as a name, of which it is asked first whether it can be one.
"""

from __future__ import annotations

import keyword
import unicodedata
from typing import TypeGuard

from ...runtime.hidden_text import hiding_in, one_line, visible


def quoted(text: str) -> str:
    """The literal that is this text, with double quotes where that needs no escapes.

    >>> print(quoted("plain"), quoted('a"b'), quoted("it's"))
    "plain" 'a"b' "it's"
    """
    literal = visible(repr(text))
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text else literal


def in_docstring(text: str) -> str:
    """The lines of a raw docstring, of which none ends it."""
    return visible(text).replace('"""', "'''")


def fits_docstring(text: str) -> bool:
    """Whether a line can be a whole docstring as it is."""
    return one_line(text) == text and not {'"', "\\"} & set(text)


def in_comment(text: str) -> str:
    """The rest of a line."""
    return one_line(text)


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a variable, and of an attribute within a class: no word of
    Python's, none that Python reads as another one, as it does `__x` in a class."""
    is_plain = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    is_plain = is_plain and not hiding_in(text)
    return is_plain and not keyword.iskeyword(text) and not text.startswith("__")


def is_path(text: object) -> TypeGuard[str]:
    """Whether `text` is names with dots between them."""
    return isinstance(text, str) and all(map(is_name, text.split(".")))


def class_name(text: str) -> str:
    """The name of a generated class for an original of this name."""
    return text if is_name(text) else "Module"
