"""An allocation that failed -> which rank wanted how much for what, what was free, and what helps.

A GPU says so by an exception of torch, a host by one of torch, NumPy or Python where the process
has a limit; without one Linux kills the process, and whoever watches says that.
"""

from __future__ import annotations

import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..activity import Activities, Activity
from ..errors import AsyncPipeError, is_out_of_memory
from ..launching.world import World
from ..plan import Plan
from ..training.half import format_bytes
from ..training.settings import Settings
from .stall import in_the_past

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_WANTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")


class OutOfMemory(AsyncPipeError):
    """A rank for which there was no more memory."""

    comes_again = False


@contextmanager
def memory_watched(
    plan: Plan, settings: Settings, world: World, activities: Activities
) -> Iterator[None]:
    """Within, an error for want of memory leaves as OutOfMemory."""
    try:
        yield
    except Exception as error:
        cause = memory_error(error)
        if cause is None:
            raise
        told = describe(cause, plan, settings, world, activities)
        told.add_note("".join(traceback.format_exception(error)))
        raise told from cause


def memory_error(error: BaseException) -> BaseException | None:
    """The error that says that there is no more memory, of those that this one comes from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or is_out_of_memory(seen):
            return seen
        seen = seen.__cause__
    return None


def describe(
    error: BaseException, plan: Plan, settings: Settings, world: World, activities: Activities
) -> OutOfMemory:
    """What to tell of it: rank, step, action, wanted, free, planned, and what needs less."""
    activity, _ = activities.now
    free, whole = _room(world.machine.device)
    found = _WANTED.search(str(error))
    wanted = f"wanted {format_bytes(int(float(found[1]) * _UNITS[found[2]]))}, " if found else ""
    stage = plan.stages[activity.stage] if activity.stage >= 0 else None
    planned = ""
    if stage is not None and stage.peak_bytes:
        planned = f" The plan's peak of stage {stage.index} is {format_bytes(stage.peak_bytes)}."
    return OutOfMemory(
        f"rank {world.rank} ran out of memory at step {_step(activity, activities, settings)}, "
        f"when it {in_the_past(str(activity))}: {wanted}{format_bytes(free)} of "
        f"{format_bytes(whole)} free.{planned}",
        " · ".join(_cures(plan, settings, whole)),
    )


def _step(activity: Activity, activities: Activities, settings: Settings) -> int:
    """The step, counted from 1, of what a rank does; a segment has one or several."""
    if activity.kind in ("S", "norm"):
        return activities.step + activity.index - 1
    return activities.step + activity.index // (settings.micro_batches or 1)


def _room(device: torch.device | str) -> tuple[int, int]:
    """Bytes free for this process, and of how many."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * resource.getpagesize()), limit
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemAvailable"] << 10, kib["MemTotal"] << 10


def _cures(plan: Plan, settings: Settings, whole: int) -> Iterator[str]:
    size, count = settings.micro_batch_size or 1, settings.micro_batches or 1
    if size > 1:
        again = f"--micro-batch-size {size // 2} --micro-batches {count * 2}"
        yield f"{again} (half the activations)"
    if settings.schedule == "gpipe":
        yield "--schedule 1f1b (fewer micro-batches in flight)"
    if not all(stage.recompute for stage in plan.stages):
        yield "--recompute all"
    yield f"partition again with --memory-limit {int(0.9 * whole) >> 20}MiB"
