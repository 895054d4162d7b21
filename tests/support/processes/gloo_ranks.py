"""Real processes for tests: a function on every rank of a gloo group, with a hard time limit.

Processes come from a fork server that has torch loaded, so starting four takes well under a
second. They find the function by its file, for a test file has no name to import it by.
"""

from __future__ import annotations

import datetime
import multiprocessing
import runpy
import tempfile
import time
import traceback
from collections.abc import Callable
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# Importing in every rank takes seconds; the first optimizer of a process loads torch._dynamo.
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "asyncpipe.commands.in_python",
        "asyncpipe.tests.support.models.generated",
        "asyncpipe.tests.support.oracles.async_simulation",
        "asyncpipe.tests.support.processes.executor",
        __name__,
    ]
)


def run_processes(
    world_size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 60.0
) -> list[Any]:
    """`function(rank, *arguments)` on each rank of a new gloo group; the results in rank order.

    A rank that raises gives its exception's text instead of a result, one that dies or takes
    longer than `limit_s` gives None; nothing is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(
                target=_main,
                args=(rank, world_size, folder, getfile(function), function.__name__, arguments),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        end_s = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        return [_read(Path(folder) / f"{rank}.pt") for rank in range(world_size)]


class RankError(str):
    """The traceback of a rank that raised."""


def _main(
    rank: int, world_size: int, folder: str, file: str, function: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        dist.barrier()  # A rank that ends at once would break what another is still connecting.
        result = runpy.run_path(file)[function](rank, *arguments)
    except Exception:
        result = RankError(traceback.format_exc())
    torch.save(result, Path(folder) / f"{rank}.part")
    (Path(folder) / f"{rank}.part").rename(Path(folder) / f"{rank}.pt")
    if dist.is_initialized() and not isinstance(result, RankError):
        dist.barrier()
        dist.destroy_process_group()


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.is_file() else None
