"""Where a run is made: versions of software, and what the machine is, without asking any of it.

Packages are asked for their metadata and the system for its files; nothing heavy is imported, and
what cannot be found out is left out.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .launching.topology import PROC

NEEDED = ("torch", "numpy", "networkx", "highspy", "sympy", "safetensors")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers",),
    "data": ("scikit-learn", "tokenizers"),
    "metis": ("pymetis",),
    "mpi": ("mpi4py", "mpich"),
    "debug": ("debugpy",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
    "trackio": ("trackio",),
}
"""The extras of asyncpipe -> the packages that each installs."""


def describe() -> dict[str, Any]:
    """Versions and machine, as values for JSON."""
    packages = (*NEEDED, *(package for extra in EXTRAS.values() for package in extra))
    found = {package: version_of(package) for package in packages}
    return {
        "versions": {
            "asyncpipe": _own_version(),
            "python": platform.python_version(),
            **{package: number for package, number in found.items() if number},
        },
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": memory_bytes(),
        "gpus": _gpus(),
    }


def version_of(package: str) -> str:
    """The installed version; "" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_model(proc: Path = PROC) -> str:
    """What the processor calls itself."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(proc / "cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def memory_bytes(proc: Path = PROC) -> int:
    """The machine's memory; 0 where it is not known."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    if found:
        return 1024 * int(found[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _gpus() -> list[str]:
    """The names of the GPUs, where torch is loaded and sees some."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _own_version() -> str:
    from .. import __version__

    return __version__


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
