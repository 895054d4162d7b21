"""Where each rank sits -> what this rank may use: its cores, its threads, its GPU.

A rank's seat is its host, the CPUs that its launcher left it and the GPUs that it sees. All
ranks know all seats. Ranks of one host with the same CPUs share them out among themselves
(`pinning.py`); where the launcher has already bound each rank to its own, nothing is left to do.
It is the same with GPUs.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import __version__
from ..errors import TransportError
from ..plan import Plan
from ..reading import Origin, known_fields, parse_json, shaped
from ..training.resolve import check_devices, gpu_of_rank
from ..training.settings import Settings, SettingsError
from ..trust import code_hash, is_trusted
from .pinning import Cpus, near_cores, share_cores
from .topology import format_cpus, node_of_pci, parse_cpus, read_topology


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: what names it on every rank, and the memory node near it, if it is known."""

    uuid: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits, and what it runs. `cores` is how many of its CPUs' cores can be busy;
    `trusted` says whether the code of the stages is trusted there."""

    host: str
    cpus: str = ""
    cores: int = 1
    gpus: tuple[Gpu, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    trusted: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def seat_from(content: bytes) -> Seat:
    """What `to_bytes` wrote, perhaps in another version; spaces behind it do not matter."""
    origin = Origin("another rank's seat", TransportError)
    return shaped(Seat, known_fields(Seat, parse_json(content.decode(), origin)), origin)


def own_seat(settings: Settings, plan: Plan) -> Seat:
    """The seat of this process; GPUs are looked at only when it is to compute on one."""
    topology = read_topology()
    return Seat(
        host=socket.gethostname(),
        cpus=format_cpus(topology.cpus),
        cores=topology.usable,
        gpus=_visible_gpus() if settings.device == "cuda" else (),
        versions=(
            ("asyncpipe", __version__),
            ("torch", torch.__version__),
            ("the plan", hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]),
            ("the stages", code_hash(settings.folder)[:8]),
        ),
        trusted=settings.trust or is_trusted(settings.folder),
    )


def check_alike(seats: Sequence[Seat]) -> None:
    """Raises SettingsError, the same on all ranks, when one runs other versions than most."""
    for name in dict.fromkeys(name for seat in seats for name, _ in seat.versions):
        found = [dict(seat.versions).get(name, "none") for seat in seats]
        ((usual, times),) = Counter(found).most_common(1)  # of two alike rank 0's
        if times == len(seats):
            continue
        rank = next(rank for rank, value in enumerate(found) if value != usual)
        other = found.index(usual)
        others = f"rank {other} on {seats[other].host} has {usual}"
        if times > 1:
            others = f"{times} ranks have {usual}, such as rank {other} on {seats[other].host}"
        raise SettingsError(
            f"rank {rank} on {seats[rank].host} has {name} {found[rank]}, {others}.",
            "All ranks need the same: use one folder and one environment on all hosts.",
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores on all hosts of the run, and what this rank computes with.

    `threads` come from `threads_from` ("cores", "--threads" or "OMP_NUM_THREADS"). `pins` are the
    CPUs of the ranks on this host, in the order of their ranks, when they are pinned, and `own`
    those of this rank.
    """

    cores: int = 1
    threads: int = 1
    threads_from: str = "cores"
    host_of_rank: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    own: Cpus = frozenset()
    device: str = "cpu"
    launcher: str = ""
    interface: str = ""

    def pin(self) -> None:
        """Keeps this thread, and those that it starts from now on, on the rank's own CPUs."""
        if self.own and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.own)


def find_machine(settings: Settings, plan: Plan, seats: Sequence[Seat], rank: int) -> Machine:
    """What `rank` computes with, of resolved settings.

    Raises SettingsError when its host has too few GPUs.
    """
    local = [other for other, seat in enumerate(seats) if seat.host == seats[rank].host]
    return machine_with(settings, seats, rank, _gpus_of(settings, plan, seats, local))


def machine_with(
    settings: Settings, seats: Sequence[Seat], rank: int, gpus: Mapping[int, Gpu]
) -> Machine:
    """What `rank` computes with, of settings whose plan does not matter any more, when the ranks of
    its host have those `gpus` (none on CPUs)."""
    own = seats[rank]
    local = [other for other, seat in enumerate(seats) if seat.host == own.host]
    sharing = [other for other in local if seats[other].cpus == own.cpus]
    topology = read_topology(parse_cpus(own.cpus))
    near = [gpus[other].node if other in gpus else None for other in sharing]
    shares = share_cores(topology, len(sharing), near)
    fair = max(1, topology.usable // len(sharing))
    if shares is not None:
        fair = min(sum(1 for core in topology.cores if set(core.cpus) <= cpus) for cpus in shares)
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads, origin = fair, "cores"
    if settings.threads is not None:
        threads, origin = settings.threads, "--threads"
    elif given.isdigit():
        threads, origin = int(given), "OMP_NUM_THREADS"
    if shares is not None and settings.pin == "numa":
        shares = near_cores(topology, shares)
        shares = shares if len(set(shares)) > 1 else None
    elif settings.pin == "none" or threads > fair:
        shares = None
    pins = shares or ()
    return Machine(
        cores=sum({(seat.host, seat.cpus): seat.cores for seat in seats}.values()),
        threads=threads,
        threads_from=origin,
        host_of_rank=tuple(seat.host for seat in seats),
        pins=tuple(map(format_cpus, pins)),
        own=pins[sharing.index(rank)] if pins else frozenset(),
        device="cpu" if settings.device == "cpu" else f"cuda:{_index_of(gpus[rank], own)}",
    )


def _gpus_of(
    settings: Settings, plan: Plan, seats: Sequence[Seat], local: Sequence[int]
) -> dict[int, Gpu]:
    """The GPU of each rank of one host; ranks that see the same GPUs share them out."""
    if settings.device == "cpu":
        return {}
    found = {}
    for rank in local:
        sharing = [other for other in local if seats[other].gpus == seats[rank].gpus]
        check_devices(settings, plan, len(sharing), len(seats[rank].gpus))
        index = gpu_of_rank(plan, len(sharing), settings.ranks_per_gpu)[sharing.index(rank)]
        found[rank] = seats[rank].gpus[index]
    return found


def _index_of(gpu: Gpu, seat: Seat) -> int:
    return [each.uuid for each in seat.gpus].index(gpu.uuid)


def _visible_gpus() -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        card: Any = torch.cuda.get_device_properties(index)
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        found.append(Gpu(str(card.uuid), node_of_pci(address)))
    return tuple(found)
