"""Groups -> fewer, larger blocks, with never a cycle between blocks.

Two blocks become one only if no path leaves one and comes back to the other through a third.
For an edge u -> v that holds if u has no other successor or v no other predecessor, which is
looked at first, and is else searched for (the cycle detection of Herrmann et al., "Multilevel
Algorithms for Acyclic Partitioning of Directed Acyclic Graphs", SISC 2019, section 4.1). A
topological order of the blocks is kept up to date through merges, as Pearce and Kelly ("A Dynamic
Topological Sort Algorithm for Directed Acyclic Graphs", JEA 2006) do through new edges: only what
lies between u and v in it is searched and put in order again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from ..cost import Costs


class Blocks:
    """A graph of blocks, at first one for every group; a block has the name of one of its groups.

    `work_ms` is what each takes, `weight` {(block, block): ms} what passes between two.
    """

    def __init__(self, costs: Costs) -> None:
        self._num_groups = len(costs.groups)
        self._in = list(range(self._num_groups))
        self._place = list(range(self._num_groups))
        self._at: list[int | None] = list(range(self._num_groups))
        self.work_ms: dict[int, float] = dict(enumerate(costs.work_ms.tolist()))
        self.after: dict[int, set[int]] = {group: set() for group in self.work_ms}
        self.before: dict[int, set[int]] = {group: set() for group in self.work_ms}
        for source, target in costs.edges:
            self.after[source].add(target)
            self.before[target].add(source)
        self.weight: dict[tuple[int, int], float] = {}
        times_ms = (costs.send_ms + costs.receive_ms).tolist()
        for value, time_ms in zip(costs.values, times_ms, strict=True):
            for reader in value.readers:
                pair = _pair(value.owner, reader)
                self.weight[pair] = self.weight.get(pair, 0.0) + time_ms

    def __len__(self) -> int:
        return len(self.work_ms)

    def __contains__(self, block: int) -> bool:
        return block in self.work_ms

    def neighbours(self, block: int) -> list[int]:
        return sorted(self.before[block] | self.after[block])

    def weight_of(self, one: int, other: int) -> float:
        """Milliseconds that pass between two blocks."""
        return self.weight.get(_pair(one, other), 0.0)

    def sends_ms(self, block: int) -> float:
        """Milliseconds of what passes between a block and its successors."""
        return sum(self.weight_of(block, other) for other in self.after[block])

    def may_merge(self, one: int, other: int) -> bool:
        """Whether two blocks that an edge joins can be one without making a cycle."""
        first, second = (one, other) if other in self.after[one] else (other, one)
        if len(self.after[first]) == 1 or len(self.before[second]) == 1:
            return True
        return second not in self._reached(first, second)

    def merge(self, one: int, other: int) -> None:
        """Makes `other` a part of `one`."""
        self._put_in_order(one, other)
        self._in[other] = one
        self.work_ms[one] += self.work_ms.pop(other)
        for near, far in ((self.after, self.before), (self.before, self.after)):
            for block in near.pop(other):
                far[block].discard(other)
                if block != one:
                    far[block].add(one)
                    near[one].add(block)
                if _pair(block, other) in self.weight:
                    moved_ms = self.weight.pop(_pair(block, other))
                    if block != one:
                        pair = _pair(block, one)
                        self.weight[pair] = self.weight.get(pair, 0.0) + moved_ms

    def _reached(self, first: int, second: int) -> set[int]:
        """The blocks up to the place of `second` that paths from `first` lead to, but for the
        edge between the two."""
        last = self._place[second]
        front = [
            block for block in self.after[first] if block != second and self._place[block] <= last
        ]
        seen = set(front)
        while front:
            for block in self.after[front.pop()]:
                if block not in seen and self._place[block] <= last:
                    seen.add(block)
                    front.append(block)
        return seen

    def _put_in_order(self, one: int, other: int) -> None:
        """Gives `one` and what lies between the two new places, as if both were one."""
        first, second = sorted((one, other), key=self._place.__getitem__)
        places = range(self._place[first], self._place[second] + 1)
        between = _present(self._at[places.start + 1 : places.stop - 1])
        later = self._reached(first, second)
        ordered = [block for block in between if block not in later]
        ordered += [one, *(block for block in between if block in later)]
        for place in places:
            self._at[place] = None
        for place, block in zip(places, ordered, strict=False):
            self._at[place] = block
            self._place[block] = place

    def numbered(self) -> list[int]:
        """The block of every group, the blocks numbered in a topological order."""
        number = {block: index for index, block in enumerate(_present(self._at))}
        return [number[self._home(group)] for group in range(self._num_groups)]

    def _home(self, group: int) -> int:
        block = group
        while self._in[block] != block:
            block = self._in[block]
        self._in[group] = block
        return block


def _present(blocks: Iterable[int | None]) -> list[int]:
    return [block for block in blocks if block is not None]


def match(blocks: Blocks, most_ms: float, generator: random.Random) -> None:
    """Merges blocks in pairs, along the edge with the highest rating of each.

    The rating is what passes, squared, over the product of both blocks' work: edges that are dear
    to cut, between blocks that are small (Osipov, Sanders: "n-Level Graph Partitioning", 2010). No
    block gets more than `most_ms`.
    """
    order = sorted(blocks.work_ms)
    generator.shuffle(order)
    taken: set[int] = set()
    for block in order:
        if block in taken or block not in blocks:
            continue
        best = _best(
            (other for other in blocks.neighbours(block) if other not in taken),
            key=lambda other, block=block: _rating(blocks, block, other),  # type: ignore[misc]
            allows=lambda other, block=block: (  # type: ignore[misc]
                blocks.work_ms[block] + blocks.work_ms[other] <= most_ms
                and blocks.may_merge(block, other)
            ),
        )
        if best is not None:
            blocks.merge(block, best)
            taken |= {block, best}


def _rating(blocks: Blocks, one: int, other: int) -> float:
    product = blocks.work_ms[one] * blocks.work_ms[other]
    return blocks.weight_of(one, other) ** 2 / product if product else np.inf


def _best(
    found: Iterable[int], key: Callable[[int], float], allows: Callable[[int], bool]
) -> int | None:
    return next(filter(allows, sorted(found, key=lambda one: (-key(one), one))), None)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
