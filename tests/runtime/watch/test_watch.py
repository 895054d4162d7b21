"""The page that follows runs in progress, stalled, killed or over; refusals of its server; a run
and its viewer leave each other alone."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.distributed.failure import RankFolder
from asyncpipe.runtime.monitoring import tail as tails
from asyncpipe.runtime.monitoring.run_files import METRICS, gathered, read_run
from asyncpipe.runtime.monitoring.tail import Tail
from asyncpipe.runtime.monitoring.watchdog import RankState
from asyncpipe.runtime.watch.pages import RunPage, SeveralPage
from asyncpipe.runtime.watch.ranks_seen import see_ranks
from asyncpipe.runtime.watch.server import Viewer, address_of, open_socket
from asyncpipe.tests.support.oracles.html_pages import SCRIPT, all_of, by_id, parsed, text_of
from asyncpipe.tests.support.processes.in_process import error_of

ROOT = Path(__file__).parent.parent.parent.parent
MODEL = ROOT / "generated_models" / "residual_mlp_2p"
TOKEN = "a-token"
START: dict[str, Any] = {
    "event": "start",
    "time_s": 1.0,
    "micro_batches": 4,
    "facts": {"plan": "x"},
}
END = {"event": "end", "steps": 3}


def step(number: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    at = {"step": number, "loss": loss, "lr": 0.1, "elapsed_s": number, "step_ms": 5.0}
    return {"event": "step", **at, "tok_per_s": 10.0, **more}


def append(folder: Path, *records: object) -> None:
    with (folder / METRICS).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 100 steps that has made three."""
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'steps = 100\nstall_s = 5.0\nschedule = "1f1b"\nfolder = "{MODEL}"\n'
    )
    append(folder, START, *map(step, (1, 2, 3)))
    return folder


def leave(folder: Path, rank: int, process: int, *, idle_s: float = 0.0, **more: Any) -> Path:
    """The state of a rank; returns its file."""
    left = RankFolder(folder)
    left.path.mkdir(exist_ok=True)
    (left.path / f"{rank}.pid").write_text(str(process))
    state = RankState(rank, process, socket.gethostname(), "F", "computes", None, 1.0, 9, idle_s)
    path = left.path / f"{rank}.state"
    path.write_text(json.dumps(asdict(state) | more))
    return path


def gone() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def shown(folder: Path) -> dict[str, str]:
    return dict(RunPage(folder).refresh())


def status_of(parts: dict[str, str]) -> str:
    return text_of(all_of(parsed("<!doctype html><title>x</title>" + parts["header"]), "span")[0])


# What the records and the ranks say


def test_a_tail_has_the_records_of_whole_lines_alone(folder: Path) -> None:
    tail = Tail(folder / METRICS)
    assert tail.read() and gathered(folder, tail).last_step == 3
    assert not tail.read()
    with (folder / METRICS).open("ab") as file:
        file.write(json.dumps(step(4)).encode()[:20])
    tail.read()
    assert gathered(folder, tail).last_step == 3 and gathered(folder, tail).damaged == 0
    with (folder / METRICS).open("ab") as file:
        file.write(json.dumps(step(4)).encode()[20:] + b"\n\xff\x00\xfe\n[1]\n")
    assert tail.read()
    assert gathered(folder, tail).last_step == 4 and gathered(folder, tail).damaged == 2


def test_a_tail_begins_again_with_a_file_that_a_resumed_run_has_written(folder: Path) -> None:
    tail = Tail(folder / METRICS)
    tail.read()
    kept = "".join((folder / METRICS).read_text().splitlines(keepends=True)[:2])
    for write_again in ("in place", "as a new file"):
        path = folder / METRICS
        if write_again == "as a new file":
            path = folder / "new"
        path.write_text(kept)
        path.replace(folder / METRICS)
        append(folder, *(step(number, 7.0) for number in range(2, 9)))
        tail.read()
        losses = [record["loss"] for record in gathered(folder, tail).steps]
        assert losses == [1.0] + [7.0] * 7, write_again


def test_a_long_run_is_thinned_evenly_with_its_first_and_its_last_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_KEPT", 64)
    append(folder, *map(step, range(4, 1002)))
    tail = Tail(folder / METRICS)
    tail.read()
    steps = [record["step"] for record in gathered(folder, tail).steps]
    assert (steps[0], steps[-1]) == (1, 1001)
    assert 32 <= len(steps) <= 66
    assert len({after - before for before, after in zip(steps, steps[1:-1], strict=False)}) == 1


def test_a_line_without_an_end_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_LONGEST", 1000)
    monkeypatch.setattr(tails, "_READ", 512)
    with (folder / METRICS).open("ab") as file:
        file.write(b"x" * 5000 + b"\n" + json.dumps(step(4)).encode() + b"\n")
    tail = Tail(folder / METRICS)
    tail.read()
    assert gathered(folder, tail).last_step == 4 and gathered(folder, tail).damaged == 1


def test_a_file_of_any_size_is_read_in_bounded_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long records, events of any name, bytes that are not text, and a last line without an end."""
    monkeypatch.setattr(tails, "_KEPT_BYTES", 1 << 20)
    text = "x" * (1 << 16)
    with (folder / METRICS).open("ab") as file:
        for number in range(4, 200):
            note, other = {"event": "note", "text": text}, {"event": f"other {number}", "x": text}
            records = step(number, text=text), note, other
            file.writelines(json.dumps(record).encode() + b"\n" for record in records)
            file.write(b"\x00\xff" * (1 << 15) + b"\n")
        file.write(json.dumps(step(200)).encode())
    assert (folder / METRICS).stat().st_size > 48 << 20
    tracemalloc.start()
    run = read_run(folder)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3 << 20 and most < 10 << 20
    assert run.last_step == 200 and run.damaged == 196


def test_a_run_whose_ranks_work_is_running(folder: Path) -> None:
    for rank in (0, 1):
        leave(folder, rank, os.getpid())
    parts = shown(folder)
    assert status_of(parts) == "running: step 3 of 100"
    assert text_of(parsed_part(parts["ranks"])).count("computes") == 2


def parsed_part(html: str) -> Any:
    return parsed(f"<!doctype html><title>x</title>{html}")


def test_a_stall_says_who_waits_for_whom(folder: Path) -> None:
    waits = {"kind": "receive", "text": "waits for the gradient from rank 1", "peer": 1}
    leave(folder, 0, os.getpid(), idle_s=30.0, **waits)
    leave(folder, 1, os.getpid(), idle_s=31.0, kind="data", text="reads the data of micro-batch 5")
    parts = shown(folder)
    assert status_of(parts) == "stalled: step 3 of 100"
    text = text_of(parsed_part(parts["header"]))
    assert "No progress for 30 s at step 1. rank 0 waits for the gradient from rank 1;" in text
    assert "rank 1 reads the data" in text and "Usual cause: the data loader" in text


def test_a_run_whose_processes_are_gone_was_killed(folder: Path) -> None:
    process = gone()
    for rank in (0, 1):
        path = leave(folder, rank, process)
        os.utime(path, (time.time() - 60, time.time() - 60))
    parts = shown(folder)
    assert status_of(parts) == "killed after step 3 of 100"
    assert "the 2 processes of its ranks exited without reporting" in parts["header"]


def test_another_process_with_the_number_of_a_killed_rank_is_none_of_the_run(folder: Path) -> None:
    long_ago_s = time.time() - 1e7
    path = leave(folder, 0, os.getpid())
    os.utime(path, (long_ago_s, long_ago_s))
    assert see_ranks(RunPage(folder).run).standing == "killed"


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([END], "✓ 3 steps"),
        ([{"event": "failure", "text": "rank 1 <b>failed</b>"}], "failed after step 3 of 100"),
        (
            [
                {"event": "note", "about": "stopped", "text": "by SIGTERM"},
                {"event": "failure", "text": "it was asked to stop"},
            ],
            "stopped after step 3 of 100",
        ),
    ],
)
def test_a_run_that_is_over_says_how(folder: Path, records: list[object], status: str) -> None:
    append(folder, *records)
    parts = shown(folder)
    assert status_of(parts) == status
    assert "<b>failed" not in parts["header"] and parts["ranks"] == ""


def test_a_run_that_has_not_begun_is_starting(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 10\n")
    assert status_of(shown(tmp_path)) == "starting"


# What the page draws


def test_the_planned_step_is_drawn_until_the_measured_one_is_there(folder: Path) -> None:
    planned = parsed_part(shown(folder)["step"])
    assert text_of(all_of(planned, "h2")[0]) == "One step, predicted"
    assert "--trace 3" in text_of(planned)
    assert len(all_of(planned, "svg", "timed")) == 2  # the step, and its memory
    timeline = [
        [0, 0, "F", 0, 0, 1],
        [1, 1, "F", 0, 1, 2],
        [1, 1, "B", 0, 2, 4],
        [0, 0, "B", 0, 4, 6],
    ]
    drawn = {"costs": "costs", "simulated": timeline, "measured": timeline}
    append(folder, {"event": "timelines", **drawn}, END)
    measured = parsed_part(shown(folder)["step"])
    assert text_of(all_of(measured, "h2")[0]) == "One step, measured above predicted"
    assert [text_of(one).partition(":")[0] for one in all_of(measured, "figcaption")] == [
        "Measured",
        "Predicted",
        "Sizes from the plan, over the measured step. All ranks have the same scale.",
    ]
    assert len(all_of(measured, "path", "activations")) == 2  # of each rank


def test_a_run_of_another_plan_or_of_none_has_no_drawing_of_it(folder: Path) -> None:
    timeline = [[0, 7, "F", 0, 0, 1]]
    drawn = {"costs": "costs", "simulated": timeline, "measured": timeline}
    append(folder, {"event": "timelines", **drawn})
    assert len(all_of(parsed_part(shown(folder)["step"]), "svg", "timed")) == 2
    others = {"forward_ms": [1.0, 2.0, 3.0], "backward_ms": [1.0, 2.0, 3.0]}
    (folder / METRICS).write_text(json.dumps(START | {"predicted": others}) + "\n")
    assert shown(folder)["step"] == shown(folder)["cut"] == ""
    (folder / METRICS).write_text(json.dumps(START) + "\n")
    assert len(all_of(parsed_part(shown(folder)["cut"]), "path", "cut")) == 1
    (folder / "config.toml").write_text('folder = "nowhere"\n')
    assert shown(folder)["step"] == shown(folder)["cut"] == ""


def test_delay_gap_and_learning_rate_have_curves(folder: Path) -> None:
    append(folder, *(step(number, delay_mean=1.5, gap=0.1) for number in (4, 5)))
    headings = [text_of(one) for one in all_of(parsed_part(shown(folder)["others"]), "h3")]
    assert {"Learning rate", "Mean delay of the weights in steps"} <= {*headings}
    assert any(heading.startswith("Gap: ") for heading in headings)


def test_only_parts_that_have_changed_are_rendered_again(folder: Path) -> None:
    page = RunPage(folder)
    first = dict(page.refresh())
    page.look()
    assert page.refresh() == first
    append(folder, step(4, 9.0))
    page.look()
    second = page.refresh()
    assert second["curves"] != first["curves"] and second["setup"] == first["setup"]


def test_several_runs_have_their_states_and_common_charts(folder: Path) -> None:
    other = folder.parent / "2"
    other.mkdir()
    append(other, START, *map(step, (1, 2)), {"event": "failure", "text": "<i>x"})
    pages = [RunPage(folder), RunPage(other)]
    parts = SeveralPage(pages).refresh()
    states = [text_of(one) for one in all_of(parsed_part(parts["runs"]), "dd")]
    assert states == [
        "killed after step 3 of 100The run was killed after step 3: its ranks exited without "
        "reporting a result or an error. Linux kills processes when memory runs out; see dmesg | "
        "tail.",
        "failed after step 2<i>x",
    ]
    assert len(all_of(parsed_part(parts["compared"]), "g", "curve1")) > 0


# The server


@contextmanager
def served(*folders: Path, idle_s: float | None = None) -> Iterator[tuple[int, threading.Thread]]:
    """The port of a viewer, and its thread."""
    listening = open_socket()
    viewer = Viewer(folders, listening, TOKEN)
    port = listening.getsockname()[1]
    assert address_of(listening, TOKEN) == f"http://127.0.0.1:{port}/{TOKEN}/"
    thread = threading.Thread(target=lambda: viewer.serve(idle_s=idle_s))
    thread.start()
    try:
        yield port, thread
    finally:
        viewer.end()
        thread.join(10)
        assert not thread.is_alive()


def get(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer


def test_the_page_stands_alone_and_its_policy_lets_only_its_own_scripts_run(folder: Path) -> None:
    with served(folder) as (port, _):
        status, answer = get(port, f"/{TOKEN}/")
        page = answer.read().decode()
    assert status == 200
    tree = parsed(page)
    for element in tree.iter():
        assert not {"src", "href", "action"} & {*element.attrib}
    policy = answer.headers["Content-Security-Policy"]
    nonces = {script.get("nonce") for script in all_of(tree, "script")}
    assert len(nonces) == 1 and f"script-src 'nonce-{nonces.pop()}';" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert all_of(tree, "script")[-1].text == f"\n{SCRIPT}"
    assert "running" in text_of(by_id(tree, "part-header")) or "killed" in page


@pytest.mark.parametrize(
    "path",
    ["/", "/other/", f"/{TOKEN}", f"/{TOKEN}/../x", f"/{TOKEN}/7/", f"/{TOKEN}/{METRICS}",
     f"/{TOKEN}//etc/passwd", "/favicon.ico", f"/{TOKEN}x/", "/%ff/"],
)  # fmt: skip
def test_nothing_but_the_pages_is_served(folder: Path, path: str) -> None:
    with served(folder) as (port, _):
        assert get(port, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "", "["])
def test_another_hosts_name_is_refused(folder: Path, host: str) -> None:
    with served(folder) as (port, _):
        assert get(port, f"/{TOKEN}/", Host=host)[0] == 403
        assert get(port, f"/{TOKEN}/", Host="localhost:8000")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_written(folder: Path, method: str) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with served(folder) as (port, _):
        assert get(port, f"/{TOKEN}/", method)[0] == 501
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_stream_has_new_records_within_seconds(folder: Path) -> None:
    leave(folder, 0, os.getpid())
    with served(folder) as (port, _):
        page = get(port, f"/{TOKEN}/")[1].read().decode()
        since = page.partition('data-since="')[2].partition('"')[0]
        _, stream = get(port, f"/{TOKEN}/events?since={since}")
        assert stream.headers["Content-Type"] == "text/event-stream"
        append(folder, step(4))
        parts = event_of(stream, "header")
        assert "running: step 4 of 100" in parts["header"]
        assert "setup" not in parts


def event_of(stream: http.client.HTTPResponse, name: str) -> dict[str, str]:
    """The next event with that part."""
    for line in iter(stream.readline, b""):
        if line.startswith(b"data: ") and name in (parts := json.loads(line[6:])):
            return dict(parts)
    raise AssertionError("the stream has ended")


def test_each_of_several_runs_has_its_own_page(folder: Path) -> None:
    other = folder.parent / "2"
    other.mkdir()
    append(other, START, step(1), {**END, "steps": 1})
    with served(folder, other) as (port, _):
        links = [one.get("href") for one in all_of(parsed(html(port)), "a")]
        assert links == ["0/", "1/"]
        assert "✓ 1 steps" in html(port, links[1] or "")


def html(port: int, place: str = "") -> str:
    return get(port, f"/{TOKEN}/{place}")[1].read().decode()


def test_the_viewer_ends_when_the_run_is_over_and_nobody_looks(folder: Path) -> None:
    leave(folder, 0, os.getpid())
    with served(folder, idle_s=0.1) as (_, thread):
        thread.join(1.5)
        assert thread.is_alive()  # the run goes on
        append(folder, END)
        thread.join(10)
        assert not thread.is_alive()


# The commands


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    assert "nowhere does not contain a run" in error_of(tmp_path, "view", "nowhere")


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with open_socket() as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} cannot be used" in error_of(folder, "view", ".", "--port", port)
