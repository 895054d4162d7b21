"""A schedule survives its text file, and a bad file is answered with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.builders import one_f_one_b
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.schedule.schedule import Action, parse_action
from asyncpipe.runtime.schedule.text import from_text, to_text
from asyncpipe.tests.support.models.small_schedules import synchronous

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.one_of(
    st.builds(
        Action, NUMBERS, st.sampled_from("FBW"), NUMBERS, st.none(), st.none() | st.integers(0, 99)
    ),
    st.builds(Action, NUMBERS, st.just("S"), NUMBERS, st.none(), st.none()),
    st.builds(
        Action,
        NUMBERS,
        st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]),
        NUMBERS,
        NUMBERS,
        st.none(),
    ),
)


@given(ACTIONS)
def test_every_action_is_read_back_from_its_text(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F3", "2X3", "2F3@", "2F3@v", "2S4@v1", "2F3>3", "2SEND_F3", "2SEND_F3<3"]
    + ["2RECV_F3>2", "-1F0", "2SEND_F3>3@v1", "2f3", "2F3 ", "2SEND_S3>3"],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_every_schedule_is_read_back_from_its_text(stages: int) -> None:
    made = [*synchronous(stages, 6), *(async_1f1b(stages, 6, every) for every in (2, 6))]
    for schedule in made:
        assert from_text(to_text(schedule)) == schedule
        assert from_text(to_text(lower(schedule))) == lower(schedule)


def test_the_file_looks_as_documented() -> None:
    assert to_text(one_f_one_b(2, 2)) == (
        "name: 1f1b\n"
        "synchronous: yes\n"
        "in flight: 2 1\n"
        "rank 0: 0F0@v0 0F1@v0 0B0@v0 0B1@v0 0S1\n"
        "rank 1: 1F0@v0 1B0@v0 1F1@v0 1B1@v0 1S1\n"
    )


def test_a_short_file_is_enough() -> None:
    made = from_text("""
        # two stages, no flush
        rank 0: 0F0 0F1 0B0 0S1 0B1 0S2
        rank 1: 1F0 1B0 1S1 1F1 1B1 1S2
    """)
    assert made.ranks == async_1f1b(2, 2, step_every=1).ranks
    assert (made.name, made.synchronous, made.in_flight) == ("custom", False, (2, 1))


def test_stages_may_lie_on_ranks_as_one_likes() -> None:
    made = from_text("rank 0: 0F0 0B0 0S1 2F0 2B0 2S1\nrank 1: 1F0 1B0 1S1", edges=[])
    assert made.rank_of_stage == (0, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule has 0 of 0 stages"),
        ("rank 0: 0F0 0B0", "1 micro-batches and 0 optimizer steps"),
        ("rank 0: 1F0 1B0 1S1", "the schedule has 1 of 2 stages"),
        ("rank 1: 0F0 0B0 0S1", "line 1 of the schedule is 'rank 1: 0F0 0B0 0S1', where the act"),
        (
            "rank 0: 0F0 0B0 0S1\n0F1",
            "line 2 of the schedule is '0F1', where the actions of rank 1",
        ),
        ("rank 0: 0F0 0B0 oops", "'oops' is not an action"),
        ("synchronous: maybe\nrank 0: 0F0 0B0 0S1", "synchronous is 'maybe'"),
        ("in flight: 1 1\nrank 0: 0F0 0B0 0S1", "in flight is '1 1' in the schedule"),
        ("in flight: x\nrank 0: 0F0 0B0 0S1", "in flight is 'x' in the schedule"),
        ("rank 0: 0B0 0F0 0S1", "never ends"),
        ("rank 0: 0F0 0B0 0F1 0B1 0F2 0B2 0S1 0S2", "has 3 micro-batches and 2 optimizer steps"),
        ("rank 0: 0F0@v1 0B0 0S1", "stage 0 is at version 0 there"),
        ("rank 0: 0F0 0B0 0S1\nrank 1: 0F1 0B1", "0S1 is missing from rank 1"),
        ("rank 0: 0F0 0B0 0S1\nrank 1: 0F1 0B1 1F0 1B0 1S1", "stage 0 is on rank 1"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_text(text)
