"""`asyncpipe.launch`: a function in a process for each rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

import asyncpipe
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.process import is_alive
from asyncpipe.tests.support.processes.quick_python import bin_folder

SCRIPT = """
import os, time, asyncpipe

def place(times):
    return int(os.environ["RANK"]) * times, int(os.environ["WORLD_SIZE"]), os.getpid()

def one_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("no such sheep")
    time.sleep(120)

def one_leaves():
    os._exit(3 if os.environ["RANK"] == "0" else 0)

if __name__ == "__main__":
    found = asyncpipe.launch(place, 10, ranks=2)
    print([each[:2] for each in found], len({each[2] for each in found} | {os.getpid()}))
    for function in (one_fails, one_leaves):
        try:
            asyncpipe.launch(function, ranks=2)
        except Exception as error:
            print(error.what)
"""
NOTEBOOK = """
import os, sys, torch, asyncpipe
del sys.modules["__main__"].__file__  # as in a notebook
torch.randn(500, 500) @ torch.randn(500, 500)  # its threads have started
from asyncpipe.partitioner.capture.fake_inputs import FakeWorld
with FakeWorld(torch.nn.Linear(2, 2)).mode:  # as a partition does, and it runs a backward
    torch.ones(2)
torch.ones((), requires_grad=True).backward()
def here():
    x = torch.randn(500, 500, requires_grad=True)
    (x @ x).sum().backward()
    return int(os.environ["RANK"])
print(asyncpipe.launch(here, ranks=2))
"""


def printed(folder: Path, text: str, python: Path) -> list[str]:
    """The output of a script, which must succeed."""
    (folder / "sheep.py").write_text(text)
    done = subprocess.run(
        [python, folder / "sheep.py"],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ranks_of_a_script_return_their_results_and_the_first_cause_ends_all(
    tmp_path: Path,
) -> None:
    results, failed, left = printed(tmp_path, SCRIPT, bin_folder() / "python")
    assert results == "[(0, 2), (10, 2)] 3"
    assert failed.startswith("rank 1 failed: ValueError: no such sheep")
    assert "sheep.py:9" in failed
    assert "sheep.py:13 ended the process (SystemExit: " in left


def test_ctrl_c_is_what_python_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(agent: object) -> None:
        raise SignalException("process got signal 2", signal.SIGINT)

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    with pytest.raises(KeyboardInterrupt):
        asyncpipe.launch(print, ranks=2)


def test_a_function_of_a_notebook_runs_in_forks_of_it(tmp_path: Path) -> None:
    assert printed(tmp_path, NOTEBOOK, Path(sys.executable)) == ["[0, 1]"]


WITHOUT_FORKS = """
import os, sys, torch, asyncpipe
del sys.modules["__main__"].__file__
class Found:
    def __init__(self, rank):
        self.rank = rank
scale, starter = torch.tensor(10), os.getpid()
def here(added, *, kind=Found):
    torch.ones((), requires_grad=True).backward()
    return kind(int(os.environ["RANK"]) * int(scale) + added)
def prepare():
    {prepared}
prepare()
found = asyncpipe.launch(here, 7, ranks=2)
print([each.rank for each in found], all(isinstance(each, Found) for each in found))
def fails():
    raise ValueError("no such sheep")
try:
    asyncpipe.launch(fails, ranks=2)
except Exception as error:
    print(error.what)
"""
UNABLE = """
    def backward(tensor):  # as torch's in a fork of a process that used a GPU
        raise RuntimeError("Unable to handle autograd's threading")
    torch.Tensor.backward = backward
"""


@pytest.mark.parametrize("prepared", [UNABLE, "torch.cuda.is_initialized = lambda: True"])
def test_a_function_of_a_notebook_whose_forks_cannot_train_runs_in_new_processes(
    prepared: str, tmp_path: Path
) -> None:
    text = WITHOUT_FORKS.format(prepared=prepared)
    found, failed = printed(tmp_path, text, Path(sys.executable))
    assert found == "[7, 17] True"
    assert "failed: ValueError: no such sheep" in failed


ENDLESS = """
import os, time, asyncpipe

def stay(folder):
    open(f"{folder}/{os.environ['RANK']}.pid", "w").write(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    asyncpipe.launch(stay, os.path.dirname(os.path.abspath(__file__)), ranks=2)
"""


def test_a_killed_script_leaves_no_rank_behind(tmp_path: Path) -> None:
    (tmp_path / "stay.py").write_text(ENDLESS)
    marks = [tmp_path / "0.pid", tmp_path / "1.pid"]
    with subprocess.Popen([sys.executable, tmp_path / "stay.py"]) as script:
        end_s = time.monotonic() + 100
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert script.poll() is None and time.monotonic() < end_s
            time.sleep(0.05)
        script.kill()
    ranks = [int(mark.read_text()) for mark in marks]
    end_s = time.monotonic() + 10
    while any(map(is_alive, ranks)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks))


def test_a_rank_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AsyncPipeError, match="a rank already"):
        asyncpipe.launch(print, ranks=2)
    monkeypatch.delenv("RANK")
    with pytest.raises(AsyncPipeError, match="ranks is 0"):
        asyncpipe.launch(print, ranks=0)
