"""A TOML file of devices and links -> a `Cluster`.

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
    duplex = 1.8                    # both directions at once carry 1.8 times as much as one

    [[links]]
    devices = ["gpu0", "gpu3"]      # two devices by their names, of one host or of two
    bandwidth_gb_s = 50

Instead of a speed, a device may name a `spec`: a known device or a file that describes one
(`partitioner/profile/roofline.py`), which gives its memory and its predicted times. Or it may name
a `kind`, under which the nodes of a cost graph list their times. The most specific entry for a link
applies.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runtime.errors import PlanError
from ...runtime.serialization import Origin, parse_toml, read_text
from ..graph.costs import Link
from ..graph.rank_model import Device
from ..profile.roofline import device_spec
from .cluster import ANY_HOST, HOSTS_CURE, MOST_DEVICES, Cluster, check_number, rising
from .options import REPLICATING, check_options

_TABLES = ("devices", "links", "overlap")
_DEVICE_KEYS = ("name", "host", "count", "speed", "memory_gib", "spec", "kind")
_MOST = 1e9
_LINK_KEYS = ("within", "between", "devices", "bandwidth_gb_s", "latency_us", "duplex")
_ENDS = _LINK_KEYS[:3]


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
    links: dict[str, dict[Any, Link]] = {ends: {} for ends in _ENDS}
    for number, table in enumerate(tables["links"]):
        where = f"{path}: link {number + 1}"
        _check_keys(table, _LINK_KEYS, where, "a link")
        ends, key = _joined(table, where, hosts, [device.name for device in devices])
        if key in links[ends]:
            raise PlanError(f"{where} joins what an earlier one joins.", "Leave one of the two.")
        links[ends][key] = _link(table, where)
    return Cluster(
        tuple(devices), links["within"], links["between"], overlap, pairs=links["devices"]
    )


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


def _joined(
    table: Mapping[str, Any], where: str, hosts: Sequence[str], devices: Sequence[str]
) -> tuple[str, str | tuple[str, str] | tuple[int, int]]:
    """The key of `_ENDS` that a link has, and what it joins: a host, two hosts, or two devices by
    their numbers, in rising order.
    """
    given = [ends for ends in _ENDS if ends in table]
    if len(given) != 1:
        raise PlanError(
            f"{where} needs one of within, between and devices.",
            'Write within = "HOST", between = ["HOST", "HOST"] or devices = ["NAME", "NAME"]; "*" '
            "is every host.",
        )
    if given == ["devices"]:
        first, second = sorted(_numbers_of(table["devices"], where, devices))
        return "devices", (first, second)
    named = _hosts_of(table, where, hosts)
    return given[0], named[0] if given == ["within"] else rising(*named)


def _numbers_of(named: object, where: str, devices: Sequence[str]) -> list[int]:
    if not isinstance(named, list) or len(named) != 2:
        raise PlanError(
            f"{where}: devices = {named!r:.60} is not two devices.", 'devices = ["a", "b"]'
        )
    for name in named:
        count = devices.count(name)
        if not count:
            meant = _meant(str(name), dict.fromkeys(devices), "Devices")
            raise PlanError(f"{where}: no device is called {name!r:.60}.", meant)
        if count > 1:
            raise PlanError(
                f"{where}: {count} devices are called {name!r}, and a link joins two single ones.",
                "Give each a name of its own, without count.",
            )
    if named[0] == named[1]:
        raise PlanError(f"{where} is between {named[0]} and itself.", "Name two devices.")
    return [devices.index(name) for name in named]


def _hosts_of(table: Mapping[str, Any], where: str, hosts: Sequence[str]) -> list[str]:
    """The hosts that a link joins: one for a link within a host, or two."""
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
    duplex = _number(table, "duplex", where) if "duplex" in table else 1.0
    if not 1 <= duplex <= 2:
        raise PlanError(
            f"{where}: duplex = {duplex:g} is not 1 to 2, the bandwidth of both directions at once "
            "as a multiple of one direction's.",
            "duplex = 2 for a link that is as fast in both directions at once, 1 for one that is "
            "not",
        )
    return Link(latency_us / 1e3, 1e9 * _number(table, "bandwidth_gb_s", where), duplex=duplex)


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


def cluster_of(
    devices: Cluster | str | Path | None,
    stages: int | None,
    *,
    ranks: int | None = None,
    zero: int = 0,
    method: str = "auto",
) -> Cluster | None:
    """The devices that may be used; None for equal ranks.

    Raises PlanError when neither devices nor a number of stages or ranks are given, and for a
    `zero` that has no replicas.
    """
    if devices is None and stages is None and ranks is None:
        raise PlanError("neither stages nor devices are given.", "stages=4")
    check_options({"stages": stages, "ranks": ranks, "zero": zero})
    if devices is None and zero and method not in REPLICATING:
        raise PlanError(
            f"--zero {zero} shares optimizer state out over replicas, but each stage of the plan "
            "has 1 replica.",
            "Give --devices or --hosts for a plan with replicas, or --zero to asyncpipe-train.",
        )
    if devices is None:
        return None
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    check_number(cluster, stages)
    return cluster
