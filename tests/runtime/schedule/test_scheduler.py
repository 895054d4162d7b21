"""Computed schedules: legal, timed as the simulator times them, and near the best there is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.builders import (
    computed,
    fit_auto,
    make_schedule,
    named_for,
    one_f_one_b,
)
from asyncpipe.runtime.schedule.fit import Fit, blocks_of, fit_schedule
from asyncpipe.runtime.schedule.schedule import Action, Schedule, count_versions
from asyncpipe.runtime.schedule.search import improve, merged, orders, policies, timed
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.tasks import ActivationLimit, Tasks
from asyncpipe.runtime.schedule.validation import validate
from asyncpipe.tests.support.models.small_schedules import synchronous
from asyncpipe.tests.support.oracles.exact_schedule import exact_period_ms

PLACEMENTS = ([0], [0, 1], [0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 0], [0, 0, 1, 1])


def random_costs(stages: int, random: Random, *, transfers: bool = True) -> ActionCosts:
    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(round(random.uniform(low, high), 2) for _ in range(stages))

    edges = [(j, j + 1) for j in range(stages - 1)] if transfers else []
    links = {edge: round(random.uniform(0, 2), 2) for edge in edges}
    forward, backward = each(1, 5), each(2, 9)
    weight = tuple(ms * random.uniform(0.2, 0.7) for ms in backward)
    return ActionCosts(forward, backward, each(0, 2), links, weight, each(0, 0.4))


def line_of_steps(schedule: Schedule, steps: int) -> Schedule:
    """So many steps of a synchronous schedule, one after the other on every rank."""
    m = schedule.micro_batches
    rows = []
    for row in schedule.ranks:
        line = [
            Action(a.stage, a.kind, a.index + step * (1 if a.kind == "S" else m))
            for step in range(steps)
            for a in row
        ]
        rows.append(tuple(count_versions(line)))
    return replace(
        schedule, micro_batches=steps * m, synchronous=False, step_every=m, ranks=tuple(rows)
    )


def simulated_period_ms(schedule: Schedule, costs: ActionCosts) -> float:
    """What each of the last steps of a long line takes, by the simulator."""
    line = line_of_steps(schedule, 24)
    events = simulate(line, costs).events
    last = max(e.action.index for e in events if e.action.kind == "S")
    ends = {
        step: max(e.end_ms for e in events if (e.action.kind, e.action.index) == ("S", step))
        for step in (last - 12, last)
    }
    return (ends[last] - ends[last - 12]) / 12


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_an_order_takes_what_the_simulator_says(stages: int) -> None:
    random = Random(stages)
    for micro_batches in (1, 3, 5):
        for schedule in synchronous(stages, micro_batches):
            costs = random_costs(stages, random)
            tasks = Tasks(costs, schedule.rank_of_stage, micro_batches)
            rows = tasks.rows_of(schedule)
            assert tasks.schedule_of(rows, schedule.name) == schedule
            found = tasks.run(rows, [0.0] * tasks.ranks, [0.0] * tasks.links)
            assert found is not None
            events = simulate(schedule, costs).events
            assert max(found[0]) == approx(max(event.end_ms for event in events))
            steady = tasks.steady(rows)
            assert steady is not None
            assert steady.period_ms == approx(simulated_period_ms(schedule, costs), rel=1e-6)
            assert steady.period_ms >= tasks.bound_ms - 1e-9


def test_a_step_that_waits_for_all_stages_is_timed_so_too() -> None:
    costs = random_costs(4, Random(5))
    schedule = make_schedule("interleaved", stages=4, micro_batches=4)
    tasks = Tasks(costs, schedule.rank_of_stage, 4, shared_stages=[(0, 1, 2, 3)])
    free, _ = tasks.run(tasks.rows_of(schedule), [0.0, 0.0], [0.0] * tasks.links) or ([], [])
    timeline = simulate(schedule, costs, shared_stages=[(0, 1, 2, 3)])
    assert max(free) == approx(timeline.makespan_ms)
    alone, _ = Tasks(costs, schedule.rank_of_stage, 4).run(
        tasks.rows_of(schedule), [0.0, 0.0], [0.0] * tasks.links
    ) or ([], [])
    assert min(free) > min(alone)


def test_an_order_that_never_ends_has_no_period() -> None:
    tasks = Tasks(ActionCosts.equal(2), [0, 1], 2)
    rows = tasks.rows_of(one_f_one_b(2, 2))
    assert tasks.steady([rows[0][::-1], rows[1]]) is None


def sums_in_order(schedule: Schedule) -> bool:
    """True if every stage adds to the gradients of its weights in the order of the plain loop."""
    added: dict[int, list[int]] = defaultdict(list)
    for row in schedule.ranks:
        for action in row:
            is_first_part = (action.stage, action.index) in schedule.split and action.kind == "B"
            if action.kind in ("B", "W") and not is_first_part:
                added[action.stage].append(action.index)
    return all(indices == sorted(indices) for indices in added.values())


def test_schedules_with_a_name_add_gradients_in_the_order_of_the_plain_loop() -> None:
    for stages in range(1, 6):
        for micro_batches in range(1, 7):
            for schedule in synchronous(stages, micro_batches):
                assert sums_in_order(schedule)
                tasks = Tasks(ActionCosts.equal(stages), schedule.rank_of_stage, micro_batches)
                assert all(map(tasks.is_ordered, tasks.rows_of(schedule)))


def test_an_order_that_adds_gradients_in_another_order_is_seen() -> None:
    tasks = Tasks(ActionCosts.equal(1), [0], 2)
    early, late = (
        [tasks.number(*task) for task in [(0, 0, 0), (0, 0, 1), (2, 0, 0), *rest]]
        for rest in ([(3, 0, 0), (1, 0, 1)], [(1, 0, 1), (3, 0, 0)])
    )
    assert tasks.is_ordered(early) and not tasks.is_ordered(late)
    made = tasks.schedule_of([late], "auto")
    assert not sums_in_order(made)
    assert fit_schedule(tasks, [made]).schedule != made


@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1, 0, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("may_split", [False, True])
def test_a_stage_cut_further_on_its_rank_makes_no_step_longer(
    placement: list[int], may_split: bool
) -> None:
    for seed in range(3):
        costs = random_costs(len(placement), Random(seed))
        tasks = Tasks(
            costs,
            placement,
            3,
            edges=[*pairwise(range(len(placement))), (0, len(placement) - 1)],
            shared_stages=[(0, len(placement) - 1)],
            may_split=may_split,
        )
        blocks = blocks_of(tasks)
        assert blocks is not None and len(blocks.stages) < len(placement)
        coarse, fine = (computed(each, effort=0.05) for each in (blocks.tasks, tasks))
        assert fine.period_ms <= coarse.period_ms * (1 + 1e-9)
    assert blocks_of(Tasks(ActionCosts.equal(4), [0, 1, 0, 1], 2)) is None


@given(st.sampled_from(PLACEMENTS), st.integers(1, 6), st.integers(0, 10**6), st.booleans())
@settings(max_examples=40)
def test_a_computed_schedule_is_legal_and_no_worse_than_any_named_one(
    placement: list[int], micro_batches: int, seed: int, may_split: bool
) -> None:
    costs = random_costs(len(placement), Random(seed))
    fit = fit_auto(
        costs, micro_batches, ranks=max(placement) + 1, rank_of_stage=placement, may_split=may_split
    )
    validate(fit.schedule)
    assert fit.period_ms == approx(simulated_period_ms(fit.schedule, costs), rel=1e-6)
    assert fit.period_ms >= fit.bound_ms - 1e-9
    assert may_split or not fit.schedule.split
    assert sums_in_order(fit.schedule)
    for named in named_for(placement, micro_batches):
        if may_split or not named.split:
            assert fit.period_ms <= simulated_period_ms(named, costs) * (1 + 1e-6)


CASES = [
    ([0, 1], 2, True),
    ([0, 1], 4, False),
    ([0, 1, 0, 1], 2, False),
    ([0, 1, 1, 0], 2, False),
    ([0, 0, 1, 1], 2, False),
    ([0, 1, 2], 2, True),
    ([0, 1, 2], 3, False),
    ([0, 1, 0, 1], 1, True),
]


@pytest.mark.parametrize(("placement", "micro_batches", "may_split"), CASES)
def test_small_computed_schedules_are_the_best_there_are(
    placement: list[int], micro_batches: int, may_split: bool
) -> None:
    for seed in range(2):
        costs = random_costs(len(placement), Random(seed), transfers=False)
        exact_ms = exact_period_ms(costs, placement, micro_batches, may_split=may_split)
        tasks = Tasks(costs, placement, micro_batches, may_split=may_split)
        fit = fit_schedule(tasks, named_for(placement, micro_batches))
        assert tasks.bound_ms <= exact_ms + 1e-6
        assert exact_ms - 1e-6 <= fit.period_ms <= exact_ms * 1.002


def test_the_oracle_sees_that_1f1b_is_not_the_best() -> None:
    costs = random_costs(2, Random(0), transfers=False)
    exact_ms = exact_period_ms(costs, [0, 1], 2, may_split=True)
    assert simulated_period_ms(one_f_one_b(2, 2), costs) > exact_ms * 1.002


def search_alone(tasks: Tasks, start: Schedule) -> tuple[float, float]:
    before = timed(tasks, tasks.rows_of(start))
    assert before is not None
    return before.period_ms, improve(tasks, before, 1000).period_ms


def test_the_search_improves_on_1f1b_by_putting_a_few_weights_off() -> None:
    costs = ActionCosts.equal(2)
    before, after = search_alone(Tasks(costs, [0, 1], 8), one_f_one_b(2, 8))
    assert (before, after) == (27, 24)
    whole = Tasks(costs, [0, 1], 8, may_split=False)
    assert search_alone(whole, one_f_one_b(2, 8)) == (27, 27) and whole.bound_ms == 27


def heavy_head(ranks: int, chunks: int) -> ActionCosts:
    """A GPT: an embedding of little work, equal blocks, a head worth two and a half of them."""
    stages = ranks * chunks
    blocks = (31 - 2.6) / stages
    forward = [0.1 + blocks, *[blocks] * (stages - 2), blocks + 2.5]
    backward = [2 * ms for ms in forward]
    weight = [ms / 2 for ms in backward]
    extra = [0.05 * ms for ms in backward]
    return ActionCosts(
        tuple(forward), tuple(backward), (0.5,) * stages, {}, tuple(weight), tuple(extra)
    )


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_two_ranks_with_many_stages_are_hardly_idle_and_hardly_anything_is_split(
    chunks: int,
) -> None:
    costs = heavy_head(2, chunks)
    fit = fit_auto(costs, 8, ranks=2, rank_of_stage=[j % 2 for j in range(2 * chunks)])
    whole = make_schedule("interleaved", stages=2 * chunks, micro_batches=8, ranks=2)
    assert fit.gap < 0.01
    assert fit.period_ms < 0.99 * simulated_period_ms(whole, costs)
    assert len(fit.schedule.split) <= 2 * chunks


@pytest.mark.parametrize("extra", [0.0, 0.1, 10.0])
def test_a_backward_is_split_only_where_it_pays(extra: float) -> None:
    costs = replace(ActionCosts.equal(4), weight_ms=(1.0,) * 4, split_ms=(extra,) * 4)
    fit = fit_auto(costs, 8, ranks=4)
    assert bool(fit.schedule.split) == (extra < 10)
    tasks = Tasks(costs, range(4), 8)
    rows = tasks.rows_of(fit.schedule)
    order = timed(tasks, rows)
    assert order is not None and merged(tasks, order).splits == len(fit.schedule.split)


def test_live_activations_stay_below_the_limit() -> None:
    costs = ActionCosts.equal(4)
    periods = []
    for most in (1.0, 2.0, 3.0, 4.0, 8.0):
        tasks = Tasks(costs, range(4), 8, limit=ActivationLimit((most,) * 4))
        fit = fit_schedule(tasks, named_for(range(4), 8))
        assert max(tasks.peaks(tasks.rows_of(fit.schedule))) <= most
        periods.append(fit.period_ms)
    assert periods == sorted(periods, reverse=True) and periods[0] > periods[-1] == 24
    limit = ActivationLimit((300.0, 300.0), (50.0, 50.0, 100.0, 10.0))
    sized = Tasks(costs, [0, 1, 0, 1], 8, limit=limit)
    assert sized.peaks(sized.rows_of(fit_schedule(sized).schedule))[0] <= 300


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_lowest_limit_leaves_no_rank_waiting_for_ever(placement: list[int]) -> None:
    limit = tuple(float(placement.count(rank)) for rank in range(max(placement) + 1))
    tasks = Tasks(ActionCosts.equal(len(placement)), placement, 5, limit=ActivationLimit(limit))
    for policy in policies(tasks):
        for rows in orders(tasks, policy):
            order = timed(tasks, rows)
            assert order is not None and len(sum(rows, [])) >= 2 * tasks.count


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    tasks = Tasks(ActionCosts.equal(4), [0, 1, 0, 1], 4, limit=ActivationLimit((2, 1)))
    with pytest.raises(ScheduleError, match="one micro-batch holds 2 on rank 1, whose limit is 1"):
        fit_schedule(tasks)


def test_equal_input_makes_equal_schedules() -> None:
    def made() -> Fit:
        return fit_auto(random_costs(4, Random(3)), 6, ranks=2)

    assert made() == made()


def test_auto_without_costs_takes_stages_to_be_equal() -> None:
    made = make_schedule("auto", stages=4, micro_batches=8, ranks=2)
    assert made.name == "auto" and len(made.ranks) == 2
    tasks = Tasks(ActionCosts.equal(4), made.rank_of_stage, 8)
    steady = tasks.steady(tasks.rows_of(made))
    assert steady is not None and steady.period_ms == tasks.bound_ms == 48


def test_a_search_that_leads_nowhere_ends_after_a_quarter_of_its_tries(monkeypatch) -> None:
    tried = []

    def counted(*arguments: object) -> None:
        tried.append(arguments)

    monkeypatch.setattr("asyncpipe.runtime.schedule.search.changed", counted)
    tasks = Tasks(ActionCosts.equal(2), [0, 1], 4, may_split=False)
    start = timed(tasks, tasks.rows_of(make_schedule("seq", stages=2, micro_batches=4)))
    assert start is not None and start.period_ms > tasks.bound_ms
    assert improve(tasks, start, 400) == start
    assert len(tried) == 101
