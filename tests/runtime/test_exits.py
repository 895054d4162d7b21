"""The user's code ends the process: no command takes that for its own good end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asyncpipe.runtime.process import Ended, Interrupted
from asyncpipe.runtime.user_code import ExitError, exits_as_errors
from asyncpipe.tests.support.faults.run_faults import FaultyRun
from asyncpipe.tests.support.models.hand_folders import WIDTH, write_mlp
from asyncpipe.tests.support.processes.quick_python import bin_folder

OWN = f"""
import ctypes, os, sys, torch
import asyncpipe
from torch.utils.data import DataLoader, Dataset
calls = 0

def leave(where):
    global calls
    calls += where == "{{where}}"
    if where == "{{where}}" and calls == {{call}}:
        {{how}}

leave("import")

EXIT_GROUP = 231 if os.uname().machine == 'x86_64' else 94

class Samples(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        leave("sample")
        return {{{{"x": torch.zeros({WIDTH}), "target": 0}}}}

class Loaded:
    def __init__(self):
        self.loader = iter(DataLoader(Samples(), batch_size=None, num_workers=1))
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return next(self.loader)

def data():
    leave("data")
    return Samples()
def loaded():
    return Loaded()
def criterion(outputs, target):
    leave("criterion")
    return torch.nn.functional.cross_entropy(outputs, target)
class Log(asyncpipe.Reporter):
    def on_step(self, record):
        leave("log")
def log(settings, folder):
    return Log()
"""
LEAVING = {
    "SystemExit": "raise SystemExit(0)",
    "sys.exit": "sys.exit(0)",
    "exit": "import site; site.setquit(); exit()",
    "os._exit": "os._exit(0)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
}
OTHER_WAYS = {
    "posix._exit": "import posix; posix._exit(0)",
    "C's _exit": "import ctypes; ctypes.CDLL(None)._exit(0)",
    "C's exit": "import ctypes; ctypes.CFUNCTYPE(None)(('exit', ctypes.CDLL(None)))()",
    "C's _Exit": "import _ctypes, ctypes; _ctypes.dlsym(ctypes.CDLL(None)._handle, '_Exit')",
    "os.execv": "os.execv('/bin/true', ['true'])",
}
CASES = [
    ("import", 1, "os._exit"),
    ("data", 1, "SystemExit"),
    ("sample", 50, "os._exit"),
    ("criterion", 10, "KeyboardInterrupt"),
    ("log", 2, "sys.exit"),
    ("stage", 10, "SystemExit"),
    ("criterion", 10, "C's _exit"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "mlp2"
    write_mlp(made)
    return made


def own_code(folder: Path, where: str, call: int, how: str) -> str:
    path = folder / "own.py"
    path.write_text(OWN.format(where=where, call=call, how=how))
    return str(path)


@pytest.mark.parametrize("schedule", ["single", "1f1b"])
@pytest.mark.parametrize(("where", "call", "leaving"), CASES)
def test_code_that_ends_the_process_is_named_and_the_run_has_failed(
    folder: Path, tmp_path: Path, schedule: str, where: str, call: int, leaving: str
) -> None:
    own = own_code(tmp_path, where, call, (LEAVING | OTHER_WAYS)[leaving])
    options = {name: f"{own}:{name}" for name in ("data", "criterion", "log")}
    if where == "stage":
        write_mlp(folder := tmp_path / "edited")
        stage = folder / "stage_1.py"
        head = f"import sys\nsys.path.append({str(tmp_path)!r})\nfrom own import leave\n"
        text = stage.read_text().replace("        time.sleep(0)", "        leave('stage')")
        stage.write_text(head + text)
        options |= {"trust": None}
    given = {"schedule": schedule, "steps": 20, **options}
    with FaultyRun(folder, tmp_path / "run", given) as run:
        ended = run.finish()
    assert ended.code == 1, ended.error
    assert "own.py:11 ended the process (" in ended.first_line
    assert ended.first_line.startswith("error: ") and "Traceback" not in ended.error


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_worker_that_ends_is_told(folder: Path, tmp_path: Path, how: str) -> None:
    own = own_code(tmp_path, "sample", 60, how)
    given = {"schedule": "single", "steps": 20, "data": f"{own}:loaded"}
    with FaultyRun(folder, tmp_path / "run", given) as run:
        ended = run.finish()
    assert ended.code == 1
    first, second = ended.error.splitlines()
    assert "could not be read" in first and second.startswith("A data-loading process")


def test_a_rank_that_ends_in_a_way_that_nobody_sees_is_told(folder: Path, tmp_path: Path) -> None:
    own = own_code(tmp_path, "criterion", 10, "ctypes.CDLL(None).syscall(EXIT_GROUP, 0)")
    given = {"steps": 20, "criterion": f"{own}:criterion"}
    with FaultyRun(folder, tmp_path / "run", given) as run:
        ended = run.finish()
    assert ended.code == 1
    assert ended.first_line.startswith("error: rank 1 (stage 1) ended with exit code 0 at step ")


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", "raise KeyboardInterrupt"])
def test_a_model_whose_factory_ends_the_process_is_not_partitioned(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "net.py").write_text(f"import os, sys\ndef build():\n    {how}\n")
    command = [bin_folder() / "asyncpipe-partition", "--model", "net.py:build", "--stages", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "net.py:3 ended the process (" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "generated_models").exists()


@pytest.mark.parametrize("how", [*LEAVING, *OTHER_WAYS])
def test_each_way_to_end_a_process_is_told_with_its_line(tmp_path: Path, how: str) -> None:
    """In a process of its own: one that is not told would end the tests, as if all had passed."""
    (own := tmp_path / "own.py").write_text(f"import os, sys\n{(LEAVING | OTHER_WAYS)[how]}")
    code = compile(own.read_text(), str(own), "exec")
    told = 7
    if (child := os.fork()) == 0:
        ended = 1
        try:
            with exits_as_errors():
                exec(code, {})
        except ExitError as error:
            ended = told if "/own.py:2 ended the process" in str(error) else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == told


def test_what_ends_a_process_is_as_it_was_afterwards() -> None:
    real = os._exit
    with exits_as_errors():
        assert os._exit is not real
    assert os._exit is real is sys.modules[os.name]._exit
    assert ctypes.CDLL(None)._exit  # nobody is asked any more


def test_a_thread_that_ends_the_process_is_told(folder: Path, tmp_path: Path) -> None:
    ending = "import threading; threading.Thread(target=os._exit, args=(0,)).start()"
    own = own_code(tmp_path, "criterion", 10, ending)
    given = {"schedule": "single", "steps": 2000, "criterion": f"{own}:criterion"}
    with FaultyRun(folder, tmp_path / "run", given) as run:
        ended = run.finish()
    assert ended.code == 1
    assert ended.first_line.endswith("ended the process (os._exit in a thread).")


def test_signals_and_other_processes_end_as_they_did() -> None:
    with pytest.raises(Ended), exits_as_errors():
        raise Ended(143)
    with pytest.raises(Interrupted), exits_as_errors(), exits_as_errors():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    with exits_as_errors():
        if (child := os.fork()) == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=lambda: exits_as_errors().__enter__())
    thread.start()
    thread.join()


STARTER = """
import subprocess, sys, os, time
command = [sys.executable, "-P", "-m", "asyncpipe.runtime.launch.worker", str(os.getpid())]
ranks = [subprocess.Popen([*command, "{}", "folder", "reporter"]) for _ in range(2)]
print(*(rank.pid for rank in ranks), flush=True)
time.sleep(60)
"""


def test_no_rank_outlives_a_command_that_is_killed_while_they_start() -> None:
    """Importing torch takes a rank longer than any of these waits; what starts it is tied first."""
    delays = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    left: dict[int, float] = {}
    for delay in delays:
        with subprocess.Popen(
            [sys.executable, "-c", STARTER],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as command:
            assert command.stdout is not None
            ranks = list(map(int, command.stdout.readline().split()))
            assert len(ranks) == 2
            time.sleep(delay)
            command.kill()
            left |= dict.fromkeys(ranks, time.monotonic())
    end_s = time.monotonic() + 2.0
    while alive := [rank for rank in left if _runs(rank)]:
        assert time.monotonic() < end_s, f"ranks {alive} are left"
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
