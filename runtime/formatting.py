"""Numbers and texts for people: times, bytes, shares, tables, close matches, and hidden characters
made visible.

Numbers have one style on terminals, pages and in files: `36,371 tok/s`, `43%`, `1.3 GiB`, `53.6 M`.

Control characters move the cursor of a terminal and clear its lines. Bidirectional marks, tags and
characters without width make a text look like another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def write_ms(time_ms: float) -> str:
    """Four digits, and no more after the point than two.

    >>> write_ms(0.123), write_ms(12.34), write_ms(601.19), write_ms(6321.4)
    ('0.12 ms', '12.34 ms', '601.2 ms', '6,321 ms')
    """
    return f"{time_ms:,.{2 if time_ms < 100 else 1 if time_ms < 1000 else 0}f} ms"


def write_change(before_ms: float, after_ms: float) -> str:
    """
    >>> write_change(10.0, 12.5), write_change(10.0, 9.0), write_change(10.0, 10.0)
    ('10.00 ms → 12.50 ms', '10.00 ms → 9.00 ms', '10.00 ms (unchanged)')
    """
    before, after = write_ms(before_ms), write_ms(after_ms)
    return f"{before} → {after}" if before != after else f"{before} (unchanged)"


def write_share(share: float) -> str:
    """
    >>> write_share(0.614), write_share(0.0123), write_share(0.0004), write_share(0.0)
    ('61%', '1.2%', 'under 0.1%', '0%')
    """
    if 0 < share < 0.0005:
        return "under 0.1%"
    return f"{100 * share:.{0 if share >= 0.0995 or not share else 1}f}%"


def write_accuracy(share: float) -> str:
    """
    >>> write_accuracy(0.976)
    '97.6%'
    """
    return f"{100 * share:.1f}%"


def write_ratio(ratio: float) -> str:
    """
    >>> write_ratio(1.5)
    '1.50×'
    """
    return f"{ratio:.2f}×"


def write_loss(loss: float) -> str:
    """
    >>> write_loss(10.96591), write_loss(0.000123456), write_loss(3.7298e56)
    ('10.9659', '0.0001235', '3.73e+56')
    """
    return f"{loss:.4f}" if loss == 0 or 0.01 <= abs(loss) < 1e6 else f"{loss:.4g}"


def write_gap(gap: float) -> str:
    """
    >>> write_gap(0.058), write_gap(0.0002)
    ('at most 5.8%', 'less than 0.1%')
    """
    return "less than 0.1%" if gap < 0.0005 else f"at most {write_share(gap)}"


def write_bytes(count: float) -> str:
    """
    >>> write_bytes(12), write_bytes(20300), write_bytes(522e6)
    ('12 bytes', '19.8 KiB', '497.8 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,.0f} bytes"


def counted(number: int, noun: str, plural: str = "") -> str:
    """
    >>> counted(1, "stage"), counted(4, "stage"), counted(2, "micro-batch", "micro-batches")
    ('1 stage', '4 stages', '2 micro-batches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def kind_of(value: object) -> str:
    """The class of a value with its article.

    >>> kind_of(3), kind_of([]), kind_of(object())
    ('an int', 'a list', 'an object')
    """
    name = type(value).__name__
    return f"an {name}" if name.lower().startswith(("a", "e", "i", "o")) else f"a {name}"


def write_duration(seconds: float) -> str:
    """
    >>> write_duration(0.034), write_duration(8.24), write_duration(312), write_duration(7500)
    ('0.03 s', '8.2 s', '5 min 12 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.{1 if seconds >= 1 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def write_count(number: float) -> str:
    """
    >>> write_count(1234567.8), write_count(12.34)
    ('1,234,568', '12.3')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def write_rate(rate: float, unit: str) -> str:
    """
    >>> write_rate(10234.5, "tok")
    '10,234 tok/s'
    """
    return f"{write_count(rate)} {unit}/s"


def write_large_count(number: float) -> str:
    """
    >>> write_large_count(53.6e6), write_large_count(2_100), write_large_count(12)
    ('53.6 M', '2.1 k', '12')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def known(value: float, write: Callable[[float], str]) -> str:
    """The number in words, or "" where it is not a number.

    >>> known(0.5, write_share), known(float("nan"), write_share)
    ('50%', '')
    """
    return write(value) if math.isfinite(value) else ""


_GAP = 2
"""The spaces between two columns of a table in a terminal."""
_TEXT_WIDTH = 20
"""A column of text is readable from this width on, if its words are not longer."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    heading: the text above it
    kind: numbers are aligned to the right; notes and texts may be wrapped between words
    leave_out: a terminal that is too narrow leaves out the columns with the largest number first,
        and never those with 0
    """

    heading: str
    kind: Literal["number", "text", "code", "note", "bar"] = "number"
    leave_out: int = 0

    @property
    def is_wrapped(self) -> bool:
        """True if its cells may have several lines."""
        return self.kind in ("text", "note")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with a cell for each column, to be shown on a terminal, on a page or as Markdown."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """
        >>> table = Table((Column("method", "text"), Column("loss")), (("sync", "0.2510"),))
        >>> print(table.to_markdown(), end="")
        | method | loss |
        | --- | ---: |
        | sync | 0.2510 |
        """
        marks = tuple("---:" if column.kind == "number" else "---" for column in self.columns)
        headings = tuple(column.heading for column in self.columns)
        lines = [map(in_markdown, headings), marks, *(map(in_markdown, row) for row in self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    @property
    def width(self) -> int:
        """Its columns in a terminal if no cell is wrapped."""
        return _total(self._most(index) for index in range(len(self.columns)))

    def fitted(self, width: int) -> tuple[Table, ...]:
        """The table for a terminal of `width` columns: without its less important columns, and in
        several parts that repeat the first column if that is not enough.

        >>> columns = Column("stage"), Column("ms"), Column("load", "bar", leave_out=1), Column("n")
        >>> table = Table(columns, (("0", "1.5", "████", "10"), ("1", "1.7", "█████", "12")))
        >>> [[column.heading for column in part.columns] for part in table.fitted(14)]
        [['stage', 'ms', 'n']]
        >>> [[column.heading for column in part.columns] for part in table.fitted(10)]
        [['stage', 'ms'], ['stage', 'n']]
        """
        columns = list(range(len(self.columns)))
        for index in sorted(columns, key=lambda index: -self.columns[index].leave_out):
            if _total(map(self._least, columns)) <= width or not self.columns[index].leave_out:
                break
            columns.remove(index)
        parts = [columns[:1]]
        for index in columns[1:]:
            if _total(map(self._least, [*parts[-1], index])) > width and len(parts[-1]) > 1:
                parts.append(columns[:1])
            parts[-1].append(index)
        return tuple(self._only(part) for part in parts)

    def widths(self, width: int) -> tuple[int, ...]:
        """The width of each column in a terminal of `width` columns."""
        indices = range(len(self.columns))
        chosen = [self._least(index) for index in indices]
        for index in sorted(indices, key=lambda index: not self.columns[index].is_wrapped):
            spare = max(0, width - _total(chosen))
            chosen[index] += min(spare, self._most(index) - chosen[index])
        return tuple(chosen)

    def _only(self, indices: Sequence[int]) -> Table:
        return Table(
            tuple(self.columns[index] for index in indices),
            tuple(tuple(row[index] for index in indices) for row in self.rows),
        )

    def _texts(self, index: int) -> list[str]:
        return [row[index] for row in self.rows]

    def _most(self, index: int) -> int:
        return max(map(len, [self.columns[index].heading, *self._texts(index)]))

    def _least(self, index: int) -> int:
        """The width from which no word of a column is cut, and no number wrapped."""
        cells, column = self._texts(index), self.columns[index]
        longest = max(map(len, cells), default=0)
        if column.is_wrapped:
            words = max((len(word) for cell in cells for word in cell.split()), default=0)
            longest = max(words, min(longest, _TEXT_WIDTH))
        return max([longest, *map(len, column.heading.split())])


def _total(widths: Iterable[int]) -> int:
    """The width of a table whose columns have these widths."""
    column_widths = list(widths)
    return sum(column_widths) + _GAP * (len(column_widths) - 1)


def in_terminal(
    table: Table, width: int, styles: Mapping[int, str] | None = None
) -> tuple[RichTable, ...]:
    """A table as rich prints it in `width` columns, in one or several parts; `styles` has those of
    single rows."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    parts = []
    for part in table.fitted(width):
        shown = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        for column, columns in zip(part.columns, part.widths(width), strict=True):
            justify: Literal["left", "right"] = "right" if column.kind == "number" else "left"
            heading = escape(column.heading)
            shown.add_column(heading, justify=justify, width=columns, overflow="fold")
        for position, row in enumerate(part.rows):
            shown.add_row(*map(escape, row), style=(styles or {}).get(position))
        parts.append(shown)
    return tuple(parts)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """
    >>> did_you_mean("adamv", ["sgd", "adamw"]), did_you_mean("x", ["sgd"], "Choose sgd.")
    ('Did you mean adamw?', 'Choose sgd.')
    """
    near = get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise


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
    hidden = _HIDING.search(text)
    return _spelled(hidden[0]) if hidden else ""


def visible(text: str) -> str:
    """The text as it may be shown on a terminal: what would hide something is spelled out. Line
    breaks and tabs stay.

    >>> print(visible("a\\u202eb\\x1b[2J"))
    a\\u202eb\\x1b[2J
    """
    return _SHOWN.sub(lambda hidden: _spelled(hidden[0]), text)


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
