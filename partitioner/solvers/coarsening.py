"""Groups -> fewer, larger blocks that belong together, without cycles between blocks.

`BlockGraph` merges two blocks only if no path leaves one and returns to the other through a third.
An edge u -> v satisfies this if u has no other successor or v no other predecessor, which is
checked first; otherwise a search decides (the cycle detection of Herrmann et al., "Multilevel
Algorithms for Acyclic Partitioning of Directed Acyclic Graphs", SISC 2019, section 4.1). Merges
update a topological order of the blocks, as Pearce and Kelly ("A Dynamic Topological Sort Algorithm
for Directed Acyclic Graphs", JEA 2006) do for new edges: only the blocks between u and v are
searched and reordered.

`blocks_of` makes about L blocks by the five rules of Mixed-pipe, one after the other:

    blocks of the model     groups of one block of the model become one
    without work            a group that takes no time joins a predecessor, or else a successor
    costly to send          a block whose time is below the transfer time of its results joins a
                            predecessor or successor, as long as both together stay below a
                            rank's share of the work
    centers                 L blocks spread over the work absorb their neighbors round-robin
    smallest                the smallest block joins its smallest neighbor

Each rule stops when L blocks are left. Groups that no cut may separate are one group before all
rules (`multilevel.by_pieces`). After Eliad et al. (USENIX ATC 2021, section 4), where the centers
are drawn among the blocks of the model.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

import numpy as np

from ..graph.costs import Costs
from ..graph.problem import Problem


class BlockGraph:
    """A graph of blocks, at first one per group; a block has the name of one of its groups.

    work_ms: time of each block
    weight: {(block, block): ms} of transfers between two blocks
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

    def weight_of(self, block: int, other: int) -> float:
        """Milliseconds of transfers between two blocks."""
        return self.weight.get(_pair(block, other), 0.0)

    def sends_ms(self, block: int) -> float:
        """Milliseconds of transfers between a block and its successors."""
        return sum(self.weight_of(block, other) for other in self.after[block])

    def may_merge(self, block: int, other: int) -> bool:
        """Two blocks that an edge joins can become one without creating a cycle."""
        first, second = (block, other) if other in self.after[block] else (other, block)
        if len(self.after[first]) == 1 or len(self.before[second]) == 1:
            return True
        return second not in self._reached(first, second)

    def merge(self, block: int, other: int) -> None:
        """Merges `other` into `block`."""
        self._put_in_order(block, other)
        self._in[other] = block
        self.work_ms[block] += self.work_ms.pop(other)
        for near, far in ((self.after, self.before), (self.before, self.after)):
            for neighbour in near.pop(other):
                far[neighbour].discard(other)
                if neighbour != block:
                    far[neighbour].add(block)
                    near[block].add(neighbour)
                if _pair(neighbour, other) in self.weight:
                    moved_ms = self.weight.pop(_pair(neighbour, other))
                    if neighbour != block:
                        pair = _pair(neighbour, block)
                        self.weight[pair] = self.weight.get(pair, 0.0) + moved_ms

    def _reached(self, first: int, second: int) -> set[int]:
        """The blocks up to the position of `second` that paths from `first` reach without the edge
        between the two.
        """
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

    def _put_in_order(self, block: int, other: int) -> None:
        """Gives new positions to `block` and the blocks between the two, as if both were one."""
        first, second = sorted((block, other), key=self._place.__getitem__)
        places = range(self._place[first], self._place[second] + 1)
        between = _present(self._at[places.start + 1 : places.stop - 1])
        later = self._reached(first, second)
        ordered = [member for member in between if member not in later]
        ordered += [block, *(member for member in between if member in later)]
        for place in places:
            self._at[place] = None
        for place, member in zip(places, ordered, strict=False):
            self._at[place] = member
            self._place[member] = place

    def numbered(self) -> list[int]:
        """The block of every group, with the blocks numbered in a topological order."""
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


def match(blocks: BlockGraph, most_ms: float, generator: random.Random) -> None:
    """Merges blocks in pairs, along the edge with the highest rating of each block.

    The rating is the squared transfer time over the product of both blocks' work: it prefers edges
    that are costly to cut, between small blocks (Osipov, Sanders: "n-Level Graph Partitioning",
    2010). No block grows beyond `most_ms`.
    """
    order = sorted(blocks.work_ms)
    generator.shuffle(order)
    matched: set[int] = set()
    for block in order:
        if block in matched or block not in blocks:
            continue
        best = _best(
            (other for other in blocks.neighbours(block) if other not in matched),
            key=lambda other, block=block: _rating(blocks, block, other),  # type: ignore[misc]
            allows=lambda other, block=block: (  # type: ignore[misc]
                blocks.work_ms[block] + blocks.work_ms[other] <= most_ms
                and blocks.may_merge(block, other)
            ),
        )
        if best is not None:
            blocks.merge(block, best)
            matched |= {block, best}


def _rating(blocks: BlockGraph, block: int, other: int) -> float:
    product = blocks.work_ms[block] * blocks.work_ms[other]
    return blocks.weight_of(block, other) ** 2 / product if product else np.inf


def _best(
    candidates: Iterable[int], key: Callable[[int], float], allows: Callable[[int], bool]
) -> int | None:
    return next(filter(allows, sorted(candidates, key=lambda block: (-key(block), block))), None)


def _pair(block: int, other: int) -> tuple[int, int]:
    return (block, other) if block < other else (other, block)


def blocks_of(problem: Problem, number: int, generator: random.Random) -> list[int]:
    """The block of every group, with the blocks numbered topologically; there are more than
    `number` only where every further merge would create a cycle.
    """
    blocks, names = BlockGraph(problem.costs), problem.costs.blocks
    share_ms = float(problem.costs.work_ms.sum()) / problem.stages

    def same_block(block: int, other: int) -> bool:
        return bool(names[block]) and names[block] == names[other]

    def without_work(block: int, _: int) -> bool:
        return not blocks.work_ms[block]

    def dear_to_send(block: int, other: int) -> bool:
        both_ms = blocks.work_ms[block] + blocks.work_ms[other]
        return blocks.sends_ms(block) > blocks.work_ms[block] and both_ms <= share_ms

    for wanted in (same_block, without_work, dear_to_send):
        _merge_where(blocks, number, wanted)
    _grow(blocks, _centres(blocks, number, generator))
    _merge_smallest(blocks, number)
    return blocks.numbered()


def without_little_ones(problem: Problem, share: float) -> list[int]:
    """The block of every group after groups below a share of a rank's work join a neighbor; at
    least as many blocks as ranks remain.
    """
    blocks = BlockGraph(problem.costs)
    little_ms = share * float(problem.costs.work_ms.sum()) / problem.stages
    _merge_where(blocks, problem.stages, lambda block, _: blocks.work_ms[block] <= little_ms)
    return blocks.numbered()


def _merge_where(blocks: BlockGraph, number: int, wanted: Callable[[int, int], bool]) -> None:
    """Merges each block with neighbors as long as the rule wants it, the largest weight first."""
    for block in sorted(blocks.work_ms):
        merged = True
        while merged and block in blocks and len(blocks) > number:
            merged = False
            around = sorted(
                blocks.neighbours(block),
                key=lambda other, block=block: (-blocks.weight_of(block, other), other),  # type: ignore[misc]
            )
            for other in around:
                if wanted(block, other) and blocks.may_merge(block, other):
                    blocks.merge(block, other)
                    merged = True
                    break


def _centres(blocks: BlockGraph, number: int, generator: random.Random) -> list[int]:
    """Blocks at random places in equal shares of the work."""
    names = sorted(blocks.work_ms)
    done_ms = np.cumsum([blocks.work_ms[block] for block in names])
    places = [(index + generator.random()) / number * done_ms[-1] for index in range(number)]
    indices = np.minimum(np.searchsorted(done_ms, places), len(names) - 1)
    return [names[index] for index in dict.fromkeys(indices.tolist())]


def _grow(blocks: BlockGraph, centres: list[int]) -> None:
    """The centers absorb round-robin a successor, or else a predecessor, that is not a center
    itself.
    """
    absorbed = set(centres)
    growing = list(centres)
    while growing:
        still = []
        for centre in growing:
            around = [*sorted(blocks.after[centre]), *sorted(blocks.before[centre])]
            for other in around:
                if other not in absorbed and blocks.may_merge(centre, other):
                    blocks.merge(centre, other)
                    still.append(centre)
                    break
        growing = still


def _merge_smallest(blocks: BlockGraph, number: int) -> None:
    """The smallest block joins the smallest neighbor that it may, until `number` blocks are
    left.
    """
    smallest = [(work_ms, block) for block, work_ms in blocks.work_ms.items()]
    heapq.heapify(smallest)
    while smallest and len(blocks) > number:
        work_ms, block = heapq.heappop(smallest)
        if blocks.work_ms.get(block) != work_ms:
            continue  # merged in the meantime
        around = sorted((blocks.work_ms[other], other) for other in blocks.neighbours(block))
        for _, other in around:
            if blocks.may_merge(block, other):
                blocks.merge(block, other)
                heapq.heappush(smallest, (blocks.work_ms[block], block))
                break
