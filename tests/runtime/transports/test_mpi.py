"""Ranks that talk over MPI: the thread that makes progress, what may be missing, and whole runs."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.mpi_memory import takes_cuda
from asyncpipe.runtime.transports import Channel
from asyncpipe.runtime.transports.mpi import (
    MpiTransport,
    check_thread_level,
    check_world,
    load_mpi,
    mpiexec,
)
from asyncpipe.tests.support.models.hand_folders import FAILING, write_mlp
from asyncpipe.tests.support.processes.mpi_ranks import run_mpi, stop
from asyncpipe.tests.support.processes.quick_python import bin_folder, run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=1)
LARGE = replace(HIDDEN, tag=2, shape=(4, 1024, 1024))


def sleep_outside_of_mpi(until: Path) -> bool:
    end_s = time.monotonic() + 15
    while not until.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    return until.exists()


def move_while_the_peer_computes(rank: int, folder: str) -> bool:
    transport = MpiTransport(timeout_s=20.0)
    sent, taken = Path(folder) / "sent", Path(folder) / "taken"
    if rank == 0:
        transport.send(LARGE, torch.ones(LARGE.shape), 0)
        moved = sleep_outside_of_mpi(taken)
        transport.send(LARGE, torch.ones(LARGE.shape), 1)
        transport.wait_sent(LARGE, 1)
        sent.touch()
    else:
        transport.wait(transport.recv(LARGE, 0))
        taken.touch()
        handle = transport.recv(LARGE, 1)
        moved = sleep_outside_of_mpi(sent)
        transport.wait(handle)
    transport.close()
    return moved


def test_large_messages_move_while_either_end_computes(tmp_path: Path) -> None:
    assert run_mpi(2, move_while_the_peer_computes, str(tmp_path)) == [True, True]


def compute_without_the_thread(rank: int, folder: str) -> bool:
    """The same with bare MPI calls: the receiver never looks, so the sender is not done."""
    world, taken = load_mpi().COMM_WORLD, Path(folder) / "taken"
    content = torch.ones(LARGE.shape).numpy()
    if rank == 1:
        request = world.Irecv(content, 0)
        assert sleep_outside_of_mpi(taken)
        request.Wait()
        return True
    request = world.Isend(content, 1)
    end_s = time.monotonic() + 1.0
    is_over = False
    while not is_over and time.monotonic() < end_s:
        is_over = request.Test()
    taken.touch()
    request.Wait()
    return is_over


def test_without_the_thread_they_do_not(tmp_path: Path) -> None:
    assert run_mpi(2, compute_without_the_thread, str(tmp_path))[0] is False


def idle(rank: int) -> tuple[float, float]:
    transport = MpiTransport(timeout_s=20.0)
    spent = []
    for _ in range(2):
        start_s = time.process_time()
        time.sleep(1.0)
        spent.append(time.process_time() - start_s)
        handle = transport.recv(BACK if rank == 0 else HIDDEN, 0)  # comes after the second time
    channel = HIDDEN if rank == 0 else BACK
    for index in (0, 0):
        transport.send(channel, torch.zeros(2, 3), index)
    transport.wait(handle)
    transport.close()
    return spent[0], spent[1]


def test_the_thread_sleeps_with_nothing_under_way_and_naps_otherwise() -> None:
    for nothing_s, posted_s in run_mpi(2, idle):
        assert nothing_s < 0.1
        assert posted_s < 0.5


def let_go(rank: int) -> list[bool]:
    transport = MpiTransport(timeout_s=20.0)
    alive = []
    if rank == 0:
        handle = transport.recv(BACK, 0)
        memory = StorageWeakRef(handle.message.buffer.untyped_storage())
        del handle  # MPI will write to it all the same
        alive.append(not memory.expired())
    load_mpi().COMM_WORLD.Barrier()
    if rank == 1:
        transport.send(BACK, torch.zeros(2, 3), 0)
        transport.send(BACK, torch.zeros(2, 3), 1)
    else:
        transport.wait(transport.recv(BACK, 1))
        while not memory.expired():
            time.sleep(0.01)
        transport.recv(BACK, 2)  # nothing comes for it
    transport.close()
    return alive


def test_memory_that_mpi_writes_to_outlives_a_handle_that_was_let_go() -> None:
    assert run_mpi(2, let_go) == [[True], []]


def refuse(rank: int) -> str:
    transport = MpiTransport()
    transport._largest_tag = 32767
    beyond = replace(HIDDEN, tag=32)
    with pytest.raises(TransportError) as raised:
        transport.send(beyond, torch.ones(2, 3), 1)
    return str(raised.value)


def test_a_tag_beyond_what_mpi_numbers_is_refused() -> None:
    assert run_mpi(1, refuse) == [
        "this MPI numbers messages up to 32767, and "
        'the activation "hidden" of micro-batch 1 needs 32769.\n--transport gloo'
    ]


# Without an MPI that can be used


def imported(tmp_path: Path, package: str, **environment: str) -> str:
    """The error message when mpi4py has the given source code."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(package)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from asyncpipe.runtime.transports.mpi import load_mpi\n"
        "from asyncpipe.runtime.errors import TransportError\n"
        "try: load_mpi()\n"
        "except TransportError as error: sys.exit(str(error))"
    )
    command = [bin_folder() / "python", "-c", program]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    return result.stderr


def test_a_missing_mpi4py_is_said_with_the_command_that_installs_it(tmp_path: Path) -> None:
    absent = "raise ModuleNotFoundError(\"No module named 'mpi4py'\")"
    assert imported(tmp_path, absent) == (
        "--transport mpi: mpi4py is not installed.\npip install 'mpi4py>=4.1' 'mpich>=5'\n"
    )


def test_an_mpi4py_without_a_library_is_said(tmp_path: Path) -> None:
    assert imported(tmp_path, "raise RuntimeError('cannot load MPI library')").startswith(
        "--transport mpi: mpi4py is installed but finds no MPI library (libmpi.so.12 or .40).\n"
    )


def serialized(rank: int) -> str:
    mpi = load_mpi()
    with pytest.raises(TransportError) as raised:
        check_thread_level(mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE, mpi.Get_library_version())
    return str(raised.value)


def test_a_lower_thread_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = run_mpi(1, serialized)
    assert "MPICH Version:" in text and "MPI_THREAD_MULTIPLE" in text
    program = "from asyncpipe.runtime.transports.mpi import load_mpi; load_mpi()"
    result = subprocess.run(
        [bin_folder() / "python", "-c", program],
        env=os.environ | {"MPI4PY_RC_THREAD_LEVEL": "serialized"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "was started with thread level 2, and two threads call it" in result.stderr


def singleton(rank: int) -> str:
    with pytest.raises(TransportError) as raised:
        check_world(load_mpi().COMM_WORLD, 2, 4)
    return str(raised.value)


def test_ranks_that_mpi_does_not_know_are_told_which_mpiexec_to_take() -> None:
    (text,) = run_mpi(1, singleton)
    what, cure = text.splitlines()
    assert what.endswith("for MPI this process is rank 0 of 1, for its launcher rank 2 of 4.")
    assert cure.endswith("/mpiexec -n 4 ...")


# The command under mpirun


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp2")
    write_mlp(folder / "mlp4", stages=4)
    write_mlp(folder / "slow", slow_s=0.02)
    (folder / "own.py").write_text(FAILING)
    return folder


def command(
    *arguments: object, launcher: tuple[str, ...] = (), scripts: Path | None = None
) -> subprocess.Popen[str]:
    given = [*map(str, arguments), "--transport", "mpi", "--threads", "1", "--log-every", "1"]
    return subprocess.Popen(
        [*launcher, (scripts or bin_folder()) / "asyncpipe-train", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def mpirun(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    return command(*arguments, launcher=(mpiexec(), "-n", str(ranks)))


def finished(start: subprocess.Popen[str], limit_s: float = 90) -> tuple[int, str, str]:
    try:
        out, error = start.communicate(timeout=limit_s)
    finally:
        stop(start)
    return start.returncode, out, error


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_under_mpirun_makes_the_losses_of_gloo(
    ranks: int, folders: Path, tmp_path: Path
) -> None:
    folder = folders / f"mlp{ranks}"
    code, out, error = finished(mpirun(ranks, folder, "--steps", 4, "--output", tmp_path / "mpi"))
    assert code == 0, error
    assert f"{ranks} processes by mpirun · mpi · " in out
    gloo = Settings(
        folder=str(folder),
        steps=4,
        threads=1,
        log_every=1,
        transport="gloo",
        output=str(tmp_path / "gloo"),
    )
    run(gloo, FACTORY)
    assert losses(tmp_path / "mpi") == losses(tmp_path / "gloo")
    for file in sorted((tmp_path / "gloo" / "weights").iterdir()):
        assert file.read_bytes() == (tmp_path / "mpi" / "weights" / file.name).read_bytes()
    assert not (tmp_path / "mpi" / "ranks").exists()


def test_a_failing_rank_ends_all_under_mpirun_and_its_sentence_is_shown(
    folders: Path, tmp_path: Path
) -> None:
    criterion = f"{folders / 'own.py'}:criterion"
    start = mpirun(
        2, folders / "mlp2", "--steps", 50, "--criterion", criterion, "--output", tmp_path / "run"
    )
    code, _, error = finished(start)
    assert code == 1
    assert error.count("error: ") == 1
    assert "ValueError: the tenth call fails" in error


def test_a_rank_that_fails_leaves_when_its_output_is_read() -> None:
    program = (
        "import os, sys\n"
        "from types import SimpleNamespace\n"
        "from asyncpipe.runtime.transports.mpi import leave_mpi\n"
        "world = SimpleNamespace(Abort=lambda code: os.write(1, b'leaves'))\n"
        "answers = {'Is_initialized': lambda: True, 'Is_finalized': lambda: False}\n"
        "sys.modules['mpi4py.MPI'] = SimpleNamespace(COMM_WORLD=world, **answers)\n"
        "os.write(2, b'error: the sentence')\n"
        "leave_mpi(1)\n"
    )
    start = subprocess.Popen(
        [bin_folder() / "python", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert start.stdout is not None and start.stderr is not None
    assert select.select([start.stderr], [], [], 30.0)[0]  # it is written, and nobody reads it
    assert not select.select([start.stdout], [], [], 0.3)[0]
    assert start.communicate() == (b"leaves", b"error: the sentence")


def test_a_killed_rank_ends_all_under_mpirun(folders: Path, tmp_path: Path) -> None:
    start = mpirun(2, folders / "slow", "--steps", 10_000, "--output", tmp_path / "run")
    pids = ranks_of(tmp_path / "run")
    os.kill(pids[1], signal.SIGKILL)
    killed_s = time.monotonic()
    code, _, _ = finished(start)
    assert code != 0
    assert time.monotonic() - killed_s < 60
    assert_gone(pids)


def test_ranks_that_are_done_may_leave_one_after_another() -> None:
    program = (
        "import os, time\n"
        "from mpi4py import MPI\n"
        "from asyncpipe.runtime.transports.mpi import leave_mpi\n"
        "finalize, wait_s = MPI.Finalize, MPI.COMM_WORLD.Get_rank() * 0.3\n"
        "MPI.Finalize = lambda: (finalize(), time.sleep(wait_s), print('done', flush=True))\n"
        "leave_mpi(0)\n"
        "os._exit(0)\n"
    )
    ended = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, "-c", program], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, 2 * "done\n")


def ranks_of(output: Path) -> dict[int, int]:
    """The process of each rank of the run in `output`, when all have made a step."""
    marks = [output / "ranks" / f"{rank}.step" for rank in range(2)]
    end_s = time.monotonic() + 60
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    states = [output / "ranks" / f"{rank}.state" for rank in range(2)]
    return {rank: json.loads(state.read_text())["pid"] for rank, state in enumerate(states)}


def assert_gone(pids: dict[int, int]) -> None:
    """Within seconds, because mpiexec ends its ranks by signal without waiting for them."""
    end_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
        assert time.monotonic() < end_s
        time.sleep(0.05)


# The command by itself, which calls mpiexec


def by_itself(
    folder: Path, output: Path, *arguments: object, scripts: Path | None = None
) -> subprocess.Popen[str]:
    return command(folder, "--output", output, *arguments, scripts=scripts)


def test_without_mpirun_the_command_starts_its_ranks_with_mpiexec(
    folders: Path, tmp_path: Path
) -> None:
    code, out, error = finished(by_itself(folders / "mlp2", tmp_path / "run", "--steps", 3))
    assert (code, error) == (0, "")
    assert "2 processes · mpi · " in out and "✓ 3 steps" in out
    assert len(losses(tmp_path / "run")) == 3
    assert not (tmp_path / "run" / "ranks").exists()


def test_a_killed_rank_is_named(folders: Path, tmp_path: Path) -> None:
    start = by_itself(folders / "slow", tmp_path / "run", "--steps", 10_000)
    pids = ranks_of(tmp_path / "run")
    os.kill(pids[1], signal.SIGKILL)
    killed_s = time.monotonic()
    code, out, error = finished(start)
    assert code == 1
    assert time.monotonic() - killed_s < 60
    assert error.startswith("error: rank 1 (stage 1) was killed by SIGKILL at step ")
    assert "BAD TERMINATION" not in out
    assert_gone(pids)


def test_a_failing_rank_ends_all_and_its_sentence_is_shown(folders: Path, tmp_path: Path) -> None:
    criterion = f"{folders / 'own.py'}:criterion"
    start = by_itself(folders / "mlp2", tmp_path / "run", "--steps", 50, "--criterion", criterion)
    code, _, error = finished(start)
    assert code == 1
    assert error.startswith("error: ") and error.count("\n") <= 2
    assert "ValueError: the tenth call fails" in error


def test_an_interrupted_run_ends_with_one_line(folders: Path, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent  # a fork is not in the group of the command
    start = by_itself(folders / "slow", tmp_path / "run", "--steps", 10_000, scripts=scripts)
    pids = ranks_of(tmp_path / "run")
    os.killpg(start.pid, signal.SIGINT)  # as a terminal does
    code, out, error = finished(start)
    assert code == 130
    assert "interrupted at step " in out + error
    assert_gone(pids)


def test_ranks_do_not_outlive_a_killed_command(folders: Path, tmp_path: Path) -> None:
    start = by_itself(folders / "slow", tmp_path / "run", "--steps", 10_000)
    pids = ranks_of(tmp_path / "run")
    start.kill()
    finished(start)
    assert_gone(pids)


class Described:
    """A communicator whose library lists these kinds of memory."""

    def __init__(self, kinds: str | None) -> None:
        self.kinds = kinds

    def Get_info(self) -> Described:
        return self

    def Get(self, key: str) -> str | None:
        assert key == "mpi_memory_alloc_kinds"
        return self.kinds

    def Free(self) -> None: ...


@pytest.mark.parametrize(
    ("kinds", "answer", "expected"),
    [
        ("system,mpi,cuda:device", None, True),
        ("system,mpi", 1, True),
        ("system,mpi", 0, False),
        (None, 1, True),
        (None, None, False),
    ],
)
def test_a_library_is_asked_in_both_ways_for_memory_of_gpus(
    monkeypatch: pytest.MonkeyPatch, kinds: str | None, answer: int | None, expected: bool
) -> None:
    asked = {} if answer is None else {"MPIX_Query_cuda_support": lambda: answer}
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(__file__="")))
    monkeypatch.setattr(ctypes, "CDLL", lambda file: SimpleNamespace(**asked))
    assert takes_cuda(Described(kinds)) is expected
