"""The simulated time is that of the closed forms, of a flow shop, and within the bounds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.plan.forecast import few_micro_batches_warning
from asyncpipe.runtime.schedule.asynchronous import ASYNCHRONOUS, async_1f1b
from asyncpipe.runtime.schedule.builders import gpipe, make_schedule, one_f_one_b, seq, single
from asyncpipe.runtime.schedule.dependencies import Edge, lower
from asyncpipe.runtime.schedule.schedule import Action, Schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts, Event, Timeline, simulate
from asyncpipe.tests.support.models.small_schedules import names_for, ranks_for

F_MS, B_MS, S_MS = 1.0, 1.7, 0.3


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micro_batches", range(1, 11))
def test_equal_stages_take_the_closed_forms(stages: int, micro_batches: int) -> None:
    p, m, pair = stages, micro_batches, F_MS + B_MS
    costs = ActionCosts.equal(p, forward_ms=F_MS, backward_ms=B_MS)
    flushed, serial = (m + p - 1) * pair, m * p * pair
    times = {"gpipe": flushed, "1f1b": flushed, "seq": serial, "single": serial}
    idles = {"gpipe": (p - 1) / (m + p - 1), "1f1b": (p - 1) / (m + p - 1), "seq": (p - 1) / p}
    held = {
        "gpipe": (m,) * p,
        "1f1b": tuple(min(m, p - j) for j in range(p)),
        "seq": (1,) * p,
        "single": (1,) * p,
    }
    for name, time in times.items():
        made = make_schedule(name, stages=p, micro_batches=m)
        timeline = simulate(made, costs)
        assert timeline.makespan_ms == approx(time)
        assert timeline.idle_share == approx(idles.get(name, 0))
        assert timeline.peak_in_flight == held[name] == made.in_flight
    for step_every in (k for k in range(1, m + 1) if m % k == 0):
        timeline = simulate(async_1f1b(p, m, step_every), costs)
        assert timeline.makespan_ms == approx(flushed)
        assert timeline.peak_in_flight == held["1f1b"]


def test_the_step_of_a_flushed_schedule_is_on_top() -> None:
    costs = ActionCosts.equal(4, forward_ms=F_MS, backward_ms=B_MS, step_ms=S_MS)
    pair = F_MS + B_MS
    for made, time in (
        (gpipe(4, 8), 11 * pair + S_MS),
        (one_f_one_b(4, 8), 11 * pair + S_MS),
        (seq(4, 8), 32 * pair + S_MS),
        (single(4, 8), 32 * pair + 4 * S_MS),
    ):
        assert simulate(made, costs).makespan_ms == approx(time)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("step_every", [1, 2, 5, 8])
def test_without_a_flush_equal_stages_are_never_idle_in_the_steady_state(
    stages: int, step_every: int
) -> None:
    made = async_1f1b(stages, 10 * step_every + 2 * stages * step_every, step_every)
    costs = ActionCosts.equal(stages, forward_ms=F_MS, backward_ms=B_MS, step_ms=S_MS)
    timeline = simulate(made, costs)
    assert timeline.steady_idle_share == approx(0, abs=1e-9)
    assert timeline.idle_share > 0 or stages == 1
    tied = simulate(made, costs, shared_stages=[(0, stages - 1)])
    assert tied.steady_idle_share == approx(0, abs=1e-9)


def test_tied_gradients_that_do_not_come_late_make_the_stages_wait() -> None:
    costs = ActionCosts.equal(4)
    prompt = async_1f1b(4, 40, 1)
    in_time = simulate(prompt, costs, shared_stages=[(0, 3)])
    hasty = replace(prompt, in_flight=(1, 1, 1, 1))
    assert in_time.steady_idle_share == approx(0, abs=1e-9)
    assert simulate(hasty, costs, shared_stages=[(0, 3)]).steady_idle_share > 0.1


def test_without_a_flush_the_slowest_stage_sets_the_pace() -> None:
    costs = ActionCosts((1, 1, 2, 1), (2, 2, 3, 2), (0.5,) * 4)
    timeline = simulate(async_1f1b(4, 160, 8), costs)
    work = [8 * 3 + 0.5, 8 * 5 + 0.5]
    assert timeline.steady_idle_share == approx(3 / 4 * (1 - work[0] / work[1]))


def test_too_short_a_segment_has_no_steady_state() -> None:
    timeline = simulate(async_1f1b(4, 8, 8), ActionCosts.equal(4))
    assert timeline.steady_idle_share == timeline.idle_share == approx(3 / 11)
    assert simulate(gpipe(4, 8), ActionCosts.equal(4)).steady_idle_share == approx(3 / 11)


def test_slow_links_are_hidden_by_a_deeper_warm_up() -> None:
    costs = ActionCosts.equal(3, transfer_ms=0.4)
    usual = simulate(async_1f1b(3, 60, 2), costs)
    deeper = simulate(async_1f1b(3, 60, 2, warmup=[4, 2, 0]), costs)
    assert usual.steady_idle_share > 0.1
    assert deeper.steady_idle_share == approx(0, abs=1e-9)


MS = st.floats(0.01, 10)


def all_costs(stages: int) -> st.SearchStrategy[ActionCosts]:
    each = st.tuples(*[MS] * stages)
    transfers = st.dictionaries(
        st.sampled_from([(s, t) for t in range(stages) for s in range(t)] or [(0, 0)]), MS
    )
    return st.builds(ActionCosts, each, each, each, transfers)


CASES = st.integers(1, 4).flatmap(
    lambda stages: st.tuples(
        st.sampled_from(names_for(stages)).flatmap(lambda name: schedules(name, stages)),
        all_costs(stages),
    )
)


def schedules(name: str, stages: int) -> st.SearchStrategy[Schedule]:
    if name in ASYNCHRONOUS:
        return st.tuples(st.integers(1, 4), st.integers(1, 4)).map(
            lambda counts: async_1f1b(stages, counts[0] * counts[1], counts[1])
        )
    return st.tuples(st.integers(1, 8), st.sampled_from(ranks_for(name, stages))).map(
        lambda given: make_schedule(name, stages=stages, micro_batches=given[0], ranks=given[1])
    )


def flow_shop_ms(jobs: int, machines_ms: list[float]) -> float:
    """When the last of equal jobs leaves the last machine, each taking them in order."""
    free_ms = [0.0] * len(machines_ms)
    end_ms = 0.0
    for _ in range(jobs):
        end_ms = 0.0
        for machine, cost_ms in enumerate(machines_ms):
            end_ms = free_ms[machine] = max(end_ms, free_ms[machine]) + cost_ms
    return end_ms


@given(all_costs(3), st.integers(1, 8))
def test_gpipe_is_two_flow_shops_over_stages_and_links(
    costs: ActionCosts, micro_batches: int
) -> None:
    link = [costs.transfer_ms.get(edge, 0.0) for edge in ((0, 1), (1, 2))]
    f, b, s = costs.forward_ms, costs.backward_ms, costs.step_ms
    forward = flow_shop_ms(micro_batches, [f[0], link[0], f[1], link[1], f[2]])
    backward = flow_shop_ms(micro_batches, [b[2], link[1], b[1], link[0], b[0]])
    timeline = simulate(gpipe(3, micro_batches), costs)
    last = max(e.end_ms for e in timeline.events if e.action.kind == "F")
    assert last == approx(forward)
    ends = [
        flow_shop_ms(micro_batches, [b[2]]) + s[2],
        flow_shop_ms(micro_batches, [b[2], link[1], b[1]]) + s[1],
        backward + s[0],
    ]
    assert timeline.makespan_ms == approx(forward + max(ends))


def work_of_rank(schedule: Schedule, costs: ActionCosts) -> list[float]:
    split = schedule.split
    return [
        sum(costs.of(action, split=(action.stage, action.index) in split) for action in row)
        for row in schedule.ranks
    ]


@given(CASES)
def test_the_makespan_is_between_its_bounds(case: tuple[Schedule, ActionCosts]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    work = work_of_rank(schedule, costs)
    p, m = schedule.stages, schedule.micro_batches
    there_and_back = sum(
        costs.of(Action(stage, kind, 0), split=(stage, 0) in schedule.split)
        for stage in range(p)
        for kind in ("F", "B")
    )
    transfers = sum(costs.transfer_ms.get((j, j + 1), 0) for j in range(p - 1))
    assert timeline.makespan_ms >= max(work) - 1e-6
    assert timeline.makespan_ms >= there_and_back - 1e-6
    assert timeline.makespan_ms <= sum(work) + 2 * m * transfers + 1e-6
    busy = [sum(e.end_ms - e.start_ms for e in timeline.of_rank(r)) for r in range(timeline.ranks)]
    assert busy == approx(work)
    assert timeline.idle_share == approx(1 - sum(work) / len(work) / timeline.makespan_ms)


@given(CASES, st.data())
def test_a_slower_action_never_makes_the_whole_faster(
    case: tuple[Schedule, ActionCosts], data: st.DataObject
) -> None:
    schedule, costs = case
    more = data.draw(st.tuples(*[st.floats(0, 5)] * schedule.stages))
    slower = ActionCosts(
        tuple(ms + extra for ms, extra in zip(costs.forward_ms, more, strict=True)),
        tuple(ms + extra for ms, extra in zip(costs.backward_ms, reversed(more), strict=True)),
        tuple(ms + extra for ms, extra in zip(costs.step_ms, more, strict=True)),
        {edge: ms + sum(more) for edge, ms in costs.transfer_ms.items()},
    )
    before, after = simulate(schedule, costs), simulate(schedule, slower)
    assert after.makespan_ms >= before.makespan_ms - 1e-6


@given(CASES, st.integers(1, 3))
def test_fewer_processors_share_the_work_without_losing_any(
    case: tuple[Schedule, ActionCosts], processors: int
) -> None:
    schedule, costs = case
    alone, shared = simulate(schedule, costs), simulate(schedule, costs, processors=processors)
    work = sum(work_of_rank(schedule, costs))
    assert shared.makespan_ms >= alone.makespan_ms - 1e-6
    assert shared.makespan_ms >= work / processors - 1e-6
    if processors == 1 and not costs.transfer_ms:
        assert shared.makespan_ms == approx(work)
    if processors >= len(schedule.ranks):
        assert shared.makespan_ms == approx(alone.makespan_ms)


def test_two_actions_on_one_processor_take_turns_at_every_moment() -> None:
    """F0 of both stages alone, then 1F0 and 0F1 share: the shorter ends after twice its time."""
    made = gpipe(2, 2)
    timeline = simulate(made, ActionCosts((1, 3), (1, 1), (0, 0)), processors=1, grad_edges=[])
    spans = {str(e.action.unversioned): (e.start_ms, e.end_ms) for e in timeline.events}
    assert spans["0F0"] == (0, 1)
    assert spans["0F1"] == (1, 3)
    assert spans["1F0"][0] == 1
    # 1 ms of 1F0 is done at 3; stage 0's backwards run beside it from there.
    assert spans["0B0"] == (3, 5) and spans["0B1"] == (5, 7)
    assert spans["1F0"][1] == 7


@given(CASES)
@settings(max_examples=20)
def test_messages_of_a_lowered_schedule_take_no_time(case: tuple[Schedule, ActionCosts]) -> None:
    schedule, costs = case
    assert simulate(lower(schedule), costs) == simulate(schedule, costs)


@given(CASES)
def test_no_action_begins_before_what_it_waits_for(case: tuple[Schedule, ActionCosts]) -> None:
    schedule, costs = case
    spans = {e.action.unversioned: e for e in simulate(schedule, costs).events}
    for action, event in spans.items():
        if action.kind == "F" and action.stage > 0:
            before = Action(action.stage - 1, "F", action.index)
        elif action.kind == "B" and action.stage < schedule.stages - 1:
            before = Action(action.stage + 1, "B", action.index)
        else:
            continue
        edge: Edge = (min(before.stage, action.stage), max(before.stage, action.stage))
        remote = schedule.rank_of_stage[before.stage] != schedule.rank_of_stage[action.stage]
        arrived = spans[before].end_ms + remote * costs.transfer_ms.get(edge, 0)
        assert event.start_ms >= arrived - 1e-9


def test_a_schedule_that_never_ends_is_shown() -> None:
    rows = one_f_one_b(2, 1).ranks
    backwards = (rows[0][1], rows[0][0], rows[0][2])
    stuck = replace(one_f_one_b(2, 1), ranks=(backwards, rows[1]))
    with pytest.raises(ScheduleError, match="1f1b never ends: rank 0 stays at 0B0@v0"):
        simulate(stuck, ActionCosts.equal(2))


def test_measured_events_are_read_like_simulated_ones() -> None:
    spans = [(0, "F", 100, 101), (0, "B", 103, 105), (1, "F", 101, 102), (1, "B", 102, 103)]
    events = tuple(
        Event(rank, Action(rank, kind, 0), start, end)  # type: ignore[arg-type]
        for rank, kind, start, end in spans
    )
    timeline = Timeline("measured", 2, events)
    assert timeline.makespan_ms == 5
    assert timeline.idle_shares == approx((0.4, 0.6))
    assert timeline.peak_in_flight == (1, 1)


def test_nothing_takes_no_time() -> None:
    timeline = Timeline("nothing", 1, ())
    assert (timeline.makespan_ms, timeline.idle_share, timeline.peak_in_flight) == (0, 0, ())


def test_few_micro_batches_are_warned_about_with_the_number_that_helps() -> None:
    assert few_micro_batches_warning("gpipe", ranks=4, micro_batches=1) == (
        "with 1 micro-batch, gpipe leaves 4 ranks idle 75% of the time. "
        "Use --micro-batches 16 to reduce this to 16%."
    )
    for name, ranks, micro_batches in (
        ("1f1b", 4, 8),
        ("1f1b", 1, 1),
        ("seq", 4, 2),
        ("single", 4, 1),
        ("async-1f1b", 4, 1),
    ):
        assert few_micro_batches_warning(name, ranks=ranks, micro_batches=micro_batches) is None


def test_a_backward_that_skips_a_stage_comes_over_its_own_link() -> None:
    costs = ActionCosts.equal(3)
    skipping = ActionCosts(costs.forward_ms, costs.backward_ms, costs.step_ms, {(0, 2): 10})
    edges = [(0, 1), (1, 2), (0, 2)]
    plain, skipped = (simulate(gpipe(3, 1), c, edges).makespan_ms for c in (costs, skipping))
    assert plain == approx(9)
    # forward 1 + 10 + 1, backward 2 + 10 + 2
    assert skipped == approx(26)


def test_the_clock_keeps_whole_numbers_whole() -> None:
    timeline = simulate(one_f_one_b(4, 8), ActionCosts.equal(4))
    ends = sorted({event.end_ms for event in timeline.events})
    assert ends == [float(round(end)) for end in ends]
    assert timeline.makespan_ms == 33
