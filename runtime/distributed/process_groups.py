"""Rank and options -> the process groups of a run, and a key-value store that its ranks share.

`join` connects the ranks over gloo at rank 0's address and exchanges their resources. All ranks
share two groups; with replicas or tensor ranks, each rank also has a group for its pipeline, one
for the ranks with the same stages, and one for its tensor ranks.

Through the `SharedStore`, a rank posts or reads short texts at any moment and from any thread,
without a collective and without waiting for other ranks.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from ..config.batch_layout import stage_replicas
from ..config.settings import RunConfig, SettingsError
from ..errors import TransportError
from ..plan.plan import Plan
from ..plan.trust import untrusted
from ..transports.mpi import forget_segments, load_mpi, share_store
from .cpu_affinity import (
    Machine,
    RankResources,
    check_alike,
    find_machine,
    find_resources,
    resources_from,
)
from .grid import Grid
from .interfaces import VARIABLES, address_of, choose_interface, name_interface
from .ranks import ALONE, RankInfo
from .rendezvous import found_hosts, joining_error, open_store, wait_for_all

_PATIENCE = datetime.timedelta(days=1)


@dataclass(frozen=True)
class World:
    """The ranks of a run, and the process groups of this rank.

    info: this rank among the others.
    control: group of all ranks, for collectives between segments; None for a lone rank.
    metrics: group of all ranks, for metrics on their way to rank 0; None for a lone rank.
    machine: the cores, threads and device of this rank.
    replicas: the number of replicas of the whole pipeline.
    tensor_ranks: the number of ranks that share out the layers of each stage.
    replica_group: group of this rank's pipeline, if there are several; None if it has one rank.
    data_parallel_group: group of the ranks with the same parts of the same stages; None without
        others.
    tensor_group: group of the ranks that share out the layers of this rank's stages; None for one.
    ranks_of_stage: where single stages have replicas, the ranks of each stage, as for `Grid`.
    tied_groups: the groups of this rank's tied parameters, by their number in the plan; only where
        single stages have replicas.
    """

    info: RankInfo = ALONE
    control: dist.ProcessGroup | None = None
    metrics: dist.ProcessGroup | None = field(default=None)
    machine: Machine = field(default_factory=Machine)
    replicas: int = 1
    tensor_ranks: int = 1
    replica_group: dist.ProcessGroup | None = None
    data_parallel_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    ranks_of_stage: tuple[tuple[int, ...], ...] = ()
    tied_groups: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def ranks(self) -> int:
        return self.info.ranks

    @property
    def grid(self) -> Grid:
        in_pipeline = self.ranks // (self.replicas * self.tensor_ranks)
        return Grid(in_pipeline, self.replicas, self.tensor_ranks, self.ranks_of_stage)

    @property
    def replica(self) -> int:
        return self.grid.replica_of(self.rank)

    @property
    def copy(self) -> int:
        """The index of this rank among the ranks with the same stages."""
        return self.grid.copy_of(self.rank)

    @property
    def tensor_rank(self) -> int:
        """The rank among those that share out the layers of the same stages."""
        return self.grid.tensor_rank_of(self.rank)

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes and counts for all that have the same stages."""
        return self.copy == 0 and self.tensor_rank == 0

    @property
    def pipeline_rank(self) -> int:
        """The rank within the pipeline, which schedules and channels use."""
        return self.grid.rank_of(self.rank)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's pipeline; None if it has one rank."""
        has_several = self.replicas * self.tensor_ranks > 1
        return self.replica_group if has_several else self.control

    def text_of_first(self, text: str = "") -> str:
        """Broadcasts the text of rank 0 to every rank."""
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

    def tensor_sums(self, values: list[float]) -> list[float]:
        """The sum of each value over the ranks that share out the layers of the same stages."""
        if self.tensor_group is None:
            return values
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed, group=self.tensor_group)
        result: list[float] = summed.tolist()
        return result

    def gathered(self, content: bytes) -> list[bytes]:
        """The content of each rank; all must have the same length."""
        return (
            [content] if self.control is None else gather_alike(content, self.ranks, self.control)
        )

    def sum_of_copies(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks with the same stages. To the last bit that of a gradient bucket,
        which is longer by a flag: the length decides in which order a ring adds."""
        if self.data_parallel_group is None:
            return part
        content = torch.cat([part.reshape(-1), part.new_ones(1)])
        dist.all_reduce(content, group=self.data_parallel_group)
        return content[:-1].view_as(part)

    def meet(self) -> None:
        """Returns when every rank has called it."""
        self.sums([0.0])


def join(info: RankInfo, config: RunConfig, plan: Plan, code: Mapping[str, str]) -> World:
    """Connects to the other ranks over gloo and pins this rank to its cores.

    With the transport `mpi`, the ranks exchange rank 0's address over MPI. `code` has the SHA-256
    of the stages' files.

    Raises TransportError when the ranks cannot be reached in time; SettingsError when rank 0's
    address is unknown, when the ranks have different versions, or when a host has too few GPUs;
    TrustError when no host trusts the folder's code.
    """
    timeout_s = config.patience_s
    timeout = datetime.timedelta(seconds=timeout_s)
    if config.transport == "mpi":
        load_mpi()  # what the run cannot do is said before anything of it begins
    info, control = connect(
        info, requested=config.interface, timeout_s=timeout_s, over_mpi=config.transport == "mpi"
    )
    try:
        resources = _gather_resources(find_resources(config, plan, code), info.ranks, control)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise joining_error(info, timeout_s, str(error)) from error
    check_alike(resources)
    if not any(of_rank.trusted for of_rank in resources):  # they all have the same code
        raise untrusted(config.folder)
    machine = find_machine(config, plan, resources, info.rank)
    # Metrics may wait for as long as a step takes; the pipeline's own timeouts end a hang.
    metrics = dist.new_group(timeout=_PATIENCE, backend="gloo")
    machine.pin()
    machine = replace(machine, launcher=info.launcher, interface=os.environ.get(VARIABLES[0], ""))
    world = World(
        info,
        control,
        metrics,
        machine,
        config.pipelines,
        config.tensor_ranks,
        ranks_of_stage=stage_replicas(plan, config),
    )
    return _in_groups(world, plan, timeout)


def connect(
    info: RankInfo, *, requested: str | None, timeout_s: float, over_mpi: bool
) -> tuple[RankInfo, dist.ProcessGroup]:
    """Connects to the other ranks over gloo; returns this rank, with its place on its host, and the
    group of all.

    `requested` is the network interface that the user chose. `over_mpi`: the ranks exchange rank
    0's address over MPI. Raises TransportError when the ranks cannot be reached in time, and
    SettingsError when rank 0's address is unknown.
    """
    exists = dist.is_initialized()
    if not (info.head or info.file or over_mpi or exists):
        raise SettingsError(
            f"the address of rank 0 is unknown: it is not provided by {info.launcher}, and the "
            f"{info.ranks} ranks are on several hosts.",
            "Give --master-addr HOST, the name or address of the first host.",
        )
    interface = None
    if is_known := bool(info.local_ranks and not info.file):
        interface = choose_interface(info, requested)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if not (exists and is_known):
            store = wait_for_all(_open_store(info, interface, timeout_s, over_mpi), info, timeout_s)
            if over_mpi:
                forget_segments()
            info, peer = found_hosts(store, info)
            if not is_known:
                interface = choose_interface(info, requested, peer)
        name_interface(interface, requested=requested is not None)
        if exists:
            return info, dist.new_group(timeout=timeout, backend="gloo")
        dist.init_process_group(
            "gloo", store=store, rank=info.rank, world_size=info.ranks, timeout=timeout
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise joining_error(info, timeout_s, str(error)) from error
    assert dist.group.WORLD is not None
    return info, dist.group.WORLD


def _open_store(info: RankInfo, interface: str | None, timeout_s: float, over_mpi: bool) -> Store:
    """The store in which the ranks meet."""
    if dist.is_initialized():
        return PrefixStore("asyncpipe ranks", _get_default_store())
    if over_mpi and not info.file:
        head = info.head or address_of(interface) or socket.gethostname()
        return share_store(info.rank, info.ranks, head, timeout_s)
    return open_store(info, timeout_s)


def stay_alone(config: RunConfig, plan: Plan, code: Mapping[str, str]) -> World:
    """The world of a lone rank."""
    return World(machine=find_machine(config, plan, [find_resources(config, plan, code)], 0))


def leave() -> None:
    """Leaves the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _gather_resources(
    own: RankResources, ranks: int, group: dist.ProcessGroup | None
) -> list[RankResources]:
    content = own.to_bytes()
    lengths = gather_alike(len(content).to_bytes(4, "big"), ranks, group)
    longest = max(int.from_bytes(length, "big") for length in lengths)
    return [resources_from(part) for part in gather_alike(content.ljust(longest), ranks, group)]


def _in_groups(world: World, plan: Plan, timeout: datetime.timedelta) -> World:
    """The world with the groups of this rank's pipeline, of the ranks with its stages, of its
    tensor ranks, and of the holders of its tied parameters.

    Only the members of a group create it, so a rank that is in none creates one of itself: torch
    names a group by its ranks and by the number of groups that a process has created.
    """
    grid, rank = world.grid, world.rank

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        return group

    if grid.most_copies * grid.tensor_ranks == 1:
        return world
    if not grid.ranks_of_stage:
        ranks_of_group = grid.pipeline_of(rank), grid.copies_of(rank), grid.tensor_group_of(rank)
        own, copies, tensor = (
            group_of(ranks) if len(ranks) > 1 else None for ranks in ranks_of_group
        )
        return replace(world, replica_group=own, data_parallel_group=copies, tensor_group=tensor)
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
        data_parallel_group=copies if len(grid.copies_of(rank)) > 1 else None,
        tied_groups={number: groups[ranks] for number, ranks in holders.items() if rank in ranks},
    )


def regrouped(world: World, plan: Plan, replicas: int, timeout_s: float) -> World:
    """The world with its ranks in another number of pipelines. Collective; the groups of the ones
    before end."""
    if replicas == world.replicas:
        return world
    for group in (world.replica_group, world.data_parallel_group):
        if group is not None:
            dist.destroy_process_group(group)
    alike = replace(world, replicas=replicas, replica_group=None, data_parallel_group=None)
    return _in_groups(alike, plan, datetime.timedelta(seconds=timeout_s))


def be_patient(world: World) -> None:
    """Lets this rank, which has no work, wait in collectives of all ranks for as long as these
    train and evaluate."""
    if world.control is not None:
        _set_pg_timeout(_PATIENCE, world.control)


def gather_alike(content: bytes, ranks: int, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The content of each rank of a group; all must have the same length."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist()) for part in parts]


_LOOK_S = 0.02


WARNINGS = LOSS_WARNING, OPTIMIZER_WARNING = "warning of the loss", "warning of the optimizer"
"""The keys under which ranks post warnings for rank 0 to report, each once."""


class SharedStore:
    """A key-value store of short texts that all ranks of a run share; each key is set once. Stores
    of other names have keys of their own."""

    def __init__(self, world: World, name: str = "run") -> None:
        self._rank, self._ranks = world.rank, world.ranks
        self._store: Store | None = None
        if world.control is not None:
            self._store = PrefixStore(f"asyncpipe {name}", _get_default_store())
        self._own: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Sets a text for all ranks to read."""
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """The text under a key; None if it has not been set yet."""
        if self._store is None:
            return self._own.get(key)
        if not self._store.check([key]):
            return None
        content: bytes = self._store.get(key)
        return content.decode()

    def post_own(self, key: str, text: str) -> None:
        """Sets this rank's text under a key for which every rank sets one."""
        self.post(f"{key}/{self._rank}", text)

    def gathered(
        self, key: str, *, wait_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> Sequence[str]:
        """Waits for the texts that all ranks set under a key; returns them by rank.

        Returns nothing if `is_over` becomes true meanwhile. Raises TransportError on a timeout.
        """
        texts: list[str] = []
        for rank in range(self._ranks):
            text = self.awaited(f"{key}/{rank}", rank, wait_s=wait_s, is_over=is_over)
            if text is None:
                return ()
            texts.append(text)
        return texts

    def awaited(
        self, key: str, of: int, *, wait_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Waits for a text that the rank `of` sets.

        Returns None if `is_over` becomes true meanwhile. Raises TransportError on a timeout.
        """
        end_s = time.monotonic() + wait_s
        while (text := self.read(key)) is None:
            if is_over():
                return None
            if time.monotonic() > end_s:
                raise TransportError(
                    f"rank {self._rank} timed out after {wait_s:g} s waiting for rank {of} to post "
                    f"{key}."
                )
            time.sleep(_LOOK_S)
        return text
