"""Expressions of values that have no variable: each stands where its one reader reads it.

A value that the user never named and that only what follows reads stands inside the expression
that reads it. Order is program order: what mutates or draws random numbers is never moved, nor
anything over it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import fx

from . import layout
from .items import Call, Item, Loop, Op, Segment, regions_of
from .layout import Code
from .origins import line_of
from .reads import Reads
from .variables import is_good


@dataclass(frozen=True, slots=True)
class Folded:
    """The expression of a value that has no variable, to stand where the value is read;
    `statement` writes it as one after all."""

    code: Code
    names: frozenset[str]
    is_effectful: bool
    statement: Callable[[], None]


class Folds:
    """The folded values that nothing has read yet; `used` are those that the expression being
    written holds."""

    def __init__(self) -> None:
        self._waiting: dict[fx.Node, Folded] = {}
        self.used: list[fx.Node] = []

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._waiting

    def fold(self, node: fx.Node, folded: Folded) -> None:
        self._waiting[node] = folded

    def begin_expression(self) -> None:
        self.used = []

    def use(self, node: fx.Node) -> Code:
        self.used.append(node)
        return self._waiting[node].code

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Forgets values that are now inside another expression or statement."""
        for node in nodes:
            self._waiting.pop(node, None)

    def names_in(self, nodes: Iterable[fx.Node]) -> frozenset[str]:
        return frozenset[str]().union(*(self._waiting[node].names for node in nodes))

    def is_name_used(self, name: str) -> bool:
        return any(name in folded.names for folded in self._waiting.values())

    def unfold(self, node: fx.Node) -> None:
        """Writes the value's own statement after all."""
        self._waiting.pop(node).statement()

    def unfold_all(self, but: Collection[fx.Node] = frozenset()) -> None:
        for node in [node for node in self._waiting if node not in but]:
            self.unfold(node)

    def unfold_effectful(self, but: Collection[fx.Node]) -> None:
        for node in [node for node, folded in self._waiting.items() if folded.is_effectful]:
            if node not in but:
                self.unfold(node)

    def unfold_longest(self) -> None:
        """Gives a variable to the longest of the used expressions; to all if order matters."""
        if any(self._waiting[node].is_effectful for node in self.used):
            self.unfold_all()
        else:
            self.unfold(max(self.used, key=lambda node: len(self._waiting[node].code.flat)))


def can_fold(
    item: Op | Call | Segment, code: Code, here: int, reads: Reads, is_taken: Callable[[str], bool]
) -> bool:
    """Whether the one reader of the one result of the item at position `here` may hold its
    expression."""
    if len(item.results) != 1 or (isinstance(item, Op) and item.items):
        return False
    (result,) = item.results
    reader: Item | None = reads.reader(result)
    if reader is None or isinstance(reader, Loop) or len(code.flat) > layout.WIDTH - 24:
        return False
    if regions_of(reader) != regions_of(item):
        return False
    hint = result.meta.get("hint")
    is_next = reads.of(result) == [here + 1]
    if hint is None or not is_good(hint):
        return is_next or line_of(result) == line_of(reader.nodes[-1])
    return is_next and is_taken(hint)
