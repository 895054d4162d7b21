"""A schedule as data: the actions of every rank, in order.

An action is printed as its stage, kind and index:

    2F3@v1      stage 2, forward of micro-batch 3, with weight version 1
    2B3@v1      backward of micro-batch 3, when the stage's newest weights are version 1
    2W3@v1      the weight gradients of a split backward; 2B3 then makes the input gradients only
    2S4         the optimizer step that makes version 4
    2SEND_F3>3  sends micro-batch 3's boundary tensors to stage 3
    3RECV_F3<2  posts the receive of these tensors; 3F3 waits until they arrive
    3SEND_B3>2  sends their gradients back
    2RECV_B3<3  posts the receive of these gradients; 2B3 waits

Micro-batches and versions count from 0 at the start of the segment that a schedule describes: one
mini-batch of a synchronous schedule, some steps and a drain of an asynchronous one. `builders.py`
makes F, B, W and S; `dependencies.py` adds the messages between ranks and defines what an action
waits for. `alternating` makes the simplest schedules, which run some forwards ahead and then
alternate a forward and a backward: gpipe, 1f1b, seq and all asynchronous ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, NamedTuple, cast

from ..errors import ScheduleError

Kind = Literal["F", "B", "W", "S", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

_COMPUTE = re.compile(r"(\d{1,9})([FBW])(\d{1,9})()(?:@v(\d{1,9}))?", re.ASCII)
_STEP = re.compile(r"(\d{1,9})(S)(\d{1,9})()()", re.ASCII)
_MESSAGE = re.compile(
    r"(\d{1,9})(SEND_[FB](?=\d+>)|RECV_[FB](?=\d+<))(\d{1,9})[<>](\d{1,9})()", re.ASCII
)


class Action(NamedTuple):
    """An action of a rank for one of its stages; a tuple, since a schedule has thousands.

    >>> print(Action(2, "F", 3, version=1), Action(2, "SEND_F", 3, peer=3), Action(2, "S", 4))
    2F3@v1 2SEND_F3>3 2S4

    stage: the stage of the action
    kind: F, B, W or S, or a message: SEND_F, RECV_F, SEND_B, RECV_B
    """

    stage: int
    kind: Kind
    index: int  # type: ignore[assignment]  # no need of the tuple's method of that name
    """The micro-batch, or the version that an S makes."""
    peer: int | None = None
    """The other stage of a message."""
    version: int | None = None
    """The weight version of an F, B or W."""

    @property
    def unversioned(self) -> Action:
        """The action as `DependencyRule.dependencies` names it."""
        return self if self.version is None else self._replace(version=None)

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"{'>' if 'SEND' in self.kind else '<'}{self.peer}"
        version = "" if self.version is None else f"@v{self.version}"
        return f"{self.stage}{self.kind}{self.index}{peer}{version}"


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises ScheduleError if there is none.

    >>> parse_action("2RECV_B3<4")
    Action(stage=2, kind='RECV_B', index=3, peer=4, version=None)
    """
    for pattern in (_COMPUTE, _STEP, _MESSAGE):
        if match := pattern.fullmatch(text):
            stage, kind, index, peer, version = match.groups()
            return Action(
                int(stage),
                cast(Kind, kind),
                int(index),
                int(peer) if peer else None,
                int(version) if version else None,
            )
    raise ScheduleError(
        f"{text[:60]!r} is not an action.",
        "Actions look like 2F3 or 2F3@v1, 2B3, 2W3, 2S4, 2SEND_F3>3, 3RECV_F3<2.",
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank over one segment.

    Micro-batch i of a stage with r replicas runs on its replica i mod r.

    name: as `--schedule` names it
    stages: the number of stages
    micro_batches: the number of micro-batches of the segment
    """

    name: str
    stages: int
    micro_batches: int
    step_every: int
    """The number of micro-batches of an optimizer step."""
    synchronous: bool
    """True for one step at the end of the segment, so that no gradient is late."""
    ranks: tuple[tuple[Action, ...], ...]
    """The actions of each rank."""
    rank_of_stage: tuple[int, ...]
    """The rank of each stage; the first one of a stage with replicas."""
    in_flight: tuple[int, ...]
    """For each stage, the most micro-batches that one rank holds between their forward and
    backward."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """If some stage has replicas: the ranks of every stage, each of which has that stage alone
    unless these are whole pipelines `side_by_side`."""

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage: its replicas."""
        return self.replicas[stage] if self.replicas else (self.rank_of_stage[stage],)

    def rank_of(self, stage: int, index: int) -> int:
        """The rank that runs a micro-batch of a stage."""
        ranks = self.ranks_of(stage)
        return ranks[index % len(ranks)]

    @property
    def placements(self) -> set[tuple[int, ...]]:
        """The sequences of ranks that micro-batches pass, stage after stage."""
        turns = range(lcm(*map(len, self.replicas)))
        return {tuple(self.rank_of(j, i) for j in range(self.stages)) for i in turns}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage in range(self.stages) if rank in self.ranks_of(stage))

    @property
    def steps(self) -> int:
        """The number of optimizer steps of each stage."""
        return self.micro_batches // self.step_every

    @property
    def delays(self) -> tuple[int, ...]:
        """The most steps by which a gradient of each stage is late; 0 if synchronous."""
        return tuple(shared_delay(self, [stage]) for stage in range(self.stages))

    @property
    def split(self) -> frozenset[tuple[int, int]]:
        """Stage and micro-batch of the split backwards, B and W."""
        return split_backwards(self.ranks)

    @property
    def is_lowered(self) -> bool:
        """True with messages between ranks, as `lower` adds them."""
        return any(action.peer is not None for row in self.ranks for action in row)

    @property
    def compute(self) -> Schedule:
        """The schedule without its messages, as before `lower`."""
        rows = (tuple(action for action in row if action.peer is None) for row in self.ranks)
        return replace(self, ranks=tuple(rows))

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.ranks)
        )


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers, in the whole run, of a segment's micro-batches in one pipeline.

    first: the number of the first one
    of_step: the micro-batches of a step in this pipeline
    in_all: the micro-batches of a step in all replicas of the pipeline

    >>> second_of_two = Numbering(first=10, of_step=2, in_all=4)
    >>> [second_of_two.number(index) for index in range(4)], second_of_two.index(15)
    ([10, 11, 14, 15], 3)
    """

    first: int = 0
    of_step: int = 1
    in_all: int = 1

    def number(self, index: int) -> int:
        """The number of the micro-batch that has this index in the segment."""
        step, place = divmod(index, self.of_step)
        return self.first + step * self.in_all + place

    def index(self, number: int) -> int:
        """The index of the micro-batch in the segment."""
        step, place = divmod(number - self.first, self.in_all)
        return step * self.of_step + place


def one_step(
    name: str,
    rows: Iterable[Iterable[Action]],
    rank_of_stage: Iterable[int],
    replicas: Iterable[Iterable[int]] = (),
) -> Schedule:
    """The synchronous schedule of these forwards and backwards, one list a rank; at the end each
    rank steps its stages. `replicas` as in Schedule.

    >>> print(one_step("mine", [[Action(0, "F", 0), Action(0, "B", 0)]], [0]))
    rank 0: 0F0@v0 0B0@v0 0S1
    """
    placed, replicated = tuple(rank_of_stage), tuple(map(tuple, replicas))
    ranks = []
    for rank, row in enumerate(rows):
        on = replicated or tuple((at,) for at in placed)
        steps = (Action(stage, "S", 1) for stage, of_stage in enumerate(on) if rank in of_stage)
        ranks.append(tuple(count_versions((*row, *steps))))
    micro_batches = 1 + max((a.index for row in ranks for a in row if a.kind == "F"), default=0)
    return Schedule(
        name=name,
        stages=len(placed),
        micro_batches=micro_batches,
        step_every=micro_batches,
        synchronous=True,
        ranks=tuple(ranks),
        rank_of_stage=placed,
        in_flight=count_in_flight(ranks, len(placed)),
        replicas=replicated,
    )


def count_versions(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions of one rank with each F, B and W at the version that the steps before it made.

    >>> print(*count_versions(map(parse_action, "0F0 0F1 0B0 0S1 0F2 0B1".split())))
    0F0@v0 0F1@v0 0B0@v0 0S1 0F2@v1 0B1@v1
    """
    versions: dict[int, int] = {}
    for action in actions:
        if action.kind == "S":
            versions[action.stage] = versions.get(action.stage, 0) + 1
        if action.kind in ("F", "B", "W"):
            action = action._replace(version=versions.get(action.stage, 0))
        yield action


def count_in_flight(ranks: Iterable[Iterable[Action]], stages: int) -> tuple[int, ...]:
    """For each stage, the most micro-batches that one rank holds between their forward and the end
    of their backward."""
    rows = [list(row) for row in ranks]
    split = split_backwards(rows)
    most = [0] * stages
    for row in rows:
        in_flight = [0] * stages
        for action in row:
            if action.kind == "F":
                in_flight[action.stage] += 1
            elif is_backward_end(action, split):
                in_flight[action.stage] -= 1
            most[action.stage] = max(most[action.stage], in_flight[action.stage])
    return tuple(most)


def split_backwards(ranks: Iterable[Iterable[Action]]) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of every W."""
    return frozenset(
        (action.stage, action.index) for row in ranks for action in row if action.kind == "W"
    )


def is_backward_end(action: Action, split: frozenset[tuple[int, int]]) -> bool:
    """True for the last action of a micro-batch's backward at its stage."""
    last = "W" if (action.stage, action.index) in split else "B"
    return action.kind == last


def shared_delay(schedule: Schedule, stages: Iterable[int]) -> int:
    """The number of steps by which the gradient of a parameter shared by `stages` is late.

    The holder that runs furthest ahead has done W = in_flight - 1 more forwards than backwards, so
    only the gradients of `ceil(W / k)` steps ago are complete on all stages without a stall, where
    k are the micro-batches of a step on one rank. 0 for a synchronous schedule.
    """
    if schedule.synchronous:
        return 0
    ahead = max(schedule.in_flight[stage] for stage in stages) - 1
    return -(-ahead // (schedule.step_every // len(schedule.ranks_of(0))))


def alternating(
    name: str, micro_batches: int, *, ahead: Sequence[int], step_every: int | None = None
) -> Schedule:
    """Stage j, on rank j, runs `ahead[j]` forwards, then alternates a forward and a backward, then
    runs the remaining backwards. With `step_every` it steps after each `step_every`-th backward,
    asynchronously; without, once at the end, synchronously."""
    rows = (
        alternate(stage, micro_batches, forwards, step_every or micro_batches)
        for stage, forwards in enumerate(ahead)
    )
    return Schedule(
        name=name,
        stages=len(ahead),
        micro_batches=micro_batches,
        step_every=step_every or micro_batches,
        synchronous=step_every is None,
        ranks=tuple(tuple(count_versions(row)) for row in rows),
        rank_of_stage=tuple(range(len(ahead))),
        in_flight=tuple(forwards + 1 for forwards in ahead),
    )


def alternate(stage: int, micro_batches: int, ahead: int, step_every: int) -> Iterator[Action]:
    """The actions of one rank of such a schedule."""
    for index in range(min(ahead, micro_batches)):
        yield Action(stage, "F", index)
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(stage, "F", index + ahead)
        yield Action(stage, "B", index)
        if (index + 1) % step_every == 0:
            yield Action(stage, "S", (index + 1) // step_every)
