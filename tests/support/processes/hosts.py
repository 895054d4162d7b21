"""Several hosts on one machine, for tests and benchmarks: network namespaces joined by a link.

A host is a process that sleeps in namespaces of its own (network, host name, mounts), and what
runs "on" it enters them. All hosts hang on one bridge; each has an `eth0` whose bandwidth may be
limited, its own name, and a file of host names. Nothing outlives the processes, and nothing of
the machine's own network is touched. Root is needed, or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("ip", "tc", "unshare", "nsenter", "mount")
_SLEEP = "import signal, sys; sys.stdout.write('x'); sys.stdout.flush(); signal.pause()"


class HostsError(RuntimeError):
    """This machine cannot play several hosts; says what is missing."""


@dataclass(frozen=True)
class Host:
    """A host that runs: its name, its address, and how to enter it."""

    name: str
    address: str
    enter: tuple[str, ...]

    def command(self, *command: str) -> list[str]:
        """The command that runs another one there."""
        return [*self.enter, *command]

    def run(self, *command: str) -> str:
        """Runs it to its end; its output. Raises HostsError when it fails."""
        return _run(self.command(*command))


@contextmanager
def hosts(
    names: Sequence[str], *, mbit_s: float | None = None, names_file: str = ""
) -> Iterator[list[Host]]:
    """Hosts with addresses 10.77.0.1, .2, .. on one network, each sending at most `mbit_s`.

    Every host knows all names, in its /etc/hosts; `names_file` is its content instead, where
    that is to be wrong. Raises HostsError where the machine cannot do this.
    """
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise HostsError(f"{', '.join(missing)} not found")
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
        for name, address in zip(names, addresses, strict=True):
            pid = stack.enter_context(
                _sleeping(*as_root, "unshare", "--net", "--uts", "--mount", "--propagation=private")
            )
            host = Host(
                name,
                address,
                (*as_root, "nsenter", f"--target={pid}", "--net", "--uts", "--mount"),
            )
            _connect(host, pid, on_switch, file, mbit_s)
            made.append(host)
        yield made


def cut_link(host: Host) -> None:
    """Pulls the cable: packets from and to the host are lost from now on."""
    host.run("ip", "link", "set", "eth0", "down")


def restore_link(host: Host) -> None:
    """Puts the cable back in."""
    host.run("ip", "link", "set", "eth0", "up")


def _connect(
    host: Host, pid: int, on_switch: tuple[str, ...], file: Path, mbit_s: float | None
) -> None:
    set_name = "import socket, sys; socket.sethostname(sys.argv[1])"
    host.run(sys.executable, "-c", set_name, host.name)
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
    """The process of a sleeper in the namespaces that the command makes."""
    process = subprocess.Popen(
        [*command, sys.executable, "-c", _SLEEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.read(1) != "x":
            raise HostsError(f"{' '.join(command)}: {process.stderr.read().strip()}")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise HostsError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
