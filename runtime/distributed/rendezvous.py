"""Rank 0's address -> the network interface to use, and a store that all ranks have joined.

Network interface: gloo's default looks up the host's own name, which on many systems resolves to
127.0.1.1, where no other host can connect. So the interface is set explicitly: loopback if all
ranks are on this host, else the interface over which the kernel would reach rank 0.

Rendezvous: every rank enters itself in the store and waits until all have, so an error can name the
missing ranks.

Loopback: the ranks of a single machine use a store that no other machine can reach. torch's store
listens on all interfaces, whatever host it is given, and anyone who connects can send the ranks
any data; given a socket that is already bound, it stays on that socket.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ..config.settings import SettingsError
from ..errors import TransportError
from .ranks import RankInfo

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables in which the backends of torch.distributed look up the interface."""

_TRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, with one of its addresses."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def check_interface(name: str) -> None:
    """Raises SettingsError when this host has no such interface."""
    have = interfaces()
    if have and name not in {interface.name for interface in have}:
        raise SettingsError(
            f"--interface {name}: {socket.gethostname()} has {_listed(have)}.",
            "Choose one that every host has, or omit the option.",
        )


def choose_interface(info: RankInfo, requested: str | None = None) -> str | None:
    """The interface over which this rank connects to the others; None leaves it to the backends.

    `requested` is the user's choice. Raises SettingsError when it does not exist, or when several
    interfaces are possible.
    """
    if requested is not None:
        check_interface(requested)
        return requested
    have = interfaces()
    if info.all_local:
        return next((interface.name for interface in have if interface.is_loopback), None)
    for address in resolve_host(info.head) if info.head else ():
        towards = source_towards(address)
        for interface in have:
            if interface.address == towards and not interface.is_loopback:
                return interface.name
    outside = [
        interface
        for interface in have
        if not interface.is_loopback and not _is_link_local(interface.address)
    ]
    if len({interface.name for interface in outside}) > 1:
        raise SettingsError(
            f"cannot determine the network over which {socket.gethostname()} reaches the other "
            f"hosts: it has {_listed(outside)}, and rank 0 is at "
            f"{info.head or 'an unknown address'}.",
            f"Give --interface {outside[0].name}, or --master-addr with an address that all reach.",
        )
    return outside[0].name if outside else None


def name_interface(name: str | None, *, requested: bool) -> None:
    """Sets the backends' environment variables; those of the user stay unless the
    user `requested` this interface."""
    for variable in VARIABLES:
        if name is not None and (requested or variable not in os.environ):
            os.environ[variable] = name


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this host that are up, IPv4 before IPv6; empty unless on Linux."""
    own = []
    up = [name for _, name in socket.if_nameindex() if not _is_down(name)]
    for name in up:
        address = _ipv4_of(name)
        if address is not None:
            own.append(Interface(name, address))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.is_file() else ():
        digits, _, _, _, _, name = line.split()
        if name not in up:
            continue
        own.append(Interface(name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return tuple(own)


def address_of(name: str | None) -> str | None:
    """The first address of an interface."""
    return next((interface.address for interface in interfaces() if interface.name == name), None)


def resolve_host(name: str) -> tuple[str, ...]:
    """The addresses of a host as resolved here; empty if its name is unknown."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in entries))


def source_towards(address: str) -> str | None:
    """The local address from which the kernel would send to `address`; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def unreachable(info: RankInfo, seconds: float) -> TransportError:
    """The error of a rank that cannot reach rank 0, after one more attempt at each of its
    addresses."""
    own_host, addresses = socket.gethostname(), resolve_host(info.head)
    tried = [f"{address}: {_attempt(address, info.port)}" for address in addresses]
    about = "; ".join(tried) if tried else f"{own_host} cannot resolve the name {info.head}"
    own = [
        address for address in addresses if ipaddress.ip_address(address.split("%")[0]).is_loopback
    ]
    if own and info.head not in own:
        about += f"; on {own_host} {info.head} is {own[0]}, its own loopback"
    outside = _listed([interface for interface in interfaces() if not interface.is_loopback])
    return TransportError(
        f"rank {info.rank} on {own_host} cannot reach rank 0 at {info.head}:{info.port} in "
        f"{seconds:g} s ({about}).",
        f"--master-addr with an address of rank 0's host that {own_host} reaches, or --interface "
        f"with the network between them; {own_host} has {outside}.",
    )


def _attempt(address: str, port: int) -> str:
    try:
        with socket.create_connection((address, port), timeout=_TRY_S):
            return "answers now"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _ipv4_of(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, name.encode()[:15].ljust(40, b"\0"))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _is_down(name: str) -> bool:
    """True for a down interface, such as a container bridge without containers; its address is
    unreachable."""
    state = Path("/sys/class/net") / name / "operstate"
    return state.is_file() and state.read_text().strip() == "down"


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


def _listed(have: Sequence[Interface]) -> str:
    first = {interface.name: interface for interface in reversed(have)}
    return ", ".join(map(str, reversed(first.values()))) or "no interface that is up"


_HEAD = "head"
_POLL_S = 0.02


def open_store(info: RankInfo, seconds: float) -> Store:
    """The store at rank 0's address, which torch's agent or rank 0 itself serves.

    Raises torch's own errors when it cannot be opened or reached.
    """
    return TCPStore(
        info.head,
        info.port,
        info.ranks,
        info.rank == 0 and not info.shares_store,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=not info.shares_store,
    )


def wait_for_all(store: Store, info: RankInfo, seconds: float) -> Store:
    """Waits until every rank has called it; returns the part of the store for these ranks alone.

    torch's agent has one store for all attempts, and the agents of several hosts count attempts
    independently. So rank 0 opens a list under a random name, every rank enters a random name of
    its own there, and a rank proceeds once rank 0 has closed a list that contains it.

    Raises TransportError that names the ranks missing after the timeout.
    """
    own, entered = secrets.token_hex(8), ""
    if info.rank == 0:
        store.set(_HEAD, own)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        head = _read(store, _HEAD)
        if head != entered:
            store.set(f"{head}/{info.rank}", f"{own} {socket.gethostname()}")
            entered = head
        if info.rank == 0 and len(present := _present(store, head, info.ranks)) == info.ranks:
            store.set(f"{head}/closed", " ".join(present.values()))
        if own in _read(store, f"{head}/closed").split():
            return PrefixStore(head, store)
        time.sleep(_POLL_S)
    raise _missing(info, _present(store, entered, info.ranks), seconds)


def _present(store: Store, head: str, ranks: int) -> dict[int, str]:
    """The entries of the ranks in a list: each one's random name and its host."""
    entries = {rank: _read(store, f"{head}/{rank}") for rank in range(ranks)}
    return {rank: entry for rank, entry in entries.items() if entry}


def _read(store: Store, key: str) -> str:
    """The text under a key; "" if it has not been set yet."""
    if not store.check([key]):
        return ""
    content: bytes = store.get(key)
    return content.decode()


def joining_error(info: RankInfo, seconds: float, text: str) -> TransportError:
    """The error for an exception of torch.distributed during the rendezvous."""
    at = f"{info.head}:{info.port}"
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
    return unreachable(info, seconds)


def _missing(info: RankInfo, present: Mapping[int, str], seconds: float) -> TransportError:
    # Without rank 0 there is no list of the others.
    missing = [rank for rank in range(info.ranks) if rank not in present] if present else [0]
    at = f" at {info.head}:{info.port}" if info.head and info.port else ""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, entry in present.items():
        by_host[entry.split()[1]].append(rank)
    hosts = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in by_host.items())
    return TransportError(
        f"rank {info.rank} timed out{at} after {seconds:g} s waiting for {_ranks(missing)}"
        f"{'; present: ' if hosts else ''}{hosts}.",
        f"Check the output of {_ranks(missing)}, or allow more time with --timeout-s.",
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


class Loopback(RendezvousHandler):
    """The rendezvous of a single agent: each round has a new store on a new port."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
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
        """Does nothing: there are no other agents."""

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
