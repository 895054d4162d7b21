"""A function body -> where each of its values is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import fx

from .items import Body, Item, inputs_of


class Reads:
    """The positions of the items that read a value; what the function returns is read after
    the last item."""

    def __init__(self, body: Body) -> None:
        self._items = body.items
        self._positions: dict[fx.Node, list[int]] = defaultdict(list)
        for position, item in enumerate(body.items):
            for node in inputs_of(item):
                self._positions[node].append(position)
        for node in body.results:
            self._positions[node].append(len(body.items))

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._positions)

    def of(self, node: fx.Node) -> list[int]:
        return self._positions.get(node, [])

    @property
    def last(self) -> Mapping[fx.Node, int]:
        return {node: positions[-1] for node, positions in self._positions.items()}

    def reader(self, node: fx.Node) -> Item | None:
        """The item that alone, and once, reads a value."""
        positions = self.of(node)
        is_item = len(positions) == 1 and positions[0] < len(self._items)
        return self._items[positions[0]] if is_item else None
