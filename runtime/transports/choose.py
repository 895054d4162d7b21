"""The name of a transport, and where the ranks are -> the transport that carries their tensors.

    one process                            local
    every rank on a GPU of its own         nccl
    all ranks on one host                  shm
    several hosts                          gloo

`mpi` is taken when it is asked for: it carries tensors between hosts faster than gloo does, but
only ranks that mpiexec started have it.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import TransportError
from .gloo import GlooTransport
from .local import LocalHub
from .mpi import MpiTransport, check_world, load_mpi
from .nccl import Lane, NcclTransport
from .protocol import Transport


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Where the ranks of a run are. `own_gpus`: each computes on a GPU that no other uses."""

    ranks: int
    one_host: bool
    on_gpus: bool = False
    own_gpus: bool = False
    has_nccl: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why it was taken; no reason where the user asked for it."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def choose(asked: str, where: Circumstances) -> Choice:
    """The transport of that name, or the fastest that works for `auto`.

    Raises TransportError for one that cannot work there.

    >>> print(choose("auto", Circumstances(ranks=4, one_host=False)))
    gloo (several hosts)
    """
    if asked == "auto":
        return _fastest(where)
    if refusal := _refusal(asked, where):
        raise TransportError(f"--transport {asked}: {refusal}", "--transport auto")
    return Choice(asked if where.ranks > 1 else "local")


def _fastest(where: Circumstances) -> Choice:
    if where.ranks == 1:
        return Choice("local", "one process")
    if where.own_gpus and where.has_nccl:
        return Choice("nccl", "a GPU each")
    if where.one_host:
        return Choice("gloo", "one host")  # shm takes this place
    return Choice("gloo", "several hosts")


def _refusal(asked: str, where: Circumstances) -> str:
    """Why the transport cannot work there; "" if it can."""
    if where.ranks == 1:
        return ""
    if asked == "local":
        return f"it is of one process, and this run has {where.ranks}."
    if asked == "nccl" and not where.on_gpus:
        return "it carries tensors between GPUs, and --device is cpu."
    if asked == "nccl" and not where.has_nccl:
        return "this torch was built without NCCL."
    if asked == "nccl" and not where.own_gpus:
        return "several ranks share one GPU, which NCCL refuses."
    if asked == "shm" and not where.one_host:
        return "it is of one host, and the ranks are on several."
    return ""


def whereabouts(device: torch.device) -> bytes:
    """Machine, GPU and abilities of this process, in 33 bytes, to be compared with the others'."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    able = device.type == "cuda" and has_nccl()
    return _digest(_machine()) + _digest(gpu) + bytes([able])


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return dist.is_nccl_available()


def find_circumstances(all_whereabouts: Sequence[bytes], *, all_local: bool) -> Circumstances:
    """What the ranks' whereabouts amount to. `all_local` is the launcher's word: two hosts may be
    one machine that keeps their networks apart."""
    places = [(text[:16], text[16:32]) for text in all_whereabouts]
    on_gpus = all(gpu != _digest("") for _, gpu in places)
    return Circumstances(
        ranks=len(places),
        one_host=all_local and len({machine for machine, _ in places}) == 1,
        on_gpus=on_gpus,
        own_gpus=on_gpus and len(set(places)) == len(places),
        has_nccl=all(text[32] for text in all_whereabouts),
    )


def open_transport(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    device: str | torch.device,
    lanes: Iterable[Lane] = (),
) -> Transport:
    """This rank's end; every rank of `group` calls it, with the same `lanes`."""
    if group is None or name == "local":
        return LocalHub(1).transport(0)
    if name == "nccl":
        return NcclTransport(lanes, group, timeout_s=timeout_s, device=device)
    if name == "mpi":
        world = load_mpi().COMM_WORLD
        check_world(world, dist.get_rank(group), dist.get_world_size(group))
        return MpiTransport(world, timeout_s=timeout_s, device=device)
    return GlooTransport(group, timeout_s=timeout_s, device=device)


def _machine() -> str:
    """What processes have in common that can share memory: one running system, one /dev/shm."""
    boot, shared = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    if boot.is_file() and shared.is_dir():
        return f"{boot.read_text().strip()} {os.stat(shared).st_dev}"
    return platform.node()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
