"""Local search by moves of single groups: descent, and chains of moves with rollback.

`descend` takes the best move that relieves the slowest part until there is none. `chains` goes on
from there as Fiduccia and Mattheyses (DAC 1982) do: the best such move is made even if it costs,
its group is locked, and the chain is rolled back to its best point. As it is always the part that
is slowest at the moment, a chain pushes load along the pipeline, which single moves cannot.

Which moves there are says a neighbourhood; for stages in order these of Moreira, Popp and Schulz
("Graph Partitioning with Acyclicity Constraints", SEA 2017, section 4) are here:

    simple      to the stage before or after, if all predecessors and successors allow it
    advanced    to any stage between the last predecessor's and the first successor's

`Budget` counts trials, not seconds: the same input gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..cost import Costs
from .parts import Parts, Score

# The parts that a group may go to as things are.
Neighbourhood = Callable[[Parts, int], Iterable[int]]

CHAIN_LENGTH = 40


class Budget:
    """How many moves may still be tried."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def spend(self) -> None:
        self.left -= 1

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


class Order:
    """The neighbourhoods that keep every edge from going to an earlier stage."""

    def __init__(self, costs: Costs) -> None:
        self.before: list[list[int]] = [[] for _ in costs.groups]
        self.after: list[list[int]] = [[] for _ in costs.groups]
        for source, target in costs.edges:
            self.before[target].append(source)
            self.after[source].append(target)

    def simple(self, parts: Parts, group: int) -> Iterable[int]:
        own = parts.part_of[group]
        return [part for part in self.advanced(parts, group) if abs(part - own) == 1]

    def advanced(self, parts: Parts, group: int) -> Iterable[int]:
        part_of = parts.part_of
        first = max((part_of[other] for other in self.before[group]), default=0)
        last = min(
            (part_of[other] for other in self.after[group]), default=len(parts.groups_in) - 1
        )
        if first == last or parts.groups_in[part_of[group]] == 1:
            return ()
        return (part for part in range(first, last + 1) if part != part_of[group])


def descend(parts: Parts, neighbourhood: Neighbourhood, budget: Budget) -> None:
    """Moves that relieve the slowest part, the best first, while the score gets less."""
    while not budget.is_spent:
        best = _best_move(parts, neighbourhood, budget, locked=set())
        if best is None or best[0] >= parts.score:
            return
        parts.move(*best[1:])


def chains(parts: Parts, neighbourhood: Neighbourhood, budget: Budget) -> None:
    """Chains of moves with rollback, while they make the score less."""
    while not budget.is_spent and _chain(parts, neighbourhood, budget):
        pass


def swap(parts: Parts, budget: Budget) -> None:
    """Exchanges of a group of the slowest part for one of another, the best first, while the score
    gets less; order does not matter to it."""
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
                found = parts.score_after(group, part), group, other
                if best is None or found < best:
                    best = found
            parts.move(other, part)
        if best is None or best[0] >= parts.score:
            return
        _, group, other = best
        part = parts.part_of[other]
        parts.move(other, slowest)
        parts.move(group, part)


def _chain(parts: Parts, neighbourhood: Neighbourhood, budget: Budget) -> bool:
    """One chain; whether the score is less than before."""
    start = best = parts.score
    done: list[tuple[int, int]] = []
    kept = 0
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
            best, kept = score, len(done)
    for group, source in reversed(done[kept:]):
        parts.move(group, source)
    return best < start


def _best_move(
    parts: Parts, neighbourhood: Neighbourhood, budget: Budget, locked: set[int]
) -> tuple[Score, int, int] | None:
    """The move that relieves the slowest part and has the least score after it."""
    best: tuple[Score, int, int] | None = None
    for group, target in _relieving(parts, neighbourhood, locked):
        budget.spend()
        found = parts.score_after(group, target), group, target
        if best is None or found < best:
            best = found
    return best


def _relieving(
    parts: Parts, neighbourhood: Neighbourhood, locked: set[int]
) -> Iterator[tuple[int, int]]:
    """Moves out of the slowest part, and into it of what it exchanges values with."""
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
