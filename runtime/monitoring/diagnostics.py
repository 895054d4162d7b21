"""A failed allocation -> an error with rank, size, free memory and remedies; and `--debug RANKS`.

Out of memory: a GPU raises an exception of torch; a host raises one of torch, NumPy or Python if
the process has a limit. Without a limit Linux kills the process, which the launcher reports.

Debugger: the ranks that `--debug` names wait for one, each on its own port. debugpy speaks the
Debug Adapter Protocol, as VS Code, PyCharm and Emacs do. A rank listens on loopback only, and
continues once a debugger has attached; from then on waits have no timeout, as a rank may be at a
breakpoint.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import struct
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config.execution_options import ExecutionOptions
from ..config.settings import RunConfig, SettingsError
from ..distributed.process_groups import World
from ..errors import AsyncPipeError, is_out_of_memory
from ..executor.instrumented import Activities, Activity
from ..extras import install
from ..formatting import write_bytes
from ..plan.plan import Plan
from .records import Reporter
from .watchdog import in_the_past

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_WANTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


class OutOfMemory(AsyncPipeError):
    """A rank ran out of memory."""

    comes_again = False


@contextmanager
def memory_watched(
    plan: Plan, config: RunConfig, world: World, activities: Activities
) -> Iterator[None]:
    """Within it, out-of-memory errors become OutOfMemory."""
    try:
        yield
    except Exception as error:
        cause = memory_error(error)
        if cause is None:
            raise
        report = describe(cause, plan, config, world, activities)
        report.add_note("".join(traceback.format_exception(error)))
        raise report from cause


def memory_error(error: BaseException) -> BaseException | None:
    """The out-of-memory error among an error and its causes; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or is_out_of_memory(seen):
            return seen
        seen = seen.__cause__
    return None


def describe(
    error: BaseException, plan: Plan, config: RunConfig, world: World, activities: Activities
) -> OutOfMemory:
    """The error with rank, step, action, requested, free and planned memory, and remedies."""
    activity, _ = activities.now
    free, whole = free_and_total_bytes(world.machine.device)
    request = _WANTED.search(str(error))
    wanted = (
        f"wanted {write_bytes(int(float(request[1]) * _UNITS[request[2]]))}, " if request else ""
    )
    stage = plan.stages[activity.stage] if activity.stage >= 0 else None
    planned = ""
    if stage is not None and stage.peak_bytes:
        planned = f" The plan's peak of stage {stage.index} is {write_bytes(stage.peak_bytes)}."
    return OutOfMemory(
        f"rank {world.rank} ran out of memory at step {_step(activity, activities, config)}, "
        f"when it {in_the_past(str(activity))}: {wanted}{write_bytes(free)} of "
        f"{write_bytes(whole)} free.{planned}",
        " · ".join(_cures(plan, config, whole)),
    )


def _step(activity: Activity, activities: Activities, config: RunConfig) -> int:
    """The step, counted from 1, of an activity; a segment has one or several steps."""
    if activity.kind in ("S", "norm"):
        return activities.step + activity.index - 1
    return activities.step + activity.index // config.micro_batches


def free_and_total_bytes(device: torch.device | str) -> tuple[int, int]:
    """The free bytes for this process, and the total."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * resource.getpagesize()), limit
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable"] << 10, kib["MemTotal"] << 10


def _cures(plan: Plan, config: RunConfig, whole: int) -> Iterator[str]:
    size, count = config.micro_batch_size, config.micro_batches
    if size > 1:
        again = f"--micro-batch-size {size // 2} --micro-batches {count * 2}"
        yield f"{again} (half the activations)"
    if config.schedule == "gpipe":
        yield "--schedule 1f1b (fewer micro-batches in flight)"
    if not all(stage.recompute for stage in plan.stages):
        yield "--recompute all"
    yield f"partition again with --memory-limit {int(0.9 * whole) >> 20}MiB"


FIRST_PORT = 5678
"""Rank r listens on FIRST_PORT + r, or on any free port if that one is taken."""


def check_debugger(options: ExecutionOptions, ranks: int) -> None:
    """Raises SettingsError if debugpy or one of the given ranks is missing."""
    if options.debug is None:
        return
    if importlib.util.find_spec("debugpy") is None:
        raise SettingsError(
            f"--debug {options.debug} needs debugpy, which is not installed.",
            install("debug"),
        )
    named = [] if options.debug == "all" else [int(rank) for rank in options.debug.split(",")]
    for rank in named:
        if rank >= ranks:
            last = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"
            raise SettingsError(f"--debug {options.debug}, but the run has {last}.", "--debug all")


def wait_for_debugger(options: ExecutionOptions, world: World, reporter: Reporter | None) -> None:
    """Reports, on rank 0, the address at which each rank waits; returns once a debugger has
    attached to this rank. Every rank calls it."""
    is_debugged = options.is_debugged(world.rank)
    port = _listen(world.rank) if is_debugged else 0
    ports = [struct.unpack("<q", part)[0] for part in world.gathered(struct.pack("<q", port))]
    if reporter is not None:
        for rank, of_rank in enumerate(ports):
            if of_rank:
                text = f"rank {rank} waits for a debugger to attach at 127.0.0.1:{of_rank}"
                reporter.on_note("debugger", text)
    if is_debugged:
        import debugpy

        debugpy.wait_for_client()


def _listen(rank: int) -> int:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules
    import debugpy

    for port in (FIRST_PORT + rank, 0):
        try:
            _, bound_port = debugpy.listen(("127.0.0.1", port))
            return int(bound_port)
        except RuntimeError:  # The port is taken.
            continue
    raise SettingsError(f"--debug {rank}: no port of 127.0.0.1 is free for a debugger.")
