"""Downsets -> the sums of the stages between pairs of them, without a look at every pair.

The stage between downsets J and I, J within I, is S = I - J. Each sum over S that `cost.py` knows
splits into a term of I, a term of J, and one for each way q that something crosses I:

    sum(I, J) = a(I) + b(J) - sum over q of weight_q [q is how I is crossed] phi_q(J)

with phi_q(J) 1 where J has all of some groups, or any of them. So a block of rows I by columns J
is one product of small matrices. With o and M the owner and the readers of a value, x = [M not in
I], and o before M, as it is for an activation,

    send     [o in S, M not in S]    = [o in I] x - x [o in J]
    receive  [o not in S, M meets S] = [o in J, M not in J] - x [o in I] [o in J, M & I in J]

and for a gradient of its own, with o after M, x = [o not in I, M meets I]:

    send     = [M meets J] - [o in J] - x [M meets J]
    receive  = x - x [M & I in J]

What is held by groups G counts [G meets I] - [G in J] - [G meets I, G not in I] [G & I in J]. What
they exchange, in whatever order they come, is paid for by a stage that has some of them and not
all; with x = [G meets I, G not in I] that is x + [G meets J, G not in J] - x ([G & I in J] + [G
meets J]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import Bools, Costs, Floats, Held, Ints, StageSums
from .downsets import Downsets, mask_of

_HELD, _EXCHANGED = -1, -2
_TALK, _PARAMS, _SAVED, _RECEIVED, _SENT, _ROOTS, _TIED, _FROZEN = range(8)


@dataclass(frozen=True, slots=True)
class _Item:
    """A value, or with `owner` _HELD or _EXCHANGED what groups hold or exchange. `weights[kind,
    field]` count where it is received, held or exchanged, `sends` where it is sent."""

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

    `send_ms` has what is received in it too, since only their sum counts. Without `memory` what
    is measured in bytes is left at 0.
    """

    def __init__(self, kinds: Sequence[Costs], downsets: Downsets, *, memory: bool) -> None:
        self.downsets, self.memory = downsets, memory
        fields = 8 if memory else 1
        self._of_rows = np.zeros((len(kinds), fields, len(downsets)))
        self._of_columns = np.zeros((len(kinds), fields, len(downsets)))
        self._additive = [
            (downsets.sums(costs.forward_ms), downsets.sums(costs.backward_ms)) for costs in kinds
        ]
        if memory:
            self._buffers = downsets.sums(kinds[0].buffer_bytes)
            self._levels, self._above = _transients(kinds[0], downsets)
        self._items = list(_items(kinds, fields))
        spans = [self._span(item) for item in self._items]
        self._first, self._end = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        for item, (first, end) in zip(self._items, spans, strict=True):
            self._count(item, first, end)

    def legal(self, rows: Ints, columns: Ints) -> Bools:
        """Whether each of `columns` is within, and not the same as, each of `rows`."""
        outside = np.zeros((len(rows), len(columns)), dtype=bool)
        of_rows, of_columns = self.downsets.bits[:, rows], self.downsets.bits[:, columns]
        some = np.bitwise_or.reduce(of_columns, axis=1)
        for word in np.flatnonzero(some & ~np.bitwise_and.reduce(of_rows, axis=1)):
            outside |= (of_columns[word][None, :] & ~of_rows[word][:, None]) != 0
        inside: Bools = ~outside & (columns[None, :] < rows[:, None])
        return inside

    def sums(self, rows: Ints, columns: Ints) -> list[StageSums]:
        """The sums of the stages from `columns` to `rows`, of each kind; without meaning where
        the pair is not legal."""
        crossing = self._crossing(rows, columns)
        fields = self._of_rows[:, :, rows, None] + self._of_columns[:, :, None, columns] - crossing
        none = np.zeros((1, 1))
        transient = buffers = none
        if self.memory:
            transient = self._transient(rows, columns)
            buffers = self._buffers[rows, None] - self._buffers[None, columns]
        return [
            StageSums(
                forward_ms=forward[rows, None] - forward[None, columns],
                backward_ms=backward[rows, None] - backward[None, columns],
                send_ms=found[_TALK],
                receive_ms=none,
                param_bytes=found[_PARAMS] if self.memory else none,
                buffer_bytes=buffers,
                saved_bytes=found[_SAVED] if self.memory else none,
                received_bytes=found[_RECEIVED] if self.memory else none,
                transient_bytes=transient,
                sent_bytes=found[_SENT] if self.memory else none,
                root_bytes=found[_ROOTS] if self.memory else none,
                tied_bytes=found[_TIED] if self.memory else none,
                frozen_bytes=found[_FROZEN] if self.memory else none,
            )
            for (forward, backward), found in zip(self._additive, fields, strict=True)
        ]

    def _span(self, item: _Item) -> tuple[int, int]:
        """The first and one past the last downset that may have some of the item and not all."""
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
        """Whether each of the downsets has any, or has all, of the groups."""
        bits, masks = self.downsets.bits, mask_of(groups)
        found = np.full(bits[0, which].shape, test is all)
        for word, mask in masks.items():
            if test is all:
                found &= bits[word, which] & mask == mask
            else:
                found |= bits[word, which] & mask != 0
        return found

    def _crossing(self, rows: Ints, columns: Ints) -> Floats:
        """The sum over q: for each kind and field, rows by columns."""
        weights: dict[tuple[bool, tuple[int, ...]], Floats] = {}
        shape = (*self._of_rows.shape[:2], len(rows))
        for index in np.flatnonzero((self._first <= rows[-1]) & (self._end > rows[0])).tolist():
            item = self._items[index]
            for is_any, guard, which, amount in self._ways(item, rows):
                found = weights.setdefault((is_any, guard), np.zeros(shape))
                found += amount[:, :, None] * which
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
        """How the item is crossed by rows: the test of columns, by which rows, and its weight."""
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
            there = np.zeros(len(rows), dtype=bool)
            there[crossed] = which.reshape(-1) == index
            inside = tuple(np.array(item.members)[pattern].tolist())
            yield False, (*guard, *inside), there, item.weights

    def _transient(self, rows: Ints, columns: Ints) -> Floats:
        """The largest of the levels that some group between reaches, by bisection."""
        low = np.zeros((len(rows), len(columns)), dtype=np.int64)
        high = np.full_like(low, len(self._levels) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            above = self._above[middle, rows[:, None]] > self._above[middle, columns[None, :]]
            high, low = np.where(above, middle, high), np.where(above, low, middle + 1)
            low = np.minimum(low, high)
        return self._levels[low]


def _items(kinds: Sequence[Costs], fields: int) -> Iterator[_Item]:
    """What is counted once a stage: values with the same ends are one, and so is what the same
    groups hold."""
    none = np.zeros((len(kinds), fields))
    found: dict[tuple[int, tuple[int, ...]], tuple[Floats, Floats]] = {}
    for index, value in enumerate(kinds[0].values):
        key = value.owner, value.readers
        if value.is_exchange:
            key = _EXCHANGED, tuple(sorted((value.owner, *value.readers)))
        weights, sends = found.setdefault(key, (none.copy(), none.copy()))
        for kind, costs in enumerate(kinds):
            weights[kind, _TALK] += costs.receive_ms[index]
            sends[kind, _TALK] += costs.send_ms[index]
        if fields > 1:
            weights[:, _RECEIVED] += kinds[0].value_bytes[index]
            weights[:, _TIED] += kinds[0].tied_bytes[index]
            sends[:, _SENT] += kinds[0].value_bytes[index]
            sends[:, _ROOTS] += kinds[0].root_bytes[index]
    if fields > 1:
        of_fields: tuple[tuple[int, tuple[Held, ...]], ...] = (
            (_PARAMS, kinds[0].parameters),
            (_SAVED, kinds[0].saved),
            (_FROZEN, kinds[0].frozen),
        )
        for field, held in of_fields:
            for one in held:
                weights, _ = found.setdefault((_HELD, one.groups), (none.copy(), none))
                weights[:, field] += one.num_bytes
    for (owner, members), (weights, sends) in found.items():
        if weights.any() or sends.any():
            yield _Item(owner, members, weights, sends)


def _transients(costs: Costs, downsets: Downsets) -> tuple[Floats, Ints]:
    """The transient sizes, falling, and how many groups of each downset have at least each."""
    levels = np.unique(costs.transient_bytes)[::-1]
    above = [downsets.sums((costs.transient_bytes >= level) * 1.0) for level in levels]
    return levels, np.rint(np.stack(above)).astype(np.int64)
