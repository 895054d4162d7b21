"""Statements of a function -> its lines: blocks opened, paragraphs under headings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .layout import WIDTH, Code, lay_out
from .quoting import in_comment


@dataclass(frozen=True, slots=True)
class Opener:
    """A line that opens a block; neighbours in blocks of equal `key` share one. Right after the
    block `other` it is an `else:`."""

    key: object
    text: str
    other: object = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the original computes a statement: the module, and the file and line if known."""

    path: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    prefix: str
    code: Code
    comment: str = ""
    blocks: tuple[Opener, ...] = ()
    origin: Origin | None = None


def write_lines(statements: Sequence[Statement], *, headings: bool) -> list[str]:
    """The lines of a method's body, indented. With `headings`, statements of one module and
    file of the original are a paragraph under a comment that says which."""
    if not headings:
        return list(_Blocks().lines(statements))
    lines: list[str] = []
    blocks = _Blocks()
    for paragraph in _paragraphs(statements):
        heading = _heading(paragraph, is_first=not lines)
        if heading:
            lines += [""] if lines else []
            lines.append(f"        # {in_comment(heading)}")
            blocks = _Blocks()
        lines += blocks.lines(paragraph)
    return lines


class _Blocks:
    """The blocks that are open, and at which depths an `else:` opened them."""

    def __init__(self) -> None:
        self._open: tuple[Opener, ...] = ()
        self._else_at: set[int] = set()

    def lines(self, statements: Sequence[Statement]) -> Iterator[str]:
        for statement in statements:
            yield from self._enter(statement.blocks)
            indent = 8 + 4 * len(statement.blocks)
            yield lay_out(
                statement.prefix, statement.code, indent=indent, comment=statement.comment
            )

    def _enter(self, blocks: tuple[Opener, ...]) -> Iterator[str]:
        before, self._open = self._open, blocks
        shared = 0
        for one, other in zip(before, blocks, strict=False):
            if one.key != other.key:
                break
            shared += 1
        after_else = shared in self._else_at
        self._else_at = {depth for depth in self._else_at if depth < shared}
        for depth in range(shared, len(blocks)):
            is_else = depth == shared < len(before) and before[depth].key == blocks[depth].other
            if is_else and not after_else:
                self._else_at.add(depth)
                yield " " * (8 + 4 * depth) + "else:"
            else:
                yield " " * (8 + 4 * depth) + blocks[depth].text


def _paragraphs(statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    """Runs of statements of one module and file; one without an origin belongs to what it
    precedes."""
    run: list[Statement] = []
    waiting: list[Statement] = []
    path, file = "", ""
    for statement in statements:
        waiting.append(statement)
        origin = statement.origin
        if origin is None:
            continue
        if run and (origin.path != path or (origin.file and file and origin.file != file)):
            yield run
            run, file = [], ""
        run += waiting
        waiting = []
        path, file = origin.path, origin.file or file
    if run or waiting:
        yield run + waiting


def _heading(paragraph: Sequence[Statement], *, is_first: bool) -> str:
    origins = [statement.origin for statement in paragraph if statement.origin is not None]
    if not origins:
        return ""
    lines = [origin.line for origin in origins if origin.line]
    file = next((os.path.basename(origin.file) for origin in origins if origin.file), "")
    where = ""
    if lines:
        last = f"-{max(lines)}" if max(lines) > min(lines) else ""
        where = f"{file}:{min(lines)}{last}"
    path = origins[0].path if where or not is_first else ""
    text = f"{path}, {where}" if path and where else path or where
    return text if len(text) + 10 <= WIDTH else where
