"""The dependencies of actions: one rule for the simulator, the validator, the lowering and the
search.

    F(j, i)  waits for F(s, i) of every stage s that sends tensors to j
    B(j, i)  waits for F(j, i), and for B(t, i) of every stage t that returns gradients to j
    W(j, i)  waits for B(j, i)
    S(j, v)  waits for B, and W where there is one, of every micro-batch of window v at j, and of
             window v - D at the other stages that hold a parameter of j (window v: the
             step_every micro-batches of step v)

Between two ranks "waits for F(s, i)" means: s has sent its message and j has received it. Earlier
actions of the same rank are over anyway. Replicas of a stage need no rule of their own: the
schedule says which of them has micro-batch i, and S waits for all of them. `Player` runs a schedule
by this rule alone, without a clock; `simulate.py` adds one.

`lower` adds the messages between ranks. Sends follow the action that makes their tensors. Receives
are posted before the sends that precede their consumer, so that two ranks which send to each other
at the same time both find a receive:

    0F1 0RECV_B0<1 0SEND_F1>1 0B0     rank 0 of 1f1b, two stages
    1B0 1RECV_F1<0 1SEND_B0>0 1F1     rank 1, at the same time

If a boundary skips stages this is not early enough: the sender may be several micro-batches ahead
of the reader, and a rank must hold the tensors. Therefore `lower` runs the schedule with blocking
sends, and posts a receive earlier where all ranks would otherwise wait forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from ..errors import ScheduleError
from .schedule import Action, Kind, Schedule, shared_delay

Edge = tuple[int, int]
Direction = Literal["F", "B"]


class DependencyRule:
    """The dependencies of one schedule for one model.

    - `edges`: the (source, target) stages of boundary tensors, neighbors or not; by default each
      stage and the next
    - `grad_edges`: the edges whose tensors get a gradient; by default all
    - `shared_stages`: the groups of stages that hold one (tied) parameter
    """

    def __init__(
        self,
        schedule: Schedule,
        edges: Iterable[Edge] | None = None,
        *,
        grad_edges: Iterable[Edge] | None = None,
        shared_stages: Iterable[Sequence[int]] = (),
    ) -> None:
        stages = range(schedule.stages)
        forward = sorted(set(zip(stages, stages[1:], strict=False) if edges is None else edges))
        backward = forward if grad_edges is None else sorted(set(grad_edges))
        for source, target in forward:
            if not 0 <= source < target < schedule.stages:
                raise ScheduleError(
                    f"({source}, {target}) is not an edge of {schedule.stages} stages: "
                    "tensors go from a stage to a later one."
                )
        for edge in backward:
            if edge not in forward:
                raise ScheduleError(f"gradients return over {edge}, but no tensors go there.")
        self.schedule, self.edges, self.grad_edges = schedule, forward, backward
        self._sources: dict[tuple[Direction, int], list[int]] = defaultdict(list)
        self._targets: dict[tuple[Direction, int], list[int]] = defaultdict(list)
        for source, target in forward:
            self._sources["F", target].append(source)
            self._targets["F", source].append(target)
        for source, target in reversed(backward):  # the nearest stage first
            self._sources["B", source].append(target)
            self._targets["B", target].append(source)
        self._shared = [(tuple(group), shared_delay(schedule, group)) for group in shared_stages]
        self._by_message = schedule.is_lowered
        self._split = schedule.split

    def sources(self, direction: Direction, stage: int) -> list[int]:
        """The stages whose tensors (F) or gradients (B) this stage needs."""
        return self._sources[direction, stage]

    def targets(self, direction: Direction, stage: int) -> list[int]:
        """The stages that need this stage's tensors (F) or gradients (B)."""
        return self._targets[direction, stage]

    def receives(self, action: Action) -> list[Action]:
        """The messages from other ranks that an F or B needs; none for any other action."""
        if action.kind not in ("F", "B"):
            return []
        direction, stage, index = action.kind, action.stage, action.index
        return [
            message(direction, source, stage, index)[1]
            for source in self.sources(direction, stage)
            if self.is_remote(source, stage)
        ]

    def sends(self, action: Action) -> list[Action]:
        """The messages to other ranks that an F or B makes, the nearest stage's first."""
        if action.kind not in ("F", "B"):
            return []
        direction, stage, index = action.kind, action.stage, action.index
        return [
            message(direction, stage, target, index)[0]
            for target in self.targets(direction, stage)
            if self.is_remote(stage, target)
        ]

    def dependencies(self, action: Action, *, rendezvous: bool = False) -> list[Action]:
        """The actions that must be over before `action` can begin, without versions.

        With `rendezvous` a send waits until its receive is posted; otherwise sends are buffered.
        """
        stage, index, peer = action.stage, action.index, action.peer
        match action.kind:
            case "F":
                return self._arrivals("F", stage, index)
            case "B":
                return [Action(stage, "F", index), *self._arrivals("B", stage, index)]
            case "W":
                return [Action(stage, "B", index)]
            case "S":
                return [Action(*needed) for needed in self._gradients(stage, index)]
            case "SEND_F" | "SEND_B" if peer is not None:
                direction: Direction = "F" if action.kind == "SEND_F" else "B"
                _, receive = message(direction, stage, peer, index)
                return [Action(stage, direction, index), *([receive] if rendezvous else [])]
        return []

    def is_remote(self, source: int, target: int) -> bool:
        """True if the two stages are on different ranks."""
        ranks = self.schedule.rank_of_stage
        return ranks[source] != ranks[target]

    def _arrivals(self, direction: Direction, stage: int, index: int) -> list[Action]:
        needed: list[Action] = []
        for source in self.sources(direction, stage):
            if self._by_message and self.is_remote(source, stage):
                needed += message(direction, source, stage, index)
            else:
                needed.append(Action(source, direction, index))
        return needed

    def _gradients(self, stage: int, step: int) -> list[tuple[int, Kind, int]]:
        windows = {(stage, step)}
        for group, delay in self._shared:
            if stage in group:
                windows |= {(holder, step - delay) for holder in group if holder != stage}
        every = self.schedule.step_every
        return [
            (holder, "W" if (holder, index) in self._split else "B", index)
            for holder, window in sorted(windows)
            if window >= 1
            for index in range((window - 1) * every, window * every)
        ]


def message(direction: Direction, source: int, target: int, index: int) -> tuple[Action, Action]:
    """The send and the receive that carry micro-batch `index` from one stage to another.

    >>> print(*message("B", 3, 2, 7))
    3SEND_B7>2 2RECV_B7<3
    """
    if direction == "F":
        return Action(source, "SEND_F", index, target), Action(target, "RECV_F", index, source)
    return Action(source, "SEND_B", index, target), Action(target, "RECV_B", index, source)


class Player:
    """Runs the actions of all ranks, each as soon as the rule allows, without a clock."""

    def __init__(self, rule: DependencyRule, *, rendezvous: bool = False) -> None:
        self.rule = rule
        self.rendezvous = rendezvous
        self.rows = [list(row) for row in rule.schedule.ranks]
        self.position = [0] * len(self.rows)
        self.done: set[Action] = set()

    def run(self) -> bool:
        """Runs until every rank is at its end (True) or none can continue (False)."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.rows)):
                while (action := self.next_action(rank)) and not self.missing(action):
                    self.done.add(action.unversioned)
                    self.position[rank] += 1
                    moved = True
        return all(self.next_action(rank) is None for rank in range(len(self.rows)))

    def next_action(self, rank: int) -> Action | None:
        """The current action of `rank`, None at the end of its list."""
        row, position = self.rows[rank], self.position[rank]
        return row[position] if position < len(row) else None

    def missing(self, action: Action) -> list[Action]:
        """The actions that `action` still waits for."""
        needed = self.rule.dependencies(action, rendezvous=self.rendezvous)
        return [other for other in needed if other not in self.done]


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    ahead: int = 0,
) -> Schedule:
    """Adds SEND and RECV actions; none between stages of one rank.

    `edges` and `grad_edges` are as in DependencyRule. Receives are posted `ahead` forwards and
    backwards earlier than necessary.

    >>> from asyncpipe.runtime.schedule.builders import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)))
    rank 0: 0F0@v0 0RECV_B0<1 0SEND_F0>1 0B0@v0 0S1
    rank 1: 1RECV_F0<0 1F0@v0 1B0@v0 1SEND_B0>0 1S1
    """
    rule = DependencyRule(schedule.compute, edges, grad_edges=grad_edges)
    rows = (tuple(_with_messages(row, rule, ahead)) for row in rule.schedule.ranks)
    lowered = replace(schedule, ranks=tuple(rows))
    player = Player(
        DependencyRule(lowered, rule.edges, grad_edges=rule.grad_edges), rendezvous=True
    )
    while not player.run() and _post_earlier(player):
        pass
    return replace(lowered, ranks=tuple(map(tuple, player.rows)))


def _with_messages(row: Sequence[Action], rule: DependencyRule, ahead: int) -> Iterator[Action]:
    computes = [action for action in row if action.kind != "S"]
    post_at: list[list[Action]] = [[] for _ in range(len(computes) + 1)]
    for number, action in enumerate(computes):
        post_at[max(number - ahead, 0)] += rule.receives(action)
    posts = iter(post_at)
    yield from next(posts)
    for action in row:
        yield action
        if action.kind != "S":
            yield from next(posts)
            yield from rule.sends(action)


def _post_earlier(player: Player) -> bool:
    """Moves one receive to its rank's current position, for a sender that is waiting for it."""
    for rank in range(len(player.rows)):
        action = player.next_action(rank)
        for receive in player.missing(action) if action and "SEND" in action.kind else ():
            receiver = player.rule.schedule.rank_of(receive.stage, receive.index)
            row, position = player.rows[receiver], player.position[receiver]
            row.insert(position, row.pop(row.index(receive, position)))
            return True
    return False
