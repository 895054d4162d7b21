"""Two live runs never write into one folder; a dead run locks nobody out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpipe.runtime.checkpoint.folders import FolderInUse, FolderLock
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.distributed.failure import RankFolder
from asyncpipe.runtime.launch.job import make_folder, make_job
from asyncpipe.tests.support.faults.run_faults import FaultyRun
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.in_process import error_of

HOLD = """
import os, sys, time
from pathlib import Path
from asyncpipe.runtime.checkpoint.folders import FolderLock
lock = FolderLock("run")
lock.take(Path(sys.argv[1]))
child = os.fork() or time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[tuple[int, int]]:
    """A process that has the folder, and one that it has forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process.pid, child
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def refused(folder: Path) -> str:
    with pytest.raises(FolderInUse) as told, FolderLock("run") as lock:
        lock.take(folder)
    return told.value.what


def test_a_folder_is_one_processs_as_long_as_that_lives(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "1"
    with holder(run) as (process, child):
        told = (
            f"{run} is being written by another run, process {process} on {socket.gethostname()}."
        )
        assert refused(run) == told == refused(run)  # who asks takes nothing away
        (run / ".lock").write_text("process \x1b[2J on \n")
        assert refused(run) == f"{run} is being written by another run."
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        os.kill(child, 0)  # what it has forked lives on, and has nothing
        with FolderLock("run") as lock:
            lock.take(run)
            assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_the_folder_is_free_after_the_block(tmp_path: Path) -> None:
    with FolderLock("run") as lock:
        lock.take(tmp_path)
    with holder(tmp_path):
        refused(tmp_path)


def test_a_file_system_without_locks_keeps_no_run_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", without)
    with FolderLock("run") as lock:
        lock.take(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp"
    write_mlp(folder, slow_s=0.01)
    return folder


def made(**options: object) -> Path:
    job = make_job(Settings(**options))  # type: ignore[arg-type]
    with job.lock:
        return make_folder(job).folder


def test_a_run_without_a_folder_of_its_own_takes_the_next_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs") / "mlp"
    settings = Settings(folder=str(folder))
    job = make_job(settings)
    assert job.folder == runs / "1"
    with holder(runs / "1"):  # which came first, after this one had looked
        with job.lock:
            assert make_folder(job).folder == runs / "2"
        for given in ({"resume": "auto", "output": str(runs / "1")}, {"output": str(runs / "1")}):
            with pytest.raises(FolderInUse):
                made(folder=str(folder), **given)


def test_what_a_run_left_that_never_began_is_in_nobodys_way(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    given = {"folder": str(folder), "output": str(tmp_path / "run")}
    assert made(**given) == made(**given) == tmp_path / "run"
    RankFolder(tmp_path / "run").mark_step(0, 1)
    with pytest.raises(SettingsError, match="already contains a run"):
        made(**given)
    (tmp_path / "mine" / "ranks").mkdir(parents=True)
    (tmp_path / "mine" / "ranks" / "first.txt").write_text("mine")
    for name in ("mine", "mine/ranks/first.txt"):
        with pytest.raises(SettingsError, match="already exists and is not a run"):
            made(folder=str(folder), output=str(tmp_path / name))
    assert (tmp_path / "mine" / "ranks" / "first.txt").read_text() == "mine"


TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--standalone", "--no-python")


@pytest.mark.parametrize("command", [(), TORCHRUN], ids=["own", "torchrun"])
def test_a_second_command_is_refused_while_the_first_lives_and_goes_on_when_it_is_dead(
    folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    output = tmp_path / "run"
    again = ("--resume", "auto", "--output", str(output), "--steps", "3", "-q")
    options = {"steps": 3000, "save_every": 1, "warmup": 0}
    with FaultyRun(folder, output, options, command) as run:
        run.wait_for(lambda: run.step >= 2)
        leader = int((output / ".lock").read_text().split()[1])
        for given in (again, again[2:]):
            told = error_of(tmp_path, "train", str(folder), *given)
            assert f"{output} is being written by another run, process {leader} on " in told
        step = run.step
        run.wait_for(lambda: run.step > step + 1)  # as if nothing had been
        os.kill(leader, signal.SIGKILL)
        run.process.wait(30)
        end_s = time.monotonic() + 10
        while run.processes() and time.monotonic() < end_s:
            time.sleep(0.05)
    job = make_job(Settings(folder=str(folder), resume="auto", output=str(output)))
    with job.lock:
        assert make_folder(job).folder == output
