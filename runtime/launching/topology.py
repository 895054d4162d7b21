"""/sys -> the cores of this machine that this process may use: their threads and memory nodes.

The kernel's affinity mask says which logical CPUs are ours (a launcher or a container may have
narrowed it), `/sys/devices/system` which of them are one core and which memory is near, and the
control group how many CPUs' worth of time we get.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A core: the memory node that it is on, and its logical CPUs (more than one with SMT)."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The cores that a process may use, node by node; `quota` bounds how many CPUs' time."""

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
        """How many cores can be busy at a time, at least one."""
        return max(1, int(min(len(self.cores), self.quota)))


def read_topology(
    allowed: Iterable[int] | None = None, *, sys: Path = SYS, proc: Path = PROC
) -> Topology:
    """The topology of this machine, of the CPUs in `allowed` (by default this process's).

    Where /sys is not there every CPU is a core of its own, all on one node.
    """
    cpus = sorted(allowed if allowed is not None else allowed_cpus())
    node_of = _nodes(sys / "devices/system/node")
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = parse_cpus(_text(path)) or (cpu,)
        cores.setdefault(siblings, []).append(cpu)
    made = sorted(Core(node_of.get(own[0], 0), tuple(own)) for own in cores.values())
    return Topology(tuple(made), _quota(sys, proc))


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def parse_cpus(text: str) -> tuple[int, ...]:
    """The kernel's list of CPUs.

    >>> parse_cpus("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The same list as the kernel writes it.

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
    """The memory node near a PCI device (`0000:3b:00.0`); None where it is not known."""
    text = _text(sys / "bus/pci/devices" / address / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1 where there is one node


def _nodes(folder: Path) -> dict[int, int]:
    """The memory node of each CPU."""
    return {
        cpu: int(path.name.removeprefix("node"))
        for path in folder.glob("node[0-9]*")
        for cpu in parse_cpus(_text(path / "cpulist"))
    }


def _quota(sys: Path, proc: Path) -> float:
    """CPUs' worth of time that the control groups above this process allow, v2 or v1."""
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
