"""The task `diagnose`: measures on running ranks the quantities that seven causes change.

All ranks measure the causes in their order. A cause that is found is measured again after the
others, and counts only if it is found twice, because other work of the machine lasts a moment.
Repeated messages count with their shortest time, because all disturbances add to it.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.cpu_affinity import read_topology
from ..distributed.interfaces import VARIABLES, interfaces, outside_of, source_towards
from ..monitoring.run_files import read_run
from ..reports.causes import Check, checks_of_run, conclusion, longest_wait
from ..transports.mpi import load_mpi_for_one_thread
from ..transports.protocol import Channel, Transport
from .diagnosis import (
    MULTIPLE,
    Communicators,
    Cores,
    Files,
    Link,
    Networks,
    Observation,
    Others,
    Placement,
    Progress,
)
from .endpoints import GroupLinks, MpiLinks, TransportLinks
from .host_facts import (
    Binding,
    FolderProbe,
    cpu_seconds,
    probe_folder,
    rdma_devices,
    read_binding,
    thread_seconds,
    waited_share,
)
from .options import DiagnoseOptions
from .ring import PointToPoint
from .session import Session
from .splits import lone_among
from .tcp_links import EchoPath, EchoServer, NetworkPath, echo_rates

_WINDOWS, _WINDOW_S = 7, 0.1  # in which ranks sleep, or compute
_REPEATS = 5  # of a message
_LONG_S = 0.15  # of a message, in which waking up on a busy core does not count
_SIZES = (512 * 1024, 8 * 1024 * 1024)  # of a message to a lone rank; above a link's burst
_THREAD_BYTES = 256 * 1024
_EXCHANGE_BYTES = 16 * 1024 * 1024


def run_rank(session: Session, options: Mapping[str, Any]) -> dict[str, Any]:
    """Diagnoses as one of the ranks; `options` has the fields of DiagnoseOptions."""
    given = DiagnoseOptions(**options)
    sharing = Counter(session.hosts)[session.hosts[session.rank]]
    torch.set_num_threads(max(1, read_topology().usable // sharing))
    with ExitStack() as stack:
        live = _Live(session, given, stack)
        measures: Sequence[Callable[[], Observation]] = (
            live.placement,
            live.communicators,
            live.progress,
            live.cores,
            live.networks,
            live.files,
            live.others,
        )
        checks = [measure().check() for measure in measures]
        checks = [
            measure().check() if check.verdict == "fault" else check
            for check, measure in zip(checks, measures, strict=True)
        ]
    return {
        "ranks": session.ranks,
        "hosts": list(session.hosts),
        "transport": session.transport,
        "checks": [asdict(check) for check in checks],
        "sentence": conclusion(checks),
    }


def diagnose_run(folder: Path) -> dict[str, Any]:
    """Diagnoses a run from its records and its trace, and the folder that it wrote to.

    Raises DataError for a folder without a run, or a run without steps.
    """
    run = read_run(folder)
    checks = [
        *checks_of_run(run, longest_wait(folder / "trace.json")),
        Files(probe_folder(folder)).check(),
    ]
    return {
        "run": str(folder),
        "checks": [asdict(check) for check in checks],
        "sentence": conclusion(checks),
    }


def checks_of(answer: Mapping[str, Any]) -> list[Check]:
    """The checks of an answer."""
    return [Check(**raw) for raw in answer["checks"]]


class _Live:
    """The measurements of one rank. All are collective, and their result is the same on all
    ranks."""

    def __init__(self, session: Session, given: DiagnoseOptions, stack: ExitStack) -> None:
        self._session, self._given, self._stack = session, given, stack
        self._peer = next(
            (rank for rank, host in enumerate(session.hosts) if host != session.hosts[0]),
            min(1, session.ranks - 1),
        )
        """The rank with which rank 0 exchanges messages, on another host if there is one."""

    @cached_property
    def _mpi(self) -> dict[str, Any]:
        """The lowest thread level of MPI among the ranks; empty without MPI."""
        if self._session.transport != "mpi":
            return {}
        mpi = load_mpi_for_one_thread()
        names = {
            getattr(mpi, f"THREAD_{name}"): name
            for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        }
        variables = ("MPI4PY_RC_THREAD_LEVEL", "MPI4PY_RC_THREADS")
        asked = (f"{name}={os.environ[name]}" for name in variables if name in os.environ)
        level, version = mpi.Query_thread(), re.split("[,\n\0]", mpi.Get_library_version())[0]
        own = {
            "library": " ".join(version.replace("Version:", "").split()),
            "level": level,
            "level_name": names.get(level, str(level)),
            "asked_by": next(asked, ""),
        }
        return min(self._session.gathered(own), key=lambda each: int(each["level"]))

    @property
    def _has_transport(self) -> bool:
        return int(self._mpi.get("level", MULTIPLE)) >= MULTIPLE

    @cached_property
    def _links(self) -> PointToPoint:
        """Links over the transport of the ranks; over gloo if no transport can be opened."""
        session = self._session
        is_gloo = session.transport == "gloo" and session.device.type == "cpu"
        if is_gloo or not self._has_transport:
            return GroupLinks(session.group, timeout_s=session.timeout_s)
        transport = session.open_transport()
        self._stack.callback(transport.close)
        return TransportLinks(transport, session.ranks)

    def placement(self) -> Placement:
        """Exchanges messages between ranks that are alone on their hosts and their neighbors."""
        hosts, ranks = self._session.hosts, self._session.ranks
        pairs = {
            (min(pair), max(pair))
            for rank in lone_among(hosts)
            for pair in ((rank, (rank - 1) % ranks), (rank, (rank + 1) % ranks))
        }
        links = tuple(self._link(*pair) for pair in sorted(pairs))
        return Placement(hosts, links, self._given.endpoint)

    def _link(self, first: int, second: int) -> Link:
        """Messages in one direction, in the other, and in both at once, alternately."""
        size, most = _SIZES
        while size < most and self._shortest_s(first, second, size) < _LONG_S:
            size *= 2
        rows = []
        for repeat in range(_REPEATS + 1):
            there_s = self._one_way(first, second, size)
            back_s = self._one_way(second, first, size)
            both_s, busy = self._both_ways(first, second, size)
            if repeat:  # the first one only warms up
                rows.append([there_s, back_s, both_s, busy])
        of_first, of_second = map(self._session.gathered(rows).__getitem__, (first, second))
        repeats = [
            [max(of_both) for of_both in zip(*of_repeat, strict=True)]
            for of_repeat in zip(of_first, of_second, strict=True)
        ]
        there_s, back_s, both_s, busy = map(min, zip(*repeats, strict=True))
        slower_s = max(there_s, back_s)
        duplex = min(2.0, 2 * slower_s / both_s)  # more is noise
        return Link(first, second, size / slower_s / 1e9, round(duplex, 3), busy)

    def _shortest_s(self, source: int, target: int, size: int) -> float:
        """The time of a message, on all ranks."""
        return max(self._agreed(min(self._one_way(source, target, size) for _ in range(2))))

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._session.device)

    def _one_way(self, source: int, target: int, size: int) -> float:
        """The time of a message and of a byte back at its source; 0 at other ranks."""
        own, links = self._session.rank, self._links
        start_s = time.perf_counter()
        if own == source:
            links.send(target, self._buffer(size))
            links.recv(target, self._buffer(1))
            return time.perf_counter() - start_s
        if own == target:
            links.recv(source, self._buffer(size))
            links.send(source, self._buffer(1))
        return 0.0

    def _both_ways(self, first: int, second: int, size: int) -> tuple[float, float]:
        """The time in which a rank sends a message and receives one, by the endpoint of the
        program, and the share of it in which its threads run; 0 at other ranks."""
        own, links = self._session.rank, self._links
        if own not in (first, second):
            return 0.0, 0.0
        other = second if own == first else first
        outgoing, incoming = self._buffer(size), self._buffer(size)
        self._one_way(first, second, 1)
        start_s, busy_s = time.perf_counter(), time.process_time()
        if self._given.endpoint == "concurrent":
            links.exchange(other, outgoing, other, incoming)
        elif own == first:
            links.send(other, outgoing)
            links.recv(other, incoming)
        else:
            links.recv(other, incoming)
            links.send(other, outgoing)
        time_s = time.perf_counter() - start_s
        return time_s, round((time.process_time() - busy_s) / time_s, 3)

    def _agreed(self, own: float) -> list[float]:
        """The number of each rank, on all ranks."""
        return [float(value) for value in self._session.gathered(own)]

    def communicators(self) -> Communicators:
        """Messages of several threads over one communicator and over one each, alternately."""
        session, threads = self._session, max(2, self._given.threads)
        is_shared = self._given.threads > 1
        if session.group is None:
            return Communicators(0, is_shared)
        own = self._lanes(threads)
        lanes = {"shared": [own[0]] * threads, "own": own}
        tensor = torch.zeros(_THREAD_BYTES, dtype=torch.uint8)
        times_s: dict[str, list[float]] = {name: [] for name in lanes}

        def move(links: PointToPoint | MpiLinks) -> None:
            if session.rank == 0:
                links.send(self._peer, tensor.clone())
            else:
                links.recv(0, tensor.clone())

        with ThreadPoolExecutor(threads) as pool:
            for repeat in range(-1, _REPEATS):
                for name, links in lanes.items():
                    session.barrier()
                    start_s = time.perf_counter()
                    if session.rank in (0, self._peer):
                        list(pool.map(move, links))
                    if repeat >= 0:
                        times_s[name].append(time.perf_counter() - start_s)
        shortest = session.gathered([1e3 * min(times_s[name]) for name in lanes])
        shared_ms, own_ms = map(max, zip(*shortest, strict=True))
        over = "MPI" if isinstance(own[0], MpiLinks) else "gloo"
        return Communicators(threads, is_shared, shared_ms, own_ms, over)

    def _lanes(self, threads: int) -> Sequence[GroupLinks | MpiLinks]:
        limit_s = self._session.timeout_s
        if self._mpi and self._has_transport:
            world = load_mpi_for_one_thread().COMM_WORLD
            copies = [world.Dup() for _ in range(threads)]
            for copy in copies:
                self._stack.callback(copy.Free)
            return [MpiLinks(copy, timeout_s=limit_s) for copy in copies]
        timeout = datetime.timedelta(seconds=limit_s)
        groups = [dist.new_group(timeout=timeout, backend="gloo") for _ in range(threads)]
        return [GroupLinks(group, timeout_s=limit_s) for group in groups]

    def progress(self) -> Progress:
        """An exchange over MPI, alone and during a computation."""
        if not (self._mpi and self._has_transport and self._session.ranks > 1):
            return Progress(**self._mpi)
        transport = self._session.open_transport()
        alone_s = self._exchange_s(transport, range(_REPEATS))
        exposed_s = self._exchange_s(transport, range(_REPEATS, 2 * _REPEATS), 2 * alone_s)
        transport.close()
        return Progress(**self._mpi, alone_ms=1e3 * alone_s, exposed_ms=1e3 * exposed_s)

    def _exchange_s(
        self, transport: Transport, indices: Iterable[int], compute_s: float = 0.0
    ) -> float:
        """The shortest time that is left of an exchange after a computation that begins with it."""
        own = self._session.rank
        other = self._peer if own == 0 else 0
        outgoing, incoming = (
            Channel("message", "exchange", *ends, *ends, ends[0], torch.uint8, (_EXCHANGE_BYTES,))
            for ends in ((own, other), (other, own))
        )
        content, times_s = self._buffer(_EXCHANGE_BYTES), []
        for index in indices:
            self._session.barrier()
            if own not in (0, self._peer):
                continue
            receive = transport.recv(incoming, index)
            transport.send(outgoing, content, index)
            _compute(compute_s)
            start_s = time.perf_counter()
            transport.wait(receive)
            transport.wait_sent(outgoing, index)
            times_s.append(time.perf_counter() - start_s)
        return max(self._agreed(min(times_s, default=0.0)))

    def cores(self) -> Cores:
        """The cores and the memory of the ranks, and how long they wait for a core."""
        own = asdict(read_binding()), self._computing()[0]
        by_rank = self._session.gathered(own)
        bindings = tuple(
            Binding(**raw | {name: tuple(raw[name]) for name in ("cpus", "cpu_nodes")})
            for raw, _ in by_rank
        )
        return Cores(self._session.hosts, bindings, tuple(waited for _, waited in by_rank))

    def _computing(self) -> tuple[float, float]:
        """The share of its time that this rank waits for a core, and the stolen share of its cores,
        while all ranks compute."""
        cpus, waited, stolen = read_binding().cpus, [], []
        for _ in range(_WINDOWS):
            self._session.barrier()
            before, stat = thread_seconds(), cpu_seconds()
            window_s = _compute(_WINDOW_S)
            waited.append(waited_share(before, thread_seconds(), window_s))
            after = cpu_seconds()
            taken_s = sum(after[cpu].stolen - stat[cpu].stolen for cpu in cpus if cpu in after)
            stolen.append(taken_s / window_s / max(1, len(cpus)))
        return median(waited), round(median(stolen), 4)

    def others(self) -> Others:
        """The use of the ranks' cores while all ranks sleep."""
        session, cpus = self._session, read_binding().cpus
        rows = []
        for _ in range(_WINDOWS):
            session.barrier()
            before, own_s, start_s = cpu_seconds(), time.process_time(), time.perf_counter()
            time.sleep(_WINDOW_S)
            window_s = time.perf_counter() - start_s
            after, own_s = cpu_seconds(), time.process_time() - own_s
            busy = [(after[cpu].busy - before[cpu].busy) / window_s for cpu in cpus if cpu in after]
            rows.append([sum(busy), max(busy, default=0.0), own_s / window_s])
        waited, stolen = self._computing()
        by_rank = session.gathered([list(cpus), rows, waited, stolen])
        used, busiest = [], []
        for rank, (_, seen, _, _) in enumerate(by_rank):
            local = [each for each, host in enumerate(session.hosts) if host == session.hosts[rank]]
            of_ranks = [sum(by_rank[each][1][at][2] for each in local) for at in range(_WINDOWS)]
            left = [max(0.0, row[0] - own) for row, own in zip(seen, of_ranks, strict=True)]
            used.append(round(median(left), 3))
            busiest.append(round(median(map(min, left, (row[1] for row in seen))), 3))
        return Others(
            session.hosts,
            tuple(tuple(row[0]) for row in by_rank),
            tuple(used),
            tuple(busiest),
            tuple(row[2] for row in by_rank),
            tuple(row[3] for row in by_rank),
        )

    def networks(self) -> Networks:
        """The bandwidth of every path between the first ranks of neighboring hosts."""
        session = self._session
        hosts = session.hosts
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        if len(firsts) == 1:
            return Networks(session.transport, hosts)
        word = session.gathered(secrets.token_hex(8))[0].encode()
        own = outside_of(interfaces()) if session.rank in firsts else []
        with EchoServer([interface.address for interface in own], word) as server:
            about = session.gathered(
                {
                    "ends": [
                        [interface.name, interface.address, server.ports[interface.address]]
                        for interface in own
                        if interface.address in server.ports
                    ],
                    "used": os.environ.get(VARIABLES[0], ""),
                    "rdma": rdma_devices(),
                    "disabled": os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"),
                }
            )
            found: list[dict[str, Any]] = []
            for rank, peer in pairwise(firsts):
                if session.rank == rank:
                    found += map(asdict, _paths(rank, peer, about, word))
            paths = [NetworkPath(**raw) for of_rank in session.gathered(found) for raw in of_rank]
        return Networks(
            session.transport,
            hosts,
            tuple(paths),
            tuple(tuple(of_rank["rdma"]) for of_rank in about),
            tuple(rank for rank, of_rank in enumerate(about) if of_rank["disabled"]),
        )

    def files(self) -> Files:
        """Writes to the folder of the program, on rank 0."""
        folder = Path(self._given.output or Path.cwd())
        own = asdict(probe_folder(folder)) if self._session.rank == 0 else None
        return Files(FolderProbe(**self._session.gathered(own)[0]))


def _paths(
    rank: int, peer: int, about: Sequence[Mapping[str, Any]], word: bytes
) -> list[NetworkPath]:
    """The paths to the addresses of a peer, one for each two interfaces, with their bandwidths."""
    own = {address: name for name, address, _ in about[rank]["ends"]}
    known: dict[tuple[str, str], tuple[EchoPath, bool]] = {}
    for peer_name, address, port in about[peer]["ends"]:
        source = source_towards(address)
        if source is None or source not in own or address in own:  # as a bridge of containers
            continue
        used = (own[source], peer_name) == (about[rank]["used"], about[peer]["used"])
        known.setdefault((own[source], peer_name), (EchoPath(source, address, port), used))
    rates = echo_rates([path for path, _ in known.values()], word)
    return [
        NetworkPath(rank, peer, name, path.address, rate / 1e9, used)
        for ((name, _), (path, used)), rate in zip(known.items(), rates, strict=True)
        if rate
    ]


def _compute(seconds: float) -> float:
    """Multiplies matrices for some time; returns the time that it took."""
    matrix = torch.ones(192, 192)
    start_s = time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < seconds:
        torch.mm(matrix, matrix)
    return passed_s
