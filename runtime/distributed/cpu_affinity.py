"""Hardware and options -> the cores, threads and GPU of each rank.

The kernel's affinity mask gives the logical CPUs of this process, `/sys/devices/system` their cores
and memory nodes, and the control group a quota of CPU time. Two ranks never share a core: every
rank gets a memory node (its GPU's, if known), and the ranks of a node divide its cores evenly, in
order, so that neighbors in the pipeline are close. CPUs and GPUs that the launcher has already
bound to single ranks stay with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import __version__
from ..config.execution_options import ExecutionOptions
from ..config.option_files import own_files
from ..config.resolve import check_devices, gpu_of_rank
from ..config.settings import RunConfig, Settings, SettingsError
from ..errors import TransportError
from ..plan.plan import Plan
from ..plan.trust import is_trusted
from ..process import PROC
from ..serialization import Origin, known_fields, parse_json, shaped

SYS = Path("/sys")


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A physical core.

    node: its memory node.
    cpus: its logical CPUs, more than one with SMT.
    """

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The cores that a process may use.

    cores: the cores, ordered by memory node.
    quota: the limit on CPU time, in CPUs.
    """

    cores: tuple[Core, ...]
    quota: float = inf

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def usable(self) -> int:
        """The number of cores that can be busy at a time, at least 1."""
        return max(1, int(min(len(self.cores), self.quota)))


def read_topology(
    allowed: Iterable[int] | None = None, *, sys: Path = SYS, proc: Path = PROC
) -> Topology:
    """The topology of this machine, restricted to the CPUs in `allowed` (default: this process's).

    Without /sys, every CPU counts as a core and all are on one node.
    """
    cpus = sorted(allowed if allowed is not None else allowed_cpus())
    node_of = _nodes(sys / "devices/system/node")
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = parse_cpus(_text(path)) or (cpu,)
        cores.setdefault(siblings, []).append(cpu)
    sorted_cores = sorted(Core(node_of.get(own[0], 0), tuple(own)) for own in cores.values())
    return Topology(tuple(sorted_cores), _quota(sys, proc))


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs of a list in the kernel's format.

    >>> parse_cpus("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """CPUs as a list in the kernel's format.

    >>> format_cpus({0, 1, 2, 8, 10, 11})
    '0-2,8,10-11'
    """
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def node_of_pci(address: str, *, sys: Path = SYS) -> int | None:
    """The memory node near a PCI device (`0000:3b:00.0`); None if unknown."""
    text = _text(sys / "bus/pci/devices" / address / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1 on a machine with one node


def _nodes(folder: Path) -> dict[int, int]:
    """The memory node of each CPU."""
    return {
        cpu: int(path.name.removeprefix("node"))
        for path in folder.glob("node[0-9]*")
        for cpu in parse_cpus(_text(path / "cpulist"))
    }


def _quota(sys: Path, proc: Path) -> float:
    """The CPUs' worth of time that the control groups of this process allow (cgroup v2 or v1)."""
    quota = inf
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = sys / "fs/cgroup" / ("cpu" if controllers else "")
        # In a container the group's own folder is the root of what is mounted.
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder == sys / "fs":
                break
            quota = min(quota, _quota_of(folder))
    return quota


def _quota_of(folder: Path) -> float:
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    if not limit:
        limit = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    return int(limit) / int(period) if limit.strip().isdigit() and period.strip() else inf


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


Cpus = frozenset[int]
T = TypeVar("T")


def share_cores(
    topology: Topology, ranks: int, near: Sequence[int | None] = ()
) -> tuple[Cpus, ...] | None:
    """The CPUs of each rank, disjoint; `near` are the memory nodes of their GPUs.

    None if the ranks should share all cores: for a single rank, for fewer cores than ranks, or for
    a quota below the number of cores, as other processes may then use these very cores.

    >>> two_sockets = Topology(tuple(Core(cpu // 4, (cpu,)) for cpu in range(8)))
    >>> [sorted(cpus) for cpus in share_cores(two_sockets, 3)]
    [[0, 1], [2, 3], [4, 5, 6, 7]]
    """
    cores = topology.cores
    if ranks < 2 or len(cores) < ranks or topology.quota < len(cores):
        return None
    of_node = {node: [core for core in cores if core.node == node] for node in topology.nodes}
    wanted = [node if node in of_node else None for node in (*near, *[None] * ranks)][:ranks]
    if ranks < len(of_node) and not any(node is not None for node in wanted):
        nodes = list(of_node.values())
        return tuple(
            _cpus(core for node in part for core in node) for part in _even_parts(nodes, ranks)
        )
    node_of_rank = _nodes_of_ranks(of_node, wanted)
    parts = {
        node: iter(_even_parts(own, node_of_rank.count(node)))
        for node, own in of_node.items()
        if node in node_of_rank
    }
    return tuple(_cpus(next(parts[node])) for node in node_of_rank)


def near_cores(topology: Topology, shares: Sequence[Cpus]) -> tuple[Cpus, ...]:
    """The shares, widened to all cores of their memory nodes."""
    widened = []
    for share in shares:
        nodes = {core.node for core in topology.cores if share & set(core.cpus)}
        widened.append(_cpus(core for core in topology.cores if core.node in nodes))
    return tuple(widened)


def _nodes_of_ranks(of_node: dict[int, list[Core]], wanted: list[int | None]) -> list[int]:
    """A node for each rank, the wanted one if it has a core left."""
    used = dict.fromkeys(of_node, 0)
    free = 0
    placed: list[int | None] = []
    for node in wanted:
        if node is not None and used[node] < len(of_node[node]):
            used[node] += 1
            placed.append(node)
        else:
            free += 1
            placed.append(None)
    rest: list[int] = []
    for _ in range(free):
        node = max(of_node, key=lambda n: (len(of_node[n]) // (used[n] + 1), -used[n], -n))
        used[node] += 1
        rest.append(node)
    rest.sort()
    return [rest.pop(0) if node is None else node for node in placed]


def _even_parts(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Contiguous parts whose lengths differ by at most one."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [items[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def _cpus(cores: Iterable[Core]) -> Cpus:
    return frozenset(cpu for core in cores for cpu in core.cpus)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    uuid: its identity, the same on every rank.
    node: the memory node near it, if known.
    """

    uuid: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class RankResources:
    """The hardware and versions of a rank.

    host: its host name.
    cpus: its logical CPUs, as a list in the kernel's format.
    cores: the number of its cores that can be busy at a time.
    gpus: the GPUs that it sees.
    versions: versions and checksums that must be equal on all ranks, by name.
    trusted: True if the code of the stages is trusted on its host.
    """

    host: str
    cpus: str = ""
    cores: int = 1
    gpus: tuple[Gpu, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    trusted: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def resources_from(content: bytes) -> RankResources:
    """Reads the output of `to_bytes`, also of another version; ignores trailing spaces."""
    origin = Origin("another rank's resources", TransportError)
    return shaped(
        RankResources, known_fields(RankResources, parse_json(content.decode(), origin)), origin
    )


def find_resources(config: RunConfig, plan: Plan, code: Mapping[str, str]) -> RankResources:
    """The resources of this process; `code` has the SHA-256 of its stages' files.

    Reads GPUs only if the run computes on them.
    """
    topology = read_topology()
    return RankResources(
        host=socket.gethostname(),
        cpus=format_cpus(topology.cpus),
        cores=topology.usable,
        gpus=_visible_gpus() if config.device == "cuda" else (),
        versions=(
            ("asyncpipe", __version__),
            ("torch", torch.__version__),
            ("the plan", _short(plan.to_json().encode())),
            ("the stages", _short(json.dumps(code, sort_keys=True).encode())),
            *((of, _short(data)) for of, data in own_files(asdict(config))),
        ),
        trusted=config.trust or is_trusted(config.folder),
    )


def _short(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()[:8]


def check_alike(resources: Sequence[RankResources]) -> None:
    """Raises SettingsError, the same on all ranks, if a rank has other versions than most."""
    for name in dict.fromkeys(name for of_rank in resources for name, _ in of_rank.versions):
        numbers = [dict(of_rank.versions).get(name, "none") for of_rank in resources]
        counted = Counter(filter(None, numbers)).most_common()
        if len(counted) < 2:
            continue
        usual, times = counted[0]  # of two alike rank 0's
        rank = next(rank for rank, value in enumerate(numbers) if value not in (usual, ""))
        other = numbers.index(usual)
        others = f"rank {other} on {resources[other].host} has {usual}"
        if times > 1:
            others = f"{times} ranks have {usual}, such as rank {other} on {resources[other].host}"
        raise SettingsError(
            f"rank {rank} on {resources[rank].host} has {name} {numbers[rank]}, {others}.",
            "All ranks need the same: use one folder and one environment on all hosts.",
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a run, and the share of this rank.

    cores: the number of cores on all hosts.
    threads, threads_from: threads of this rank, from "cores", "--threads" or "OMP_NUM_THREADS".
    host_of_rank: the host of each rank.
    pins: the CPUs of each rank of this host if they are pinned, in the order of ranks.
    own: the CPUs that this rank is pinned to.
    device: the device of this rank.
    launcher, interface: the launcher's name and the network interface.
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
        """Pins this thread, and the threads that it starts from now on, to the rank's CPUs."""
        if self.own and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.own)


def find_machine(
    options: Settings, plan: Plan, resources: Sequence[RankResources], rank: int
) -> Machine:
    """The hardware that `rank` computes with, by these options.

    Raises SettingsError when its host has too few GPUs.
    """
    local = [
        other for other, of_rank in enumerate(resources) if of_rank.host == resources[rank].host
    ]
    return machine_with(options, resources, rank, _gpus_of(options, plan, resources, local))


def machine_with(
    options: ExecutionOptions,
    resources: Sequence[RankResources],
    rank: int,
    gpus: Mapping[int, Gpu],
) -> Machine:
    """As `find_machine`, with the GPUs of the ranks of its host given (none on CPUs)."""
    own = resources[rank]
    local = [other for other, of_rank in enumerate(resources) if of_rank.host == own.host]
    sharing = [other for other in local if resources[other].cpus == own.cpus]
    topology = read_topology(parse_cpus(own.cpus))
    near = [gpus[other].node if other in gpus else None for other in sharing]
    shares = share_cores(topology, len(sharing), near)
    fair = max(1, topology.usable // len(sharing))
    if shares is not None:
        fair = min(sum(1 for core in topology.cores if set(core.cpus) <= cpus) for cpus in shares)
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads, origin = fair, "cores"
    if options.threads is not None:
        threads, origin = options.threads, "--threads"
    elif given.isdigit():
        threads, origin = int(given), "OMP_NUM_THREADS"
    if shares is not None and options.pin == "numa":
        shares = near_cores(topology, shares)
        shares = shares if len(set(shares)) > 1 else None
    elif options.pin == "none" or threads > fair:
        shares = None
    pins = shares or ()
    return Machine(
        cores=sum({(of_rank.host, of_rank.cpus): of_rank.cores for of_rank in resources}.values()),
        threads=threads,
        threads_from=origin,
        host_of_rank=tuple(of_rank.host for of_rank in resources),
        pins=tuple(map(format_cpus, pins)),
        own=pins[sharing.index(rank)] if pins else frozenset(),
        device="cpu" if options.device == "cpu" else f"cuda:{_index_of(gpus[rank], own)}",
    )


def _gpus_of(
    options: Settings, plan: Plan, resources: Sequence[RankResources], local: Sequence[int]
) -> dict[int, Gpu]:
    """The GPU of each rank of one host; ranks that see the same GPUs divide them."""
    if options.device == "cpu":
        return {}
    gpus = {}
    for rank in local:
        sharing = [other for other in local if resources[other].gpus == resources[rank].gpus]
        visible = resources[rank].gpus
        check_devices(options, plan, sharing, len(visible))
        of_rank = gpu_of_rank(
            plan, sharing, options.ranks_per_gpu, len(visible), options.tensor_ranks
        )
        gpus[rank] = visible[of_rank[sharing.index(rank)]]
    return gpus


def _index_of(gpu: Gpu, of_rank: RankResources) -> int:
    return [own.uuid for own in of_rank.gpus].index(gpu.uuid)


def _visible_gpus() -> tuple[Gpu, ...]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        card: Any = torch.cuda.get_device_properties(index)
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        gpus.append(Gpu(str(card.uuid), node_of_pci(address)))
    return tuple(gpus)
