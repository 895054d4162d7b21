"""Drawings of a schedule and of a timeline on a terminal."""

import inspect

from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.builders import gpipe, make_schedule, single
from asyncpipe.runtime.schedule.schedule import Action
from asyncpipe.runtime.schedule.simulate import ActionCosts, Event, Timeline, simulate
from asyncpipe.runtime.schedule.text import draw_grid, draw_timeline


def test_a_long_backward_is_drawn_on_with_dashes() -> None:
    assert draw_grid(gpipe(2, 2), backward_clocks=3) == inspect.cleandoc("""
        rank 0 | F0 F1 .  .  .  .  B0 -  -  B1 -  -  S1
        rank 1 | .  F0 F1 B0 -  -  B1 -  -  S1 .  .  .
    """)


def test_stages_that_are_not_connected_run_beside_each_other() -> None:
    assert draw_grid(gpipe(2, 1), []) == inspect.cleandoc("""
        rank 0 | F0 B0 S1
        rank 1 | F0 B0 S1
    """)


def test_stages_of_one_rank_are_told_apart() -> None:
    assert draw_grid(single(2, 1)) == "rank 0 | 0F0 1F0 1B0 0B0 0S1 1S1"


def test_both_parts_of_a_backward_are_drawn() -> None:
    schedule = make_schedule("zb-h1", stages=2, micro_batches=2)
    assert draw_grid(schedule) == inspect.cleandoc("""
        rank 0 | F0 F1 .  B0 W0 B1 W1 S1
        rank 1 | .  F0 B0 F1 B1 W0 W1 S1
    """)
    assert draw_timeline(simulate(schedule, ActionCosts.equal(2, step_ms=1)), width=32) == (
        "rank 0 |░░░░░░░░    ▓▓▓▓▒▒▒▒▓▓▓▓▒▒▒▒████|  12% idle\n"
        "rank 1 |    ░░░░▓▓▓▓░░░░▓▓▓▓▒▒▒▒▒▒▒▒████|  12% idle\n"
        "        ░ forward  ▓ backward  ▒ its weights  █ step 8.00 ms"
    )


def test_every_bar_is_as_wide_as_asked() -> None:
    for width in (10, 33, 72, 100):
        for step_ms in (0.0, 0.01, 3.0):
            timeline = simulate(async_1f1b(3, 12, 2), ActionCosts.equal(3, step_ms=step_ms))
            lines = draw_timeline(timeline, width=width).splitlines()
            assert {len(line.split("|")[1]) for line in lines[:3]} == {width}


def test_a_step_shorter_than_a_column_is_seen() -> None:
    timeline = simulate(async_1f1b(2, 8, 4), ActionCosts.equal(2, step_ms=0.001))
    assert [line.count("█") for line in draw_timeline(timeline, width=54).splitlines()[:2]] == [
        2,
        2,
    ]


def test_the_end_of_the_axis_is_the_makespan_wherever_it_begins() -> None:
    events = tuple(
        Event(0, Action(0, kind, 0), start, start + 10)
        for kind, start in (("F", 1000.0), ("B", 1010.0))
    )
    assert draw_timeline(Timeline("measured", 1, events), width=40) == (
        f"rank 0 |{'░' * 20}{'▓' * 20}|   0% idle\n        ░ forward  ▓ backward  █ step   20.00 ms"
    )


def test_an_empty_timeline_is_drawn_empty() -> None:
    assert draw_timeline(Timeline("nothing", 1, ()), width=40).startswith("rank 0 |          ")
