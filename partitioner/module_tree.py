"""Calls of modules and their operations as a tree -> lines in which equal blocks are one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the graph: its name, what it does, its dtype and shape, and the file and line
    of the original. `ms` are forward and backward of one micro-batch, if they are known."""

    name: str
    does: str
    value: str
    source: str
    module: str
    ms: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a module that is no leaf, and what it consists of."""

    path: str
    type_name: str
    call: int
    items: tuple[Operation | Part, ...]

    @property
    def operations(self) -> Iterator[Operation]:
        for item in self.items:
            if isinstance(item, Part):
                yield from item.operations
            else:
                yield item


_INDENT = "  "


def write_tree(root: Part, name: str, inputs: Sequence[str]) -> list[str]:
    """The lines of a tree, under the model's name and what it is given."""
    rows = list(_rows(root, 0))
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    number = sum(1 for _ in root.operations)
    first = f"{name} ({root.type_name}) · {number} operations{_time(root)}"
    lines = [first, *(f"{_INDENT}{given}" for given in inputs)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=False) if width)
        lines.append("  ".join(padded).rstrip())
    return lines


def _rows(part: Part, depth: int) -> Iterator[tuple[str, ...]]:
    """A row of five cells for an operation, of one for the heading of a part."""
    margin = _INDENT * depth
    for first, others in _folded(part.items):
        if isinstance(first, Operation):
            ms = " + ".join(f"{ms:.3f}" for ms in first.ms or ())
            yield f"{margin}{first.name}", first.does, first.value, ms and f"{ms} ms", first.source
            continue
        number = sum(1 for _ in first.operations)
        heading = f"{margin}{_called(first)} ({first.type_name}) · {number} operations"
        yield (heading + _time(first),)
        yield from _rows(first, depth + 1)
        if others:
            last = others[-1]
            until = f" .. {_called(last)}" if len(others) > 1 else ""
            yield (
                f"{margin}{_called(others[0])}{until} as {_called(first)} · "
                f"{len(others) * number} operations{_time(*others)}",
            )


def _called(part: Part) -> str:
    return f"{part.path}, call {part.call + 1}" if part.call else part.path


def _time(*parts: Part) -> str:
    costs = [operation.ms for part in parts for operation in part.operations if operation.ms]
    if not costs:
        return ""
    return f" · {sum(ms for ms, _ in costs):.2f} + {sum(ms for _, ms in costs):.2f} ms"


def _folded(
    items: Sequence[Operation | Part],
) -> Iterator[tuple[Operation | Part, list[Part]]]:
    """Items, each part with those that follow it and do the same: the next of a list, or the
    next call of one module."""
    waiting: tuple[Part, list[Part]] | None = None
    for item in items:
        if waiting and isinstance(item, Part) and _is_like(waiting[0], item):
            waiting[1].append(item)
            continue
        if waiting:
            yield waiting
        waiting = (item, []) if isinstance(item, Part) else None
        if isinstance(item, Operation):
            yield item, []
    if waiting:
        yield waiting


def _is_like(first: Part, other: Part) -> bool:
    siblings = first.path.rpartition(".")[0] == other.path.rpartition(".")[0]
    numbered = other.path.rpartition(".")[2].isdigit()
    return (siblings and numbered or first.path == other.path) and _shape(first) == _shape(other)


def _shape(part: Part) -> Hashable:
    return part.type_name, tuple(
        (item.does, item.value, item.source) if isinstance(item, Operation) else _shape(item)
        for item in part.items
    )
