"""Python -> spans of HTML in few classes, which the page colours for light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

_CLASSES: tuple[tuple[Any, str], ...] = (
    (Comment, "c"),
    (Keyword, "k"),
    (String, "s"),
    (Number, "m"),
    (Name.Class, "d"),
    (Name.Function, "d"),
    (Name.Decorator, "d"),
)


def highlighted(code: str) -> Markup:
    """
    >>> highlighted("x = 1  # <one>\\n")
    Markup('x = <i class="m">1</i>  <i class="c"># &lt;one&gt;</i>\\n')
    """
    return Markup("").join(_spans(code))


def _spans(code: str) -> Iterator[Markup]:
    tokens = ((_class_of(kind), text) for kind, text in PythonLexer().get_tokens(code))
    for name, run in groupby(tokens, key=lambda token: token[0]):
        text = escape("".join(text for _, text in run))
        yield Markup('<i class="{}">{}</i>').format(name, text) if name else text


def _class_of(kind: Any) -> str:
    return next((name for parent, name in _CLASSES if kind in parent), "")
