"""The eight commands, of which each is a module in commands/.

asyncpipe-partition --model gpt2 --stages 4
asyncpipe-train generated_models/gpt2_4p
asyncpipe-inspect generated_models/gpt2_4p
asyncpipe-compare generated_models/gpt2_4p --methods sync stash none
asyncpipe-view runs/gpt2_4p/1
asyncpipe-comm bench --ranks 2
asyncpipe-job run job.toml
asyncpipe-info
"""

from __future__ import annotations

import atexit
import importlib
import sys
from typing import NoReturn

from .runtime.import_path import isolate


def partition() -> None:
    """Entry point of asyncpipe-partition."""
    _run_and_end("partition", calls_exit_functions=True)


def train() -> None:
    """Entry point of asyncpipe-train."""
    _run_and_end("train")


def _run_and_end(command: str, *, calls_exit_functions: bool = False) -> NoReturn:
    """Runs a command, and ends the process as a rank ends: it may be one, or hold a large model,
    with which the interpreter would take seconds to shut down. With `calls_exit_functions`, those
    that the model's own code has registered are called before."""
    code = _run(command)
    if calls_exit_functions:
        atexit._run_exitfuncs()
    if "torch.distributed" in sys.modules:  # else only --help, or a usage error
        from .runtime.distributed.failure import end_process

        end_process(code)
    sys.exit(code)


def inspect() -> None:
    """Entry point of asyncpipe-inspect."""
    sys.exit(_run("inspect"))


def compare() -> None:
    """Entry point of asyncpipe-compare."""
    sys.exit(_run("compare"))


def view() -> None:
    """Entry point of asyncpipe-view."""
    sys.exit(_run("view"))


def comm() -> None:
    """Entry point of asyncpipe-comm."""
    _run_and_end("comm")


def job() -> None:
    """Entry point of asyncpipe-job."""
    sys.exit(_run("job"))


def info() -> None:
    """Entry point of asyncpipe-info."""
    sys.exit(_run("info"))


def _run(command: str) -> int:
    isolate()
    try:
        from .commands.running import run

        app = importlib.import_module(f".commands.{command}", __package__).app
    except KeyboardInterrupt:  # while modules are imported
        sys.stderr.write("interrupted\n")
        return 130
    return run(app)
