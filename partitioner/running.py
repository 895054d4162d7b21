"""How the user means a plan to run, in the words of the command -> the setting of its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, cast

from ..runtime.errors import PlanError
from ..runtime.schedules import ASYNCHRONOUS, AUTO, make_schedule, natural_ranks
from .options import bytes_of, check_options
from .setting import Device, Recompute, Setting

_MOST_PASSES = 2**20


class Running(TypedDict, total=False):
    """How a plan is meant to run; the names are those of the command's options.

    `schedule` is asynchronous when none is named (None). `ranks` share the stages, by default
    as many as the schedule has for them: mostly one a stage. `memory_limit` is of every rank:
    bytes, or a text such as "11GiB". `recompute` is "auto" (where a stage does not fit otherwise),
    "all" or "none"; `staleness` has methods of an asynchronous run, joined by +.
    """

    schedule: str | None
    ranks: int | None
    micro_batches: int
    recompute: str
    memory_limit: int | str | None
    optimizer: str
    staleness: str


def make_setting(
    stages: int,
    *,
    overlap: bool = False,
    devices: Sequence[Device] = (),
    schedule: str | None = None,
    ranks: int | None = None,
    micro_batches: int = 8,
    recompute: str = "auto",
    memory_limit: int | str | None = None,
    optimizer: str = "adamw",
    staleness: str = "none",
) -> Setting:
    """The setting of the equal ranks of `stages`, or of `devices`, that run so: see `Running`.

    Raises PlanError for a name that there is not and a number that cannot be.
    """
    schedule = schedule or "async-1f1b"
    check_options(
        {
            "stages": stages,
            "ranks": ranks,
            "schedule": schedule,
            "recompute": recompute,
            "optimizer": optimizer,
            "staleness": staleness,
            "micro_batches": micro_batches,
            "memory_limit": memory_limit,
        }
    )
    if micro_batches > _MOST_PASSES // stages:
        raise PlanError(
            f"{micro_batches} micro-batches are too many for {stages} stages.", "--micro-batches 8"
        )
    if schedule == "single" and stages > 1:
        raise PlanError(
            f"single runs all {stages} stages in one process, so nothing is balanced.",
            "Plan for 1f1b; asyncpipe-train --schedule single runs any plan.",
        )
    if schedule == "virtual-stages-1f1b":
        raise PlanError(
            "virtual-stages-1f1b leaves ranks idle for the sake of fresh weights: no cut suits it "
            "better than another.",
            "Plan for async-1f1b; asyncpipe-train --schedule virtual-stages-1f1b runs any plan.",
        )
    if schedule == "2bw":
        staleness = "2bw" if staleness == "none" else staleness
    if staleness != "none" and schedule not in ASYNCHRONOUS:
        raise PlanError(
            f"--staleness {staleness}, but under {schedule} no weights are stale.",
            "--schedule async-1f1b",
        )
    if ranks is not None and devices:
        raise PlanError(
            "ranks are given twice: by number, and as devices.",
            "Leave --ranks out: every device is a rank.",
        )
    if not devices and schedule not in ASYNCHRONOUS:
        ranks = natural_ranks(schedule, stages) if ranks is None else ranks
        if schedule != AUTO:  # raises where they do not fit
            make_schedule(schedule, stages=stages, micro_batches=micro_batches, ranks=ranks)
    most_bytes = math.inf if memory_limit is None else bytes_of(memory_limit) or math.inf
    return Setting(
        devices=tuple(
            replace(device, memory_bytes=min(device.memory_bytes, most_bytes))
            for device in devices or (Device(),) * (ranks or stages)
        ),
        schedule=schedule,
        micro_batches=micro_batches,
        recompute=cast(Recompute, recompute),
        optimizer=optimizer,
        staleness=staleness,
        overlap=overlap,
    )
