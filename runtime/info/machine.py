"""Processor, memory, GPUs and network interfaces of this machine."""

from __future__ import annotations

import os
import platform
import socket
from collections import defaultdict
from math import isfinite
from pathlib import Path

import torch

from ..environment import cpu_model, memory_bytes
from ..launching.interfaces import interfaces
from ..launching.topology import SYS, format_cpus, read_topology
from ..wording import counted, write_bytes


def cpu() -> dict[str, str]:
    """The processor, what of it this process may use, and memory."""
    topology = read_topology()
    threads = max(len(core.cpus) for core in topology.cores)
    usable = f"{counted(len(topology.cores), 'core')} ({format_cpus(topology.cpus)})"
    if threads > 1:
        usable += f", {threads} threads each"
    if isfinite(topology.quota):
        usable += f"; a quota of {topology.quota:g} CPUs' time"
    return {
        "host": f"{socket.gethostname()}, {platform.system()} {platform.release()}",
        "model": cpu_model(),
        "usable": usable,
        "of": counted(os.cpu_count() or 1, "logical CPU"),
        "memory nodes": ", ".join(map(str, topology.nodes)),
        "memory": write_bytes(memory_bytes()) if memory_bytes() else "unknown",
    }


def gpus() -> dict[str, str]:
    """The GPUs that torch sees, by number."""
    if not torch.cuda.is_available():
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        )
        return {"none": f"torch sees none; it was {built}"}
    found = {}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found[str(index)] = (
            f"{card.name}, {write_bytes(card.total_memory)}, compute capability "
            f"{card.major}.{card.minor}"
        )
    return found


def links(sys: Path = SYS) -> dict[str, str]:
    """The network interfaces that are up: addresses, and the speed that the system knows."""
    addresses: dict[str, list[str]] = defaultdict(list)
    loopback = set()
    for interface in interfaces():
        addresses[interface.name].append(interface.address)
        if interface.is_loopback:
            loopback.add(interface.name)
    return {
        name: ", ".join(own) + (" (loopback)" if name in loopback else _speed(name, sys))
        for name, own in addresses.items()
    }


def _speed(name: str, sys: Path) -> str:
    """`, 25 Gbit/s`; "" where nobody knows, as of a virtual interface."""
    try:
        megabits = int((sys / "class/net" / name / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
