"""The built-in schedules look as published and have the closed forms of the papers."""

import inspect
from collections.abc import Iterator
from math import ceil

import pytest

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS, async_1f1b
from asyncpipe.runtime.schedule.builders import SCHEDULES, SYNCHRONOUS, VIRTUAL, make_schedule
from asyncpipe.runtime.schedule.schedule import Schedule, count_in_flight, shared_delay
from asyncpipe.runtime.schedule.text import draw_grid
from asyncpipe.runtime.schedule.validation import validate

GRIDS = {
    ("gpipe", 4, 4): """
        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3 S1
        rank 1 | .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 S1 .
        rank 2 | .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 S1 .  .
        rank 3 | .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 S1 .  .  .
    """,
    ("1f1b", 4, 4): """
        rank 0 | F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3 S1
        rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 S1 .
        rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 S1 .  .
        rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 S1 .  .  .
    """,
    ("seq", 3, 2): """
        rank 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1 S1
        rank 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 S1 .
        rank 2 | .  .  F0 B0 .  .  .  .  F1 B1 S1 .  .
    """,
    ("interleaved", 4, 4): """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3 0S1 2S1
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 1S1 3S1 .
    """,
    ("looped-bfs", 4, 2): """
        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1 0S1 2S1
        rank 1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 1S1 3S1 .
    """,
    ("zb-h1", 3, 4): """
        rank 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3 S1
        rank 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 S1
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 S1
    """,
    ("zb-h2", 2, 4): """
        rank 0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 S1 .
        rank 1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 S1
    """,
    ("zb-v", 4, 2): """
        rank 0 | 0F0 0F1 .   3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 .   0B1 0W1 0S1 3S1
        rank 1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1 1S1 2S1 .
    """,
    ("single", 2, 2): """
        rank 0 | 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0S1 1S1
    """,
}


@pytest.mark.parametrize(("name", "stages", "micro_batches"), GRIDS)
def test_a_synchronous_schedule_looks_like_its_figure(
    name: str, stages: int, micro_batches: int
) -> None:
    made = make_schedule(name, stages=stages, micro_batches=micro_batches)
    assert draw_grid(made) == inspect.cleandoc(GRIDS[name, stages, micro_batches])


def test_async_1f1b_steps_on_the_way_and_goes_on_with_the_new_version() -> None:
    assert draw_grid(async_1f1b(3, 6, step_every=2)) == inspect.cleandoc("""
        rank 0 | F0@v0 F1@v0 F2@v0 .     .     B0@v0 F3@v0 B1@v0 S1    F4@v1 B2@v1 F5@v1 B3@v1 S2    .     B4@v2 .     B5@v2 S3
        rank 1 | .     F0@v0 F1@v0 .     B0@v0 F2@v0 B1@v0 S1    F3@v1 B2@v1 F4@v1 B3@v1 S2    F5@v2 B4@v2 .     B5@v2 S3    .
        rank 2 | .     .     F0@v0 B0@v0 F1@v0 B1@v0 S1    F2@v1 B2@v1 F3@v1 B3@v1 S2    F4@v2 B4@v2 F5@v2 B5@v2 S3    .     .
    """)  # noqa: E501


def test_fewer_micro_batches_than_stages_make_a_shorter_warm_up() -> None:
    made = make_schedule("1f1b", stages=4, micro_batches=2)
    assert draw_grid(made, backward_clocks=2) == inspect.cleandoc("""
        rank 0 | F0 F1 .  .  .  .  .  .  .  .  B0 -  .  B1 -  S1
        rank 1 | .  F0 F1 .  .  .  .  .  B0 -  .  B1 -  S1 .  .
        rank 2 | .  .  F0 F1 .  .  B0 -  .  B1 -  S1 .  .  .  .
        rank 3 | .  .  .  F0 B0 -  F1 B1 -  S1 .  .  .  .  .  .
    """)


def asynchronous(stages: int) -> Iterator[tuple[Schedule, list[int]]]:
    """Every segment of up to 10 micro-batches, at three depths, with the warm-up of each stage."""
    usual = [stages - 1 - stage for stage in range(stages)]
    for warmup in (usual, [2 * forwards for forwards in usual], [min(1, w) for w in usual]):
        for micro_batches in range(1, 11):
            for step_every in range(1, micro_batches + 1):
                if micro_batches % step_every == 0:
                    yield async_1f1b(stages, micro_batches, step_every, warmup), warmup


def versions(schedule: Schedule, kind: str) -> dict[tuple[int, int], int]:
    return {
        (action.stage, action.index): action.version
        for row in schedule.ranks
        for action in row
        if action.kind == kind and action.version is not None
    }


@pytest.mark.parametrize("stages", range(1, 6))
def test_versions_have_the_closed_form_of_no_flush_1f1b(stages: int) -> None:
    for schedule, warmup in asynchronous(stages):
        k = schedule.step_every
        forward, backward = versions(schedule, "F"), versions(schedule, "B")
        for stage in range(stages):
            for t in range(schedule.micro_batches):
                assert forward[stage, t] == max(0, t - warmup[stage]) // k
                assert backward[stage, t] == t // k
                assert backward[stage, t] - forward[stage, t] <= ceil(warmup[stage] / k)


@pytest.mark.parametrize("stages", range(1, 6))
def test_async_1f1b_is_legal_at_every_depth_with_tied_ends(stages: int) -> None:
    for schedule, _ in asynchronous(stages):
        validate(schedule, shared_stages=[(0, stages - 1)])


def test_a_stage_has_one_more_in_flight_than_its_warm_up() -> None:
    for stages in range(1, 6):
        for schedule, warmup in asynchronous(stages):
            n = schedule.micro_batches
            found = count_in_flight(schedule.ranks, stages)
            assert found == tuple(min(n, forwards + 1) for forwards in warmup)


def test_a_synchronous_schedule_knows_one_version_and_one_step() -> None:
    for name in SYNCHRONOUS:
        made = make_schedule(name, stages=3, micro_batches=4)
        assert set(versions(made, "F").values()) | set(versions(made, "B").values()) == {0}
        assert made.synchronous and made.steps == 1
        assert all(row[-1].kind == "S" for row in made.ranks)


def test_the_delay_of_tied_weights_is_that_of_the_stage_furthest_ahead() -> None:
    assert shared_delay(make_schedule("1f1b", stages=4, micro_batches=8), (0, 3)) == 0
    for step_every, delay in ((1, 3), (2, 2), (3, 1), (4, 1)):
        made = async_1f1b(4, 12, step_every)
        assert shared_delay(made, (0, 3)) == delay
        assert shared_delay(async_1f1b(4, step_every, step_every), (0, 3)) == delay
    assert shared_delay(async_1f1b(4, 8, 1), (2, 3)) == 1
    assert shared_delay(async_1f1b(4, 8, 1), (3,)) == 0


def test_an_unknown_schedule_is_answered_with_the_names_and_the_nearest() -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule("async1f1b", stages=2, micro_batches=4)
    assert caught.value.what == (
        "unknown schedule 'async1f1b': there are gpipe, 1f1b, zb-h1, zb-h2, seq, single, "
        "interleaved, looped-bfs, zb-v, async-1f1b, virtual-stages-1f1b, 2bw, auto."
    )
    assert caught.value.cure == "Did you mean --schedule async-1f1b?"
    with pytest.raises(ScheduleError, match="there are gpipe") as caught:
        make_schedule("zzz", stages=2, micro_batches=4)
    assert not caught.value.cure


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "step_every", "message"),
    [
        ("1f1b", 0, 4, None, "a schedule cannot have 0 stages"),
        ("1f1b", 2, 0, None, "a schedule cannot have 0 micro-batches"),
        ("1f1b", 2, 8, 4, "one optimizer step over all 8 micro-batches, not one every 4"),
        ("async-1f1b", 2, 8, None, "needs the number of micro-batches of one optimizer step"),
        ("async-1f1b", 2, 8, 3, "8 micro-batches cannot have a step every 3: the last 2 would"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(
    name: str, stages: int, micro_batches: int, step_every: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, stages=stages, micro_batches=micro_batches, step_every=step_every)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "message", "cure"),
    [
        (
            "1f1b",
            4,
            2,
            "1f1b has one stage on every rank, but 4 stages are on 2 ranks",
            "--ranks 4",
        ),
        ("single", 4, 2, "single has all stages on one rank, but 4 stages are on", "--ranks 1"),
        ("interleaved", 5, None, "equally many stages on every rank, but 5", "--ranks 1 or 5"),
        ("looped-bfs", 6, 4, "but 6 stages are on 4 ranks", "--ranks 1 or 2 or 3 or 6"),
        ("zb-v", 6, 2, "two stages on every rank, but 6 stages are on 2", "--ranks 3, or part"),
        ("zb-v", 3, 1, "but 3 stages are on 1 rank.", "Partition again with --stages 2"),
        ("zb-v", 1, None, "but 1 stage is on 1 rank.", "Partition again with --stages 2"),
        ("interleaved", 4, 8, "4 stages cannot be shared by 8 ranks", "--ranks 1 to 4"),
        ("auto", 4, 0, "4 stages cannot be shared by 0 ranks", "--ranks 1 to 4"),
    ],
)
def test_stages_that_do_not_fit_the_ranks_are_refused(
    name: str, stages: int, ranks: int | None, message: str, cure: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, stages=stages, micro_batches=4, ranks=ranks)
    assert message in caught.value.what and caught.value.cure.startswith(cure)


@pytest.mark.parametrize("warmup", [[1], [0, 1], [1, -1]])
def test_a_warm_up_that_would_never_end_is_refused(warmup: list[int]) -> None:
    with pytest.raises(ScheduleError, match="does not fit 2 stages"):
        async_1f1b(2, 4, 1, warmup)


def test_every_schedule_is_in_one_table() -> None:
    assert {*SYNCHRONOUS, *VIRTUAL, *ASYNCHRONOUS} == set(SCHEDULES)
    assert len(SCHEDULES) == len(set(SCHEDULES))
    for name in SCHEDULES:
        made = make_schedule(name, stages=2, micro_batches=2, step_every=2)
        assert made.name == name and made.synchronous == (name not in ASYNCHRONOUS)
