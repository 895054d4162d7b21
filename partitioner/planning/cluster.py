"""Devices on hosts and the links between them -> the configuration of the ranks that run a plan.

A `Cluster` comes from `--hosts`, or from a TOML file of devices and links:

    [[devices]]                     # two cards of one host
    name = "RTX 3090"
    host = "tower"
    count = 2
    speed = 1.0                     # relative to the device of the profile
    memory_gib = 24

    [[links]]
    between = ["tower", "attic"]    # or within = "tower"; "*" is every host
    bandwidth_gb_s = 1.1
    latency_us = 60

Instead of a speed, a device may name a `spec`: a known device or a file that describes one
(`partitioner/profile/roofline.py`), which gives its memory and its predicted times. Or it may name
a `kind`, under which the nodes of a cost graph list their times. The most specific entry for a link
applies.

`make_setting` configures ranks for the options of a run.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Unpack, cast

from ...runtime.errors import PlanError
from ...runtime.schedule.asynchronous import ASYNCHRONOUS
from ...runtime.schedule.builders import AUTO, make_schedule, natural_ranks
from ...runtime.serialization import Origin, parse_toml, read_text
from ..graph.costs import LOCALHOST, Link
from ..graph.rank_model import Device, RankConfig, Recompute
from ..profile.roofline import device_spec
from .keywords import PlanConfig
from .options import PartitionOptions, bytes_of

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
    """

    devices: tuple[Device, ...]
    within: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[Pair, Link] = field(default_factory=dict)
    overlap: bool = False

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, each once."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    @cached_property
    def kinds(self) -> tuple[tuple[object, ...], ...]:
        """The properties that two interchangeable devices share: their host first."""
        return tuple(
            (device.host, device.kind, device.speed, device.memory_bytes, device.pays_transfers)
            for device in self.devices
        )

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
        """The smallest latency and the largest bandwidth of any link."""
        return Link(
            latency_ms=min(link.latency_ms for link in self._links_used),
            bytes_per_s=max(link.bytes_per_s for link in self._links_used),
        )

    def link(self, first: int, second: int) -> Link:
        """The link between two devices."""
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
    """The largest latency and the smallest bandwidth of the links: those of the last transfer to
    end.
    """
    return Link(
        latency_ms=max((link.latency_ms for link in links), default=0.0),
        bytes_per_s=min((link.bytes_per_s for link in links), default=math.inf),
    )


def rising(first: str, second: str) -> Pair:
    """Two hosts as `Cluster.between` names them."""
    return (first, second) if first <= second else (second, first)


_TABLES = ("devices", "links", "overlap")
_DEVICE_KEYS = ("name", "host", "count", "speed", "memory_gib", "spec", "kind")
_MOST = 1e9
_LINK_KEYS = ("within", "between", "bandwidth_gb_s", "latency_us")


def read_cluster(path: str | Path) -> Cluster:
    """The devices and links of a TOML file.

    Raises PlanError, with the expected form, for every illegal entry.
    """
    origin = Origin(f"device file {path}", PlanError, HOSTS_CURE)
    raw = parse_toml(read_text(Path(path), origin), origin)
    _check_keys(raw, _TABLES, str(path), "the file")
    tables = {name: _tables(raw, name, str(path)) for name in ("devices", "links")}
    if not tables["devices"]:
        raise PlanError(f"{path} has no devices.", 'Write [[devices]] and name = "..." below it.')
    overlap = raw.get("overlap", False)
    if not isinstance(overlap, bool):
        raise PlanError(f"{path}: overlap = {overlap!r} is neither true nor false.")
    devices = [
        device
        for number, table in enumerate(tables["devices"])
        for device in _devices(table, f"{path}: device {number + 1}", Path(path).parent)
    ]
    hosts = tuple(dict.fromkeys(device.host for device in devices))
    within: dict[str, Link] = {}
    between: dict[Pair, Link] = {}
    for number, table in enumerate(tables["links"]):
        where = f"{path}: link {number + 1}"
        named = _hosts_of(table, where, hosts)
        links, key = (within, named[0]) if "within" in table else (between, rising(*named))
        if key in links:
            raise PlanError(f"{where} joins what an earlier one joins.", "Leave one of the two.")
        links[key] = _link(table, where)  # type: ignore[index]
    return Cluster(tuple(devices), within, between, overlap)


def _devices(table: Mapping[str, Any], where: str, folder: Path) -> list[Device]:
    _check_keys(table, _DEVICE_KEYS, where, "a device")
    texts = {key: table.get(key, "") for key in ("name", "host", "spec", "kind")}
    for key, text in texts.items():
        if not isinstance(text, str) or (key in table and not text):
            raise PlanError(f"{where}: {key} = {text!r} is not a name.", f'Write {key} = "..."')
    if texts["spec"] and texts["kind"]:
        raise PlanError(f"{where} has both spec and kind.", "kind is for cost graphs: leave one.")
    if not texts["name"] and not texts["spec"]:
        raise PlanError(f"{where} has no name.", 'Write name = "..." below [[devices]].')
    count = table.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_DEVICES:
        raise PlanError(
            f"{where}: count = {count!r:.60} is not a number of devices, 1 to {MOST_DEVICES}.",
            "count = 2",
        )
    memory_bytes, kind = math.inf, texts["kind"] or None
    if texts["spec"]:
        name = texts["spec"]
        name = str(folder / name) if name.endswith(".toml") else name
        memory_bytes = device_spec(name).memory_bytes
        kind = None if "speed" in table else name
    if "memory_gib" in table:
        memory_bytes = int(_number(table, "memory_gib", where) * 2**30)
    device = Device(
        name=texts["name"] or texts["spec"],
        speed=_number(table, "speed", where) if "speed" in table else 1.0,
        memory_bytes=memory_bytes,
        host=texts["host"],
        kind=kind,
    )
    return [device] * count


def _hosts_of(table: Mapping[str, Any], where: str, hosts: Sequence[str]) -> list[str]:
    """The hosts that a link joins: one for a link within a host, or two."""
    _check_keys(table, _LINK_KEYS, where, "a link")
    if ("within" in table) == ("between" in table):
        raise PlanError(
            f"{where} needs either within or between.",
            'Write within = "HOST" or between = ["HOST", "HOST"]; "*" is every host.',
        )
    named = [table["within"]] if "within" in table else table["between"]
    if named == ANY_HOST:
        named = [ANY_HOST, ANY_HOST]
    if not isinstance(named, list) or len(named) != (1 if "within" in table else 2):
        raise PlanError(f"{where}: between = {named!r} is not two hosts.", 'between = ["a", "b"]')
    for host in named:
        if host != ANY_HOST and host not in hosts:
            meant = _meant(str(host), filter(None, hosts), "Hosts")
            raise PlanError(f"{where}: no device is on host {host!r}.", meant)
    if len(named) == 2 and named[0] == named[1] != ANY_HOST:
        raise PlanError(f"{where} is between {named[0]} and itself.", f'within = "{named[0]}"')
    return named


def _link(table: Mapping[str, Any], where: str) -> Link:
    if "bandwidth_gb_s" not in table:
        raise PlanError(f"{where} has no bandwidth_gb_s.", "bandwidth_gb_s = 12 (10^9 bytes/s)")
    latency_us = _number(table, "latency_us", where, least=0) if "latency_us" in table else 0.0
    return Link(latency_us / 1e3, 1e9 * _number(table, "bandwidth_gb_s", where))


def _tables(raw: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    tables = raw.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise PlanError(f"{where}: {name} is not a list of tables.", f"Write [[{name}]], twice [.")
    return tables


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str, section: str) -> None:
    for key in table:
        if key not in known:
            raise PlanError(f"{where}: {section} has no {key}.", _meant(key, known, "Keys"))


def _number(table: Mapping[str, Any], key: str, where: str, least: float = 1e-12) -> float:
    value = table[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < _MOST:
        raise PlanError(
            f"{where}: {key} = {value!r:.60} is not a number above 0 that a device can have.",
            f"{key} = 1",
        )
    return float(value)


def _meant(word: str, known: Iterable[str], label: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {near[0]}?" if near else f"{label}: {', '.join(names) or 'none named'}."


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
