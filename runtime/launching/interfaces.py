"""Where rank 0 is -> the network interface of this host to talk over, or why none leads there.

Left alone, gloo looks up the host's own name, which on many systems is 127.0.1.1, and then no
other host reaches it. So the interface is named: loopback when all ranks are here, else the one
that the kernel would reach rank 0 through.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import TransportError
from ..training.settings import SettingsError
from .launchers import Place

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where the backends of torch.distributed look for the interface."""

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


def check_interface(asked: str) -> None:
    """Raises SettingsError when this host has no such interface."""
    have = interfaces()
    if have and asked not in {each.name for each in have}:
        raise SettingsError(
            f"--interface {asked}: {socket.gethostname()} has {_listed(have)}.",
            "Name one that every host has, or leave it out.",
        )


def choose_interface(place: Place, asked: str | None = None) -> str | None:
    """The interface over which this rank talks to the others; None leaves it to the backends.

    `asked` is what the user names. Raises SettingsError when there is no such interface, or when
    several would do and nothing tells which.
    """
    if asked is not None:
        check_interface(asked)
        return asked
    have = interfaces()
    if place.all_local:
        return next((each.name for each in have if each.is_loopback), None)
    for address in resolve_host(place.head) if place.head else ():
        towards = source_towards(address)
        for each in have:
            if each.address == towards and not each.is_loopback:
                return each.name
    outside = [each for each in have if not each.is_loopback and not _is_link_local(each.address)]
    if len({each.name for each in outside}) > 1:
        raise SettingsError(
            f"nothing tells over which network {socket.gethostname()} reaches the other hosts: it "
            f"has {_listed(outside)}, and rank 0 is at {place.head or 'an unknown address'}.",
            f"--interface {outside[0].name}, or --master-addr with an address that all reach.",
        )
    return outside[0].name if outside else None


def name_interface(name: str | None, *, asked: bool) -> None:
    """Tells the backends; what the user's environment says stands unless the user `asked`."""
    for variable in VARIABLES:
        if name is not None and (asked or variable not in os.environ):
            os.environ[variable] = name


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this host that are up, IPv4 before IPv6; empty where Linux is not."""
    found = []
    up = [name for _, name in socket.if_nameindex() if not _is_down(name)]
    for name in up:
        address = _ipv4_of(name)
        if address is not None:
            found.append(Interface(name, address))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.is_file() else ():
        digits, _, _, _, _, name = line.split()
        if name not in up:
            continue
        found.append(Interface(name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return tuple(found)


def address_of(name: str | None) -> str | None:
    """The first address of an interface."""
    return next((each.address for each in interfaces() if each.name == name), None)


def resolve_host(name: str) -> tuple[str, ...]:
    """The addresses of a host, as this one sees them; empty when it is not known."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def source_towards(address: str) -> str | None:
    """The own address that the kernel would send from; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def unreachable(place: Place, seconds: float) -> TransportError:
    """Why this rank does not reach rank 0, after one more try of every address of it."""
    here, addresses = socket.gethostname(), resolve_host(place.head)
    tried = [f"{address}: {_attempt(address, place.port)}" for address in addresses]
    about = "; ".join(tried) if tried else f"{here} does not know the name {place.head}"
    own = [each for each in addresses if ipaddress.ip_address(each.split("%")[0]).is_loopback]
    if own and place.head not in own:
        about += f"; on {here} {place.head} is {own[0]}, its own loopback"
    outside = _listed([each for each in interfaces() if not each.is_loopback])
    return TransportError(
        f"rank {place.rank} on {here} cannot reach rank 0 at {place.head}:{place.port} in "
        f"{seconds:g} s ({about}).",
        f"--master-addr with an address of rank 0's host that {here} reaches, or --interface with "
        f"the network between them; {here} has {outside}.",
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
    """As a bridge of containers is while there are none; its address reaches nobody."""
    state = Path("/sys/class/net") / name / "operstate"
    return state.is_file() and state.read_text().strip() == "down"


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


def _listed(have: Sequence[Interface]) -> str:
    first = {each.name: each for each in reversed(have)}
    return ", ".join(map(str, reversed(first.values()))) or "no interface that is up"
