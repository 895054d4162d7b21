"""Characters that hide what a text says, or steer what shows it, and how to show them.

Control characters move the cursor of a terminal and clear its lines. Bidirectional marks, tags and
characters without width make a text look like another one.
"""

from __future__ import annotations

import re

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
_DIRECTION = r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_BLANK = (
    r"\xad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u2800\u3164\ufeff"
    r"\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_JOINERS = r"\u200c\u200d"  # some scripts are written with these, and emoji

_HIDING = re.compile(f"[{_CONTROL}{_DIRECTION}{_BLANK}]")
_SHOWN = re.compile(f"[{_CONTROL}{_DIRECTION}{_BLANK}{_JOINERS}]")


def hiding_in(text: str) -> str:
    """The first character that no text from outside may have, spelled out; "" if there is none.
    Line breaks and tabs are fine.

    >>> hiding_in("plain"), hiding_in("a\\u202eb"), hiding_in("a\\x1b[2J")
    ('', '\\\\u202e', '\\\\x1b')
    """
    found = _HIDING.search(text)
    return _spelled(found[0]) if found else ""


def visible(text: str) -> str:
    """The text as it may be shown on a terminal: what would hide something is spelled out. Line
    breaks and tabs stay.

    >>> print(visible("a\\u202eb\\x1b[2J"))
    a\\u202eb\\x1b[2J
    """
    return _SHOWN.sub(lambda found: _spelled(found[0]), text)


def one_line(text: str) -> str:
    """The text as it may stand within a line.

    >>> print(one_line("a\\nb"))
    a\\nb
    """
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def in_markdown(text: str) -> str:
    """The text as it may stand in a line or a cell of Markdown: no markup of its own.

    >>> print(in_markdown("a|b <i>"))
    a\\|b &lt;i>
    """
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[|`\[\\]", r"\\\g<0>", escaped)


def _spelled(character: str) -> str:
    return repr(character)[1:-1] if not character.isprintable() else f"\\u{ord(character):04x}"
