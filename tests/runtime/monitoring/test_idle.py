"""The idle share in its parts: they add up, and each planted cause is found under its name."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.monitoring.idle import IdleSplit, RankTime, measured_costs, split_idle
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.schedule import Schedule, parse_action
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate

PARTS = [part.name for part in fields(IdleSplit)]


def schedule_of(name: str, stages: int, micro_batches: int) -> Schedule:
    steps = 8 if name == "async-1f1b" else 1
    return make_schedule(
        name, stages=stages, micro_batches=micro_batches * steps, step_every=micro_batches
    )


def in_two_parts(schedule: Schedule) -> Schedule:
    """Every backward in two parts, one right after the other."""
    rows = []
    for row in schedule.ranks:
        actions = []
        for action in row:
            actions.append(action)
            if action.kind == "B":
                actions.append(action._replace(kind="W"))
        rows.append(tuple(actions))
    return replace(schedule, ranks=tuple(rows))


def two_stages_a_rank() -> Schedule:
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1."""
    rows = (
        "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1 0S1 2S1",
        "1F0 3F0 3B0 1F1 3F1 1B0 3B1 1B1 1S1 3S1",
    )
    return Schedule(
        "two stages per rank", 4, 2, 2, True,
        tuple(tuple(map(parse_action, row.split())) for row in rows), (0, 1, 0, 1), (2, 2, 2, 1),
    )  # fmt: skip


def played(schedule: Schedule, costs: ActionCosts, **more: float) -> list[RankTime]:
    """What ranks would measure in a run that goes as simulated; `more` is added to each."""
    timeline = simulate(schedule, costs)
    split = schedule.split
    times = []
    for rank, waiting_ms in enumerate(timeline.idle_ms_a_step):
        stage_ms: dict[tuple[str, int], float] = {}
        for action in schedule.compute.ranks[rank]:
            key = action.kind, action.stage
            cost = costs.of(action, split=(action.stage, action.index) in split)
            stage_ms[key] = stage_ms.get(key, 0.0) + cost / schedule.steps
        time = RankTime(stage_ms, waiting_ms, 0.0, 0.0, 0.0)
        times.append(replace(time, **{name: getattr(time, name) + ms for name, ms in more.items()}))
    return times


SCHEDULES = [
    schedule_of("gpipe", 3, 4),
    schedule_of("1f1b", 4, 8),
    in_two_parts(schedule_of("1f1b", 3, 4)),
    schedule_of("async-1f1b", 3, 2),
    schedule_of("single", 3, 4),
    two_stages_a_rank(),
    make_schedule("interleaved", stages=4, ranks=2, micro_batches=4),
    make_schedule("zb-h1", stages=3, micro_batches=4),
    make_schedule("zb-v", stages=4, ranks=2, micro_batches=4),
]
MS = st.floats(0, 100, allow_subnormal=False)


@st.composite
def measured(draw: st.DrawFn) -> tuple[Schedule, list[RankTime]]:
    schedule = draw(st.sampled_from(SCHEDULES))
    times = []
    for row in schedule.compute.ranks:
        keys = sorted({(action.kind, action.stage) for action in row})
        stage_ms = {key: draw(st.floats(0.01, 100)) for key in keys}
        times.append(RankTime(stage_ms, *(draw(MS) for _ in range(6))))
    return schedule, times


@settings(max_examples=150)
@given(measured())
def test_the_parts_add_up_to_the_idle_share_and_none_is_negative(
    case: tuple[Schedule, list[RankTime]],
) -> None:
    schedule, times = case
    whole, by_rank = split_idle(times, schedule)
    for split, time in zip(by_rank, times, strict=True):
        assert split.total == pytest.approx(time.idle_ms / time.wall_ms, abs=1e-12)
        assert all(getattr(split, part) >= 0 for part in PARTS)
    idle, wall = (sum(getattr(time, name) for time in times) for name in ("idle_ms", "wall_ms"))
    assert whole.total == pytest.approx(idle / wall, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_costs_are_found_again_in_what_was_measured(schedule: Schedule) -> None:
    costs = ActionCosts(
        tuple(1.0 + stage for stage in range(schedule.stages)),
        tuple(3.0 + stage for stage in range(schedule.stages)),
        (0.5,) * schedule.stages,
        weight_ms=tuple(1.0 + stage / 2 for stage in range(schedule.stages)),
    )
    found = measured_costs(played(schedule, costs), schedule)
    for action in (action for row in schedule.compute.ranks for action in row):
        split = (action.stage, action.index) in schedule.split
        assert found.of(action, split=split) == pytest.approx(costs.of(action, split=split))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_have_nothing_but_the_bubble_of_the_formula(name: str) -> None:
    schedule = schedule_of(name, 4, 8)
    whole, by_rank = split_idle(played(schedule, ActionCosts.equal(4)), schedule)
    assert whole.bubble == pytest.approx(3 / 11)
    assert whole.total == pytest.approx(whole.bubble)
    assert all(split.bubble == pytest.approx(3 / 11) for split in by_rank)


def test_a_slow_stage_is_imbalance() -> None:
    costs = ActionCosts((1.0, 2.0, 1.0, 1.0), (2.0, 4.0, 2.0, 2.0), (0.0,) * 4)
    schedule = schedule_of("1f1b", 4, 16)
    times = played(schedule, costs)
    whole, by_rank = split_idle(times, schedule)
    assert whole.imbalance > whole.bubble > 0
    assert whole.communication == pytest.approx(0, abs=1e-9)
    assert by_rank[1].imbalance == pytest.approx(0, abs=1e-9)


def test_an_asynchronous_run_has_no_bubble() -> None:
    costs = ActionCosts((1.0, 2.0, 1.0), (2.0, 4.0, 2.0), (0.0,) * 3)
    schedule = schedule_of("async-1f1b", 3, 4)
    whole, by_rank = split_idle(played(schedule, costs), schedule)
    assert whole.bubble == pytest.approx(0, abs=1e-9)
    assert whole.imbalance == pytest.approx(whole.total) and whole.imbalance > 0.3
    assert by_rank[1].total == pytest.approx(0, abs=1e-9)


def test_slow_transfers_are_communication() -> None:
    schedule = schedule_of("1f1b", 2, 4)
    slow = ActionCosts.equal(2, transfer_ms=1.0)
    free = simulate(schedule, ActionCosts.equal(2)).makespan_ms
    took = simulate(schedule, slow).makespan_ms
    whole, _ = split_idle(played(schedule, slow), schedule)
    assert took > free
    assert whole.communication == pytest.approx((took - free) / took)
    assert whole.imbalance == pytest.approx(0, abs=1e-9)


def test_what_others_wait_for_a_slow_reader_is_data() -> None:
    schedule = schedule_of("1f1b", 3, 8)
    reading = ActionCosts((2.0, 1.0, 1.0), (2.0,) * 3, (0.0,) * 3)  # 1 ms of them to read
    times = played(schedule, reading)
    stage_ms = dict(times[0].stage_ms)
    stage_ms["F", 0] -= 8.0
    times[0] = replace(times[0], stage_ms=stage_ms, data_ms=8.0)
    whole, by_rank = split_idle(times, schedule)
    assert whole.communication == pytest.approx(0, abs=1e-9)
    assert by_rank[0].data == pytest.approx(8.0 / times[0].wall_ms)
    assert by_rank[2].data > 0.1


def test_what_others_wait_for_a_slow_executor_is_overhead() -> None:
    schedule = schedule_of("1f1b", 2, 8)
    times = played(schedule, ActionCosts((1.5, 1.0), (2.5, 2.0), (0.5, 0.0)))
    stage_ms = {
        key: ms - 0.5 * (8 if key[0] != "S" else 1) for key, ms in times[0].stage_ms.items()
    }
    times[0] = replace(times[0], stage_ms=stage_ms, overhead_ms=8.5)
    whole, by_rank = split_idle(times, schedule)
    assert whole.communication == pytest.approx(0, abs=1e-9)
    assert by_rank[1].overhead > 0.1


def test_what_others_wait_for_a_slow_log_is_writing() -> None:
    schedule = schedule_of("1f1b", 2, 8)
    times = played(schedule, ActionCosts((1.0, 1.0), (2.0, 2.0), (3.0, 0.0)))  # all 3 ms to write
    stage_ms = {key: ms for key, ms in times[0].stage_ms.items() if key[0] != "S"}
    times[0] = replace(times[0], stage_ms=stage_ms, writing_ms=3.0)
    whole, by_rank = split_idle(times, schedule)
    assert whole.communication == pytest.approx(0, abs=1e-9)
    assert by_rank[0].writing == pytest.approx(3.0 / times[0].wall_ms)
    assert by_rank[1].writing == pytest.approx(3.0 / times[1].wall_ms)


def test_what_replicas_wait_for_each_other_is_exchange() -> None:
    schedule = schedule_of("1f1b", 2, 8)
    times = played(schedule, ActionCosts.equal(2), exchange_ms=2.0)
    whole, _ = split_idle(times, schedule)
    assert whole.exchange == pytest.approx(2.0 / times[0].wall_ms)
    assert whole.communication == pytest.approx(0, abs=1e-9)
