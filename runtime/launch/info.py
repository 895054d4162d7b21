"""asyncpipe-info: the hardware and software of this machine, and the resources that a run would
use.

`describe` returns everything as values for JSON: versions, extras and backends; processor, memory,
GPUs and network interfaces; and the device, transport, threads and cores of a number of ranks, from
the functions that decide these in a run. A missing component is reported and never an error.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config.execution_options import ExecutionOptions
from ..distributed.cpu_affinity import (
    SYS,
    Machine,
    RankResources,
    Topology,
    format_cpus,
    machine_with,
    read_topology,
)
from ..distributed.interfaces import interfaces
from ..distributed.ranks import find_rank_info
from ..errors import AsyncPipeError, TransportError
from ..extras import install
from ..formatting import counted, write_bytes
from ..import_path import ISOLATED
from ..process import EXTRAS, PROC, cpu_model, describe_environment, memory_bytes, version_of
from ..transports.choose import Circumstances, choose, has_nccl
from ..transports.mpi import mpiexec


def cpu() -> dict[str, str]:
    """The processor, the part of it that this process may use, and the memory."""
    topology = read_topology()
    threads = max(len(core.cpus) for core in topology.cores)
    usable = f"{counted(len(topology.cores), 'core')} ({format_cpus(topology.cpus)})"
    if threads > 1:
        usable += f", {threads} threads each"
    if isfinite(topology.quota):
        usable += f"; a quota of {topology.quota:g} CPUs' time"
    return {
        "host": f"{socket.gethostname()}, {platform.system()} {platform.release()}",
        "model": cpu_model(),
        "usable": usable,
        "of": counted(os.cpu_count() or 1, "logical CPU"),
        "memory nodes": ", ".join(map(str, topology.nodes)),
        "memory policy": memory_policy(),
        "memory": write_bytes(memory_bytes()) if memory_bytes() else "unknown",
    }


def gpus() -> dict[str, str]:
    """The GPUs that torch sees, by number."""
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        )
        return {"none": f"torch sees none; it was {built}"}
    cards = {}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        others = [other for other in range(torch.cuda.device_count()) if other != index]
        reached = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
        cards[str(index)] = (
            f"{card.name}, {write_bytes(card.total_memory)}, compute capability "
            f"{card.major}.{card.minor}"
            + (
                f", reads the memory of {', '.join(map(str, reached)) or 'no other'}"
                if others
                else ""
            )
        )
    return cards


def torch_build() -> dict[str, str]:
    """How torch was built, as `torch.__config__.show()` says."""
    _, *lines = (line.strip(" -,") for line in torch.__config__.show().splitlines() if line.strip())
    settings = "Build settings: "
    return {
        "with": "; ".join(line for line in lines if not line.startswith(settings)),
        "settings": "".join(line.removeprefix(settings) for line in lines if settings in line),
    }


def memory_policy(proc: Path = PROC) -> str:
    """The kernel's policy for the memory of this process, such as default or bind:0."""
    try:
        lines = (proc / "self/numa_maps").read_text().splitlines()
    except OSError:
        return "unknown"
    policies = Counter(line.split()[1] for line in lines)
    return ", ".join(policy for policy, _ in policies.most_common()) or "unknown"


def links(sys: Path = SYS) -> dict[str, str]:
    """The network interfaces that are up: their addresses, and their speed if known."""
    addresses: dict[str, list[str]] = defaultdict(list)
    loopback = set()
    for interface in interfaces():
        addresses[interface.name].append(interface.address)
        if interface.is_loopback:
            loopback.add(interface.name)
    return {
        name: ", ".join(own) + (" (loopback)" if name in loopback else _speed(name, sys))
        for name, own in addresses.items()
    }


def _speed(name: str, sys: Path) -> str:
    """`, 25 Gbit/s`; "" if it is unknown, as for a virtual interface."""
    try:
        megabits = int((sys / "class/net" / name / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""


_PATIENCE_S = 20.0
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE", "HYDRA", "MPI_", "SLURM_")
"""Prefixes of variables by which MPI identifies a process as a rank of a job."""
_ASK_MPI = """
import json
from mpi4py import MPI
from asyncpipe.runtime.mpi_memory import takes_cuda
levels = {getattr(MPI, "THREAD_" + name): name for name in
          ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
print(json.dumps([MPI.Get_library_version().strip("\\0"), levels.get(MPI.Query_thread(), "?"),
                  takes_cuda(MPI.COMM_WORLD)]))
"""


def versions() -> dict[str, str]:
    """asyncpipe, the interpreter, and the required packages."""
    optional = {package for packages in EXTRAS.values() for package in packages}
    known: dict[str, str] = describe_environment()["versions"]
    return {name: number for name, number in known.items() if name not in optional} | {
        "torch": torch.__version__,
        "python": f"{known['python']} ({sys.executable})",
    }


def extras() -> dict[str, str]:
    """The extras of asyncpipe and their installed packages."""
    return {
        extra: ", ".join(f"{package} {version_of(package) or '-'}" for package in packages)
        for extra, packages in EXTRAS.items()
    }


def backends() -> dict[str, str]:
    """The versions of gloo, nccl and MPI, or the reason why they are missing."""
    has_gloo = dist.is_available() and dist.is_gloo_available()
    return {
        "gloo": "with this torch" if has_gloo else "this torch was built without it",
        "nccl": _nccl(),
        "mpi": _mpi(),
        "mpiexec": _mpiexec(),
    }


def _nccl() -> str:
    if not has_nccl():
        return "this torch was built without it"
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{version}" if torch.cuda.is_available() else f"{version}, but torch sees no GPU"


def _mpi() -> str:
    """Queries MPI in a separate process, as a broken library may end the process."""
    if find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {install('mpi')}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)
    }
    try:
        answer = subprocess.run(
            [sys.executable, *ISOLATED, "-c", _ASK_MPI],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return f"mpi4py is installed, but MPI did not start in {_PATIENCE_S:g} s"
    if answer.returncode:
        lines_of_error = answer.stderr.strip().splitlines() or ["it ended without a message"]
        return f"mpi4py is installed, but MPI cannot start: {lines_of_error[-1].strip()}"
    library, level, is_aware = json.loads(answer.stdout.splitlines()[-1])
    lines = " ".join(library.split())
    enough = "" if level == "MULTIPLE" else ", which is too low: two threads call it"
    aware = "CUDA-aware" if is_aware else "not CUDA-aware"
    return f"{_shortened(lines)}, thread level {level}{enough}, {aware}"


def _shortened(library: str) -> str:
    """Name and version in the description of a library.

    >>> _shortened("MPICH Version: 5.0.2 Release date: .."), _shortened("Open MPI v5.0.3, ..")
    ('MPICH 5.0.2', 'Open MPI v5.0.3')
    """
    match = re.match(r"(\D+?)\s*(?:Version:)?\s*(v?\d[\w.]*)", library)
    return f"{match[1]} {match[2]}" if match else library


def _mpiexec() -> str:
    try:
        return str(Path(mpiexec()))
    except TransportError:
        return "none, neither next to the interpreter nor on the path"


def default_ranks() -> int:
    """One rank per GPU if there are several, otherwise two."""
    return max(2, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def would_use(ranks: int) -> dict[str, str]:
    """The resources of this number of ranks on this machine, in words."""
    topology = read_topology()
    machine = machine_of(topology, ranks)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    resources = {
        "ranks": f"{ranks}, {_started_by()}",
        "device": "cpu: torch sees no GPU" if not count else "cpu, unless --device cuda",
        "transport": str(choose("auto", Circumstances(ranks))),
        "threads": f"{machine.threads} a rank, {_threads_reason(machine, topology, ranks)}",
        "cores": _cores(machine, topology, ranks),
    }
    if count:
        on_gpus = Circumstances(ranks, on_gpus=True, own_gpus=count >= ranks, has_nccl=has_nccl())
        resources["transport of GPUs"] = str(choose("auto", on_gpus))
        if count < ranks:
            per_gpu = -(-ranks // count)
            resources["device"] += f", which needs {per_gpu} ranks per GPU (--ranks-per-gpu)"
    return resources


def machine_of(topology: Topology, ranks: int) -> Machine:
    """The hardware of the first of this number of ranks on this host."""
    first = RankResources(socket.gethostname(), format_cpus(topology.cpus), topology.usable)
    return machine_with(ExecutionOptions(), [first] * ranks, 0, {})


def _started_by() -> str:
    info = find_rank_info(os.environ)
    if info is None:
        return "started by asyncpipe-train itself"
    return f"though this process is rank {info.rank} of {info.ranks}, started by {info.launcher}"


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
        why = "a quota below the cores: other processes may use the same cores"
    else:
        why = f"{counted(machine.threads, 'thread')} a rank are more than its share of the cores"
    return f"all ranks share all ({why})"


Section = dict[str, Any]


def describe(ranks: int | None = None) -> dict[str, Section]:
    """Sections of names and values, for a run of this number of ranks (default: the number of GPUs,
    at least 2)."""
    sections: dict[str, Callable[[], Section]] = {
        "versions": versions,
        "torch build": torch_build,
        "extras": extras,
        "backends": backends,
        "processor": cpu,
        "gpus": gpus,
        "links": links,
        "a run here": lambda: would_use(ranks or default_ranks()),
    }
    return {name: _section(find) for name, find in sections.items()}


def _section(find: Callable[[], Section]) -> Section:
    """The values that `find` returns, or its error."""
    try:
        return find()
    except AsyncPipeError as error:
        return {"trouble": error.what, **({"cure": error.cure} if error.cure else {})}
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}
