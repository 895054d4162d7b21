"""Measurements of ranks -> whether each of seven causes slows them, and one sentence.

A cause is judged by a pure function of its observation. The causes have a fixed order, that of the
study of a slow placement: who is alone on a host comes first, who else computes comes last. The
sentence is that of the first cause that was found, and ends in its cure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed.cpu_affinity import format_cpus
from ..formatting import counted, write_bytes, write_ms, write_share
from ..reports.causes import Check, fault
from .host_facts import PROBE_BYTES, Binding, FolderProbe
from .operation_facts import EndpointKind
from .splits import lone_among
from .tcp_links import NetworkPath

LEAST_DUPLEX = 1.3
"""Both directions over one, below which an endpoint is serial: one that does one thing after the
other has 1, one that does both at once 2; halfway down to 1 is noise of a busy machine."""
MOST_BUSY = 0.5
"""The share of an exchange in which a rank's threads run, from which its core and not its link
limits it: both directions at once then cost as much as the copies."""
MOST_SHARED = 1.5
"""The time of threads that share a communicator, relative to threads with one each; two threads
that wait for each other take twice as long."""
MOST_EXPOSED = 0.15
"""The share of an exchange that may be left when a computation of twice its time ends: MPICH leaves
at most 4% with a thread that makes progress, and at least 27% without."""
MOST_WAITED = 0.15
"""The share of its time that a rank that computes may wait for a core; a process with a lower
priority (nice 10) costs a tenth, one of the same priority half."""
MOST_OF_A_CORE = 0.5
"""The share of one core that other processes may use; an endless loop uses all of it."""
MOST_STOLEN = 0.1
"""The share of a core's time that the hypervisor may take."""
MOST_FAR = 0.5
"""The share of a rank's memory that may be on a memory node without a core of the rank."""
BETTER_INTERFACE = 1.5
"""How much faster another interface has to be: single messages vary by a third."""
SLOW_WRITE_MS = 100.0
"""The time of a small write to a disk: 10 ms for one that turns, and 30 ms while others use it."""
FULL_BYTES, FULL_SHARE = 64 << 20, 0.02
"""A file system is full if it has less than both."""
NETWORK_SYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "smb3", "virtiofs"),
)
"""The types of file systems that are elsewhere."""
MULTIPLE = 3
"""MPI_THREAD_MULTIPLE."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two ranks that exchange messages.

    duplex: the bandwidth of both directions at once, relative to the slower one alone.
    gb_s: that of the slower one alone.
    busy: the share of an exchange in which the threads of a rank ran, the larger of both.
    """

    first: int
    second: int
    gb_s: float
    duplex: float
    busy: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The hosts of the ranks in the order of a ring.

    hosts: the host of each rank.
    links: those between ranks that are alone on their hosts and their neighbors.
    endpoint: how a rank sends and receives.
    """

    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    endpoint: EndpointKind

    def check(self) -> Check:
        cause, lone = "placement", lone_among(self.hosts)
        measured = f"{counted(len(self.hosts), 'rank')} on {counted(len(set(self.hosts)), 'host')}"
        if not self.links:
            return Check(cause, f"{measured}, none alone", "ok")
        worst = min(self.links, key=lambda link: (link.busy >= MOST_BUSY, link.duplex))
        measured += f", {ranks_in_words(lone)} alone: both directions {worst.duplex:.2f}× one"
        if worst.busy >= MOST_BUSY:
            return Check(cause, f"{measured}, limited by the core and not the link")
        if worst.duplex >= LEAST_DUPLEX:
            return Check(cause, measured)
        rank = next(rank for rank in lone if rank in (worst.first, worst.second))
        return fault(
            cause,
            measured,
            f"Rank {rank} is alone on its host {self.hosts[rank]}, and its endpoint sends and "
            f"receives one after the other ({worst.duplex:.2f}× the bandwidth of one direction for "
            "both at once, of 2.00× possible): place two or more ranks on every host, or send and "
            "receive at the same time.",
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_in_words([7]), ranks_in_words([0, 1, 4])
    ('rank 7', 'ranks 0, 1, 4')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, slots=True)
class Communicators:
    """Threads of a rank that send at the same time.

    threads: their number; 0 for a lone rank.
    is_shared: the ranks have threads that share a communicator.
    shared_ms, own_ms: the time of a message of each thread over one communicator, and over one for
        each.
    over: what carries the messages.
    """

    threads: int
    is_shared: bool
    shared_ms: float = 0.0
    own_ms: float = 0.0
    over: str = ""

    def check(self) -> Check:
        cause = "threads"
        if not self.threads:
            return Check(cause, "one rank", "not used")
        times = f"{write_ms(self.shared_ms)} over one communicator, {write_ms(self.own_ms)}"
        measured = f"{self.threads} threads over {self.over}: {times} over one each"
        if not self.is_shared:
            return Check(cause, f"{measured}; these ranks share none", "not used")
        if self.shared_ms < MOST_SHARED * self.own_ms:
            return Check(cause, measured)
        return fault(
            cause,
            measured,
            f"{self.threads} threads of a rank share one communicator, and their messages take "
            f"{times} with one each: give every thread a communicator of its own (dist.new_group, "
            "MPI_Comm_dup).",
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of MPI while a rank computes.

    library: its version; "" if the transport is not MPI.
    level, level_name: the thread level that it was started with.
    asked_by: the setting that asks for a lower level; "" if there is none.
    alone_ms: the time of an exchange.
    exposed_ms: the time that is left of one after a computation that takes twice as long.
    """

    library: str = ""
    level: int = MULTIPLE
    level_name: str = ""
    asked_by: str = ""
    alone_ms: float = 0.0
    exposed_ms: float = 0.0

    def check(self) -> Check:
        cause = "progress"
        if not self.library:
            return Check(cause, "no MPI among these ranks", "not used")
        measured = f"{self.library}, thread level {self.level_name}"
        if self.level < MULTIPLE:
            why = f" because {self.asked_by} is set" if self.asked_by else ""
            cure = f"unset {self.asked_by.partition('=')[0]}" if self.asked_by else ""
            return fault(
                cause,
                measured,
                f"MPI was started with thread level {self.level_name}{why}, so that no thread can "
                f"move messages while a rank computes: {cure or 'ask for MULTIPLE (mpi4py.rc)'}, "
                "or use --transport gloo.",
            )
        exposed = self.exposed_ms / self.alone_ms if self.alone_ms else 0.0
        measured += f"; {write_share(exposed)} of an exchange is left after computing"
        if exposed <= MOST_EXPOSED:
            return Check(cause, measured)
        return fault(
            cause,
            measured,
            "MPI moves no messages while a rank computes (an exchange that takes "
            f"{write_ms(self.alone_ms)} alone, and that begins with a computation, still takes "
            f"{write_ms(self.exposed_ms)} after it): set "
            "MPICH_ASYNC_PROGRESS=1 or I_MPI_ASYNC_PROGRESS=1, or use --transport gloo.",
        )


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores and the memory of the ranks.

    hosts: the host of each rank.
    bindings: the binding of each rank.
    waited: the share of its time that each rank waits for a core while all compute.
    """

    hosts: tuple[str, ...]
    bindings: tuple[Binding, ...]
    waited: tuple[float, ...]

    def check(self) -> Check:
        cause = "cores, memory"
        waits = f"waits for a core {write_share(max(self.waited))} of the time"
        cpus = list(dict.fromkeys(format_cpus(own.cpus) for own in self.bindings))
        nodes = {node for own in self.bindings for node in own.cpu_nodes}
        measured = f"ranks on {_cores('; '.join(cpus[:4]))}, {counted(len(nodes), 'memory node')}"
        measured += f"; a rank that computes {waits}"
        for ranks in self._crowded():
            confined = format_cpus({cpu for rank in ranks for cpu in self.bindings[rank].cpus})
            return fault(
                cause,
                measured,
                f"{ranks_in_words(ranks).capitalize()} may only run on {_cores(confined)} of "
                f"{self.hosts[ranks[0]]}, which has {self.bindings[ranks[0]].host_cpus} cores, and "
                f"each {waits}: give every rank a core of its own (without taskset, mpiexec "
                "--bind-to core, srun --cpus-per-task).",
            )
        for rank, own in enumerate(self.bindings):
            if own.far_share > MOST_FAR:
                return fault(
                    cause,
                    measured,
                    f"{write_share(own.far_share)} of the memory of rank {rank} is not on the "
                    f"memory node of its cores {format_cpus(own.cpus)}: bind it to the cores and "
                    "the memory of one node (--pin cores, numactl --localalloc).",
                )
            if own.policy.partition(":")[0] in ("interleave", "weighted"):
                return fault(
                    cause,
                    measured,
                    f"The memory of rank {rank} has the policy {own.policy}, which spreads it over "
                    "memory nodes: start it without numactl --interleave, or with --localalloc.",
                )
        return Check(cause, measured)

    def _crowded(self) -> list[list[int]]:
        """Ranks that are confined to fewer cores than they are, on a host that has more."""
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for rank, (host, own) in enumerate(zip(self.hosts, self.bindings, strict=True)):
            groups[host, own.cpus].append(rank)
        return [
            ranks
            for (_, cpus), ranks in groups.items()
            if len(cpus) < min(len(ranks), self.bindings[ranks[0]].host_cpus)
            and max(self.waited[rank] for rank in ranks) > MOST_WAITED
        ]


def _cores(text: str) -> str:
    """
    >>> _cores("0"), _cores("0-1")
    ('core 0', 'cores 0-1')
    """
    return f"core {text}" if text.isdigit() else f"cores {text}"


@dataclass(frozen=True, slots=True)
class Networks:
    """The network between the hosts.

    transport: the name of the transport.
    hosts: the host of each rank.
    paths: all paths between neighboring hosts.
    rdma: the devices for remote direct memory access of each rank's host.
    nccl_ib_disable: the ranks with NCCL_IB_DISABLE=1.
    """

    transport: str
    hosts: tuple[str, ...]
    paths: tuple[NetworkPath, ...] = ()
    rdma: tuple[tuple[str, ...], ...] = ()
    nccl_ib_disable: tuple[int, ...] = ()

    def check(self) -> Check:
        cause = "interface"
        if len(set(self.hosts)) < 2:
            return Check(cause, f"{self.transport} on one host", "not used")
        rates = [
            f"{path.interface}{' (used)' * path.is_used} {_rate(path.gb_s)}" for path in self.paths
        ]
        devices = sorted({name for own in self.rdma for name in own})
        measured = f"{self.transport}; {', '.join(rates[:4]) or 'no path measured'}"
        measured += f"; RDMA: {', '.join(devices)}" if devices else ""
        if devices and self.transport == "gloo":
            return fault(
                cause,
                measured,
                f"The ranks communicate over TCP although {devices[0]} can do remote direct memory "
                "access: use --transport mpi with an MPI built for it, or NCCL between GPUs.",
            )
        if devices and self.nccl_ib_disable and self.transport == "nccl":
            return fault(
                cause,
                measured,
                f"NCCL_IB_DISABLE is set on {ranks_in_words(self.nccl_ib_disable)}, so that NCCL "
                f"leaves {devices[0]} unused: unset it.",
            )
        for used in self.paths:
            others = [
                path for path in self.paths if (path.rank, path.peer) == (used.rank, used.peer)
            ]
            best = max(others, key=lambda path: path.gb_s)
            if used.is_used and best.gb_s > BETTER_INTERFACE * used.gb_s:
                return fault(
                    cause,
                    measured,
                    f"{self.hosts[used.rank]} and {self.hosts[used.peer]} communicate over "
                    f"{used.interface} with {_rate(used.gb_s)}, and {best.interface} between them "
                    f"has {_rate(best.gb_s)}: use --interface {best.interface}.",
                )
        return Check(cause, measured)


def _rate(gb_s: float) -> str:
    return f"{gb_s:.2f} GB/s" if gb_s >= 0.1 else f"{1e3 * gb_s:.1f} MB/s"


@dataclass(frozen=True, slots=True)
class Files:
    """The folder that a run writes to, as rank 0 sees it."""

    probe: FolderProbe

    def check(self) -> Check:
        cause, probe = "files", self.probe
        free = f"{write_bytes(probe.free_bytes)} free"
        size = write_bytes(PROBE_BYTES)
        measured = f"{probe.folder}: {size} and fsync {write_ms(probe.write_ms)}, {free}"
        if probe.system:
            measured += f", {probe.system}"
        is_little = probe.free_bytes < min(FULL_BYTES, FULL_SHARE * probe.total_bytes)
        if is_little or probe.error == "No space left on device":
            return fault(
                cause,
                measured,
                f"The file system of {probe.folder} is full ({free} of "
                f"{write_bytes(probe.total_bytes)}), so that checkpoints and records fail: free "
                "space on it, or choose another folder with --output.",
            )
        if probe.error:
            return fault(
                cause,
                f"{probe.folder}: {probe.error}",
                f"Nothing can be written to {probe.folder} ({probe.error.lower()}): choose another "
                "folder with --output.",
            )
        if probe.write_ms <= SLOW_WRITE_MS:
            return Check(cause, measured)
        where = f" on a network file system ({probe.system})" * (probe.system in NETWORK_SYSTEMS)
        return fault(
            cause,
            measured,
            f"A write of {size} to {probe.folder}{where} takes {write_ms(probe.write_ms)} until "
            f"the disk has it (more than {write_ms(SLOW_WRITE_MS)}), and every checkpoint waits "
            "for several: write to a local disk with --output, and less often with --save-every.",
        )


@dataclass(frozen=True, slots=True)
class Others:
    """The other work on the ranks' cores, for each rank.

    hosts: the host of each rank.
    cores: the logical CPUs that the rank may use.
    used: CPUs that other processes use of these while all ranks sleep, in CPUs.
    busiest: the share of the core that they use most.
    waited: the share of its time that the rank waits for a core while all compute.
    stolen: the share of the cores' time that the hypervisor takes meanwhile.
    """

    hosts: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]
    used: tuple[float, ...]
    busiest: tuple[float, ...]
    waited: tuple[float, ...]
    stolen: tuple[float, ...]

    def check(self) -> Check:
        cause = "other processes"
        measured = (
            f"use {max(self.used):.2f} of {counted(len(self.cores[0]), 'core')}; a rank waits "
            f"{write_share(max(self.waited))} of the time, {write_share(max(self.stolen))} stolen"
        )
        for rank, host in enumerate(self.hosts):
            if self.stolen[rank] > MOST_STOLEN:
                return fault(
                    cause,
                    measured,
                    f"The hypervisor takes {write_share(self.stolen[rank])} of the time of the "
                    f"cores of {host}: use a machine whose cores are not shared.",
                )
        crowded = [
            rank
            for rank, share in enumerate(self.busiest)
            if share >= MOST_OF_A_CORE and self.waited[rank] > MOST_WAITED
        ]
        if not crowded:
            return Check(cause, measured)
        rank = max(crowded, key=lambda each: self.waited[each])
        return fault(
            cause,
            measured,
            f"Other processes use {self.used[rank]:.2f} of the "
            f"{counted(len(self.cores[rank]), 'core')} of rank {rank} on {self.hosts[rank]}, which "
            f"waits for a core {write_share(self.waited[rank])} of the time that it computes: end "
            "them (top shows them), or give the ranks cores of their own.",
        )


Observation = Placement | Communicators | Progress | Cores | Networks | Files | Others
