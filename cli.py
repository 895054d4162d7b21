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
    _run_and_end("partition")


def train() -> None:
    """Entry point of asyncpipe-train."""
    _run_and_end("train", as_rank=True)


def _run_and_end(command: str, *, as_rank: bool = False) -> NoReturn:
    """Runs a command, and ends the process without the interpreter's shutdown, which would free
    torch and a large model for up to seconds. Exit functions, such as those that the model's own
    code has registered, are called before, but not with `as_rank`: the process may be a rank."""
    code = _run(command)
    if not as_rank:
        atexit._run_exitfuncs()
    if "torch.distributed" in sys.modules:  # else only --help, or a usage error
        from .runtime.distributed.failure import end_process

        end_process(code)
    sys.exit(code)


def inspect() -> None:
    """Entry point of asyncpipe-inspect."""
    _run_and_end("inspect")


def compare() -> None:
    """Entry point of asyncpipe-compare."""
    _run_and_end("compare")


def view() -> None:
    """Entry point of asyncpipe-view."""
    _run_and_end("view")


def comm() -> None:
    """Entry point of asyncpipe-comm."""
    _run_and_end("comm", as_rank=True)


def job() -> None:
    """Entry point of asyncpipe-job."""
    _run_and_end("job")


def info() -> None:
    """Entry point of asyncpipe-info."""
    _run_and_end("info")


def _run(command: str) -> int:
    isolate()
    try:
        from .commands.running import run

        app = importlib.import_module(f".commands.{command}", __package__).app
    except KeyboardInterrupt:  # while modules are imported
        sys.stderr.write("interrupted\n")
        return 130
    return run(app)
