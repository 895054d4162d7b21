"""A store that all ranks have joined, at rank 0's address or in a file.

Every rank enters itself in the store and waits until all have, so an error can name the missing
ranks. Where no launcher says which ranks share a host, their entries do.

Loopback: the ranks of a single machine use a store that no other machine can reach. torch's store
listens on all interfaces, whatever host it is given, and anyone who connects can send the ranks
any data; given a socket that is already bound, it stays on that socket.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ..config.settings import SettingsError
from ..errors import TransportError
from .interfaces import VARIABLES, interfaces, outside_of, unreachable
from .ranks import RankInfo

_HEAD = "head"
_POLL_S = 0.02
_TRY_AGAIN_S = 0.1
_BEAT_S = 0.5
"""Seconds between two signs of rank 0 that it waits."""
_SILENT_S = 3.0
"""Seconds without a sign after which rank 0 is gone."""


def open_store(info: RankInfo, seconds: float) -> Store:
    """The store in the file where the ranks meet, or else at rank 0's address, which torch's agent
    or rank 0 itself serves. In it the ranks of this run have a part of their own: a port that was
    free a moment ago may be the one to which another run's ranks are sent.

    Raises torch's own errors when it cannot be opened or reached, and TransportError for a file
    that no ranks have met in.
    """
    if info.file:
        return _file_store(info, seconds)
    if info.rank != 0:
        _await_head(info, seconds)
    store = TCPStore(
        info.head,
        info.port,
        info.ranks,
        info.rank == 0 and not info.shares_store,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=not info.shares_store,
    )
    return PrefixStore(info.run, store) if info.run else store


def _await_head(info: RankInfo, seconds: float) -> None:
    """Waits until rank 0's address answers: torch's store would print traces of its attempts.

    Raises TransportError if there is no answer in time.
    """
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            with socket.create_connection((info.head, info.port), end_s - time.monotonic()):
                return
        except OSError:
            time.sleep(_TRY_AGAIN_S)
    raise unreachable(info, seconds)


_MARK = b"\x09\0\0\0refcount/"
"""The first bytes of torch's FileStore."""


def _file_store(info: RankInfo, seconds: float) -> Store:
    """A store in a file. One of an earlier run may be in the file: no rank of this one enters the
    lists there."""
    path = Path(info.file)
    begin = b""
    try:
        if path.exists():
            with path.open("rb") as file:
                begin = file.read(len(_MARK))
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} is not a folder that this rank may write to")
    except OSError as error:
        raise _unusable(info, error.strerror or str(error)) from error
    if not _MARK.startswith(begin):
        raise _unusable(info, "it has other contents than a rendezvous")
    store = FileStore(str(path), info.ranks)
    store.set_timeout(datetime.timedelta(seconds=seconds))
    return store


def _unusable(info: RankInfo, why: str) -> TransportError:
    return TransportError(
        f"rank {info.rank} on {socket.gethostname()} cannot use {info.meeting_place} for the "
        f"rendezvous: {why}.",
        "Give --rendezvous a new file in a folder that all hosts share.",
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry of a rank in rank 0's list.

    token: a random name of the process.
    host: the name of its host.
    system: its host and network, the same for processes that share a loopback interface.
    ranks: the number of ranks that it expects.
    addresses: the addresses of its host.
    """

    token: str
    host: str
    system: str
    ranks: int
    addresses: tuple[str, ...]


def _own_entry(info: RankInfo) -> _Entry:
    host = socket.gethostname()
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    system = [
        host,
        boot.read_text().strip() if boot.is_file() else "",
        str(network.stat().st_ino) if network.exists() else "",
    ]
    addresses = tuple(interface.address for interface in outside_of(interfaces()))
    return _Entry(secrets.token_hex(8), host, " ".join(system), info.ranks, addresses)


def wait_for_all(store: Store, info: RankInfo, seconds: float) -> Store:
    """Waits until every rank has called it; returns the part of the store for these ranks alone.

    torch's agent has one store for all attempts, and the agents of several hosts count attempts
    independently; a file may have the store of an earlier run. So rank 0 opens a list under a
    random name, every rank enters a random name of its own there, and a rank proceeds once rank 0
    has closed a list that contains it.

    Raises TransportError that names the ranks missing after the timeout.
    """
    own, entered = _own_entry(info), ""
    if info.rank == 0:
        store.set(_HEAD, own.token)
    now_s = beat_s = time.monotonic()
    end_s, heard_s, beat = now_s + seconds, now_s, ""
    while now_s < end_s:
        head = _read(store, _HEAD)
        if head != entered:
            store.set(f"{head}/{info.rank}", json.dumps(asdict(own)))
            entered = head
        if info.rank == 0 and len(present := _present(store, head, info.ranks)) == info.ranks:
            entries = [asdict(entry) for _, entry in sorted(present.items())]
            store.set(f"{head}/closed", json.dumps(entries))
        if own in _closed(store, f"{head}/closed"):
            return PrefixStore(head, store)
        if now_s >= beat_s:
            beat_s = now_s + _BEAT_S
            if info.rank == 0:
                store.set(f"{head}/beat", secrets.token_hex(4))
            elif (new := _read(store, f"{head}/beat")) != beat:
                heard_s, beat = now_s, new
        time.sleep(_POLL_S)
        now_s = time.monotonic()
    is_left = info.rank != 0 and now_s - heard_s > _SILENT_S  # rank 0's list is of an earlier run
    closed = dict(enumerate(_closed(store, f"{entered}/closed")))
    present = closed or _present(store, entered, info.ranks)
    raise _missing(info, own, {} if is_left else present, seconds)


def found_hosts(store: Store, info: RankInfo) -> tuple[RankInfo, tuple[str, ...]]:
    """From the store that `wait_for_all` returns: this rank with its place on its host, and the
    addresses of a rank on another host, of rank 0 where that is one.

    Raises SettingsError when the ranks expect different numbers of ranks.
    """
    entries = _closed(store, "closed")
    for rank, entry in enumerate(entries):
        if entry.ranks != entries[0].ranks:
            raise SettingsError(
                f"rank {rank} on {entry.host} was started as one of {entry.ranks} ranks, rank 0 on "
                f"{entries[0].host} as one of {entries[0].ranks}.",
                "Give all ranks the same number of ranks (--world-size or WORLD_SIZE).",
            )
    local = [
        rank for rank, entry in enumerate(entries) if entry.system == entries[info.rank].system
    ]
    if not info.local_ranks:
        info = replace(info, local_rank=local.index(info.rank), local_ranks=len(local))
    others = (entry.addresses for rank, entry in enumerate(entries) if rank not in local)
    return info, next(others, ())


def _present(store: Store, head: str, ranks: int) -> dict[int, _Entry]:
    """The entries of the ranks in a list."""
    texts = {rank: _read(store, f"{head}/{rank}") for rank in range(ranks)}
    return {rank: _entry(json.loads(text)) for rank, text in texts.items() if text}


def _closed(store: Store, key: str) -> list[_Entry]:
    """The entries of all ranks, once rank 0 has closed the list."""
    return [_entry(raw) for raw in json.loads(_read(store, key) or "[]")]


def _entry(raw: dict[str, Any]) -> _Entry:
    return _Entry(**{**raw, "addresses": tuple(raw["addresses"])})


def _read(store: Store, key: str) -> str:
    """The text under a key; "" if it has not been set yet."""
    if not store.check([key]):
        return ""
    content: bytes = store.get(key)
    return content.decode()


def joining_error(info: RankInfo, seconds: float, text: str) -> TransportError:
    """The error for an exception of torch.distributed during the rendezvous."""
    at = info.meeting_place
    if "EADDRINUSE" in text:
        return TransportError(
            f"rank 0 cannot open {at}: another program has this port.",
            f"Give --master-port {info.port + 1}, the same on all hosts.",
        )
    if "full mesh" in text.lower() or "gloo" in text.lower():
        interface = os.environ.get(VARIABLES[0], "the interface that gloo chose")
        return TransportError(
            f"rank {info.rank} found the others at {at}, and cannot connect to them over "
            f"{interface}: {text.splitlines()[0]}",
            "Give --interface NAME, of a network that all hosts share.",
        )
    return _unusable(info, text.splitlines()[0]) if info.file else unreachable(info, seconds)


def _missing(
    info: RankInfo, own: _Entry, present: Mapping[int, _Entry], seconds: float
) -> TransportError:
    # Without rank 0 there is no list of the others.
    missing = [rank for rank in range(info.ranks) if rank not in present] if present else [0]
    at = f" at {info.meeting_place}" if info.meeting_place else ""
    if not missing:
        other = present[info.rank]
        twice = f"; a process on {other.host} joined as rank {info.rank} too"
        return TransportError(
            f"rank {info.rank} timed out{at} after {seconds:g} s: the other ranks have begun "
            f"without it{'' if other.token == own.token else twice}.",
            "Start each rank once, with the same number of ranks.",
        )
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, entry in present.items():
        by_host[entry.host].append(rank)
    hosts = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in by_host.items())
    same_file = " and that all hosts see this file" if info.file else ""
    return TransportError(
        f"rank {info.rank} timed out{at} after {seconds:g} s waiting for {_ranks(missing)}"
        f"{'; present: ' if hosts else ''}{hosts}.",
        f"Check the output of {_ranks(missing)}{same_file}, or allow more time with --timeout-s.",
    )


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3`, `ranks 0, 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first}-{last}"
    return f"ranks {', '.join(map(str, ranks))}"


_ADDRESS = "127.0.0.1"
_UNASSIGNED = range(10_000, 20_000)


class Loopback(RendezvousHandler):
    """The rendezvous of a single agent, under a random name: each round has a new store on a new
    port."""

    use_agent_store = True

    def __init__(self) -> None:
        self._run_id = secrets.token_hex(8)
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        return "asyncpipe-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._server = listen()
        return RendezvousInfo(
            PrefixStore("agent", self._server),
            0,
            1,
            RendezvousStoreInfo(_ADDRESS, self._server.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing, because this agent is the only one."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._server = None
        return True


def listen() -> TCPStore:
    """A store that listens only on loopback, on a free port."""
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def free_port(address: str = _ADDRESS) -> int:
    """A free port below those that operating systems assign, which another program could have by
    the time that rank 0 opens this one.

    Raises TransportError when it finds none.
    """
    for _ in range(1000):
        port = secrets.choice(_UNASSIGNED)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port
    raise TransportError(
        f"none of 1000 ports between {_UNASSIGNED[0]} and {_UNASSIGNED[-1]} is free.",
        "Give one with --master-port.",
    )
