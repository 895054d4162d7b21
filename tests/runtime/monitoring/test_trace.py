"""A traced run: every action, wait and message is in the file, in its place, and adds up."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.executor.instrumented import Activities, Activity, Span, StageMessage
from asyncpipe.runtime.monitoring import gather
from asyncpipe.runtime.monitoring.trace import (
    TRACKS,
    RankTrace,
    Tracing,
    chrome_trace,
    from_plain,
    measured_timeline,
    steady_steps,
    steps_ahead,
    to_plain,
)
from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.schedule import Action, Numbering
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of
from asyncpipe.tests.support.run_configs import run_config

Events = list[dict[str, Any]]
PART_OF_KIND = {
    **dict.fromkeys(("F", "B", "W", "S", "norm"), "busy"),
    **{
        "receive": "waiting",
        "taken": "waiting",
        "meet": "waiting",
        "send": "sending",
        "data": "data",
    },
}
FORWARD, BACKWARD, STEP = (Action(0, kind, 1) for kind in ("F", "B", "S"))
HIDDEN = StageMessage("activation", "hidden", 0, 1, 0, 1, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two traced runs: `sync`, steps 2 and 3 of 4; `async`, 3 of 6."""
    folder = tmp_path_factory.mktemp("traced")
    write_text(folder / "text")
    write_mlp(folder / "mlp4", stages=4, slow_s=0.002)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    given: dict[str, Any] = {"log_every": 1, "threads": 1, "micro_batches": 4}
    text = given | {"folder": str(folder / "text"), "data": str(folder / "text.txt"), "clip": 1.0}
    run(Settings(**text, output=str(folder / "sync"), steps=4, trace="2-3"), FACTORY)
    mlp = given | {"folder": str(folder / "mlp4"), "schedule": "async-1f1b", "steps": 6}
    run(Settings(**mlp, output=str(folder / "async"), trace="3"), FACTORY)
    return folder


def trace_of(output: Path) -> Events:
    made = json.loads((output / "trace.json").read_text())
    events: Events = made["traceEvents"]
    return events


def slices(events: Events, rank: int, *tracks: str) -> Events:
    places = [place for place, track in enumerate(TRACKS) if track in tracks or not tracks]
    return [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] in places]


def test_every_action_of_the_recorded_steps_is_there_once(folder: Path) -> None:
    events = trace_of(folder / "sync")
    for rank in range(2):
        acts = slices(events, rank, "compute", "optimizer")
        names = [event["name"] for event in acts if event["cat"] != "norm"]
        expected = [f"{kind}{i} stage {rank}" for kind in "FB" for i in range(4)] * 2
        assert sorted(names) == sorted([*expected, f"step 2 stage {rank}", f"step 3 stage {rank}"])
    numbers = {e["args"]["micro_batch"] for e in slices(events, 0, "compute")}
    assert numbers == set(range(4, 12))
    assert {e["args"]["version"] for e in slices(events, 0, "compute")} == {1, 2}
    (process,) = [e for e in events if e["name"] == "process_name" and e["pid"] == 1]
    assert process["args"]["name"] == "rank 1 (stage 1)"


def test_an_asynchronous_trace_has_the_steps_that_were_named(tmp_path: Path, folder: Path) -> None:
    given: dict[str, Any] = {"threads": 1, "micro_batches": 4, "schedule": "async-1f1b"}
    mlp = given | {"folder": str(folder / "mlp4"), "steps": 6, "trace": "4-6"}
    run(Settings(**mlp, output=str(tmp_path / "named")), FACTORY)
    events = trace_of(tmp_path / "named")
    for rank in range(4):
        steps = [e["args"]["step"] for e in slices(events, rank, "optimizer") if e["cat"] == "S"]
        assert {4, 5, 6} <= set(steps) <= {3, 4, 5, 6}
        backwards = [e for e in slices(events, rank, "compute") if e["cat"] == "B"]
        assert len(backwards) == 3 * 4


def test_an_asynchronous_trace_shows_steady_steps_and_not_the_drain(folder: Path) -> None:
    events = trace_of(folder / "async")
    forwards = sorted(e["ts"] for e in slices(events, 0, "compute") if e["cat"] == "F")
    for rank in range(4):
        steps = [e["args"]["step"] for e in slices(events, rank, "optimizer") if e["cat"] == "S"]
        # The fifth step of six is the last with forwards to come at rank 0.
        assert {3, 4, 5} == set(steps) if rank == 0 else 2 <= len(steps) <= 4
        for kind in "FB":
            done = [e for e in slices(events, rank, "compute") if e["cat"] == kind]
            assert len(done) >= 3 * 4 - 2, (rank, kind)
            # From the beginning to the end: rank 0 is never four micro-batches ahead of a rank.
            assert min(e["ts"] for e in done) < forwards[4]
            assert max(e["ts"] for e in done) > forwards[-4]
        for event in slices(events, rank, "compute"):
            late = 1 if rank < 3 else 0
            forward_step = event["args"]["micro_batch"] // 4
            assert forward_step - late <= event["args"]["version"] <= forward_step


@pytest.mark.parametrize(
    ("given", "stages", "every", "steps"),
    [
        ({}, 4, 1, range(94, 97)),
        ({"micro_batches": 4}, 4, 4, range(97, 100)),
        ({"flush_every": 10}, 4, 1, range(94, 97)),
        ({"flush_every": 1}, 4, 1, range(0)),
        ({"flush_every": 6}, 4, 1, range(92, 93)),
        ({"eval_every": 97}, 4, 1, range(91, 94)),
        ({"steps": 10**12, "eval_every": 3, "trace": "1"}, 2, 4, range(10**12 - 2, 10**12 - 1)),
        ({"samples": 100 * 8 + 2, "remainder": "proportional"}, 2, 4, range(96, 99)),
        ({"trace": "2-5"}, 4, 1, range(0)),
        ({"schedule": "1f1b"}, 4, 1, range(0)),
        ({"sync_start": "97"}, 4, 1, range(0)),
        ({"sync_end": "20%"}, 4, 1, range(74, 77)),
        ({"steps": 10**9, "sync_start": str(10**9 - 100)}, 2, 4, range(10**9 - 3, 10**9)),
        (
            {"steps": 10**9, "eval_every": 10, "sync_end": "10%"},
            *(2, 4),
            range(9 * 10**8 - 3, 9 * 10**8),
        ),
    ],
)
def test_steady_steps_are_the_last_before_a_drain(
    given: dict[str, Any], stages: int, every: int, steps: range
) -> None:
    usual = {"steps": 100, "trace": "3", "schedule": "async-1f1b", "micro_batches": every}
    settings = run_config(**usual | {"micro_batch_size": 2} | given)
    found = steady_steps(settings, async_1f1b(stages, every, step_every=every))
    assert list(found) == list(steps)


def test_ranks_behind_rank_0_record_for_the_steps_by_which_it_is_ahead() -> None:
    settings = run_config(steps=100, trace="3", schedule="async-1f1b", micro_batches=4)
    schedule, activities = async_1f1b(4, 4, step_every=4), Activities()
    tracing = Tracing(settings, activities, schedule)
    assert steady_steps(settings, schedule)[-1] == 99 and steps_ahead(schedule) == 1
    for step in range(1, 101):
        tracing.step_is_over(step)
    assert activities.spans is not None  # until step 101


@pytest.mark.parametrize("run_name", ["sync", "async"])
def test_slices_of_a_track_follow_one_another(folder: Path, run_name: str) -> None:
    events = trace_of(folder / run_name)
    for rank in {event["pid"] for event in events}:
        for track in TRACKS:
            found = sorted(slices(events, rank, track), key=lambda event: event["ts"])
            for before, after in zip(found, found[1:], strict=False):
                assert before["ts"] + before["dur"] <= after["ts"] + 0.002


@pytest.mark.parametrize("run_name", ["sync", "async"])
def test_slices_of_a_rank_nest_or_lie_apart(folder: Path, run_name: str) -> None:
    events = trace_of(folder / run_name)
    for rank in {event["pid"] for event in events}:
        open_until: list[float] = []
        for event in sorted(slices(events, rank), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.002
            open_until.append(event["ts"] + event["dur"])


def test_durations_add_up_to_the_steps_with_the_overhead_between(folder: Path) -> None:
    """The shares in metrics.jsonl and the slices in the trace describe the same moments."""
    events = trace_of(folder / "sync")
    lines = map(json.loads, (folder / "sync" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "step"]
    parts = ("busy", "waiting", "sending", "data", "overhead", "writing")
    for step in steps:
        for rank in range(2):
            shares = [step[f"{part}_shares"][rank] for part in parts]
            assert sum(shares) == pytest.approx(1, abs=3e-4)
            assert step["idle"][rank] == pytest.approx(1 - shares[0], abs=3e-4)
    for rank in range(2):
        steps_made = [e for e in slices(events, rank, "optimizer") if e["cat"] == "S"]
        before, end = (e["ts"] + e["dur"] for e in steps_made)
        # A record is made within a step's action, whose rest the next record has: of what a rank
        # computes, only forwards and backwards have a record of their own.
        spent_us = dict.fromkeys(("waiting", "sending", "data", "F", "B"), 0.0)
        for event in slices(events, rank):
            part = PART_OF_KIND.get(event["cat"], "")
            part = event["cat"] if part == "busy" else part
            if part in spent_us and before <= event["ts"] < end:
                spent_us[part] += event["dur"]
        for kind in "FB":
            recorded_ms = steps[2]["action_ms"][kind][rank]
            assert spent_us.pop(kind) / 4000 == pytest.approx(recorded_ms, rel=0.01)
        shares = {part: steps[2][f"{part}_shares"][rank] for part in spent_us}
        scale = sum(shares.values()) / sum(spent_us.values())
        for part, us in spent_us.items():
            assert us * scale == pytest.approx(shares[part], abs=2e-3), part
    assert any(e["name"] == "the norm of all gradients" for e in slices(events, 0, "waits"))


@pytest.mark.parametrize(("run_name", "ranks"), [("sync", 2), ("async", 4)])
def test_every_arrow_goes_from_a_send_to_the_wait_that_took_it(
    folder: Path, run_name: str, ranks: int
) -> None:
    events = trace_of(folder / run_name)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) >= 2 * 4 * 2 * (ranks - 1)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        (sent,) = [e for e in slices(events, start["pid"], "sends") if around(e, start["ts"])]
        (took,) = [e for e in slices(events, end["pid"], "waits") if around(e, end["ts"])]
        assert sent["args"] == took["args"]
    for rank in range(ranks):
        sends = slices(events, rank, "sends")
        arrows = [e for e in starts.values() if e["pid"] == rank]
        assert run_name == "async" or len(sends) == len(arrows) > 0


def around(event: dict[str, Any], moment_us: float) -> bool:
    return bool(event["ts"] <= moment_us <= event["ts"] + event["dur"])


@pytest.mark.parametrize(("run_name", "ranks"), [("sync", 2), ("async", 4)])
def test_the_simulated_step_stands_above_the_measured_one(
    folder: Path, run_name: str, ranks: int
) -> None:
    (told,) = events_of(folder / run_name, "timelines")
    # On a busy machine what a rank computes may be shorter than a column of the drawing.
    for drawn, idle_shares in zip(told["drawn"], told["idle_shares"], strict=True):
        rows = drawn.splitlines()
        assert len(rows) == ranks + 1
        assert all(row.startswith(f"rank {i} |") for i, row in enumerate(rows[:-1]))
        assert len(idle_shares) == ranks and all(0 <= share < 1 for share in idle_shares)
    (summary,) = events_of(folder / run_name, "end")
    assert summary["trace"] == str(folder / run_name / "trace.json")
    parts = summary["idle_parts"]
    assert sum(parts.values()) == pytest.approx(summary["idle"], abs=1e-12)
    assert len(summary["idle_parts_by_rank"]) == ranks


def test_nothing_is_recorded_that_was_not_asked_for() -> None:
    activities = Activities()
    with activities.during(Activity("F", FORWARD, 1)):
        pass
    assert activities.spans is None and activities.finished == 1


# Which steps


@pytest.mark.parametrize(
    ("trace", "steps"), [("3", range(8, 11)), ("10", range(1, 11)), ("2-4", range(2, 5))]
)
def test_steps_are_the_last_or_those_named(trace: str, steps: range) -> None:
    assert Settings(folder="x", steps=10, trace=trace).trace_steps == steps


@pytest.mark.parametrize("trace", ["0", "x", "4-2", "0-3", "-2", "2-", "9-12"])
def test_steps_that_there_are_not_are_refused(trace: str) -> None:
    with pytest.raises(SettingsError, match="--trace"):
        Settings(folder="x", steps=10, trace=trace)


# Without processes


def test_spans_survive_the_way_to_rank_0() -> None:
    spans = [
        Span(Activity("F", Action(0, "F", 3, version=1), 3), 1.0, 2.0, Numbering(8), 3),
        Span(Activity("receive", HIDDEN, 3), 2.0, 2.5, Numbering(8), 3),
        Span(Activity("meet", "the norm"), 2.5, 3.0, Numbering(8), 3),
    ]
    plain = json.loads(json.dumps(to_plain(spans)))
    assert list(from_plain(plain)) == spans
    assert next(from_plain(plain, later_s=0.5)).start_s == 1.5


def test_a_wait_within_a_step_is_no_part_of_its_bar() -> None:
    spans = (
        Span(Activity("S", STEP, 1), 0.0, 0.010),
        Span(Activity("meet", "the norm"), 0.001, 0.004),
    )
    timeline = measured_timeline([RankTrace(0, (0,), spans)], [1])
    assert [(e.start_ms, e.end_ms) for e in timeline.events] == [(0.0, 1.0), (4.0, 10.0)]


def test_a_message_of_which_one_end_is_missing_has_no_arrow() -> None:
    taken = Span(Activity("receive", HIDDEN, 3), 2.0, 2.5)
    events = chrome_trace([RankTrace(0, (0,), ()), RankTrace(1, (1,), (taken,))])["traceEvents"]
    assert [e["ph"] for e in events if e["ph"] != "M"] == ["X"]


def test_times_of_all_kinds_add_up_to_the_time_that_passed() -> None:
    ticks = iter(range(100))
    activities = Activities(clock=lambda: next(ticks))  # 0
    activities.begin(Activity("S", STEP))  # 1
    activities.begin(Activity("meet", "the norm"))  # 2
    activities.end()  # 3
    activities.end()  # 4
    activities.begin(Activity("data"))  # 5
    spent = activities.take()  # 6
    assert spent == {("other", -1): 2, ("S", 0): 2, ("meet", -1): 1, ("data", -1): 1}
    assert activities.take() == {("data", -1): 1}


# Clocks


def offset_of_another_host(rank: int, late_s: float) -> float:
    """Rank 1 believes that it is on another host, with a clock that is `late_s` behind."""
    world = World(RankInfo(rank, 2, rank, 2), dist.group.WORLD)
    if rank == 1:
        gather._host = lambda: bytes(32)  # type: ignore[assignment]
    return gather.clock_offset_s(
        world, lambda: gather.time.perf_counter() - (late_s if rank == 1 else 0.0)
    )


def test_clocks_of_two_hosts_are_aligned() -> None:
    late_s = random.Random(1).uniform(5, 50)
    assert run_processes(2, offset_of_another_host, late_s) == [
        0.0,
        pytest.approx(late_s, abs=0.5),  # half of a message's way there and back
    ]


def test_processes_of_one_host_have_one_clock() -> None:
    assert run_processes(2, offset_of_one_host) == [0.0, 0.0]


def offset_of_one_host(rank: int) -> float:
    return gather.clock_offset_s(World(RankInfo(rank, 2, rank, 2), dist.group.WORLD))


def test_what_a_rank_does_now_can_be_read_by_another_thread() -> None:
    activities = Activities()
    activities.begin(Activity("receive", HIDDEN, 3))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(activities.now))
    thread.start()
    thread.join()
    assert str(seen[0][0]) == 'waits for the activation "hidden" of micro-batch 3 from rank 0'
    assert 0 <= seen[0][1] < 60
