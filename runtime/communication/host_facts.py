"""Facts of a host that decide how fast its ranks are: cores, memory nodes, devices, file systems.

They are read from /proc and /sys, whose places can be given, and measured by small probes: how long
threads wait for a core, and how long a folder takes to keep what is written to it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..distributed.cpu_affinity import SYS, parse_cpus, read_topology
from ..process import PROC

PROBE_BYTES = 64 * 1024
"""The bytes that one probe of a folder writes: a few records, and less than any checkpoint."""
_PROBES, _LONGEST_S = 7, 3.0


@dataclass(frozen=True, slots=True)
class Binding:
    """The cores and the memory of a process.

    cpus: the logical CPUs that it may run on.
    host_cpus: the number of logical CPUs of its host.
    cpu_nodes: the memory nodes of its CPUs.
    policy: its memory policy, in the kernel's words; "" if unknown.
    far_share: the share of its own memory that is not on a node of its CPUs.
    """

    cpus: tuple[int, ...]
    host_cpus: int
    cpu_nodes: tuple[int, ...] = (0,)
    policy: str = ""
    far_share: float = 0.0


def read_binding(*, proc: Path = PROC, sys: Path = SYS) -> Binding:
    """The binding of this process."""
    status = _text(proc / "self/status")
    allowed = [line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_l")]
    online = parse_cpus(_text(sys / "devices/system/cpu/online"))
    cpus = parse_cpus(allowed[0]) if allowed else online
    policies: Counter[str] = Counter()
    nodes: Counter[int] = Counter()
    for line in _text(proc / "self/numa_maps").splitlines():
        _, policy, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if "anon" not in values:  # files are shared with other processes
            continue
        page = 1024 * int(values.get("kernelpagesize_kB", "4"))
        for name, pages in values.items():
            if name[0] == "N" and name[1:].isdigit():
                nodes[int(name[1:])] += page * int(pages)
                policies[policy] += page * int(pages)
    cpu_nodes = read_topology(cpus, sys=sys, proc=proc).nodes
    far = sum(size for node, size in nodes.items() if node not in cpu_nodes)
    return Binding(
        cpus,
        len(online) or len(cpus),
        cpu_nodes,
        policies.most_common(1)[0][0] if policies else "",
        round(far / max(1, nodes.total()), 4),
    )


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Seconds of a logical CPU since the host started.

    busy: it ran processes.
    stolen: the hypervisor ran something else.
    """

    busy: float
    stolen: float


def cpu_seconds(*, proc: Path = PROC) -> dict[int, CpuSeconds]:
    """The seconds of each logical CPU, without interrupts, which belong to no process."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    seconds = {}
    for line in _text(proc / "stat").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _, _, _, _, stolen = map(int, fields[:8])
            seconds[int(name[3:])] = CpuSeconds(tick_s * (user + nice + system), tick_s * stolen)
    return seconds


ThreadSeconds = Mapping[str, tuple[float, float]]
"""Seconds that each thread of this process ran, and waited for a core."""


def thread_seconds(*, proc: Path = PROC) -> dict[str, tuple[float, float]]:
    """The seconds that each thread has run and has waited for a core; empty without schedstat."""
    seconds = {}
    for path in (proc / "self/task").glob("*/schedstat"):
        ran, waited, *_ = (*map(int, _text(path).split()), 0, 0)
        seconds[path.parent.name] = ran / 1e9, waited / 1e9
    return seconds


def waited_share(before: ThreadSeconds, after: ThreadSeconds, window_s: float) -> float:
    """The largest share of its time that a thread waited for a core, of those that wanted to run
    for most of the window.

    >>> waited_share({"1": (1.0, 0.0)}, {"1": (1.3, 0.1), "2": (0.0, 0.01)}, 0.4)
    0.25
    """
    shares = [0.0]
    for thread, (ran_s, waited_s) in after.items():
        ran_before_s, waited_before_s = before.get(thread, (0.0, 0.0))
        ran_s, waited_s = ran_s - ran_before_s, waited_s - waited_before_s
        if ran_s + waited_s > window_s / 2:
            shares.append(round(waited_s / (ran_s + waited_s), 4))
    return max(shares)


def rdma_devices(*, sys: Path = SYS) -> tuple[str, ...]:
    """The names of this host's devices for remote direct memory access."""
    folder = sys / "class/infiniband"
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


@dataclass(frozen=True, slots=True)
class FolderProbe:
    """How a folder takes what is written to it.

    folder: its path.
    system: the type of its file system; "" if unknown.
    free_bytes, total_bytes: of its file system.
    write_ms: the median time of a write of PROBE_BYTES until the disk has it; 0 after an error.
    error: why it cannot be written to; "" if it can.
    """

    folder: str
    system: str
    free_bytes: int
    total_bytes: int
    write_ms: float = 0.0
    error: str = ""


def probe_folder(folder: Path, *, proc: Path = PROC) -> FolderProbe:
    """Writes small files to a folder, or to the nearest one above that exists, and removes them."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    space = os.statvfs(place)
    free_bytes, total_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    times_ms: list[float] = []
    error = ""
    start_s = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncpipe-probe-", dir=place) as own:
            while len(times_ms) < _PROBES and time.perf_counter() - start_s < _LONGEST_S:
                times_ms.append(1e3 * _write_s(Path(own) / f"{len(times_ms)}"))
    except OSError as failure:
        error = failure.strerror or str(failure)
    median_ms = sorted(times_ms)[len(times_ms) // 2] if times_ms else 0.0
    system = _file_system(place.resolve(), proc)
    return FolderProbe(str(folder), system, free_bytes, total_bytes, median_ms, error)


def _write_s(path: Path) -> float:
    start_s = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def _file_system(place: Path, proc: Path) -> str:
    """The type of the file system that was mounted last at the folder, or nearest above it."""
    best = -1, ""
    for line in _text(proc / "self/mountinfo").splitlines():
        own, _, mounted = line.partition(" - ")
        point = Path(own.split()[4].replace("\\040", " "))
        if place.is_relative_to(point) and len(point.parts) >= best[0]:
            best = len(point.parts), mounted.split()[0]
    return best[1]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # also a thread that has ended
        return ""
