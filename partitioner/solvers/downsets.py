"""Costs -> the sets of groups that a first few stages may hold, as rows of bits.

A downset holds all predecessors of its groups. The first s stages of a plan hold a downset I_s, so
a plan is a chain of downsets {} = I_0 < I_1 < .. < I_k = all. They are found by breadth-first
search, one group added at a time. With loads of at most T only those in a slack window count
(`Windows`): an I_s holds at most the work of s stages filled to T, and what it leaves must fit
into the others. The number of downsets is exponential in the number of parallel branches, so the
search gives up at `most`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cost import Bools, Costs, Floats, Ints

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Windows:
    """Intervals of work, one a state of the search: what a downset in that state may hold."""

    low: Floats
    high: Floats

    def holds(self, work: Floats) -> Bools:
        """Which of the amounts of work lie in any window."""
        inside: Bools = np.zeros(len(work), dtype=bool)
        for low, high in zip(self.low.tolist(), self.high.tolist(), strict=True):
            inside |= (work >= low) & (work <= high)
        return inside


@dataclass(frozen=True)
class Downsets:
    """Downsets by rising work, subsets before supersets.

    `bits[w, d]` are groups 64 w to 64 w + 63 of downset d; `work` sums `amounts` of the groups.
    """

    bits: Words
    work: Floats
    num_groups: int

    def __len__(self) -> int:
        return len(self.work)

    def within(self, windows: Windows) -> Downsets:
        """Those whose work lies in some window."""
        kept = windows.holds(self.work)
        return Downsets(self.bits[:, kept], self.work[kept], self.num_groups)

    def has(self, group: int, which: slice | Ints = slice(None)) -> Bools:
        """Whether each of the downsets has the group."""
        word = self.bits[group >> 6, which]
        has: Bools = (word >> np.uint64(group & 63)) & np.uint64(1) != 0
        return has

    def sums(self, amounts: Floats) -> Floats:
        """What the groups' amounts add up to in each downset."""
        padded = np.zeros(64 * len(self.bits))
        padded[: len(amounts)] = amounts
        total = np.zeros(len(self))
        choices = np.unpackbits(
            np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
        ).astype(np.float64)
        for index, eight in enumerate(padded.reshape(-1, 8)):
            if eight.any():
                byte = self.bits[index >> 3] >> np.uint64(8 * (index & 7)) & np.uint64(255)
                total += (choices @ eight)[byte.astype(np.intp)]
        return total

    @cached_property
    def first_with(self) -> Ints:
        """The first downset that has each group (their number, if none has)."""
        return self._first(self.bits)

    @cached_property
    def last_without(self) -> Ints:
        """The last downset that lacks each group (-1, if none does)."""
        return len(self) - 1 - self._first(~self.bits[:, ::-1])

    def _first(self, bits: Words) -> Ints:
        first = np.full(64 * len(bits), len(self), dtype=np.int64)
        for index, word in enumerate(bits):
            known = np.bitwise_or.accumulate(word)
            starts = np.flatnonzero(np.diff(known, prepend=np.uint64(0)))
            for start in starts.tolist():
                new = int(known[start]) & ~(int(known[start - 1]) if start else 0)
                while new:
                    lowest = new & -new
                    first[64 * index + lowest.bit_length() - 1] = start
                    new ^= lowest
        return first[: self.num_groups]


def find_downsets(costs: Costs, amounts: Floats, windows: Windows, *, most: int) -> Downsets | None:
    """All downsets whose sum of `amounts` lies in a window; None if there are over `most` in all.

    >>> from asyncpipe.partitioner.cost_graph import costs_of
    >>> import networkx as nx
    >>> costs = costs_of(nx.DiGraph([("a", "b"), ("a", "c")]))
    >>> everywhere = Windows(np.array([-np.inf]), np.array([np.inf]))
    >>> len(find_downsets(costs, np.ones(3), everywhere, most=9))  # {} a ab ac abc
    5
    """
    num_groups = len(costs.groups)
    before = [0] * num_groups
    after: list[list[int]] = [[] for _ in range(num_groups)]
    for source, target in dict.fromkeys(costs.edges):
        before[target] |= 1 << source
        after[source].append(target)
    num_bytes = 8 * -(-num_groups // 64)
    # Whole numbers, so that a superset never has the smaller sum for rounding.
    unit = float(amounts.sum()) * 2.0**-50 or 1.0
    weight = [int(amount / unit) for amount in amounts.tolist()]
    lows, highs = (windows.low / unit).tolist(), (windows.high / unit).tolist()
    limits = list(zip(lows, highs, strict=True))
    rows, works = bytearray(), []
    found = 0
    # A level: downset -> the groups that may be added, and its work.
    level = {0: (sum(1 << group for group in range(num_groups) if not before[group]), 0)}
    while level:
        found += len(level)
        if found > most:
            return None
        following: dict[int, tuple[int, int]] = {}
        for downset, (ready, work) in level.items():
            if any(low <= work <= high for low, high in limits):
                rows += downset.to_bytes(num_bytes, "little")
                works.append(work)
            left = ready
            while left:
                bit = left & -left
                left ^= bit
                larger = downset | bit
                if larger not in following:
                    group = bit.bit_length() - 1
                    now_ready = ready ^ bit
                    for target in after[group]:
                        if before[target] & larger == before[target]:
                            now_ready |= 1 << target
                    following[larger] = now_ready, work + weight[group]
        level = following
    sums = np.array(works, dtype=np.float64) * unit
    # Found by rising size: a stable sort keeps subsets first among equals.
    order = np.argsort(sums, kind="stable")
    table = np.frombuffer(bytes(rows), dtype="<u8").reshape(len(sums), -1)
    return Downsets(np.ascontiguousarray(table[order].T).astype(np.uint64), sums[order], num_groups)


def mask_of(groups: Sequence[int]) -> dict[int, np.uint64]:
    """The groups as bits, by word."""
    words: dict[int, int] = {}
    for group in groups:
        words[group >> 6] = words.get(group >> 6, 0) | 1 << (group & 63)
    return {word: np.uint64(bits) for word, bits in words.items()}
