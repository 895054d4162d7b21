"""Costs -> the downsets of the groups, and the sums of the stages between all pairs of downsets.

A downset contains all predecessors of its groups: it is a set of groups that the first few stages
may hold, as a row of bits. The first s stages of a plan hold a downset I_s, so a plan is a chain of
downsets {} = I_0 < I_1 < .. < I_k = all. A breadth-first search finds them, adding one group at a
time. With loads of at most T only those in a slack window count (`WorkWindows`): I_s has at most
the work of s stages filled to T, and the remaining work must fit into the other stages. The number
of downsets is exponential in the number of parallel branches, so the search stops at `most`.

The stage between downsets J and I, J within I, is S = I - J. Each sum of
`partitioner/graph/costs.py` over S splits into a term of I, a term of J, and one term for each way
q in which a value crosses I:

    sum(I, J) = a(I) + b(J) - sum over q of weight_q [q is how I is crossed] phi_q(J)

with phi_q(J) = 1 where J has all of some groups, or any of them. So a block of rows I by columns J
is one product of small matrices, and no pair is evaluated by itself. Let o and M be the owner and
the readers of a value and x = [M not in I]. For an activation, where o is before M,

    send     [o in S, M not in S]    = [o in I] x - x [o in J]
    receive  [o not in S, M meets S] = [o in J, M not in J] - x [o in I] [o in J, M & I in J]

and for a gradient that is its own value, where o is after M, with x = [o not in I, M meets I]:

    send     = [M meets J] - [o in J] - x [M meets J]
    receive  = x - x [M & I in J]

Bytes that groups G hold count [G meets I] - [G in J] - [G meets I, G not in I] [G & I in J]. A
stage pays for an exchange among G, in any order, if it has some of them and not all; with x = [G
meets I, G not in I] that is x + [G meets J, G not in J] - x ([G & I in J] + [G meets J]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..graph.costs import Bools, Costs, Floats, Ints, SharedBytes, StageSums

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class WorkWindows:
    """Intervals of work, one for each state of the search: the work of a downset in that state."""

    low: Floats
    high: Floats

    def holds(self, work: Floats) -> Bools:
        """The amounts of work that lie in any window, as a mask."""
        inside: Bools = np.zeros(len(work), dtype=bool)
        for low, high in zip(self.low.tolist(), self.high.tolist(), strict=True):
            inside |= (work >= low) & (work <= high)
        return inside


@dataclass(frozen=True)
class Downsets:
    """Downsets by rising work, subsets before supersets.

    bits: `bits[w, d]` are groups 64 w to 64 w + 63 of downset d
    work: the sum of `amounts` over the groups of each downset
    """

    bits: Words
    work: Floats
    num_groups: int

    def __len__(self) -> int:
        return len(self.work)

    def within(self, windows: WorkWindows) -> Downsets:
        """The downsets whose work lies in some window."""
        selected = windows.holds(self.work)
        return Downsets(self.bits[:, selected], self.work[selected], self.num_groups)

    def has(self, group: int, which: slice | Ints = slice(None)) -> Bools:
        """The downsets that contain the group, as a mask."""
        word = self.bits[group >> 6, which]
        has: Bools = (word >> np.uint64(group & 63)) & np.uint64(1) != 0
        return has

    def sums(self, amounts: Floats) -> Floats:
        """The sum of the groups' amounts in each downset."""
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
        """The first downset that contains each group (the number of downsets, if none does)."""
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


def find_downsets(
    costs: Costs, amounts: Floats, windows: WorkWindows, *, most: int
) -> Downsets | None:
    """All downsets whose sum of `amounts` lies in a window; None if there are over `most` in all.

    >>> from asyncpipe.partitioner.graph.cost_graph import costs_of
    >>> import networkx as nx
    >>> costs = costs_of(nx.DiGraph([("a", "b"), ("a", "c")]))
    >>> everywhere = WorkWindows(np.array([-np.inf]), np.array([np.inf]))
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
    # Integers, so that rounding never gives a superset the smaller sum.
    unit = float(amounts.sum()) * 2.0**-50 or 1.0
    weight = [int(amount / unit) for amount in amounts.tolist()]
    lows, highs = (windows.low / unit).tolist(), (windows.high / unit).tolist()
    limits = list(zip(lows, highs, strict=True))
    rows, works = bytearray(), []
    count = 0
    # A level: downset -> the groups that may be added, and its work.
    level = {0: (sum(1 << group for group in range(num_groups) if not before[group]), 0)}
    while level:
        count += len(level)
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
            if count + len(following) > most:
                return None
        level = following
    sums = np.array(works, dtype=np.float64) * unit
    # The search finds them by rising size: a stable sort keeps subsets first among equals.
    order = np.argsort(sums, kind="stable")
    table = np.frombuffer(bytes(rows), dtype="<u8").reshape(len(sums), -1)
    return Downsets(np.ascontiguousarray(table[order].T).astype(np.uint64), sums[order], num_groups)


def mask_of(groups: Sequence[int]) -> dict[int, np.uint64]:
    """The groups as bits, by word."""
    words: dict[int, int] = {}
    for group in groups:
        words[group >> 6] = words.get(group >> 6, 0) | 1 << (group & 63)
    return {word: np.uint64(bits) for word, bits in words.items()}


_HELD, _EXCHANGED = -1, -2
_TALK, _PARAMS, _SAVED, _RECEIVED, _SENT, _ROOTS, _TIED, _FROZEN = range(8)


@dataclass(frozen=True, slots=True)
class _Item:
    """A value, or bytes that groups hold or exchange.

    owner: the group that computes the value, or _HELD or _EXCHANGED
    weights: `weights[kind, field]` counts where the item is received, held or exchanged
    sends: the same where it is sent
    """

    owner: int
    members: tuple[int, ...]
    weights: Floats
    sends: Floats

    @property
    def is_gradient(self) -> bool:
        return self.owner > self.members[-1]

    @property
    def groups(self) -> list[int]:
        return [*self.members] if self.owner < 0 else [self.owner, *self.members]


class PairSums:
    """The `StageSums` of all stages between two of `downsets`, for each of `kinds` of costs.

    Where only the sum of sending and receiving counts (a duplex of 1), `receive_ms` includes both.
    Without `memory` the fields in bytes stay 0.
    """

    def __init__(self, kinds: Sequence[Costs], downsets: Downsets, *, memory: bool) -> None:
        self.downsets, self.memory = downsets, memory
        fields = 8 if memory else 1
        self._sending = _TALK
        if any(costs.duplex > 1 for costs in kinds):
            self._sending, fields = fields, fields + 1
        self._of_rows = np.zeros((len(kinds), fields, len(downsets)))
        self._of_columns = np.zeros((len(kinds), fields, len(downsets)))
        self._additive = [
            (downsets.sums(costs.forward_ms), downsets.sums(costs.backward_ms)) for costs in kinds
        ]
        self._duplex = [costs.duplex for costs in kinds]
        if memory:
            self._buffers = downsets.sums(kinds[0].buffer_bytes)
            self._transient = _Largest(kinds[0].transient_bytes, downsets)
            self._live = _Largest(kinds[0].live_bytes, downsets)
            self._largest_params = _Largest(kinds[0].largest_param_bytes, downsets)
        self._items = list(_items(kinds, fields, self._sending, memory=memory))
        spans = [self._span(item) for item in self._items]
        self._first, self._end = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        for item, (first, end) in zip(self._items, spans, strict=True):
            self._count(item, first, end)

    def legal(self, rows: Ints, columns: Ints) -> Bools:
        """Mask of pairs: each of `columns` is a proper subset of each of `rows`."""
        outside = np.zeros((len(rows), len(columns)), dtype=bool)
        of_rows, of_columns = self.downsets.bits[:, rows], self.downsets.bits[:, columns]
        some = np.bitwise_or.reduce(of_columns, axis=1)
        for word in np.flatnonzero(some & ~np.bitwise_and.reduce(of_rows, axis=1)):
            outside |= (of_columns[word][None, :] & ~of_rows[word][:, None]) != 0
        inside: Bools = ~outside & (columns[None, :] < rows[:, None])
        return inside

    def sums(self, rows: Ints, columns: Ints) -> list[StageSums]:
        """The sums of the stages from `columns` to `rows`, of each kind; undefined where the pair
        is not legal.
        """
        crossing = self._crossing(rows, columns)
        fields = self._of_rows[:, :, rows, None] + self._of_columns[:, :, None, columns] - crossing
        none = np.zeros((1, 1))
        transient = live = largest_params = buffers = none
        if self.memory:
            transient = self._transient.between(rows, columns)
            live = self._live.between(rows, columns)
            largest_params = self._largest_params.between(rows, columns)
            buffers = self._buffers[rows, None] - self._buffers[None, columns]
        return [
            StageSums(
                forward_ms=forward[rows, None] - forward[None, columns],
                backward_ms=backward[rows, None] - backward[None, columns],
                send_ms=none if self._sending == _TALK else amounts[self._sending],
                receive_ms=amounts[_TALK],
                param_bytes=amounts[_PARAMS] if self.memory else none,
                buffer_bytes=buffers,
                saved_bytes=amounts[_SAVED] if self.memory else none,
                received_bytes=amounts[_RECEIVED] if self.memory else none,
                transient_bytes=transient,
                sent_bytes=amounts[_SENT] if self.memory else none,
                root_bytes=amounts[_ROOTS] if self.memory else none,
                tied_bytes=amounts[_TIED] if self.memory else none,
                frozen_bytes=amounts[_FROZEN] if self.memory else none,
                live_bytes=live,
                duplex=duplex,
                largest_param_bytes=largest_params,
            )
            for (forward, backward), amounts, duplex in zip(
                self._additive, fields, self._duplex, strict=True
            )
        ]

    def _span(self, item: _Item) -> tuple[int, int]:
        """The first downset, and one past the last, that may have some groups of the item and not
        all.
        """
        first, last = self.downsets.first_with, self.downsets.last_without
        groups = item.groups
        return int(first[groups].min()), max(int(last[groups].max()) + 1, int(first[groups].min()))

    def _count(self, item: _Item, first: int, end: int) -> None:
        """Adds the item to the terms of rows and of columns."""
        span = slice(first, end)
        some, every = self._holds(item.members, span, any), self._holds(item.members, span, all)
        rows, columns = self._of_rows[:, :, span], self._of_columns[:, :, span]
        weights, sends = item.weights[:, :, None], item.sends[:, :, None]
        if item.owner == _EXCHANGED:
            rows += weights * (some & ~every)
            columns += weights * (some & ~every)
            return
        if item.owner == _HELD:
            rows += weights * some
            columns -= weights * every
            self._of_rows[:, :, end:] += weights
            self._of_columns[:, :, end:] -= weights
            return
        owner = self.downsets.has(item.owner, span)
        if item.is_gradient:
            rows += weights * (some & ~owner)
            columns += sends * (some & ~owner)
        else:
            rows += sends * (owner & ~every)
            columns += weights * (owner & ~every)

    def _holds(
        self, groups: Sequence[int], which: slice | Ints, test: Callable[[Iterable[bool]], bool]
    ) -> Bools:
        """Masks of the downsets that have any, or all, of the groups."""
        bits, masks = self.downsets.bits, mask_of(groups)
        holds = np.full(bits[0, which].shape, test is all)
        for word, mask in masks.items():
            if test is all:
                holds &= bits[word, which] & mask == mask
            else:
                holds |= bits[word, which] & mask != 0
        return holds

    def _crossing(self, rows: Ints, columns: Ints) -> Floats:
        """The sum over q: for each kind and field, rows by columns."""
        weights: dict[tuple[bool, tuple[int, ...]], Floats] = {}
        shape = (*self._of_rows.shape[:2], len(rows))
        for index in np.flatnonzero((self._first <= rows[-1]) & (self._end > rows[0])).tolist():
            item = self._items[index]
            for is_any, guard, which, amount in self._ways(item, rows):
                total = weights.setdefault((is_any, guard), np.zeros(shape))
                total += amount[:, :, None] * which
        if not weights:
            return np.zeros((*shape, 1))
        phi = np.stack(
            [
                self._holds(guard, columns, any if is_any else all).astype(np.float64)
                for is_any, guard in weights
            ]
        )
        stacked = np.stack(list(weights.values()), axis=-1)
        return stacked @ phi

    def _ways(
        self, item: _Item, rows: Ints
    ) -> Iterator[tuple[bool, tuple[int, ...], Bools, Floats]]:
        """How rows cross the item: the test of columns, the rows, and the weight."""
        has: Bools = np.stack([self.downsets.has(group, rows) for group in item.members])
        some, every = np.any(has, axis=0), np.all(has, axis=0)
        guard: tuple[int, ...] = ()
        if item.owner < 0:
            crossed: Bools = some & ~every
        else:
            owner = self.downsets.has(item.owner, rows)
            crossed = (some & ~owner) if item.is_gradient else (owner & ~every)
            if not item.is_gradient:
                guard = (item.owner,)
        if not crossed.any():
            return
        if item.owner == _EXCHANGED:
            yield True, item.members, crossed, item.weights
        elif item.owner >= 0 and item.is_gradient:
            yield len(item.members) > 1, item.members, crossed, item.sends
        elif item.owner >= 0:
            yield False, guard, crossed, item.sends
        if len(item.members) == 1:
            inside = item.members if item.is_gradient else ()
            yield False, (*guard, *inside), crossed, item.weights
            return
        patterns, which = np.unique(has[:, crossed], axis=1, return_inverse=True)
        for index, pattern in enumerate(patterns.T):
            crosses_here = np.zeros(len(rows), dtype=bool)
            crosses_here[crossed] = which.reshape(-1) == index
            inside = tuple(np.array(item.members)[pattern].tolist())
            yield False, (*guard, *inside), crosses_here, item.weights


def _items(kinds: Sequence[Costs], fields: int, sending: int, *, memory: bool) -> Iterator[_Item]:
    """The items that count once in a stage: values with the same ends are one item, and so are the
    bytes that the same groups hold.
    """
    none = np.zeros((len(kinds), fields))
    weights_of_item: dict[tuple[int, tuple[int, ...]], tuple[Floats, Floats]] = {}
    for index, value in enumerate(kinds[0].values):
        key = value.owner, value.readers
        if value.is_exchange:
            key = _EXCHANGED, tuple(sorted((value.owner, *value.readers)))
        weights, sends = weights_of_item.setdefault(key, (none.copy(), none.copy()))
        for kind, costs in enumerate(kinds):
            weights[kind, _TALK] += costs.receive_ms[index]
            sends[kind, sending] += costs.send_ms[index]
        if memory:
            weights[:, _RECEIVED] += kinds[0].value_bytes[index]
            weights[:, _TIED] += kinds[0].tied_bytes[index]
            sends[:, _SENT] += kinds[0].value_bytes[index]
            sends[:, _ROOTS] += kinds[0].root_bytes[index]
    if memory:
        of_fields: tuple[tuple[int, tuple[SharedBytes, ...]], ...] = (
            (_PARAMS, kinds[0].parameters),
            (_SAVED, kinds[0].saved),
            (_FROZEN, kinds[0].frozen),
        )
        for field, shared_bytes in of_fields:
            for shared in shared_bytes:
                weights, _ = weights_of_item.setdefault((_HELD, shared.groups), (none.copy(), none))
                weights[:, field] += shared.num_bytes
    for (owner, members), (weights, sends) in weights_of_item.items():
        if weights.any() or sends.any():
            yield _Item(owner, members, weights, sends)


class _Largest:
    """The largest amount of the groups between two downsets."""

    def __init__(self, amounts: Floats, downsets: Downsets) -> None:
        self._levels = np.unique(amounts)[::-1]
        # The number of groups of each downset that have at least each level.
        above = [downsets.sums((amounts >= level) * 1.0) for level in self._levels]
        self._above = np.rint(np.stack(above)).astype(np.int64)

    def between(self, rows: Ints, columns: Ints) -> Floats:
        """The largest level that some group in between reaches, by bisection."""
        low = np.zeros((len(rows), len(columns)), dtype=np.int64)
        high = np.full_like(low, len(self._levels) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            above = self._above[middle, rows[:, None]] > self._above[middle, columns[None, :]]
            high, low = np.where(above, middle, high), np.where(above, low, middle + 1)
            low = np.minimum(low, high)
        return self._levels[low]
