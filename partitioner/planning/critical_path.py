"""A schedule -> a function from its costs to its end, by one pass over its actions.

Every rank has its own processor, so costs change only the times, not the order:

    end(a)        = cost(a) + max(end of the previous action on the rank, arrivals of its inputs)
    arrival(a, t) = transfer + max(end(a), arrival of the previous message over that edge)

which is the longest path through the actions. The result equals that of
`runtime/schedule/simulate.py` in a fiftieth of the time: the dependencies are computed once
(`Rule`), not for all costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...runtime.errors import ScheduleError
from ...runtime.schedule.dependencies import DependencyRule, Edge
from ...runtime.schedule.schedule import Action, Schedule
from ...runtime.schedule.simulate import ActionCosts

_LAPS = 2


@dataclass(frozen=True, slots=True)
class _Row:
    """One action: its rank, its cost (a kind and a stage), the positions of the times that it waits
    for, its own position, and those of its messages with their edges.
    """

    rank: int
    kind: str
    stage: int
    needs: tuple[int, ...]
    place: int
    messages: tuple[tuple[int, Edge], ...]


class CriticalPath:
    """The actions of all ranks in an order in which each follows all its dependencies."""

    def __init__(
        self,
        schedule: Schedule,
        edges: Iterable[Edge],
        grad_edges: Iterable[Edge],
        shared_stages: Iterable[Sequence[int]],
    ) -> None:
        self._rule = DependencyRule(
            schedule, edges, grad_edges=grad_edges, shared_stages=shared_stages
        )
        self._place: dict[tuple[Action, int | None], int] = {}
        self._ranks = len(schedule.ranks)
        split = schedule.split
        rows, position = [list(row) for row in schedule.ranks], [0] * self._ranks
        self._rows: list[_Row] = []
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row):
                    action = row[position[rank]]
                    needs = self._needs(action)
                    if needs is None:
                        break
                    is_part = action.kind == "B" and (action.stage, action.index) in split
                    kind = "part of B" if is_part else action.kind
                    self._rows.append(self._row(rank, kind, action, needs))
                    position[rank] += 1
                    moved = True
        if position != [len(row) for row in rows]:
            raise ScheduleError(f"{schedule.name} never ends.")

    def period_ms(self, costs: ActionCosts) -> float:
        """The time per step of consecutive steps, where a rank continues when its own step is
        over.
        """
        return (self.end_ms(costs, 2 * _LAPS) - self.end_ms(costs, _LAPS)) / _LAPS

    def end_ms(self, costs: ActionCosts, steps: int = 1) -> float:
        """The end of the last action of that many steps."""
        stages = range(len(costs.forward_ms))
        cost_ms = {
            "F": costs.forward_ms,
            "B": costs.backward_ms,
            "part of B": [costs.of(Action(stage, "B", 0), split=True) for stage in stages],
            "W": [costs.of(Action(stage, "W", 0)) for stage in stages],
            "S": costs.step_ms,
        }
        at_ms = [0.0] * len(self._place)
        free_ms = [0.0] * self._ranks
        link_free_ms: dict[Edge, float] = {}
        transfers = costs.transfer_ms
        for row in self._rows * steps:
            start_ms = free_ms[row.rank]
            for place in row.needs:
                if at_ms[place] > start_ms:
                    start_ms = at_ms[place]
            end_ms = start_ms + cost_ms[row.kind][row.stage]
            at_ms[row.place] = free_ms[row.rank] = end_ms
            for place, edge in row.messages:
                transfer_ms = transfers.get((min(edge), max(edge)), 0.0) if transfers else 0.0
                begin_ms = max(end_ms, link_free_ms.get(edge, 0.0))
                link_free_ms[edge] = at_ms[place] = begin_ms + transfer_ms
        return max(free_ms)

    def _needs(self, action: Action) -> tuple[int, ...] | None:
        """The positions of an action's dependencies; None if some of them are missing so far."""
        places = []
        for other in self._rule.dependencies(action):
            place = self._place.get((other, action.stage), self._place.get((other, None)))
            if place is None:
                return None
            places.append(place)
        return tuple(places)

    def _row(self, rank: int, kind: str, action: Action, needs: tuple[int, ...]) -> _Row:
        done = action.unversioned
        place = self._place[done, None] = len(self._place)
        messages = []
        for message in self._rule.sends(action):
            assert message.peer is not None
            self._place[done, message.peer] = len(self._place)
            edge = (action.stage, message.peer)
            messages.append((self._place[done, message.peer], edge))
        return _Row(rank, kind, action.stage, needs, place, tuple(messages))
