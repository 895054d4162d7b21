"""A number of ranks -> the device, transport, threads and cores that they would have here, and why.

Asked of the functions that decide it in a run.
"""

from __future__ import annotations

import os
import socket

import torch

from ..launching.launchers import find_place
from ..launching.seats import Machine, Seat, machine_with
from ..launching.topology import Topology, format_cpus, read_topology
from ..training.settings import Settings
from ..transports.choose import Circumstances, choose, has_nccl
from ..wording import counted


def default_ranks() -> int:
    """One a GPU, where there are several, or two."""
    return max(2, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def would_use(ranks: int) -> dict[str, str]:
    """What so many ranks that this machine starts would use, in words."""
    topology = read_topology()
    machine = machine_of(topology, ranks)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    told = {
        "ranks": f"{ranks}, {_started_by()}",
        "device": "cpu: torch sees no GPU" if not count else "cpu, unless --device cuda",
        "transport": str(choose("auto", Circumstances(ranks))),
        "threads": f"{machine.threads} a rank, {_threads_reason(machine, topology, ranks)}",
        "cores": _cores(machine, topology, ranks),
    }
    if count:
        on_gpus = Circumstances(ranks, on_gpus=True, own_gpus=count >= ranks, has_nccl=has_nccl())
        told["transport of GPUs"] = str(choose("auto", on_gpus))
        if count < ranks:
            told["device"] += f", which takes {-(-ranks // count)} ranks a GPU (--ranks-per-gpu)"
    return told


def machine_of(topology: Topology, ranks: int) -> Machine:
    """What the first of so many ranks on this host would compute with."""
    seat = Seat(socket.gethostname(), format_cpus(topology.cpus), topology.usable)
    return machine_with(Settings(folder="."), [seat] * ranks, 0, {})


def _started_by() -> str:
    place = find_place(os.environ)
    if place is None:
        return "started by asyncpipe-train itself"
    return f"though this process is rank {place.rank} of {place.ranks} of {place.launcher}"


def _threads_reason(machine: Machine, topology: Topology, ranks: int) -> str:
    if machine.threads_from != "cores":
        return f"as {machine.threads_from} says"
    quota = " by the quota" if topology.usable < len(topology.cores) else ""
    shared = counted(topology.usable, "usable core")
    return f"{shared}{quota} for {counted(ranks, 'rank')}"


def _cores(machine: Machine, topology: Topology, ranks: int) -> str:
    if machine.pins:
        return f"a rank each on {', '.join(machine.pins)} (--pin cores)"
    if ranks == 1:
        why = "one rank"
    elif len(topology.cores) < ranks:
        why = f"{counted(len(topology.cores), 'core')} for {counted(ranks, 'rank')}"
    elif topology.quota < len(topology.cores):
        why = "a quota below the cores: other guests of the machine may be on just these"
    else:
        why = f"{counted(machine.threads, 'thread')} a rank are more than its share of the cores"
    return f"all ranks share all ({why})"
