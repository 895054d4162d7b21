"""The name of a transport, and where the ranks are -> the transport that carries their tensors.

    one process                            local
    every rank on a GPU of its own         nccl
    all ranks on one host, on CPUs         shm
    several hosts, or ranks share GPUs     gloo

CUDA IPC, which `shm` takes between GPUs, is not a default until it has been measured between some:
where two ranks shared one, a step took 4 and 5% less than over gloo (docs/gpu-report.md).
`mpi` is taken when it is asked for: it carries tensors between hosts faster than gloo does, but
only ranks that mpiexec started have it. `none`, which carries nothing, is for measurements.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TransportError
from ..tensor_parallel.ranks import Collectives
from .gloo import GlooTransport
from .left_out import LeftOutTransport
from .mpi import MpiTransport, check_world, load_mpi
from .nccl import Lane, NcclTransport
from .peers import obstacle
from .protocol import LocalHub, Transport
from .reductions import GroupCollectives, MpiCollectives
from .shm import ShmTransport
from .shm_collectives import ShmCollectives


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The placement of the ranks of a run."""

    ranks: int
    apart: str = ""
    """Why they cannot share memory; "" if they can."""
    on_gpus: bool = False
    own_gpus: bool = False
    """Each rank computes on a GPU that no other rank uses."""
    has_nccl: bool = False


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A transport and the reason for it; no reason if the user asked for it.

    sums: the transport of the sums over tensor ranks, if that is another one
    """

    name: str
    reason: str = ""
    sums: str = ""

    def with_sums(self, sums: TransportChoice) -> TransportChoice:
        """The choice of a pipeline whose tensor ranks, of which it has several, sum over `sums`."""
        if self.name == "local":
            return sums
        return replace(self, sums="" if sums.name == self.name else sums.name)

    def between(self, medium: str = "") -> str:
        """In words: the transport over a network interface, or with its reason."""
        by = f" over {medium}" if medium else f" ({self.reason})" if self.reason else ""
        return f"{self.name}{by}{f', sums over {self.sums}' if self.sums else ''}"

    def __str__(self) -> str:
        return self.between()


def choose(name: str, where: Circumstances) -> TransportChoice:
    """The transport of that name, or the fastest that works for `auto`.

    Raises TransportError for one that cannot work there.

    >>> print(choose("auto", Circumstances(4, apart="they are on 2 hosts")))
    gloo (they are on 2 hosts)
    """
    if name == "auto":
        return _fastest(where)
    if name == "none":
        return TransportChoice(name, "the network is left out")
    if refusal := _refusal(name, where):
        raise TransportError(f"--transport {name}: {refusal}", "--transport auto")
    return TransportChoice(name if where.ranks > 1 else "local")


def _fastest(where: Circumstances) -> TransportChoice:
    if where.ranks == 1:
        return TransportChoice("local", "one process")
    if where.own_gpus and where.has_nccl:
        return TransportChoice("nccl", "a GPU each")
    if where.on_gpus:
        return TransportChoice("gloo", where.apart or "GPUs of one host; CUDA IPC: --transport shm")
    return (
        TransportChoice("gloo", where.apart) if where.apart else TransportChoice("shm", "one host")
    )


def _refusal(name: str, where: Circumstances) -> str:
    """Why the transport cannot work there; "" if it can."""
    if where.ranks == 1:
        return ""
    if name == "local":
        return f"it connects ranks of one process, and this run has {where.ranks} processes."
    if name == "nccl" and not where.on_gpus:
        return "it carries tensors between GPUs, and --device is cpu."
    if name == "nccl" and not where.has_nccl:
        return "this torch was built without NCCL."
    if name == "nccl" and not where.own_gpus:
        return "several ranks share one GPU, which NCCL refuses."
    if name == "shm" and where.apart:
        return f"{where.apart}."
    return ""


def whereabouts(device: torch.device) -> bytes:
    """The GPU of this process and whether it has NCCL, in 17 bytes.

    To NCCL, processes with different values of NCCL_HOSTID have no GPU in common.
    """
    if device.type != "cuda":
        return bytes(17)
    gpu = f"{torch.cuda.get_device_properties(device).uuid} {os.environ.get('NCCL_HOSTID', '')}"
    return hashlib.sha256(gpu.encode()).digest()[:16] + bytes([has_nccl()])


def have_own_gpus(all_whereabouts: Sequence[bytes]) -> bool:
    """True if each of these ranks computes on a GPU that no other rank uses."""
    gpus = [text[:16] for text in all_whereabouts]
    return all(map(any, gpus)) and len(set(gpus)) == len(gpus)


def has_nccl() -> bool:
    """True if this torch was built with NCCL."""
    return dist.is_nccl_available()


def find_circumstances(
    group: dist.ProcessGroup | None, all_whereabouts: Sequence[bytes]
) -> Circumstances:
    """The placement of the ranks; all ranks of `group` call it together."""
    gpus = [text[:16] for text in all_whereabouts]
    on_gpus = all(map(any, gpus))
    return Circumstances(
        ranks=len(gpus),
        apart=(obstacle(group) or "") if len(gpus) > 1 else "",
        on_gpus=on_gpus,
        own_gpus=have_own_gpus(all_whereabouts),
        has_nccl=all(text[16] for text in all_whereabouts),
    )


def open_transport(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    device: str | torch.device,
    lanes: Iterable[Lane] = (),
    mpi_memory: str = "auto",
) -> Transport:
    """This rank's end; every rank of `group` calls it, with the same `lanes`. Groups are those of
    one pipeline each, and every rank is in one."""
    if group is None or name == "local":
        return LocalHub(1).transport(0)
    if name == "none":
        return LeftOutTransport(dist.get_rank(group), torch.device(device))
    if name == "nccl":
        return NcclTransport(lanes, group, timeout_s=timeout_s, device=device)
    if name == "mpi":
        return MpiTransport(
            _communicator(group), timeout_s=timeout_s, device=device, memory=mpi_memory
        )
    if name == "shm":
        return ShmTransport(group, timeout_s=timeout_s, device=device)
    return GlooTransport(group, timeout_s=timeout_s, device=device)


def open_collectives(name: str, group: dist.ProcessGroup, *, timeout_s: float) -> Collectives:
    """This rank's end for the tensor ranks of `group`, which is over NCCL or gloo; every rank of it
    calls it, and all ranks are in such groups."""
    if name == "mpi":
        return MpiCollectives(_communicator(group), timeout_s=timeout_s)
    if name == "shm":
        return ShmCollectives(group, timeout_s=timeout_s)
    return GroupCollectives(group)


def _communicator(group: dist.ProcessGroup) -> Any:
    """A communicator of mpi4py for the ranks of a group; all ranks call it, each for its own."""
    world = load_mpi().COMM_WORLD
    check_world(world, dist.get_rank(), dist.get_world_size())
    return world.Split(min(dist.get_process_group_ranks(group)), dist.get_rank(group))
