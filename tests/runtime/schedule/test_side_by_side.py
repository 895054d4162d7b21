"""Replicas of an asynchronous pipeline as one schedule: they wait at every step, and always end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS, Delays, depths
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import DependencyRule, Player
from asyncpipe.runtime.schedule.interleaved import side_by_side
from asyncpipe.runtime.schedule.schedule import Action, Schedule, parse_action
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.validation import validate


def make(
    name: str, stages: int, every: int, *, steps: int = 3, ranks: int | None = None
) -> Schedule:
    return make_schedule(
        name, stages=stages, micro_batches=every * steps, step_every=every, ranks=ranks
    )


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_replicas_of_every_asynchronous_schedule_end_with_sends_that_block_and_that_do_not(
    name: str,
) -> None:
    for stages, every, replicas in product((1, 2, 3), (1, 2, 4), (2, 3)):
        if name == "2bw" and every < stages:
            continue
        for ranks in range(1, stages + 1):
            made = side_by_side(make(name, stages, every, ranks=ranks), replicas)
            validate(made)
            validate(made, shared_stages=[tuple(range(stages))])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_no_gradient_of_a_window_comes_between_the_last_one_before_it_and_the_step(
    name: str,
) -> None:
    # So the gradients of two windows are never in one place, however long a sum is on its way.
    for stages, every, ranks in product((2, 3, 4), (1, 3, 4), (1, 2, 4)):
        if ranks > stages or (name == "2bw" and every < stages):
            continue
        for row in make(name, stages, every, ranks=ranks).ranks:
            for stage in range(stages):
                own = [a.kind for a in row if a.stage == stage and a.kind in "BS"]
                assert own == ([*"B" * every, "S"] * 3 if own else [])


def test_a_replica_has_the_versions_of_the_one_pipeline() -> None:
    made = side_by_side(make("async-1f1b", 3, 2), 2)
    delays = Delays(depths(3), 2)
    for rank, row in enumerate(made.ranks):
        for action in row:
            own, replica = divmod(action.index, 2)
            if action.kind == "F":
                assert replica == rank // 3
                assert action.version == delays.forward(action.stage, own)


def test_a_step_waits_for_the_window_of_all_replicas() -> None:
    made = side_by_side(make("async-1f1b", 2, 2), 2)
    waits = DependencyRule(made).dependencies(parse_action("0S2"))
    assert waits == [Action(0, "B", index) for index in (4, 5, 6, 7)]
    # A parameter of both stages is late by as many steps as in one pipeline.
    tied = DependencyRule(made, shared_stages=[(0, 1)]).dependencies(parse_action("1S2"))
    assert tied == [Action(0, "B", index) for index in (0, 1, 2, 3)] + [
        Action(1, "B", index) for index in (4, 5, 6, 7)
    ]


@dataclass(frozen=True)
class SlowReplica(ActionCosts):
    """The second of two replicas is three times as slow in its first stage."""

    def of(self, action: Action, *, split: bool = False) -> float:
        is_slow = action.stage == 0 and action.kind != "S" and action.index % 2
        return ActionCosts.of(self, action, split=split) * (3 if is_slow else 1)


def test_a_slow_replica_makes_the_others_wait_and_no_more_than_that() -> None:
    alone = make("async-1f1b", 2, 2, steps=20)
    equal = ActionCosts.equal(2)
    slow = SlowReplica(equal.forward_ms, equal.backward_ms, equal.step_ms)
    both = side_by_side(alone, 2)
    assert simulate(both, equal).makespan_ms == simulate(alone, equal).makespan_ms
    timeline = simulate(both, slow)
    assert timeline.makespan_ms == pytest.approx(20 * 2 * 3 * 3, rel=0.05)
    assert timeline.idle_shares[0] == pytest.approx(2 / 3, abs=0.05)  # waits for rank 2
    assert timeline.idle_shares[2] < 0.05


def test_a_replica_that_lacks_a_backward_leaves_the_other_waiting() -> None:
    made = side_by_side(make("async-1f1b", 1, 1, steps=1), 2)
    player = Player(DependencyRule(made))
    player.rows[1] = player.rows[1][:1]
    player.run()
    assert str(player.next_action(0)) == "0S1"
    assert player.missing(parse_action("0S1")) == [Action(0, "B", 1)]
