"""World + options -> the transport of this rank's pipeline, and what its replicas and tensor ranks
exchange their tensors over."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..config.execution_options import LEFT_OUT, ExecutionOptions
from ..config.resolve import gpu_of_rank
from ..config.settings import SettingsError
from ..executor.mailbox import plan_channels
from ..executor.precision import AS_PLANNED
from ..plan.plan import Plan
from ..schedule.schedule import Schedule
from ..tensor_parallel.ranks import Collectives
from ..transports.choose import (
    Circumstances,
    TransportChoice,
    choose,
    find_circumstances,
    has_nccl,
    have_own_gpus,
    open_collectives,
    open_transport,
    whereabouts,
)
from ..transports.nccl import Lane, lanes_of
from ..transports.protocol import Transport
from .process_groups import World, gather_alike


def agree_on_transport(world: World, options: ExecutionOptions, device: str) -> TransportChoice:
    """The transport that rank 0 was asked for, or the fastest one for this pipeline's ranks; the
    same on all of them. That of the sums over tensor ranks is chosen for these.

    Raises TransportError, on all of them, for a transport that cannot work there.
    """
    name = world.text_of_first(options.transport)
    if (name == LEFT_OUT) != (not options.has_network):
        raise SettingsError(
            f"rank 0 has --transport {name}, but rank {world.rank} {options.transport}.",
            "Give all ranks the same.",
        )
    places = world.gathered(whereabouts(torch.device(device)))

    def choice(ranks: Sequence[int], group: dist.ProcessGroup | None) -> TransportChoice:
        return choose(name, find_circumstances(group, [places[rank] for rank in ranks]))

    grid = world.grid
    own = choice(grid.pipeline_of(world.rank), world.pipeline_group)
    if world.tensor_ranks == 1 or not options.has_network:
        return own
    return own.with_sums(choice(grid.tensor_group_of(world.rank), world.tensor_group))


def group_of_gradients(
    world: World, options: ExecutionOptions, device: str
) -> dist.ProcessGroup | None:
    """The group of the ranks with the same stages, which sum gradients; None without replicas, and
    without a network. Collective."""
    if world.grid.most_copies == 1 or not options.has_network:
        return None
    copies = world.grid.copies_of(world.rank)
    return _of_device(world, options, device, copies, world.data_parallel_group)


def collectives_of_tensor_ranks(
    world: World, options: ExecutionOptions, device: str, transport: TransportChoice
) -> Collectives | None:
    """This rank's end among those that share out the layers of the same stages; None for one rank,
    and without a network. Collective."""
    if world.tensor_ranks == 1 or not options.has_network:
        return None
    ranks = world.grid.tensor_group_of(world.rank)
    group = _of_device(world, options, device, ranks, world.tensor_group)
    name = transport.sums or transport.name
    if name in ("shm", "mpi"):
        group = world.tensor_group  # over gloo, through which they meet
    assert group is not None
    return open_collectives(name, group, timeout_s=options.patience_s)


def _of_device(
    world: World,
    options: ExecutionOptions,
    device: str,
    ranks: Sequence[int],
    over_gloo: dist.ProcessGroup | None,
) -> dist.ProcessGroup | None:
    """A group of these ranks over NCCL if each rank has a GPU of its own, or else their group over
    gloo. Collective."""
    place = whereabouts(torch.device(device))
    places = gather_alike(place, len(ranks), over_gloo) if over_gloo is not None else [place]
    is_able = have_own_gpus(places) and all(text[16] for text in places)
    # All create a group or none: see `process_groups._in_groups`.
    if all(answer == b"1" for answer in world.gathered(b"1" if is_able else b"0")):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=datetime.timedelta(seconds=options.patience_s),
            backend="nccl",
            use_local_synchronization=True,
        )
        return group if len(ranks) > 1 else None
    return over_gloo


def expect_transport(options: ExecutionOptions, plan: Plan, ranks: int) -> TransportChoice:
    """The transport that ranks started on this machine would agree on."""
    on_gpus = options.device == "cuda"
    where = Circumstances(
        ranks,
        on_gpus=on_gpus,
        own_gpus=on_gpus
        and len(set(gpu_of_rank(plan, range(ranks), options.ranks_per_gpu))) == ranks,
        has_nccl=on_gpus and has_nccl(),
    )
    return choose(options.transport, where)


def make_transport(
    choice: TransportChoice,
    world: World,
    options: ExecutionOptions,
    plan: Plan,
    schedule: Schedule,
    device: str,
) -> Transport:
    """This rank's end of its pipeline's transport; every rank calls it."""
    return open_transport(
        choice.name,
        world.pipeline_group,
        timeout_s=options.patience_s,
        device=device,
        lanes=frozenset().union(*(lanes_of_plan(plan, ranks) for ranks in schedule.placements)),
        mpi_memory=options.mpi_memory,
    )


def lanes_of_plan(plan: Plan, rank_of_stage: Sequence[int]) -> frozenset[Lane]:
    """The pairs of ranks that communicate, by kind of message; independent of tensor sizes."""
    channels = plan_channels(
        plan,
        rank_of_stage,
        sizes=plan.sizes,
        shared_specs={},
        state_bytes=0,
        dtypes=AS_PLANNED,
    )
    return lanes_of(channels)
