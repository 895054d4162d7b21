"""Checks that a schedule is legal and ends, with an error that shows the place.

It checks that every stage has each forward, backward and step once, on its own rank; that weight
versions count the steps; that no stage holds more micro-batches than the schedule says; that
messages fit the edges. Then it runs the lists twice, with blocking and with buffered sends: a
schedule that ends both ways ends over every transport.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from ..errors import ScheduleError
from .dependencies import DependencyRule, Edge, Player, lower
from .schedule import Action, Schedule, count_in_flight

_CELLS_SHOWN = 5
_CURE = "Correct the order, or use a built-in schedule: --schedule 1f1b."


def validate(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    shared_stages: Iterable[Sequence[int]] = (),
) -> None:
    """Raises ScheduleError, with the grid and an arrow, unless the schedule can run.

    `edges`, `grad_edges` and `shared_stages` are as for `DependencyRule`. A schedule without
    messages is lowered first.
    """
    edges = None if edges is None else list(edges)
    grad_edges = None if grad_edges is None else list(grad_edges)
    _check_replicas(schedule)
    _check_actions(schedule)
    _check_versions(schedule)
    _check_in_flight(schedule)
    if not schedule.is_lowered:
        schedule = lower(schedule, edges, grad_edges=grad_edges)
    rule = DependencyRule(schedule, edges, grad_edges=grad_edges, shared_stages=shared_stages)
    _check_messages(rule)
    for rendezvous in (False, True):
        player = Player(rule, rendezvous=rendezvous)
        if not player.run():
            _raise_stuck(player)


def _check_actions(schedule: Schedule) -> None:
    numbers = {
        "F": range(schedule.micro_batches),
        "B": range(schedule.micro_batches),
        "W": range(schedule.micro_batches),
        "S": range(1, schedule.steps + 1),
    }
    if schedule.micro_batches % schedule.step_every:
        raise ScheduleError(
            f"{schedule.name}: {schedule.micro_batches} micro-batches are not a whole number "
            f"of steps of {schedule.step_every}.",
            _CURE,
        )
    if schedule.synchronous and schedule.steps != 1:
        raise ScheduleError(
            f"{schedule.name}: a synchronous schedule has one step, not {schedule.steps}.", _CURE
        )
    seen: Counter[tuple[Action, int]] = Counter()
    for rank, position, action in _walk(schedule):
        if not 0 <= action.stage < schedule.stages:
            _raise_at(schedule, rank, position, f"there are stages 0 to {schedule.stages - 1}")
        seen[_at_its_rank(schedule, action, rank)] += 1
        if rank not in (ranks := schedule.ranks_of(action.stage)):
            are = "rank" if len(ranks) == 1 else "ranks"
            problem = f"stage {action.stage} is on {are} {', '.join(map(str, ranks))}"
        elif action.kind != "S" and rank != (at := schedule.rank_of(action.stage, action.index)):
            problem = f"micro-batch {action.index} of stage {action.stage} is on rank {at}"
        elif seen[_at_its_rank(schedule, action, rank)] > 1:
            problem = "it is duplicated"
        elif action.kind in numbers and action.index not in numbers[action.kind]:
            of = numbers[action.kind]
            problem = f"{action.kind} of a stage runs from {of.start} to {of.stop - 1}"
        else:
            continue
        _raise_at(schedule, rank, position, problem)
    for stage in range(schedule.stages):
        for kind in ("F", "B", "S"):
            for action in (Action(stage, kind, index) for index in numbers[kind]):
                ranks = schedule.ranks_of(stage)
                if kind != "S":
                    ranks = (schedule.rank_of(stage, action.index),)
                for rank in ranks:
                    if not seen[_at_its_rank(schedule, action, rank)]:
                        end = len(schedule.ranks[rank]) - 1
                        _raise_at(schedule, rank, end, f"{action} is missing from rank {rank}")


def _check_replicas(schedule: Schedule) -> None:
    """Checks that replicas of single stages have one stage, and step at the end."""
    if not schedule.replicas:
        return
    ranks = sorted(rank for of_stage in schedule.replicas for rank in of_stage)
    if are_whole := len(set(map(len, schedule.replicas))) == 1:
        ranks = sorted(set(ranks))
    if ranks != list(range(len(schedule.ranks))):
        raise ScheduleError(
            f"{schedule.name}: replicas are on ranks {ranks}, but each of {len(schedule.ranks)} "
            "ranks has one stage.",
            _CURE,
        )
    if not schedule.synchronous and not are_whole:
        raise ScheduleError(
            f"{schedule.name} has no flush, at which alone replicas of single stages can step.",
            "Use a synchronous schedule: --schedule 1f1b.",
        )


def _at_its_rank(schedule: Schedule, action: Action, rank: int) -> tuple[Action, int]:
    """The key of which a schedule has one: a step on every rank of its stage, other actions on one
    rank."""
    return action.unversioned, rank if action.kind == "S" else -1


def _check_versions(schedule: Schedule) -> None:
    steps: Counter[tuple[int, int]] = Counter()
    for rank, position, action in _walk(schedule):
        place = rank, action.stage
        if action.kind == "S":
            if action.index != steps[place] + 1:
                problem = f"the next step of stage {action.stage} makes {steps[place] + 1}"
                _raise_at(schedule, rank, position, problem)
            steps[place] += 1
        elif action.kind in ("F", "B", "W") and action.version != steps[place]:
            problem = f"stage {action.stage} is at version {steps[place]} there"
            _raise_at(schedule, rank, position, problem)


def _check_in_flight(schedule: Schedule) -> None:
    for stage, most in enumerate(count_in_flight(schedule.ranks, schedule.stages)):
        if most > schedule.in_flight[stage]:
            raise ScheduleError(
                f"{schedule.name}: stage {stage} has {most} micro-batches in flight, "
                f"but declares at most {schedule.in_flight[stage]}.",
                _CURE,
            )


def _check_messages(rule: DependencyRule) -> None:
    """Every message has a reader and a writer, and one channel's arrive in the order sent."""
    channels: dict[tuple[str, int, int, int, int], list[int]] = {}
    computes = [action for _, _, action in _walk(rule.schedule) if action.peer is None]
    expected = {m for a in computes for m in (*rule.receives(a), *rule.sends(a))}
    for rank, position, action in _walk(rule.schedule):
        if action.peer is None:
            continue
        if action not in expected:
            _raise_at(rule.schedule, rank, position, "no edge between ranks carries it")
        other = rule.schedule.rank_of(action.peer, action.index)
        key = action.kind, action.stage, action.peer, rank, other
        channels.setdefault(key, []).append(action.index)
    for (kind, stage, peer, rank, other), received in channels.items():
        sent = channels.get((kind.replace("RECV", "SEND"), peer, stage, other, rank), received)
        if kind.startswith("RECV") and sorted(sent) == sorted(received) and sent != received:
            raise ScheduleError(
                f"{rule.schedule.name}: stage {stage} posts receives from stage {peer} for "
                f"micro-batches {received}, but they are sent in the order {sent}.",
                _CURE,
            )


def _raise_stuck(player: Player) -> NoReturn:
    schedule = player.rule.schedule
    rank_of = {action.unversioned: rank for rank, _, action in _walk(schedule)}
    arrows, causes = {}, []
    for rank, row in enumerate(player.rows):
        action = player.next_action(rank)
        if action is None:
            arrows[rank] = (len(row) - 1, "at its end")
            continue
        needed = player.missing(action)[0]
        other = rank_of.get(needed)
        if other is None:
            where = "which no rank has"
        elif other == rank:
            where = "which is later on the same rank"
        else:
            where = f"which rank {other} has not reached"
        arrows[rank] = (player.position[rank], f"waits for {needed}, {where}")
        # Waiting for another rank is a consequence, unless all ranks wait in a circle.
        causes.append((other not in (None, rank), rank, action))
    _, rank, action = min(causes, key=lambda cause: cause[:2])
    sends = " when a send waits for its receive" if player.rendezvous else ""
    raise ScheduleError(
        f"{schedule.name} never ends{sends}: rank {rank} stays at {action}, "
        f"which {arrows[rank][1]}.\n{_draw_arrows(schedule, arrows)}",
        _CURE,
    )


def _raise_at(schedule: Schedule, rank: int, position: int, problem: str) -> NoReturn:
    where = f"at {schedule.ranks[rank][position]} " if schedule.ranks[rank] else ""
    raise ScheduleError(
        f"{schedule.name} is not legal {where}on rank {rank}: {problem}.\n"
        f"{_draw_arrows(schedule, {rank: (position, problem)})}",
        _CURE,
    )


def _walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            yield rank, position, action


def _draw_arrows(schedule: Schedule, arrows: Mapping[int, tuple[int, str]]) -> str:
    """The ranks' lists in columns, up to the arrow; other ranks' up to the same column."""
    last = max(position for position, _ in arrows.values())
    rows: list[list[str]] = []
    for rank, row in enumerate(schedule.ranks):
        end = arrows[rank][0] + 1 if rank in arrows else min(last + 1, len(row))
        begin = max(0, end - _CELLS_SHOWN)
        rows.append(["…"] * (begin > 0) + [str(action) for action in row[begin:end]])
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(
        f"rank {rank} | {' '.join(cell.ljust(width) if cell != '…' else cell for cell in row)}"
        + (f" <-- {arrows[rank][1]}" if rank in arrows else "")
        for rank, row in enumerate(rows)
    )
