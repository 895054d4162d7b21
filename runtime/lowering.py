"""A schedule of F, B and S + the stages' edges -> the same with the messages between ranks.

Sends follow the action that makes their tensors. Receives are posted before the sends that come
before their consumer, so that two ranks which send to each other at once both find a receive:

    0F1 0RECV_B0<1 0SEND_F1>1 0B0     rank 0 of 1f1b, two stages
    1B0 1RECV_F1<0 1SEND_B0>0 1F1     rank 1, at the same time

Where a boundary skips stages this is not early enough: the sender may be several micro-batches
ahead of the reader, and somebody must hold the tensors. The lowering plays the schedule with
sends that block, and posts a receive earlier where all ranks would otherwise stand still.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .dependencies import Edge, Player, Rule
from .schedule import Action, Schedule


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    grad_edges: Iterable[Edge] | None = None,
    ahead: int = 0,
) -> Schedule:
    """Adds SEND and RECV actions; none between stages of one rank.

    `edges` are (source, target) stages with boundary tensors between them, by default each stage
    and the next; `grad_edges` those with a gradient, by default all of them. Receives are posted
    `ahead` forwards and backwards earlier than they must.

    >>> from asyncpipe.runtime.schedules import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)))
    rank 0: 0F0@v0 0RECV_B0<1 0SEND_F0>1 0B0@v0 0S1
    rank 1: 1RECV_F0<0 1F0@v0 1B0@v0 1SEND_B0>0 1S1
    """
    rule = Rule(schedule.compute, edges, grad_edges=grad_edges)
    rows = (tuple(_with_messages(row, rule, ahead)) for row in rule.schedule.ranks)
    lowered = replace(schedule, ranks=tuple(rows))
    player = Player(Rule(lowered, rule.edges, grad_edges=rule.grad_edges), rendezvous=True)
    while not player.run() and _post_earlier(player):
        pass
    return replace(lowered, ranks=tuple(map(tuple, player.rows)))


def _with_messages(row: Sequence[Action], rule: Rule, ahead: int) -> Iterator[Action]:
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
    """Moves one receive to where its rank stands, for a sender that stands waiting for it."""
    for rank in range(len(player.rows)):
        action = player.next_action(rank)
        for receive in player.missing(action) if action and "SEND" in action.kind else ():
            receiver = player.rule.schedule.rank_of(receive.stage, receive.index)
            row, position = player.rows[receiver], player.position[receiver]
            row.insert(position, row.pop(row.index(receive, position)))
            return True
    return False
