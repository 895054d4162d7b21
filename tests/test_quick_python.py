"""The interpreter whose imports are done behaves as the real one where tests use it."""

import os
import signal
import subprocess
import time
from pathlib import Path

from asyncpipe.tests.support.processes.quick_python import bin_folder


def start(program: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [bin_folder() / "python", "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_process_has_its_commands_environment_folder_files_and_exit_code(tmp_path: Path) -> None:
    program = (
        "import os, sys; sys.stderr.write(sys.stdin.read()); "
        "print(os.environ['ONLY'], 'HOME' in os.environ, os.getcwd(), sys.argv); sys.exit(3)"
    )
    environment = {"ONLY": "this", "PATH": os.environ["PATH"]}
    process = start(program, "a", "b c", cwd=tmp_path, env=environment)
    out, error = process.communicate("to be printed\n", timeout=60)
    assert out == f"this False {tmp_path} ['-c', 'a', 'b c']\n"
    assert (error, process.returncode) == ("to be printed\n", 3)


def test_imports_are_done_and_nothing_is_left_of_another_process() -> None:
    change = "import torch; torch.left = 1; import os; os.environ['X'] = '1'"
    assert start(change).wait(60) == 0
    program = (
        "import os, sys; assert 'torch' in sys.modules and 'transformers' in sys.modules; "
        "import torch; print(hasattr(torch, 'left'), 'X' in os.environ)"
    )
    out, error = start(program).communicate(timeout=60)
    assert out == "False False\n", error


def test_an_error_and_a_signal_that_end_it_end_its_command_alike() -> None:
    failed = start("1 / 0")
    _, error = failed.communicate(timeout=60)
    assert failed.returncode == 1 and error.rstrip().endswith("ZeroDivisionError: division by zero")
    killed = start("import os; os.kill(os.getpid(), 9)")
    assert killed.wait(60) == -signal.SIGKILL


def test_signals_of_its_command_reach_it_and_it_does_not_outlive_it() -> None:
    program = (
        "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    told, alone = start(program), start(program)
    for process in (told, alone):
        assert process.stdout is not None
        process.started = int(process.stdout.readline())
    told.terminate()
    assert told.wait(20) == 7
    alone.kill()
    end_s = time.monotonic() + 20
    while Path(f"/proc/{alone.started}").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
