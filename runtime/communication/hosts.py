"""Several hosts emulated on one machine: network namespaces joined by a bridge.

A host is a process that sleeps in namespaces of its own (network, host name, mounts); commands
that run on the host enter them. Each host has an `eth0` on the bridge whose bandwidth may be
limited, its own name, and a file of host names. The namespaces end with the process that made them,
and the machine's own network stays as it is. This requires root, or a kernel that lets users make
namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import AsyncPipeError
from ..import_path import ISOLATED
from ..process import die_with_parent

NEEDED = ("ip", "tc", "unshare", "nsenter", "mount")
_SLEEP = ("sh", "-c", "echo; exec sleep infinity")


class HostsError(AsyncPipeError):
    """This machine cannot emulate several hosts."""


@dataclass(frozen=True)
class Host:
    """An emulated host.

    name, address: its host name and its address on the bridge.
    process: the id of the process that keeps its namespaces.
    enter: the command, with its arguments, that enters its namespaces.
    """

    name: str
    address: str
    process: int
    enter: tuple[str, ...]

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return [*self.enter, *command]

    def run(self, *command: str) -> str:
        """Runs a command on this host to its end; returns its output. Raises HostsError when it
        fails."""
        return _run(self.command(*command))


@contextmanager
def hosts(
    names: Sequence[str],
    *,
    mbit_s: float | Sequence[float | None] | None = None,
    names_file: str = "",
) -> Iterator[list[Host]]:
    """Makes hosts with addresses 10.77.0.1, .2, .. on one network.

    mbit_s: the rate in Mbit/s at which each host sends at most; a sequence has one for each host.
    names_file: the content of /etc/hosts on all hosts, instead of the right names of all.

    Raises HostsError where the machine cannot do this.
    """
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise _impossible(f"{', '.join(missing)} not found")
    rates = mbit_s if isinstance(mbit_s, Sequence) else [mbit_s] * len(names)
    addresses = [f"10.77.0.{number}" for number in range(1, len(names) + 1)]
    known = names_file or "".join(
        f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)
    )
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        file.write_text(f"127.0.0.1 localhost\n{known}")
        as_root: tuple[str, ...] = ()
        if os.geteuid():
            user = stack.enter_context(_sleeping("unshare", "--user", "--map-root-user"))
            as_root = ("nsenter", f"--target={user}", "--user", "--preserve-credentials")
        switch = stack.enter_context(_sleeping(*as_root, "unshare", "--net"))
        on_switch = (*as_root, "nsenter", f"--target={switch}", "--net")
        _run([*on_switch, "ip", "link", "add", "switch", "type", "bridge"])
        _run([*on_switch, "ip", "link", "set", "switch", "up"])
        made = []
        for name, address, rate in zip(names, addresses, rates, strict=True):
            pid = stack.enter_context(
                _sleeping(*as_root, "unshare", "--net", "--uts", "--mount", "--propagation=private")
            )
            host = Host(
                name,
                address,
                pid,
                (*as_root, "nsenter", f"--target={pid}", "--net", "--uts", "--mount"),
            )
            _connect(host, pid, on_switch, file, rate)
            made.append(host)
        yield made


@contextmanager
def in_network(process: int) -> Iterator[None]:
    """Lets this thread open its sockets on the emulated host that a process keeps; open sockets
    stay where they are. Raises HostsError if the system forbids it."""
    with ExitStack() as stack:
        own = stack.enter_context(open("/proc/thread-self/ns/net"))
        try:
            other = stack.enter_context(open(f"/proc/{process}/ns/net"))
            _set_network(other.fileno())
        except OSError as error:
            raise _impossible((error.strerror or str(error)).lower()) from error
        try:
            yield
        finally:
            _set_network(own.fileno())


def _set_network(file: int) -> None:
    new_network = 0x40000000  # CLONE_NEWNET
    if ctypes.CDLL(None, use_errno=True).setns(file, new_network):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def cut_link(host: Host) -> None:
    """Cuts the link of a host: all packets from and to it are lost from now on."""
    host.run("ip", "link", "set", "eth0", "down")


def restore_link(host: Host) -> None:
    """Restores the link of a host."""
    host.run("ip", "link", "set", "eth0", "up")


def _connect(
    host: Host, pid: int, on_switch: tuple[str, ...], file: Path, mbit_s: float | None
) -> None:
    set_name = "import socket, sys; socket.sethostname(sys.argv[1])"
    host.run(sys.executable, *ISOLATED, "-c", set_name, host.name)
    host.run("mount", "--bind", str(file), "/etc/hosts")
    port = f"to-{host.name}"
    _run(
        [*on_switch, "ip", "link", "add", port, "type", "veth"]
        + ["peer", "name", "eth0", "netns", str(pid)]
    )
    _run([*on_switch, "ip", "link", "set", port, "master", "switch", "up"])
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "set", "eth0", "up")
    if mbit_s is not None:
        host.run(
            *("tc", "qdisc", "add", "dev", "eth0", "root", "tbf"),
            *("rate", f"{mbit_s:g}mbit", "burst", "64kb", "latency", "200ms"),
        )


@contextmanager
def _sleeping(*command: str) -> Iterator[int]:
    """The id of a process that sleeps in the namespaces that the command makes."""
    process = subprocess.Popen(
        [*command, *_SLEEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.read(1) != "\n":
            raise _impossible(f"{' '.join(command)}: {process.stderr.read().strip()}")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise _impossible(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def _impossible(reason: str) -> HostsError:
    return HostsError(
        f"this machine cannot emulate several hosts: {reason}.",
        "Run as root on Linux with iproute2 and util-linux, in a container with --privileged.",
    )
