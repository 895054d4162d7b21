"""Local search by moves of single groups: descent, and chains of moves with rollback.

`descend` makes the best move that relieves the slowest part until there is none. `chains` then
follows Fiduccia and Mattheyses (DAC 1982): it makes the best such move even if the score rises,
locks its group, and rolls the chain back to its best point. Because every move relieves the part
that is slowest at the moment, a chain pushes load along the pipeline, which single moves cannot.

A neighborhood gives the legal moves. For stages in order, these are the ones of Moreira, Popp and
Schulz ("Graph Partitioning with Acyclicity Constraints", SEA 2017, section 4):

    simple      to the stage before or after, if all predecessors and successors allow it
    advanced    to any stage between the last predecessor's and the first successor's

`Budget` counts trials, not seconds: the same input gives the same plan on every machine.

`GroupDivision` keeps the cost of each part while single groups move, in O(degree) per move. A part
is a stage, or everything on a rank. Its sums are those of `stage_sums`, and the setting computes
times and memory; `tests/partitioner/solvers/test_methods.py` compares both after moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..graph.costs import Costs, Floats, SharedBytes, StageSums
from ..graph.problem import Problem

# Bytes above the memory of the devices, then the milliseconds of the parts, the slowest first.
Score = tuple[float, tuple[float, ...]]


class GroupDivision:
    """A changeable division of the groups into as many parts as there are ranks.

    Part j has the costs of the rank at position j.

    groups_in: the number of groups in each part
    neighbours: for each group, the groups with which it exchanges values
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
        self._shared_bytes = tuple(
            _SharedBytesByPart(shared_bytes, self.part_of, count) for shared_bytes in _kinds(costs)
        )
        self._sums = [[0.0] * count for _ in range(9)]
        for group, part in enumerate(self.part_of):
            self._add_group(group, part, 1)
        for index in range(len(costs.values)):
            for part in {self.part_of[costs.values[index].owner], *self._readers[index]}:
                self._add_value(index, part, 1)
        self._measured = [self._measure(part) for part in range(count)]

    @property
    def score(self) -> Score:
        """The objective of the search, smaller is better; times are rounded so that equal divisions
        compare equal.
        """
        excess = sum(excess for excess, _ in self._measured)
        return excess, tuple(sorted((time_ms for _, time_ms in self._measured), reverse=True))

    @property
    def slowest(self) -> int:
        """The part to relieve first: the one that lacks the most memory, or else the slowest."""
        return max(range(len(self._measured)), key=self._measured.__getitem__)

    def move(self, group: int, target: int) -> None:
        """Moves a group into another part."""
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
        for by_part in self._shared_bytes:
            by_part.move(group, source, target)
        self.groups_in[source] -= 1
        self.groups_in[target] += 1
        for part in changed:
            self._measured[part] = self._measure(part)

    def score_after(self, group: int, target: int) -> Score:
        """The score if the group were in that part."""
        source = self.part_of[group]
        self.move(group, target)
        score = self.score
        self.move(group, source)
        return score

    def sums(self, part: int) -> StageSums:
        """The sums of one part."""
        forward, backward, send, receive, buffers, received, sent, roots, tied = (
            of[part] for of in self._sums
        )
        parameters, saved, frozen = (by_part.total[part] for by_part in self._shared_bytes)
        costs = self.problem.costs
        as_floats = (
            forward, backward, send, receive, parameters, buffers, saved, received,
            self._largest(costs.transient_bytes, part), sent, roots, tied, 0.0, 0.0, frozen,
            self._largest(costs.live_bytes, part), self.problem.seen[part].duplex,
            self._largest(costs.largest_param_bytes, part),
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

    def _largest(self, amounts: Floats, part: int) -> float:
        if not self.problem.setting.is_limited:
            return 0.0
        own = np.asarray(self.part_of) == part
        return float(amounts[own].max(initial=0.0))

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
                end = 3 if self.problem.costs.values[index].is_exchange else 2
                self._sums[end][part] += sign * table.send_ms[index]
                self._sums[6][part] += sign * table.value_bytes[index]
                self._sums[7][part] += sign * table.root_bytes[index]
                self._sums[8][part] += sign * table.tied_bytes[index]
        elif part in at:
            self._sums[3][part] += sign * table.receive_ms[index]
            self._sums[5][part] += sign * table.value_bytes[index]
            self._sums[8][part] += sign * table.tied_bytes[index]


class _Table:
    """The costs for one position, as lists: their scalars are fast."""

    def __init__(self, seen: Costs) -> None:
        self.forward_ms = seen.forward_ms.tolist()
        self.backward_ms = seen.backward_ms.tolist()
        self.send_ms = seen.send_ms.tolist()
        self.receive_ms = seen.receive_ms.tolist()
        self.buffer_bytes = seen.buffer_bytes.tolist()
        self.value_bytes = seen.value_bytes.tolist()
        self.root_bytes = seen.root_bytes.tolist()
        self.tied_bytes = seen.tied_bytes.tolist()


class _SharedBytesByPart:
    """Bytes that each part has once for all its groups that name them."""

    def __init__(
        self, shared_bytes: Sequence[SharedBytes], part_of: Sequence[int], count: int
    ) -> None:
        self.total = [0.0] * count
        self._bytes = [item.num_bytes for item in shared_bytes]
        self._of_group: dict[int, list[int]] = {}
        self._at: list[dict[int, int]] = [{} for _ in shared_bytes]
        for index, item in enumerate(shared_bytes):
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


def _kinds(costs: Costs) -> tuple[Sequence[SharedBytes], ...]:
    return costs.parameters, costs.saved, costs.frozen


def _neighbours(costs: Costs) -> list[set[int]]:
    around: list[set[int]] = [set() for _ in costs.groups]
    for value in costs.values:
        around[value.owner].update(value.readers)
        for reader in value.readers:
            around[reader].add(value.owner)
    return around


# The parts to which a group may move at present.
Neighbourhood = Callable[[GroupDivision, int], Iterable[int]]

CHAIN_LENGTH = 40


class Budget:
    """The number of moves that may still be tried."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def spend(self) -> None:
        self.left -= 1

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


class NeighbourOrder:
    """The neighborhoods in which no edge leads to an earlier stage."""

    def __init__(self, costs: Costs) -> None:
        self.before: list[list[int]] = [[] for _ in costs.groups]
        self.after: list[list[int]] = [[] for _ in costs.groups]
        for source, target in costs.edges:
            self.before[target].append(source)
            self.after[source].append(target)

    def simple(self, parts: GroupDivision, group: int) -> Iterable[int]:
        own = parts.part_of[group]
        return [part for part in self.advanced(parts, group) if abs(part - own) == 1]

    def advanced(self, parts: GroupDivision, group: int) -> Iterable[int]:
        part_of = parts.part_of
        first = max((part_of[other] for other in self.before[group]), default=0)
        last = min(
            (part_of[other] for other in self.after[group]), default=len(parts.groups_in) - 1
        )
        if first == last or parts.groups_in[part_of[group]] == 1:
            return ()
        return (part for part in range(first, last + 1) if part != part_of[group])


def descend(parts: GroupDivision, neighbourhood: Neighbourhood, budget: Budget) -> None:
    """Moves that relieve the slowest part, the best first, while the score falls."""
    while not budget.is_spent:
        best = _best_move(parts, neighbourhood, budget, locked=set())
        if best is None or best[0] >= parts.score:
            return
        parts.move(*best[1:])


def chains(parts: GroupDivision, neighbourhood: Neighbourhood, budget: Budget) -> None:
    """Chains of moves with rollback, while they reduce the score."""
    while not budget.is_spent and _chain(parts, neighbourhood, budget):
        pass


def swap(parts: GroupDivision, budget: Budget) -> None:
    """Exchanges a group of the slowest part for one of another part, the best pair first, while the
    score falls; ignores the order of stages.
    """
    while not budget.is_spent:
        slowest = parts.slowest
        best: tuple[Score, int, int] | None = None
        own = [group for group, part in enumerate(parts.part_of) if part == slowest]
        for other, part in enumerate(parts.part_of):
            if part == slowest:
                continue
            parts.move(other, slowest)
            for group in own:
                budget.spend()
                candidate = parts.score_after(group, part), group, other
                if best is None or candidate < best:
                    best = candidate
            parts.move(other, part)
        if best is None or best[0] >= parts.score:
            return
        _, group, other = best
        part = parts.part_of[other]
        parts.move(other, slowest)
        parts.move(group, part)


def _chain(parts: GroupDivision, neighbourhood: Neighbourhood, budget: Budget) -> bool:
    """One chain; returns whether it reduced the score."""
    start = best = parts.score
    done: list[tuple[int, int]] = []
    best_length = 0
    locked: set[int] = set()
    while len(done) < CHAIN_LENGTH and not budget.is_spent:
        move = _best_move(parts, neighbourhood, budget, locked)
        if move is None:
            break
        score, group, target = move
        done.append((group, parts.part_of[group]))
        parts.move(group, target)
        locked.add(group)
        if score < best:
            best, best_length = score, len(done)
    for group, source in reversed(done[best_length:]):
        parts.move(group, source)
    return best < start


def _best_move(
    parts: GroupDivision, neighbourhood: Neighbourhood, budget: Budget, locked: set[int]
) -> tuple[Score, int, int] | None:
    """The move that relieves the slowest part and gives the smallest score."""
    best: tuple[Score, int, int] | None = None
    for group, target in _relieving(parts, neighbourhood, locked):
        budget.spend()
        candidate = parts.score_after(group, target), group, target
        if best is None or candidate < best:
            best = candidate
    return best


def _relieving(
    parts: GroupDivision, neighbourhood: Neighbourhood, locked: set[int]
) -> Iterator[tuple[int, int]]:
    """Moves out of the slowest part, and moves into it of groups with which it exchanges values."""
    slowest = parts.slowest
    own = [group for group, part in enumerate(parts.part_of) if part == slowest]
    for group in own:
        if group not in locked:
            for target in neighbourhood(parts, group):
                yield group, target
    around = {other for group in own for other in parts.neighbours[group]}
    for group in sorted(around.difference(own, locked)):
        if slowest in neighbourhood(parts, group):
            yield group, slowest
