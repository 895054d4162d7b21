"""Devices on hosts and the links between them -> the setting of a plan on some of them.

`Cluster` is what a file of devices says (`cluster_file.py`), or `--hosts` in short.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from ..runtime.errors import PlanError
from .cost import LOCALHOST, Link
from .setting import Device, Setting

# Ethernet of 10 Gbit/s with TCP, of which about nine tenths are reached.
NETWORK = Link(latency_ms=0.2, bytes_per_s=1.1e9)
ANY_HOST = "*"
MOST_DEVICES = 4096

Pair = tuple[str, str]
HOSTS_CURE = "--hosts h1:4,h2:2 (four ranks on host h1, two on h2)"


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of their file, and what joins them.

    `within` are the links of devices of one host, `between` those of two hosts, by their names in
    rising order. `ANY_HOST` stands for the hosts that are not named; the link of the most
    particular names holds. With `overlap` transfers go on while the devices compute.
    """

    devices: tuple[Device, ...]
    within: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[Pair, Link] = field(default_factory=dict)
    overlap: bool = False

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.host for device in self.devices))

    @cached_property
    def kinds(self) -> tuple[tuple[object, ...], ...]:
        """What two devices have in common that may change places: their host first."""
        return tuple(
            (device.host, device.kind, device.speed, device.memory_bytes, device.pays_transfers)
            for device in self.devices
        )

    @cached_property
    def alike_hosts(self) -> Mapping[str, str]:
        """For each host the first one with the same devices and the same links to all others."""
        first: dict[str, str] = {}
        for host in self.hosts:
            earlier = dict.fromkeys(first.values())
            first[host] = next((one for one in earlier if self._are_alike(host, one)), host)
        return first

    def _are_alike(self, host: str, other: str) -> bool:
        content = [
            Counter(kind[1:] for kind in self.kinds if kind[0] == one) for one in (host, other)
        ]
        return (
            content[0] == content[1]
            and self.link_of_hosts(host, host) == self.link_of_hosts(other, other)
            and all(
                self.link_of_hosts(host, third) == self.link_of_hosts(other, third)
                for third in self.hosts
                if third not in (host, other)
            )
        )

    @cached_property
    def _links_used(self) -> list[Link]:
        """What joins two of the devices, the fastest first."""
        pairs = [(a, b) for a in range(len(self.devices)) for b in range(a)]
        distinct = dict.fromkeys(self.link(*pair) for pair in pairs)
        return sorted(distinct, key=lambda link: link.transfer_ms(1e6)) or [
            Link(overlap=self.overlap)
        ]

    @property
    def slowest_link(self) -> Link:
        """Of all that join two of the devices."""
        return self._links_used[-1]

    @property
    def fastest_link(self) -> Link:
        """The least latency and the most bandwidth of any."""
        return Link(
            latency_ms=min(link.latency_ms for link in self._links_used),
            bytes_per_s=max(link.bytes_per_s for link in self._links_used),
        )

    def link(self, first: int, second: int) -> Link:
        """What joins two devices."""
        return self.link_of_hosts(self.devices[first].host, self.devices[second].host)

    def link_of_hosts(self, first: str, second: str) -> Link:
        """What joins two hosts, or two devices of one."""
        if first == second:
            found = self.within.get(first, self.within.get(ANY_HOST, LOCALHOST))
        else:
            names = ((first, second), (first, ANY_HOST), (second, ANY_HOST), (ANY_HOST, ANY_HOST))
            pairs = [rising(*pair) for pair in names]
            found = next((self.between[pair] for pair in pairs if pair in self.between), NETWORK)
        return replace(found, overlap=self.overlap)

    def setting(self, columns: Sequence[Sequence[int]], **how: Any) -> Setting:
        """Stage j on the devices `columns[j]`, its replicas.

        A column counts as its slowest device with the least memory, and the link between two
        columns is the slowest that is used: columns of one length are pipelines side by side,
        of others every device of one talks with every device of the next. `how` are the other
        fields of Setting.
        """
        members = [[self.devices[index] for index in column] for column in columns]
        return Setting(
            devices=tuple(
                replace(
                    min(column, key=lambda device: device.speed),
                    memory_bytes=min(device.memory_bytes for device in column),
                )
                for column in members
            ),
            links=tuple(
                _slowest([self.link(a, b) for a, b in _used_pairs(left, right)])
                for left, right in zip(columns, columns[1:], strict=False)
            )
            or None,
            exchange=tuple(
                _slowest([self.link(a, b) for a, b in zip(column, column[1:], strict=False)])
                for column in columns
            ),
            replicas=tuple(len(column) for column in columns),
            overlap=self.overlap,
            **how,
        )


def cluster_of_hosts(text: str, memory_bytes: float = math.inf) -> Cluster:
    """Equal devices, so many on each host: `"h1:4,h2:2"`."""
    devices: list[Device] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s:,]+)\s*:\s*(\d{1,9})\s*", part)
        if not match or not 1 <= int(match[2]) <= MOST_DEVICES:
            raise PlanError(f"--hosts {text}: {part!r} is no host and number of ranks.", HOSTS_CURE)
        host, count = match[1], int(match[2])
        if any(device.host == host for device in devices):
            raise PlanError(f"--hosts {text}: {host} is named twice.", HOSTS_CURE)
        devices += [Device(memory_bytes=memory_bytes, host=host)] * count
    return Cluster(tuple(devices))


def _used_pairs(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    if len(left) == len(right):
        return list(zip(left, right, strict=True))
    return list(product(left, right))


def _slowest(links: Sequence[Link]) -> Link:
    """The longest latency and the least bandwidth of these: what the last of them waits for."""
    return Link(
        latency_ms=max((link.latency_ms for link in links), default=0.0),
        bytes_per_s=min((link.bytes_per_s for link in links), default=math.inf),
    )


def rising(first: str, second: str) -> Pair:
    """Two hosts as `Cluster.between` names them."""
    return (first, second) if first <= second else (second, first)
