"""Every built-in schedule is legal and ends; planted faults are found and shown."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.builders import gpipe, make_schedule, one_f_one_b
from asyncpipe.runtime.schedule.dependencies import DependencyRule, Edge, Player, lower
from asyncpipe.runtime.schedule.schedule import Action, Schedule, count_versions, parse_action
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate
from asyncpipe.runtime.schedule.validation import validate
from asyncpipe.tests.support.models.small_schedules import small_schedules

Rows = list[list[Action]]


def edge_sets(stages: int) -> list[list[Edge]]:
    """A chain, a chain with the longest skip, all pairs, and the longest skip alone."""
    chain = [(stage, stage + 1) for stage in range(stages - 1)]
    longest = [(0, stages - 1)] if stages > 2 else []
    pairs = [(source, target) for target in range(stages) for source in range(target)]
    return [chain, chain + longest, pairs, longest]


@pytest.mark.parametrize("stages", range(1, 6))
def test_every_small_schedule_is_legal_and_never_stuck(stages: int) -> None:
    for schedule in small_schedules(stages):
        for edges in edge_sets(stages):
            validate(schedule, edges)


@pytest.mark.parametrize("stages", range(2, 6))
def test_receives_posted_ahead_and_gradients_on_few_edges_are_legal(stages: int) -> None:
    for schedule in small_schedules(stages):
        for ahead in (1, 3):
            validate(lower(schedule, ahead=ahead))
        chain, with_skip, *_ = edge_sets(stages)
        validate(schedule, with_skip, grad_edges=chain)
        validate(schedule, chain, grad_edges=[])


@pytest.mark.parametrize("stages", range(2, 6))
def test_tied_weights_between_any_stages_make_nobody_wait_for_ever(stages: int) -> None:
    for schedule in small_schedules(stages):
        validate(schedule, shared_stages=[(0, stages - 1), (0, 1), tuple(range(stages))])


def test_the_stages_of_one_rank_have_no_messages() -> None:
    assert not lower(make_schedule("single", stages=4, micro_batches=3)).is_lowered


def test_lowering_adds_nothing_but_messages() -> None:
    made = async_1f1b(4, 8, 2)
    assert lower(made, [(0, 1), (1, 2), (2, 3), (0, 3)]).compute == made


def test_receives_are_posted_before_the_sends_that_come_before_their_reader() -> None:
    assert str(lower(one_f_one_b(3, 2))) == inspect.cleandoc("""
        rank 0: 0F0@v0 0SEND_F0>1 0F1@v0 0RECV_B0<1 0SEND_F1>1 0B0@v0 0RECV_B1<1 0B1@v0 0S1
        rank 1: 1RECV_F0<0 1F0@v0 1RECV_F1<0 1SEND_F0>2 1F1@v0 1RECV_B0<2 1SEND_F1>2 1B0@v0 1RECV_B1<2 1SEND_B0>0 1B1@v0 1SEND_B1>0 1S1
        rank 2: 2RECV_F0<1 2F0@v0 2B0@v0 2RECV_F1<1 2SEND_B0>1 2F1@v0 2B1@v0 2SEND_B1>1 2S1
    """)  # noqa: E501


def test_receives_can_be_posted_ahead() -> None:
    assert str(lower(gpipe(2, 3), grad_edges=[], ahead=1)).splitlines()[1] == (
        "rank 1: 1RECV_F0<0 1RECV_F1<0 1F0@v0 1RECV_F2<0 1F1@v0 1F2@v0 1B0@v0 1B1@v0 1B2@v0 1S1"
    )


def test_several_edges_into_one_stage_are_several_messages() -> None:
    lowered = lower(gpipe(3, 1), [(0, 1), (0, 2), (1, 2)], grad_edges=[(0, 1), (1, 2)])
    assert str(lowered) == inspect.cleandoc("""
        rank 0: 0F0@v0 0RECV_B0<1 0SEND_F0>1 0SEND_F0>2 0B0@v0 0S1
        rank 1: 1RECV_F0<0 1F0@v0 1RECV_B0<2 1SEND_F0>2 1B0@v0 1SEND_B0>0 1S1
        rank 2: 2RECV_F0<0 2RECV_F0<1 2F0@v0 2B0@v0 2SEND_B0>1 2S1
    """)


def test_a_step_waits_for_the_window_of_its_own_and_a_past_one_of_the_other_holders() -> None:
    rule = DependencyRule(async_1f1b(3, 8, 2), shared_stages=[(0, 2)])
    assert list(map(str, rule.dependencies(Action(2, "S", 1)))) == ["2B0", "2B1"]
    assert list(map(str, rule.dependencies(Action(2, "S", 2)))) == ["0B0", "0B1", "2B2", "2B3"]
    assert list(map(str, rule.dependencies(Action(1, "S", 2)))) == ["1B2", "1B3"]
    flushed = DependencyRule(one_f_one_b(3, 2), shared_stages=[(0, 2)])
    assert list(map(str, flushed.dependencies(Action(0, "S", 1)))) == ["0B0", "0B1", "2B0", "2B1"]


def change(schedule: Schedule, fault: Callable[[Rows], object]) -> Schedule:
    rows = [list(row) for row in schedule.ranks]
    fault(rows)
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def swap(rows: Rows, rank: int, one: int, other: int) -> None:
    rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]


def error_of(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert "--schedule 1f1b" in caught.value.cure
    return caught.value.what


def test_swapped_actions_are_found_where_they_are() -> None:
    assert error_of(change(one_f_one_b(2, 2), lambda rows: swap(rows, 1, 0, 1))) == (
        inspect.cleandoc("""
        1f1b never ends: rank 1 stays at 1B0@v0, which waits for 1F0, which is later on the same rank.
        rank 0 | … 0SEND_F0>1 0F1@v0     0RECV_B0<1 0SEND_F1>1 0B0@v0     <-- waits for 1SEND_B0>0, which rank 1 has not reached
        rank 1 | 1RECV_F0<0 1RECV_F1<0 1B0@v0     <-- waits for 1F0, which is later on the same rank
        """)  # noqa: E501
    )


@pytest.mark.parametrize("lost", ["0SEND_F1>1", "1RECV_F1<0"])
def test_a_dropped_message_is_found_by_its_reader(lost: str) -> None:
    lowered = lower(one_f_one_b(2, 2))
    rank = int(lost[0])
    dropped = change(lowered, lambda rows: rows[rank].remove(parse_action(lost)))
    what = error_of(dropped)
    assert what.startswith(
        f"1f1b never ends: rank 1 stays at 1F1@v0, which waits for {lost}, which no rank has.\n"
    )
    assert f"1F1@v0     <-- waits for {lost}, which no rank has" in what.splitlines()[2]


def test_a_wrong_version_is_found() -> None:
    def fault(rows: Rows) -> None:
        assert str(rows[0][6]) == "0F3@v1"
        rows[0][6] = rows[0][6]._replace(version=0)

    assert error_of(change(async_1f1b(2, 4, 2), fault)) == inspect.cleandoc("""
        async-1f1b is not legal at 0F3@v0 on rank 0: stage 0 is at version 1 there.
        rank 0 | … 0B0@v0 0F2@v0 0B1@v0 0S1    0F3@v0 <-- stage 0 is at version 1 there
        rank 1 | … 1F1@v0 1B1@v0 1S1    1F2@v1 1B2@v1
    """)


def test_sends_that_block_on_each_other_are_found_though_buffers_would_hide_them() -> None:
    rows = (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0S1",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1S1",
    )
    crossed = replace(
        one_f_one_b(2, 2),
        ranks=tuple(tuple(count_versions(map(parse_action, row.split()))) for row in rows),
    )
    assert Player(DependencyRule(crossed)).run()
    assert error_of(crossed) == inspect.cleandoc("""
        1f1b never ends when a send waits for its receive: rank 0 stays at 0SEND_F1>1, which waits for 1RECV_F1<0, which rank 1 has not reached.
        rank 0 | 0F0@v0     0SEND_F0>1 0F1@v0     0SEND_F1>1 <-- waits for 1RECV_F1<0, which rank 1 has not reached
        rank 1 | 1RECV_F0<0 1F0@v0     1B0@v0     1SEND_B0>0 <-- waits for 0RECV_B0<1, which rank 0 has not reached
    """)  # noqa: E501


def with_weights() -> Schedule:
    return make_schedule("zb-h1", stages=2, micro_batches=2)


WEIGHT_FAULTS: list[tuple[Callable[[Rows], object], str]] = [
    (lambda rows: swap(rows, 0, 2, 3), "rank 0 stays at 0W0@v0, which waits for 0B0, which is la"),
    (lambda rows: rows[0].remove(parse_action("0B1@v0")), "0B1 is missing from rank 0"),
    (lambda rows: rows[0].append(parse_action("0W1@v0")), "it is duplicated"),
    (lambda rows: rows[0].append(parse_action("0W2@v0")), "W of a stage runs from 0 to 1"),
    (lambda rows: swap(rows, 1, 5, 6), "not legal at 1W1@v0 on rank 1: stage 1 is at version 1"),
    (lambda rows: rows[1].remove(parse_action("1B0@v0")), "1B0 is missing from rank 1"),
]


@pytest.mark.parametrize(("fault", "message"), WEIGHT_FAULTS)
def test_a_backward_in_two_parts_has_both_in_their_order(
    fault: Callable[[Rows], object], message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(change(with_weights(), fault))
    assert message in caught.value.what


def test_a_w_that_is_not_there_makes_a_backward_whole_which_others_wait_for() -> None:
    lost = change(with_weights(), lambda rows: rows[1].remove(parse_action("1W0@v0")))
    validate(lost)
    assert lost.split == with_weights().split - {(1, 0)}
    late, soon = (simulate(made, ActionCosts.equal(2)).events for made in (lost, with_weights()))
    ends = [{str(e.action): e.end_ms for e in events}["0B0@v0"] for events in (late, soon)]
    assert ends == [5, 4]


FAULTS: list[tuple[Callable[[Rows], object], str]] = [
    (lambda rows: rows[1].pop(), "1S1 is missing from rank 1"),
    (lambda rows: rows[0].remove(parse_action("0B1@v0")), "0B1 is missing from rank 0"),
    (lambda rows: rows[0].append(rows[0][0]), "not legal at 0F0@v0 on rank 0: it is duplicated"),
    (lambda rows: rows[0].append(parse_action("0F2")), "F of a stage runs from 0 to 1"),
    (lambda rows: rows[0].append(parse_action("0S2")), "S of a stage runs from 1 to 1"),
    (lambda rows: rows[0].append(parse_action("1F0")), "stage 1 is on rank 1"),
    (lambda rows: rows[0].append(parse_action("2F0")), "there are stages 0 to 1"),
    (lambda rows: rows[0].append(parse_action("0RECV_F0<1")), "no edge between ranks carries it"),
    (lambda rows: rows[0].clear(), "1f1b is not legal on rank 0: 0F0 is missing from rank 0"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_list_with_too_much_or_too_little_is_refused(
    fault: Callable[[Rows], object], message: str
) -> None:
    assert message in error_of(change(one_f_one_b(2, 2), fault))


def test_steps_out_of_order_are_refused() -> None:
    made = async_1f1b(1, 2, 1)
    assert "the next step of stage 0 makes 1" in error_of(
        change(made, lambda rows: swap(rows, 0, 2, 5))
    )


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    lowered = lower(gpipe(2, 2), ahead=5)
    assert lowered.ranks[1][:2] == (parse_action("1RECV_F0<0"), parse_action("1RECV_F1<0"))
    what = error_of(change(lowered, lambda rows: swap(rows, 1, 0, 1)))
    assert "micro-batches [1, 0], but they are sent in the order [0, 1]" in what


def test_more_in_flight_than_promised_is_refused() -> None:
    assert "stage 0 has 4 micro-batches in flight, but declares at most 2" in error_of(
        replace(gpipe(2, 4), in_flight=(2, 4))
    )


def test_a_synchronous_schedule_steps_once() -> None:
    assert "a synchronous schedule has one step, not 2" in error_of(
        replace(async_1f1b(2, 4, 2), synchronous=True)
    )


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 2), (-1, 0)])
def test_an_edge_that_does_not_lead_on_is_refused(edge: Edge) -> None:
    with pytest.raises(ScheduleError, match="is not an edge of 2 stages"):
        validate(one_f_one_b(2, 2), [edge])


def test_gradients_return_only_where_tensors_went() -> None:
    with pytest.raises(ScheduleError, match="but no tensors go there"):
        validate(one_f_one_b(3, 2), [(0, 1), (1, 2)], grad_edges=[(0, 2)])
