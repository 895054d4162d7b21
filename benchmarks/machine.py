"""The description of the machine, which is written with every result."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions, without names of hosts or persons."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(
            int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20
        ),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Writes `benchmarks/results/<name>.json` with the machine's description."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **figures}, indent=1) + "\n")
    return path


def busy_core_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def _field(file: str, key: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None
