"""Devices on hosts and the links between them -> the configuration of the ranks that run a plan.

A `Cluster` comes from `--hosts`, or from a file (`cluster_file.py`). The most specific entry for a
link applies.

`make_setting` configures ranks for the options of a run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, Unpack, cast

from ...runtime.errors import PlanError
from ...runtime.limits import bytes_of
from ...runtime.schedule.asynchronous import ASYNCHRONOUS, KEEPS
from ...runtime.schedule.builders import AUTO, make_schedule, natural_ranks
from ..graph.costs import LOCALHOST, Link, slowest_link
from ..graph.rank_model import Device, RankConfig, Recompute
from .keywords import PlanConfig
from .options import PartitionOptions

# Ethernet of 10 Gbit/s with TCP, of which about nine tenths are reached.
NETWORK = Link(latency_ms=0.2, bytes_per_s=1.1e9)
ANY_HOST = "*"
MOST_DEVICES = 4096
_MOST_PASSES = 2**20

Pair = tuple[str, str]
HOSTS_CURE = "--hosts h1:4,h2:2 (four ranks on host h1, two on h2)"


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of their file, and their links.

    devices: the devices, of all hosts
    within: the links between devices of one host
    between: the links between two hosts, by their names in rising order; `ANY_HOST` stands for
        hosts without an entry, and the most specific entry applies
    overlap: transfers overlap with the computation of the devices
    pairs: the links between two devices, by their numbers in rising order; they apply before all
        others
    members, inside: where each device stands for several, which are tensor ranks (`in_groups`):
        their places on the host, and the slowest link among them
    left_over: the hosts of the devices that are then in no group
    """

    devices: tuple[Device, ...]
    within: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[Pair, Link] = field(default_factory=dict)
    overlap: bool = False
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    members: tuple[tuple[int, ...], ...] = ()
    inside: Link = Link()
    left_over: tuple[str, ...] = ()

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, each once."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    @cached_property
    def kinds(self) -> tuple[tuple[object, ...], ...]:
        """The properties that two interchangeable devices share: their host first, and last their
        links to the other devices, if these have links of their own.
        """
        own = [
            (device.host, device.kind, device.speed, device.memory_bytes, device.pays_transfers)
            for device in self.devices
        ]
        partners: dict[int, set[int]] = {}
        for first, second in self.pairs:
            partners.setdefault(first, set()).add(second)
            partners.setdefault(second, set()).add(first)
        like: dict[int, int] = {}  # the first device with the same links
        for device in sorted(partners):
            like[device] = next(
                (
                    other
                    for other in dict.fromkeys(like.values())
                    if own[other] == own[device]
                    and all(
                        self.link(device, third) == self.link(other, third)
                        for third in (partners[device] | partners[other]) - {device, other}
                    )
                ),
                device,
            )
        return tuple((*of, like.get(index)) for index, of in enumerate(own))

    @cached_property
    def alike_hosts(self) -> Mapping[str, str]:
        """For each host the first one with the same devices and the same links to all other
        hosts.
        """
        first: dict[str, str] = {}
        for host in self.hosts:
            earlier = dict.fromkeys(first.values())
            alike = (other for other in earlier if self._are_alike(host, other))
            first[host] = next(alike, host)
        return first

    def _are_alike(self, host: str, other: str) -> bool:
        content = [
            Counter(kind[1:] for kind in self.kinds if kind[0] == name) for name in (host, other)
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
        """The links between any two of the devices, the fastest first."""
        pairs = [(a, b) for a in range(len(self.devices)) for b in range(a)]
        distinct = dict.fromkeys(self.link(*pair) for pair in pairs)
        return sorted(distinct, key=lambda link: link.megabyte_ms) or [Link(overlap=self.overlap)]

    @property
    def slowest_link(self) -> Link:
        """The slowest link between any two of the devices."""
        return self._links_used[-1]

    @property
    def fastest_link(self) -> Link:
        """The smallest latency, the largest bandwidth and the largest duplex of any link."""
        return Link(
            latency_ms=min(link.latency_ms for link in self._links_used),
            bytes_per_s=max(link.bytes_per_s for link in self._links_used),
            duplex=max(link.duplex for link in self._links_used),
        )

    def link(self, first: int, second: int) -> Link:
        """The link between two devices."""
        own = self.pairs.get((min(first, second), max(first, second)))
        if own is not None:
            return replace(own, overlap=self.overlap)
        return self.link_of_hosts(self.devices[first].host, self.devices[second].host)

    def link_of_hosts(self, first: str, second: str) -> Link:
        """The link between two hosts, or between two devices of one host."""
        if first == second:
            link = self.within.get(first, self.within.get(ANY_HOST, LOCALHOST))
        else:
            names = ((first, second), (first, ANY_HOST), (second, ANY_HOST), (ANY_HOST, ANY_HOST))
            pairs = [rising(*pair) for pair in names]
            link = next((self.between[pair] for pair in pairs if pair in self.between), NETWORK)
        return replace(link, overlap=self.overlap)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The devices in groups of `size` equal ones of a host, in the listed order: the tensor
        ranks of a stage. Those that are left over are in no group.
        """
        alike: dict[object, list[int]] = {}
        for index, kind in enumerate(self.kinds):
            alike.setdefault(kind[:-1], []).append(index)
        groups = (
            tuple(members[first : first + size])
            for members in alike.values()
            for first in range(0, len(members) - size + 1, size)
        )
        return tuple(sorted(groups))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The sizes of groups that leave no device of the largest host over.

        >>> Cluster((Device(),) * 6).group_sizes
        (1, 2, 3, 6)
        """
        most = max(Counter(kind[:-1] for kind in self.kinds).values())
        return tuple(size for size in range(1, most + 1) if most % size == 0)

    def in_groups(self, size: int) -> Cluster:
        """The `groups` as devices, each with the times and the memory of one member. Between two
        groups, each member has the link to its counterpart.
        """
        if size == 1:
            return self
        groups = self.groups(size)
        grouped = {index for group in groups for index in group}
        pairs = combinations(range(len(groups)), 2) if self.pairs else ()
        return replace(
            self,
            devices=tuple(self.devices[group[0]] for group in groups),
            pairs={
                (first, second): _slowest(
                    [self.link(a, b) for a, b in zip(groups[first], groups[second], strict=True)]
                )
                for first, second in pairs
            },
            members=tuple(tuple(map(self._place, group)) for group in groups),
            inside=slowest_link(
                self.link(*pair) for group in groups for pair in combinations(group, 2)
            ),
            left_over=tuple(
                device.host for index, device in enumerate(self.devices) if index not in grouped
            ),
        )

    def places(self, index: int) -> tuple[int, ...]:
        """The devices of its host that a device stands for, counted in the listed order."""
        return self.members[index] if self.members else (self._place(index),)

    def _place(self, index: int) -> int:
        host = self.devices[index].host
        return sum(device.host == host for device in self.devices[:index])

    def first(self, number: int) -> Cluster:
        """The first devices of the file."""
        pairs = {pair: link for pair, link in self.pairs.items() if max(pair) < number}
        return replace(self, devices=self.devices[:number], pairs=pairs)

    def setting(self, columns: Sequence[Sequence[int]], **how: Any) -> RankConfig:
        """The configuration with stage j and its replicas on the devices `columns[j]`.

        A column counts as its slowest device with the smallest memory, and the link between two
        columns is the slowest link in use: columns of equal length are parallel pipelines; with
        unequal lengths every device of one column exchanges messages with every device of the next.
        `how` are the other fields of RankConfig.
        """
        members = [[self.devices[index] for index in column] for column in columns]
        return RankConfig(
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
    """Equal devices, with a number for each host: `"h1:4,h2:2"`. Raises PlanError for another
    text."""
    devices: list[Device] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s:,]+)\s*:\s*(\d{1,9})\s*", part)
        if not match or not 1 <= int(match[2]) <= MOST_DEVICES:
            raise PlanError(f"--hosts {text}: {part!r} is not HOST:RANKS.", HOSTS_CURE)
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
    """The largest latency and the smallest bandwidth and duplex, as the last transfer to end."""
    return Link(
        latency_ms=max((link.latency_ms for link in links), default=0.0),
        bytes_per_s=min((link.bytes_per_s for link in links), default=math.inf),
        duplex=min((link.duplex for link in links), default=1.0),
    )


def check_number(cluster: Cluster, stages: int | None) -> None:
    """Raises PlanError if there are fewer devices than requested stages."""
    number = len(cluster.devices)
    if stages is not None and stages > number:
        available = f"there {'is' if number == 1 else 'are'} {number} device{'s' * (number > 1)}"
        raise PlanError(
            f"{stages} stages asked, but {available}.", f"--stages {number}, or leave --stages out."
        )


def rising(first: str, second: str) -> Pair:
    """Two hosts as `Cluster.between` names them."""
    return (first, second) if first <= second else (second, first)


# --- the configuration for a run ------------------------------------------------------------


def make_setting(
    stages: int,
    *,
    overlap: bool = False,
    devices: Sequence[Device] = (),
    **running: Unpack[PlanConfig],
) -> RankConfig:
    """The configuration of the equal ranks of `stages`, or of `devices`, that run this way.

    Raises PlanError for an unknown name and an illegal number.
    """
    run = PartitionOptions(stages=stages, **running)
    schedule, staleness, ranks = run.schedule or "async-1f1b", run.staleness, run.ranks
    if schedule == "2bw" and staleness == "none":
        staleness = "2bw"
    _check_schedule(schedule, stages, run.micro_batches, staleness)
    _check_zero(run)
    if ranks is not None and devices:
        raise PlanError(
            "ranks are given twice: by number, and as devices.",
            "Leave --ranks out: every device is a rank.",
        )
    if not devices and schedule not in ASYNCHRONOUS:
        ranks = natural_ranks(schedule, stages) if ranks is None else ranks
        if schedule != AUTO:  # raises where they do not fit
            make_schedule(schedule, stages=stages, micro_batches=run.micro_batches, ranks=ranks)
    most_bytes = math.inf if run.memory_limit is None else bytes_of(run.memory_limit) or math.inf
    return RankConfig(
        devices=tuple(
            replace(device, memory_bytes=min(device.memory_bytes, most_bytes))
            for device in devices or (Device(),) * (ranks or stages)
        ),
        schedule=schedule,
        micro_batches=run.micro_batches,
        recompute=cast(Recompute, run.recompute),
        optimizer=run.optimizer,
        staleness=staleness,
        overlap=overlap,
        zero=run.zero,
    )


def _check_zero(run: PartitionOptions) -> None:
    """Raises PlanError where replicas cannot share out what `zero` says."""
    names = run.staleness.split("+")
    reading = [name for name in names if KEEPS[name].of_state]
    if run.zero and reading:
        others = "+".join(name for name in names if name not in reading) or "stash"
        raise PlanError(
            f"--staleness {run.staleness}: {reading[0]} reads the optimizer's state of every "
            f"weight of its stage, and under --zero {run.zero} each replica has a part of it.",
            f"--staleness {others}, or --zero 0",
        )


def _check_schedule(schedule: str, stages: int, micro_batches: int, staleness: str) -> None:
    """Raises PlanError for a schedule that a plan cannot balance, or that does not fit the rest."""
    if micro_batches > _MOST_PASSES // stages:
        raise PlanError(
            f"{micro_batches} micro-batches are too many for {stages} stages.", "--micro-batches 8"
        )
    if schedule == "single" and stages > 1:
        raise PlanError(
            f"single runs all {stages} stages in one process, so nothing is balanced.",
            "Plan for 1f1b; asyncpipe-train --schedule single runs any plan.",
        )
    if schedule == "virtual-stages-1f1b":
        raise PlanError(
            "virtual-stages-1f1b leaves ranks idle to keep weights fresh, so no cut is better than "
            "another.",
            "Plan for async-1f1b; asyncpipe-train --schedule virtual-stages-1f1b runs any plan.",
        )
    if staleness != "none" and schedule not in ASYNCHRONOUS:
        raise PlanError(
            f"--staleness {staleness}, but under {schedule} no weights are stale.",
            "--schedule async-1f1b",
        )
