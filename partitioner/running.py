"""How the user means a plan to run, in the words of the command -> the setting of its ranks."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypedDict, cast, get_args

from ..runtime.errors import PlanError
from ..runtime.schedules import ASYNCHRONOUS, AUTO, SCHEDULES, make_schedule, natural_ranks
from ..runtime.weight_copies import KEEPS
from .setting import OPTIMIZER_COPIES, Device, Recompute, Setting

_MOST = 2**12
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
    check_numbers(stages, ranks)
    check_choice("schedule", schedule, (*SCHEDULES, AUTO))
    check_choice("recompute", recompute, get_args(Recompute))
    check_choice("optimizer", optimizer, OPTIMIZER_COPIES)
    for method in staleness.split("+"):
        check_choice("staleness", method, KEEPS)
    if not 1 <= micro_batches <= _MOST_PASSES // stages:
        few = "make no step" if micro_batches < 1 else f"are too many for {stages} stages"
        raise PlanError(f"{micro_batches} micro-batches {few}.", "--micro-batches 8")
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
    most_bytes = math.inf if memory_limit is None else parse_bytes(memory_limit)
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


def check_numbers(stages: int | None, ranks: int | None) -> None:
    """Raises PlanError for more stages or ranks than there can be, or fewer."""
    if ranks is not None and not 1 <= ranks <= _MOST:
        few = "can run nothing" if ranks < 1 else "are more than can be planned for"
        raise PlanError(f"{ranks} ranks {few}.", "--ranks 2")
    if stages is not None and not 1 <= stages <= _MOST:
        few = "no stages" if stages < 1 else f"more than {_MOST} of them"
        raise PlanError(f"{stages} stages cannot be planned: {few}.", "--stages 4")


def parse_bytes(size: int | str) -> int:
    """A number of bytes from "11GiB", "500 MB" or "1.5e9".

    >>> parse_bytes("11GiB"), parse_bytes("500 MB"), parse_bytes(7)
    (11811160064, 500000000, 7)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    try:
        if found and (unit := _UNITS.get(found[2].lower())) and 0 < float(found[1]) < 1e18:
            return int(float(found[1]) * unit)
    except ValueError:
        pass
    raise PlanError(
        f"--memory-limit {size} is no size of memory.", "Write it as 11GiB, 500MiB or 16GB."
    )


_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}


def check_choice(what: str, name: str, names: Collection[str]) -> None:
    """Raises PlanError with the nearest name where there is no such one."""
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise PlanError(f'no {what} "{name}".{hint}', f"One of: {', '.join(names)}.")
