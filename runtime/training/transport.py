"""Settings, a plan and the ranks of a run -> the transport that all of them take."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..boundary_dtypes import AS_PLANNED
from ..channels import plan_channels
from ..launching.world import World
from ..plan import Plan
from ..schedule import Schedule
from ..transports.choose import (
    Choice,
    Circumstances,
    choose,
    find_circumstances,
    has_nccl,
    have_own_gpus,
    open_transport,
    whereabouts,
)
from ..transports.nccl import Lane, lanes_of
from ..transports.protocol import Transport
from .resolve import gpu_of_rank
from .settings import Settings


def agree_on_transport(world: World, settings: Settings, device: str) -> Choice:
    """What rank 0 was asked for, or the fastest for where the ranks of this pipeline are; the same
    on every rank of it.

    Raises TransportError, on every rank of it, for a transport that cannot work there.
    """
    asked = world.text_of_first(settings.transport)
    places = world.gathered(whereabouts(torch.device(device)))
    own = [places[rank] for rank in world.grid.pipeline_of(world.rank)]
    return choose(asked, find_circumstances(world.pipeline, own))


def group_of_gradients(world: World, settings: Settings, device: str) -> dist.ProcessGroup | None:
    """The ranks with the same stages, among whom gradients are summed; None without replicas. It
    is NCCL's where each has a GPU of its own. Every rank calls it."""
    if world.grid.most_copies == 1:
        return None
    places = world.gathered_from_copies(whereabouts(torch.device(device)))
    is_able = have_own_gpus(places) and all(text[16] for text in places)
    # All make a group or none: see `launching/world.py`.
    if all(told == b"1" for told in world.gathered(b"1" if is_able else b"0")):
        group: dist.ProcessGroup = dist.new_group(
            list(world.grid.copies_of(world.rank)),
            timeout=datetime.timedelta(seconds=settings.patience_s),
            backend="nccl",
            use_local_synchronization=True,
        )
        return group if len(places) > 1 else None
    return world.copies


def expect_transport(settings: Settings, plan: Plan, ranks: int) -> Choice:
    """What ranks that this machine starts would agree on."""
    on_gpus = settings.device == "cuda"
    where = Circumstances(
        ranks,
        on_gpus=on_gpus,
        own_gpus=on_gpus and len(set(gpu_of_rank(plan, ranks, settings.ranks_per_gpu))) == ranks,
        has_nccl=on_gpus and has_nccl(),
    )
    return choose(settings.transport, where)


def make_transport(
    choice: Choice, world: World, settings: Settings, plan: Plan, schedule: Schedule, device: str
) -> Transport:
    """This rank's end of the transport of its pipeline; every rank calls it."""
    return open_transport(
        choice.name,
        world.pipeline,
        timeout_s=settings.patience_s,
        device=device,
        lanes=frozenset().union(*(lanes_of_plan(plan, ranks) for ranks in schedule.placements)),
    )


def lanes_of_plan(plan: Plan, rank_of_stage: Sequence[int]) -> frozenset[Lane]:
    """The ranks that talk to each other, and of what; its tensors' sizes do not matter."""
    channels = plan_channels(
        plan,
        rank_of_stage,
        sizes=plan.sizes,
        shared_specs={},
        state_bytes=0,
        dtypes=AS_PLANNED,
    )
    return lanes_of(channels)
