"""Rank 0's address -> the network interface to use.

gloo's default looks up the host's own name, which on many systems resolves to 127.0.1.1, where no
other host can connect. So the interface is set explicitly: loopback if all ranks are on this host,
else the interface over which the kernel would reach rank 0.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def choose_interface(
    info: RankInfo, requested: str | None = None, peer: Sequence[str] = ()
) -> str | None:
    """The interface over which this rank connects to the others; None leaves it to the backends.

    requested: the user's choice.
    peer: the addresses of a rank on another host, if no address of rank 0 was given.

    Raises SettingsError if this host lacks the interface, or if several are possible.
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
    outside = outside_of(have)
    sources = set(map(source_towards, set(peer) - {interface.address for interface in have}))
    towards_peer = [interface for interface in outside if interface.address in sources]
    if len({interface.name for interface in towards_peer or outside}) > 1:
        raise SettingsError(
            f"cannot determine the network over which {socket.gethostname()} reaches the other "
            f"hosts: it has {_listed(outside)}, and rank 0 is at "
            f"{info.head or ', '.join(peer) or 'an unknown address'}.",
            f"Give --interface {outside[0].name}, or --master-addr with an address that all reach.",
        )
    return next((interface.name for interface in towards_peer or outside), None)


def outside_of(have: Sequence[Interface]) -> list[Interface]:
    """The interfaces at which other hosts may reach this one."""
    return [
        interface
        for interface in have
        if not interface.is_loopback and not _is_link_local(interface.address)
    ]


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
