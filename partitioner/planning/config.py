"""The options of a run, as the command names them -> the configuration of its ranks.

`update_ms_per_byte` gives the time of an optimizer step per byte of parameters, from a profile and
the optimizer's name. It is measured on the device of the profile, on matrices that together with
their gradients and moments exceed every cache, because other work runs between two steps. A
prediction counts the moved bytes: parameters and moments read and written, and gradients read.

Sutskever's momentum counts as torch's. Muon and SOAP count as AdamW, which updates their parameters
other than hidden matrices: their matrix products grow with a hidden layer's own work, which is
balanced anyway.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Unpack, cast

import torch

from ...runtime.errors import PlanError
from ...runtime.optimizers.facts import PLANNED
from ...runtime.schedule.asynchronous import ASYNCHRONOUS
from ...runtime.schedule.builders import AUTO, make_schedule, natural_ranks
from ..graph.rank_model import Device, RankConfig, Recompute
from ..profile.cache import ProfileCache, threads_set
from ..profile.measure import clock_of
from ..profile.profiler import Profile
from .options import PartitionOptions, PlanConfig, bytes_of

_MOST_PASSES = 2**20


def make_setting(
    stages: int,
    *,
    overlap: bool = False,
    devices: Sequence[Device] = (),
    **running: Unpack[PlanConfig],
) -> RankConfig:
    """The configuration of the equal ranks of `stages`, or of `devices`, that run this way.

    Raises PlanError for an unknown name and an illegal number.
    """
    run = PartitionOptions(stages=stages, **running)
    schedule, staleness, ranks = run.schedule or "async-1f1b", run.staleness, run.ranks
    if schedule == "2bw" and staleness == "none":
        staleness = "2bw"
    _check_schedule(schedule, stages, run.micro_batches, staleness)
    if ranks is not None and devices:
        raise PlanError(
            "ranks are given twice: by number, and as devices.",
            "Leave --ranks out: every device is a rank.",
        )
    if not devices and schedule not in ASYNCHRONOUS:
        ranks = natural_ranks(schedule, stages) if ranks is None else ranks
        if schedule != AUTO:  # raises where they do not fit
            make_schedule(schedule, stages=stages, micro_batches=run.micro_batches, ranks=ranks)
    most_bytes = math.inf if run.memory_limit is None else bytes_of(run.memory_limit) or math.inf
    return RankConfig(
        devices=tuple(
            replace(device, memory_bytes=min(device.memory_bytes, most_bytes))
            for device in devices or (Device(),) * (ranks or stages)
        ),
        schedule=schedule,
        micro_batches=run.micro_batches,
        recompute=cast(Recompute, run.recompute),
        optimizer=run.optimizer,
        staleness=staleness,
        overlap=overlap,
    )


def _check_schedule(schedule: str, stages: int, micro_batches: int, staleness: str) -> None:
    """Raises PlanError for a schedule that a plan cannot balance, or that does not fit the rest."""
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
            "virtual-stages-1f1b leaves ranks idle to keep weights fresh, so no cut is better than "
            "another.",
            "Plan for async-1f1b; asyncpipe-train --schedule virtual-stages-1f1b runs any plan.",
        )
    if staleness != "none" and schedule not in ASYNCHRONOUS:
        raise PlanError(
            f"--staleness {staleness}, but under {schedule} no weights are stale.",
            "--schedule async-1f1b",
        )


_SHAPE = (1024, 1024)
_MATRICES = 8
_STEPS = 5


def update_ms_per_byte(profile: Profile, optimizer: str, *, cached: bool = True) -> float:
    """Milliseconds of a step for each byte of parameters, on the device of the profile and with its
    threads; with `cached` an earlier measurement, if there is one.
    """
    optimizer = PLANNED[optimizer].timed_as or optimizer
    if profile.bandwidth is not None:
        return 1e3 * (3 + 2 * PLANNED[optimizer].copies) / profile.bandwidth
    device = torch.device(profile.device)
    known = ProfileCache.of(device, profile.threads, "float32", read=cached)
    key = f"update of {optimizer}"
    if (found := known.get(key)) is None:
        with threads_set(profile.threads), torch.random.fork_rng(devices=[]):
            found = _measured(optimizer, device)
        known.put(key, found)
        known.save()
    return float(found)


def _measured(optimizer: str, device: torch.device) -> float:
    matrices = [torch.randn(_SHAPE).to(device) for _ in range(_MATRICES)]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    facts = PLANNED[optimizer]
    fused: dict[str, Any] = {"fused": True} if facts.fused else {}
    stepping = facts.load()(matrices, **facts.arguments, **fused)
    stepping.step()  # makes what it keeps
    clock = clock_of(device)
    marks = [clock.mark()]
    for _ in range(_STEPS):
        stepping.step()
        marks.append(clock.mark())
    num_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    return statistics.median(clock.ms(*pair) for pair in pairwise(marks)) / num_bytes
