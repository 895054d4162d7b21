"""Groups in parts, and what each part costs while single groups move: O(degree) a move.

A part is a stage, or all that a rank has. The sums are those of `stage_sums`, and times and
memory are asked of the setting; `tests/partitioner/test_methods.py` compares both after moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost import Costs, Held, StageSums
from ..problem import Problem

# Bytes above the memory of the devices, then the milliseconds of the parts, the slowest first.
Score = tuple[float, tuple[float, ...]]


class Parts:
    """A division of the groups into as many parts as there are ranks, which may change.

    Part j is priced as the rank at position j; `groups_in[j]` is how many groups it has, and
    `neighbours[i]` are the groups that group i exchanges values with.
    """

    def __init__(self, problem: Problem, part_of: Sequence[int]) -> None:
        self.problem = problem
        self.part_of = list(part_of)
        self.groups_in = np.bincount(self.part_of, minlength=problem.stages).tolist()
        costs, count = problem.costs, problem.stages
        tables = {id(seen): _Table(seen) for seen in problem.seen}
        self._tables = [tables[id(seen)] for seen in problem.seen]
        self.neighbours = _neighbours(costs)
        self._touching: list[list[int]] = [[] for _ in costs.groups]
        self._readers: list[dict[int, int]] = []
        for index, value in enumerate(costs.values):
            at: dict[int, int] = {}
            for reader in value.readers:
                self._touching[reader].append(index)
                part = self.part_of[reader]
                at[part] = at.get(part, 0) + 1
            self._touching[value.owner].append(index)
            self._readers.append(at)
        self._held = tuple(_HeldIn(held, self.part_of, count) for held in _kinds(costs))
        self._sums = [[0.0] * count for _ in range(9)]
        for group, part in enumerate(self.part_of):
            self._add_group(group, part, 1)
        for index in range(len(costs.values)):
            for part in {self.part_of[costs.values[index].owner], *self._readers[index]}:
                self._add_value(index, part, 1)
        self._measured = [self._measure(part) for part in range(count)]

    @property
    def score(self) -> Score:
        """What a better division has less of; times are rounded so that equal ones compare so."""
        excess = sum(excess for excess, _ in self._measured)
        return excess, tuple(sorted((time_ms for _, time_ms in self._measured), reverse=True))

    @property
    def slowest(self) -> int:
        """The part to be relieved first: the one that fits least, or else the slowest."""
        return max(range(len(self._measured)), key=self._measured.__getitem__)

    def move(self, group: int, target: int) -> None:
        """Puts a group into another part."""
        source = self.part_of[group]
        values, owners = self.problem.costs.values, self.part_of
        changed = {source, target}
        touching = self._touching[group]
        concerned = []
        for index in touching:
            parts = {source, target, owners[values[index].owner]}
            concerned.append(parts)
            changed |= parts
            for part in parts:
                self._add_value(index, part, -1)
        self.part_of[group] = target
        for index, parts in zip(touching, concerned, strict=True):
            if values[index].owner != group:
                at = self._readers[index]
                at[source] -= 1
                if not at[source]:
                    del at[source]
                at[target] = at.get(target, 0) + 1
            for part in parts:
                self._add_value(index, part, 1)
        self._add_group(group, source, -1)
        self._add_group(group, target, 1)
        for held in self._held:
            held.move(group, source, target)
        self.groups_in[source] -= 1
        self.groups_in[target] += 1
        for part in changed:
            self._measured[part] = self._measure(part)

    def score_after(self, group: int, target: int) -> Score:
        """The score that there would be if the group were in that part."""
        source = self.part_of[group]
        self.move(group, target)
        score = self.score
        self.move(group, source)
        return score

    def sums(self, part: int) -> StageSums:
        """What a part adds up to."""
        forward, backward, send, receive, buffers, received, sent, roots, tied = (
            of[part] for of in self._sums
        )
        parameters, saved, frozen = (held.total[part] for held in self._held)
        as_floats = (
            forward, backward, send, receive, parameters, buffers, saved, received,
            self._transient(part), sent, roots, tied, 0.0, 0.0, frozen,
        )  # fmt: skip
        return StageSums(*map(np.float64, as_floats))  # type: ignore[arg-type]

    def _measure(self, part: int) -> tuple[float, float]:
        """Bytes above the memory of the part's rank, and its milliseconds."""
        setting, sums = self.problem.setting, self.sums(part)
        again = bool(setting.recomputes(part, sums))
        excess = 0.0
        if setting.is_limited:
            peak = float(setting.memory_bytes(part, sums, recompute=again))
            excess = max(0.0, peak - setting.devices[part].memory_bytes)
        return excess, round(float(setting.time_ms(part, sums, again=again)), 9)

    def _transient(self, part: int) -> float:
        if not self.problem.setting.is_limited:
            return 0.0
        own = np.asarray(self.part_of) == part
        return float(self.problem.costs.transient_bytes[own].max(initial=0.0))

    def _add_group(self, group: int, part: int, sign: int) -> None:
        forward, backward, _, _, buffers, *_ = self._sums
        table = self._tables[part]
        forward[part] += sign * table.forward_ms[group]
        backward[part] += sign * table.backward_ms[group]
        buffers[part] += sign * table.buffer_bytes[group]

    def _add_value(self, index: int, part: int, sign: int) -> None:
        at, table = self._readers[index], self._tables[part]
        if self.part_of[self.problem.costs.values[index].owner] == part:
            if len(at) > 1 or part not in at:
                self._sums[2][part] += sign * table.send_ms[index]
                self._sums[6][part] += sign * table.value_bytes[index]
                self._sums[7][part] += sign * table.root_bytes[index]
                self._sums[8][part] += sign * table.tied_bytes[index]
        elif part in at:
            self._sums[3][part] += sign * table.receive_ms[index]
            self._sums[5][part] += sign * table.value_bytes[index]
            self._sums[8][part] += sign * table.tied_bytes[index]


class _Table:
    """The costs as one position sees them, as lists: scalars of those are quick."""

    def __init__(self, seen: Costs) -> None:
        self.forward_ms = seen.forward_ms.tolist()
        self.backward_ms = seen.backward_ms.tolist()
        self.send_ms = seen.send_ms.tolist()
        self.receive_ms = seen.receive_ms.tolist()
        self.buffer_bytes = seen.buffer_bytes.tolist()
        self.value_bytes = seen.value_bytes.tolist()
        self.root_bytes = seen.root_bytes.tolist()
        self.tied_bytes = seen.tied_bytes.tolist()


class _HeldIn:
    """Bytes that each part has once for all its groups that name them."""

    def __init__(self, held: Sequence[Held], part_of: Sequence[int], count: int) -> None:
        self.total = [0.0] * count
        self._bytes = [item.num_bytes for item in held]
        self._of_group: dict[int, list[int]] = {}
        self._at: list[dict[int, int]] = [{} for _ in held]
        for index, item in enumerate(held):
            for group in item.groups:
                self._of_group.setdefault(group, []).append(index)
                self._enter(index, part_of[group])

    def move(self, group: int, source: int, target: int) -> None:
        for index in self._of_group.get(group, ()):
            at = self._at[index]
            at[source] -= 1
            if not at[source]:
                del at[source]
                self.total[source] -= self._bytes[index]
            self._enter(index, target)

    def _enter(self, index: int, part: int) -> None:
        at = self._at[index]
        if part not in at:
            self.total[part] += self._bytes[index]
        at[part] = at.get(part, 0) + 1


def _kinds(costs: Costs) -> tuple[Sequence[Held], ...]:
    return costs.parameters, costs.saved, costs.frozen


def _neighbours(costs: Costs) -> list[set[int]]:
    around: list[set[int]] = [set() for _ in costs.groups]
    for value in costs.values:
        around[value.owner].update(value.readers)
        for reader in value.readers:
            around[reader].add(value.owner)
    return around
