"""Schedules whose single stages have replicas: legal, never stuck, the plain model's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import DependencyRule, Player, lower
from asyncpipe.runtime.schedule.interleaved import REPLICATED, in_flight, replicated
from asyncpipe.runtime.schedule.schedule import Schedule, parse_action
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.text import from_text, to_text
from asyncpipe.runtime.schedule.validation import validate
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, skips
from asyncpipe.tests.support.oracles.async_simulation import plain_losses_and_gradients
from asyncpipe.tests.support.processes.executor import Seen

SHAPES = [shape for p in (1, 2, 3, 4) for shape in product((1, 2, 3), repeat=p)]


def ranks_of(shape: Sequence[int]) -> list[list[int]]:
    """Stage after stage."""
    return [list(range(sum(shape[:j]), sum(shape[: j + 1]))) for j in range(len(shape))]


@cache
def every_schedule() -> list[tuple[tuple[int, ...], Schedule]]:
    return [
        (shape, replicated(name, m, ranks_of(shape)))
        for shape in SHAPES
        for m in range(max(shape), 9)
        for name in REPLICATED
    ]


def test_they_are_legal_and_end_also_where_every_stage_sends_to_every_later_one() -> None:
    """With sends that block, and with sends that do not."""
    for shape, schedule in every_schedule():
        validate(schedule)
        stages = range(len(shape))
        everywhere = [(source, target) for target in stages for source in range(target)]
        validate(schedule, everywhere)
        validate(schedule, everywhere, shared_stages=[tuple(stages)])


def test_a_micro_batch_goes_forward_and_backward_on_the_replica_whose_turn_it_is() -> None:
    for shape, schedule in every_schedule():
        for rank, row in enumerate(schedule.ranks):
            (stage,) = schedule.stages_of(rank)
            turn = schedule.ranks_of(stage).index(rank)
            own = list(range(turn, schedule.micro_batches, shape[stage]))
            for kind in "FB":
                assert [a.index for a in row if a.kind == kind] == own
            assert [a.index for a in row if a.kind == "S"] == [1]


def test_one_replica_each_is_the_schedule_of_that_name() -> None:
    for stages, m, name in product((1, 2, 4), (1, 5, 8), REPLICATED):
        plain = make_schedule(name, stages=stages, micro_batches=m)
        made = replicated(name, m, ranks_of([1] * stages))
        assert replace(made, replicas=()) == plain


def test_a_replica_holds_the_ranks_from_its_stage_on_among_its_replicas() -> None:
    # PipeDream, section 3.2: ceil(workers / replicas of the input stage) at the first.
    assert in_flight("1f1b", 99, (2, 1)) == (2, 1)
    assert in_flight("1f1b", 99, (7, 1)) == (2, 1)
    assert in_flight("1f1b", 99, (1, 1, 1, 1)) == (4, 3, 2, 1)
    assert in_flight("1f1b", 99, (1, 3)) == (4, 1)
    for shape, schedule in every_schedule():
        assert schedule.in_flight == in_flight(schedule.name, schedule.micro_batches, shape)


def test_fewer_in_flight_than_that_would_wait_in_a_circle_or_take_longer() -> None:
    held = in_flight("1f1b", 12, (1, 2, 1))
    assert held == (4, 2, 1)
    made = replicated("1f1b", 12, ranks_of((1, 2, 1)))
    shallow = made.ranks[0]
    # One forward less ahead: the second of a pair changes places with the backward behind it.
    first = next(at for at, action in enumerate(shallow) if action.kind == "B")
    row = [*shallow[: first - 1], shallow[first], shallow[first - 1], *shallow[first + 1 :]]
    costs = ActionCosts((1.0, 2.0, 1.0), (2.0, 4.0, 2.0), (0.0,) * 3)
    later = simulate(replace(made, ranks=(tuple(row), *made.ranks[1:])), costs)
    assert later.makespan_ms > simulate(made, costs).makespan_ms


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1, 3), (3, 1), (2, 1, 1), (1, 1, 2)])
def test_replicas_of_a_slow_stage_shorten_the_step_as_many_times(shape: tuple[int, ...]) -> None:
    forward = tuple(map(float, shape))
    costs = ActionCosts(forward, tuple(2 * ms for ms in forward), (0.0,) * len(shape))
    made = replicated("1f1b", 24, ranks_of(shape))
    # Balanced: all ranks compute all the time, but while the pipeline fills and drains.
    fill_ms = 3 * sum(shape)
    assert 24 * 3 <= simulate(made, costs).makespan_ms <= 24 * 3 + fill_ms
    alone = simulate(make_schedule("1f1b", stages=len(shape), micro_batches=24), costs)
    assert alone.makespan_ms >= max(shape) * 24 * 3


def test_tensors_between_two_ranks_follow_one_another_and_others_do_not_wait_for_them() -> None:
    costs = replace(ActionCosts.equal(2, forward_ms=1, backward_ms=1), transfer_ms={(0, 1): 5.0})
    two = simulate(replicated("gpipe", 4, [[0, 1], [2]]), costs)
    one = simulate(make_schedule("gpipe", stages=2, micro_batches=4), costs)
    starts = [event.start_ms for event in two.of_rank(2) if event.action.kind == "F"]
    assert starts == [6, 7, 11, 12]  # of two links, each with one tensor after the other
    assert two.makespan_ms < one.makespan_ms


def test_what_cannot_be_replicated_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no replicas under zb-h1"):
        replicated("zb-h1", 4, [[0, 1], [2]])
    with pytest.raises(ScheduleError, match="2 micro-batches are too few for a stage with 3"):
        replicated("1f1b", 2, [[0, 1, 2], [3]])
    made = replicated("1f1b", 4, [[0, 1], [2]])
    with pytest.raises(ScheduleError, match="each of 3 ranks has one stage"):
        validate(replace(made, replicas=((0, 1), (1,))))
    with pytest.raises(ScheduleError, match="replicas of single stages can step"):
        validate(replace(made, synchronous=False))


def test_a_micro_batch_on_another_replica_is_shown_with_an_arrow() -> None:
    made = replicated("gpipe", 4, [[0, 1], [2]])
    first, second, *rest = made.ranks
    swapped = (*second[:-1], second[-1]), (*first[:-1], first[-1])
    with pytest.raises(ScheduleError, match="micro-batch 1 of stage 0 is on rank 1") as error:
        validate(replace(made, ranks=(*swapped, *rest)))
    assert "<--" in str(error.value)
    with pytest.raises(ScheduleError, match="0S1 is missing from rank 1"):
        validate(replace(made, ranks=(first, second[:-1], *rest)))


def test_replicas_survive_the_text_file() -> None:
    for _, schedule in every_schedule()[::7]:
        found = from_text(to_text(schedule), (), grad_edges=())
        ones = all(len(ranks) == 1 for ranks in schedule.replicas)
        assert found == (replace(schedule, replicas=()) if ones else schedule)


def test_a_step_waits_for_the_gradients_of_all_replicas() -> None:
    schedule = replicated("1f1b", 4, [[0, 1], [2]])
    needed = DependencyRule(schedule).dependencies(parse_action("0S1"))
    assert sorted(map(str, needed)) == ["0B0", "0B1", "0B2", "0B3"]
    player = Player(DependencyRule(lower(schedule)))
    assert player.run()


MODELS = {
    "blocks with dropout": lambda: chain(3, dropout=0.25),
    "skips": skips,
}


def train(
    model: HandModel, name: str, shape: Sequence[int], samples: Sequence[int]
) -> tuple[dict[int, Tensor], dict[Any, Tensor], Any]:
    """Losses and the sums of the replicas' gradients, of all ranks in this thread."""
    made = replicated(name, len(samples), ranks_of(shape))
    schedule = lower(made, forward_edges(model.plan), grad_edges=gradient_edges(model.plan))
    hub = LocalHub(len(schedule.ranks))
    seen, pipelines = [], []
    for rank in range(len(schedule.ranks)):
        (stage,) = schedule.stages_of(rank)
        module = model.build()[stage].double()
        seen.append(Seen(modules={stage: module}))
        pipelines.append(
            Executor(
                model.plan,
                {stage: module},
                hub.transport(rank),
                rank_of_stage=schedule.rank_of_stage,
                replicas=schedule.replicas,
                seed=3,
            )
        )
    sizes = [{**model.plan.sizes, "batch": count} for count in samples]

    def inputs(index: int) -> dict[str, Tensor]:
        return {key: value[: samples[index]] for key, value in model.make_inputs(index).items()}

    for _ in range(2):  # the second time over the same channels
        for each in seen:
            each.gradients.clear()
        run_together(
            [
                pipeline.steps(schedule, inputs, observer=each, sizes=sizes)
                for pipeline, each in zip(pipelines, seen, strict=True)
            ]
        )
    losses: dict[int, Tensor] = {}
    total: dict[Any, Tensor] = {}
    for each in seen:
        losses |= each.losses
        (gradients,) = each.gradients.values()
        for key, gradient in gradients.items():
            total[key] = total.get(key, torch.zeros_like(gradient)) + gradient
    return losses, total, inputs


@pytest.mark.parametrize("name", REPLICATED)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_of_the_plain_model(model: str, name: str) -> None:
    for factor in (1, 2):
        made = MODELS[model]()
        stages = len(made.stages)
        shapes = [[1 + (j == at) * factor for j in range(stages)] for at in range(stages)]
        for shape in [*shapes, [2] * (stages - 1) + [3]]:
            losses, total, _ = train(made, name, shape, [made.plan.sizes["batch"]] * 7)
            modules = made.build()
            expected, gradients = plain_losses_and_gradients(made, modules, range(7), seed=3)
            assert {i: float(loss) for i, loss in losses.items()} == pytest.approx(
                {i: float(loss) for i, loss in expected.items()}, rel=1e-12
            )
            assert total.keys() == gradients.keys()
            for key, gradient in gradients.items():
                torch.testing.assert_close(total[key], gradient, rtol=1e-11, atol=1e-13)
