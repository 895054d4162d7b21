"""The environment of a process -> its rank among the others, and the groups to talk to them.

torchrun, srun, Open MPI and MPICH each say in environment variables who a process is; the command
run by itself starts its ranks as torchrun does.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..errors import TransportError
from ..transports.mpi import share_store


@dataclass(frozen=True, slots=True)
class Place:
    """Which process this is, of how many, on all hosts and on this one; and who rank 0 is."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    head: str = "127.0.0.1"
    port: int = 0

    @property
    def all_local(self) -> bool:
        return self.local_ranks == self.ranks


ALONE = Place(rank=0, ranks=1, local_rank=0, local_ranks=1)

_LAUNCHERS = (
    # rank, ranks, local rank, local ranks, and what names the job
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_JOB_ID",
    ),
)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave this process, or None when no launcher started it.

    >>> find_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}).rank
    1
    """
    for rank, ranks, local_rank, local_ranks, job in _LAUNCHERS:
        if rank in environment and ranks in environment:
            count = int(environment[ranks])
            on_slurm = rank.startswith("SLURM")
            head = environment.get("MASTER_ADDR")
            if head is None:
                head = first_host(environment.get("SLURM_STEP_NODELIST", "")) if on_slurm else None
            return Place(
                rank=int(environment[rank]),
                ranks=count,
                local_rank=int(environment.get(local_rank, environment[rank])),
                # Slurm's tasks per node may read 2(x3) or be absent.
                local_ranks=int((re.match(r"\d+", environment.get(local_ranks, "")) or [count])[0]),
                head=head or "127.0.0.1",
                port=int(environment.get("MASTER_PORT", _port_of(environment.get(job)))),
            )
    return None


def first_host(nodes: str) -> str | None:
    """The first host of a Slurm node list.

    >>> first_host("gpu-a[03-05,11],gpu-b1")
    'gpu-a03'
    """
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    return found[1] + (found[2] or "") if found else None


@dataclass(frozen=True)
class World:
    """The ranks of a run and their two groups: `control` for what all do together between
    segments, `metrics` for figures on their way to rank 0. A lone rank has neither."""

    place: Place = ALONE
    control: dist.ProcessGroup | None = None
    metrics: dist.ProcessGroup | None = field(default=None)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

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
        if self.control is None:
            return [content]
        own = torch.tensor(list(content), dtype=torch.uint8)
        parts = [torch.zeros_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own, group=self.control)
        return [bytes(part.tolist()) for part in parts]

    def meet(self) -> None:
        """Returns when every rank has called it."""
        self.sums([0.0])


def join(place: Place, timeout_s: float, transport: str = "auto") -> World:
    """Meets the other ranks over gloo; on loopback when all are on this machine. Ranks that
    `transport` mpi joins already tell each other where.

    Raises TransportError when they cannot be reached in time.
    """
    if place.all_local:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = None
    if transport == "mpi":
        is_named = place.all_local or "MASTER_ADDR" in os.environ
        head = place.head if is_named else socket.gethostname()
        store = share_store(place.rank, place.ranks, head, timeout_s)
    os.environ.setdefault("MASTER_ADDR", place.head)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timeout,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TransportError(
            f"rank {place.rank} cannot reach rank 0 at {place.head}:{os.environ['MASTER_PORT']} in "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}",
            "Set MASTER_ADDR and GLOO_SOCKET_IFNAME to a network that all hosts share.",
        ) from error
    # A figure may be on its way for as long as a step takes; the pipeline's own waits end a hang.
    patient = datetime.timedelta(days=1)
    return World(place, dist.group.WORLD, dist.new_group(timeout=patient, backend="gloo"))


def leave() -> None:
    """Parts from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _port_of(job: str | None) -> int:
    """A port that all processes of one job agree on without being told."""
    name = job or str(os.getppid())
    return 20_000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20_000
