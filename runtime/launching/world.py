"""Ranks that were started -> ranks that know each other, and what they do together.

They meet at rank 0's address over gloo, tell each other where they sit, and have two groups from
then on; with replicas each has one more with its pipeline, and one with those of its stages.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from ..plan import Plan
from ..replication.grid import Grid
from ..replication.replicas import stage_replicas
from ..training.settings import Settings, SettingsError
from ..transports.mpi import forget_segments, share_store
from ..trust import untrusted
from .interfaces import VARIABLES, address_of, choose_interface, name_interface
from .launchers import ALONE, Place
from .meeting import call_roll, joining_error, open_store
from .seats import Machine, Seat, check_alike, find_machine, own_seat, seat_from


@dataclass(frozen=True)
class World:
    """The ranks of a run and their two groups: `control` for what all do together between
    segments, `metrics` for figures on their way to rank 0. A lone rank has neither. `machine` is
    what this rank computes with. Of several `replicas`, `own` is the group of this rank's pipeline
    (None where it has one rank), `copies` that of the ranks with the same stages. Where single
    stages have replicas, `ranks_of_stage` are as for Grid, and `holders` the ranks that have a
    parameter of several stages, by its number in the plan, where this rank is one of them."""

    place: Place = ALONE
    control: dist.ProcessGroup | None = None
    metrics: dist.ProcessGroup | None = field(default=None)
    machine: Machine = field(default_factory=Machine)
    replicas: int = 1
    own: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None
    ranks_of_stage: tuple[tuple[int, ...], ...] = ()
    holders: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def grid(self) -> Grid:
        return Grid(self.ranks // self.replicas, self.replicas, self.ranks_of_stage)

    @property
    def replica(self) -> int:
        return self.grid.replica_of(self.rank)

    @property
    def copy(self) -> int:
        """Which of the ranks with the same stages this is."""
        return self.grid.copy_of(self.rank)

    @property
    def pipeline_rank(self) -> int:
        """The rank within the pipeline, by which a schedule and its channels count."""
        return self.grid.rank_of(self.rank)

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The group of this rank's pipeline; None where it has one rank."""
        return self.own if self.replicas > 1 else self.control

    def text_of_first(self, text: str = "") -> str:
        """What rank 0 gives, on every rank."""
        if self.control is None:
            return text
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, src=0, group=self.control)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.control)
        return bytes(content.tolist()).decode()

    def sums(self, values: list[float]) -> list[float]:
        """The sum of each value over all ranks."""
        if self.control is None:
            return values
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed, group=self.control)
        result: list[float] = summed.tolist()
        return result

    def gathered(self, content: bytes) -> list[bytes]:
        """What each rank gives; equally long on all."""
        return [content] if self.control is None else gather_alike(content, self.ranks)

    def gathered_from_copies(self, content: bytes) -> list[bytes]:
        """What each rank with the same stages gives, by replica; equally long on all."""
        if self.copies is None:
            return [content]
        return gather_alike(content, len(self.grid.copies_of(self.rank)), self.copies)

    def meet(self) -> None:
        """Returns when every rank has called it."""
        self.sums([0.0])


def join(place: Place, settings: Settings, plan: Plan) -> World:
    """Meets the other ranks over gloo, and keeps to the cores that are this rank's from then on.
    Ranks that the transport `mpi` joins already tell each other where.

    Raises TransportError when they cannot be reached in time, SettingsError when nothing says
    where rank 0 is, when they are not alike, or when a host has too few GPUs, TrustError when the
    folder's code is trusted on no host.
    """
    over_mpi = settings.transport == "mpi"
    if not place.head and not over_mpi:
        raise SettingsError(
            f"{place.ranks} ranks on several hosts, and nothing says where rank 0 is: "
            f"{place.launcher} does not.",
            "--master-addr HOST, with a name or an address of the first host.",
        )
    interface = choose_interface(place, settings.interface)
    name_interface(interface, asked=settings.interface is not None)
    timeout_s = settings.patience_s
    try:
        if over_mpi:
            head = place.head or address_of(interface) or socket.gethostname()
            store = share_store(place.rank, place.ranks, head, timeout_s)
        else:
            store = open_store(place, timeout_s)
        store = call_roll(store, place, timeout_s)
        if over_mpi:
            forget_segments()
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        seats = _seats(own_seat(settings, plan), place.ranks)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise joining_error(place, timeout_s, str(error)) from error
    check_alike(seats)
    if not any(seat.trusted for seat in seats):  # they all have the same code
        raise untrusted(settings.folder)
    machine = find_machine(settings, plan, seats, place.rank)
    # A figure may be on its way for as long as a step takes; the pipeline's own waits end a hang.
    patient = datetime.timedelta(days=1)
    metrics = dist.new_group(timeout=patient, backend="gloo")
    machine.pin()
    machine = replace(machine, launcher=place.launcher, interface=os.environ.get(VARIABLES[0], ""))
    world = World(
        place,
        dist.group.WORLD,
        metrics,
        machine,
        settings.replicas or 1,
        ranks_of_stage=stage_replicas(plan, settings),
    )
    return _in_groups(world, plan, datetime.timedelta(seconds=timeout_s))


def stay_alone(settings: Settings, plan: Plan) -> World:
    """The world of a lone rank."""
    return World(machine=find_machine(settings, plan, [own_seat(settings, plan)], 0))


def leave() -> None:
    """Parts from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _seats(own: Seat, ranks: int) -> list[Seat]:
    content = own.to_bytes()
    longest = max(
        int.from_bytes(size, "big") for size in gather_alike(len(content).to_bytes(4, "big"), ranks)
    )
    return [seat_from(part) for part in gather_alike(content.ljust(longest), ranks)]


def _in_groups(world: World, plan: Plan, timeout: datetime.timedelta) -> World:
    """The world with the groups of this rank's pipeline, of the ranks with its stages, and of those
    that hold its shared parameters. Only their members make them, so a rank that is in none makes
    one of itself: torch names a group by its ranks and by how many groups a process has made."""
    grid, rank = world.grid, world.rank

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        return group

    if grid.most_copies == 1:
        return world
    if not grid.ranks_of_stage:
        own = group_of(grid.pipeline_of(rank)) if grid.ranks > 1 else None
        return replace(world, own=own, copies=group_of(grid.copies_of(rank)))
    copies = group_of(grid.copies_of(rank))
    holders = {
        number: grid.holders_of(shared.stages)
        for number, shared in enumerate(plan.shared)
        if len(shared.stages) > 1
    }
    groups = {
        ranks: group_of(ranks if rank in ranks else (rank,))
        for ranks in dict.fromkeys(holders.values())
    }
    return replace(
        world,
        copies=copies if len(grid.copies_of(rank)) > 1 else None,
        holders={number: groups[ranks] for number, ranks in holders.items() if rank in ranks},
    )


def gather_alike(content: bytes, ranks: int, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """What each rank of a group gives; equally long on all."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist()) for part in parts]
