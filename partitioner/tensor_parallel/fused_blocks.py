"""The blocks of a fused projection, as the operations behind it take them apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import fx

from ...runtime.tensor_parallel.ranks import Groups

_DISTANCE = 4
"""The most operations between a product and those that take its blocks."""


def blocks_behind(node: fx.Node, length: int) -> list[Groups]:
    """The blocks of a length in which the readers behind a node take its value: by a list of
    lengths, as `split` does, or by slices."""
    found: dict[Groups, None] = {}
    values = [node]
    for _ in range(_DISTANCE):
        readers = [reader for value in values for reader in value.users]
        for reader in readers:
            found.update(dict.fromkeys(map(_groups, _lists(reader, length))))
        for value in values:
            edges = {edge for reader in value.users for edge in _edges(reader, length)}
            if edges:
                blocks = [stop - start for start, stop in pairwise([0, *sorted(edges), length])]
                found[_groups(tuple(blocks))] = None
        values = list(dict.fromkeys(readers))
    return list(found)


def _groups(blocks: tuple[int, ...]) -> Groups:
    return len(blocks) if len(set(blocks)) == 1 else blocks


def _lists(reader: fx.Node, length: int) -> Iterator[tuple[int, ...]]:
    """The lists of several numbers among the arguments of a node that make a length."""
    for argument in (*reader.args, *reader.kwargs.values()):
        if isinstance(argument, (tuple, list)) and len(argument) > 1:
            if all(type(item) is int and item > 0 for item in argument) and sum(argument) == length:
                yield tuple(argument)


def _edges(reader: fx.Node, length: int) -> set[int]:
    """The places within a length at which the slices among the arguments of a node begin or end."""
    found: set[int] = set()

    def visit(argument: Any) -> None:
        if isinstance(argument, slice):
            for end in (argument.start, argument.stop):
                if type(end) is int and -length < end < length:
                    found.add(end % length)
        elif isinstance(argument, (tuple, list)):
            for item in argument:
                visit(item)

    visit(reader.args)
    return found - {0}
