"""Instance types of a cloud -> the devices and links that a plan is made for.

The numbers are those of the vendors' descriptions: GPUs of an instance, bandwidth between two of
them in one direction, and that of the network. `asyncpipe-comm measure` writes measured links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceType:
    """The devices of an instance.

    device: the name that asyncpipe-partition knows the GPUs by.
    count: their number.
    network_gbit_s: the bandwidth of the network.
    """

    device: str
    count: int
    network_gbit_s: float


_TYPES: Mapping[str, InstanceType] = {
    "g4dn.xlarge": InstanceType("t4", 1, 25),
    "g4dn.12xlarge": InstanceType("t4", 4, 50),
    "g4dn.metal": InstanceType("t4", 8, 100),
    "g6.xlarge": InstanceType("l4", 1, 10),
    "g6.12xlarge": InstanceType("l4", 4, 40),
    "g6.48xlarge": InstanceType("l4", 8, 100),
    "p3.2xlarge": InstanceType("v100-16g", 1, 10),
    "p3.8xlarge": InstanceType("v100-16g", 4, 10),
    "p3.16xlarge": InstanceType("v100-16g", 8, 25),
    "p3dn.24xlarge": InstanceType("v100-32g", 8, 100),
    "p4d.24xlarge": InstanceType("a100-40g", 8, 400),
    "p4de.24xlarge": InstanceType("a100-80g", 8, 400),
    "p5.48xlarge": InstanceType("h100", 8, 3200),
    "p5e.48xlarge": InstanceType("h200", 8, 3200),
}
_WITHIN_GB_S = {
    **{"t4": 12, "l4": 24, "v100-16g": 25, "v100-32g": 25},
    **{"a100-40g": 300, "a100-80g": 300, "h100": 450, "h200": 450},
}
_WITHIN_US, _BETWEEN_US = 20, 60


def instance_type(name: str | None) -> InstanceType | None:
    """The devices of an instance type; None for one that is not known.

    >>> instance_type("ml.p3.8xlarge")
    InstanceType(device='v100-16g', count=4, network_gbit_s=10)
    """
    return None if name is None else _TYPES.get(name.removeprefix("ml."))


def devices_file(name: str, kind: InstanceType, count: int) -> str:
    """The file of --devices for as many instances."""
    lines = [f"# {count} of {name}, as its vendor describes it."]
    for number in range(count):
        lines += ["[[devices]]", f'spec = "{kind.device}"', f'host = "instance-{number}"']
        lines += [f"count = {kind.count}", ""]
    lines += ["[[links]]", 'within = "*"', f"bandwidth_gb_s = {_WITHIN_GB_S[kind.device]}"]
    lines += [f"latency_us = {_WITHIN_US}"]
    if count > 1:
        lines += ["", "[[links]]", 'between = "*"', f"bandwidth_gb_s = {kind.network_gbit_s / 8:g}"]
        lines += [f"latency_us = {_BETWEEN_US}"]
    return "\n".join(lines) + "\n"
