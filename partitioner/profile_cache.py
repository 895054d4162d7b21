"""Measured costs by content -> a file that the next profile reads.

The key of a cost is a hash of what was measured; what it was measured on and with (processor,
threads, dtype, version of torch) has a file of its own. A file that cannot be read counts as
empty, and one that cannot be written is left: a cache never fails a command.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MEASURE = 2  # goes up whenever what is measured means something else
_MOST = 50_000  # entries of a file; the oldest go first


class ProfileCache:
    """Costs under their keys; `save` writes what was put.

    Without `read` nothing is found, so that all is measured again, and then written.
    """

    def __init__(self, path: Path, environment: Mapping[str, Any], *, read: bool = True) -> None:
        self.path = path
        self._environment = dict(environment)
        self._known = self._stored() if read else {}
        self._fresh: dict[str, Any] = {}

    @classmethod
    def of(
        cls, device: torch.device, threads: int, dtype: str, *, read: bool = True
    ) -> ProfileCache:
        """The cache in the user's folder for what is measured so, on this machine."""
        environment = {
            "measure": _MEASURE,
            "device": device_identity(device),
            "threads": threads,
            "dtype": dtype,
            "torch": torch.__version__,
        }
        name = content_key(environment)[:16]
        return cls(cache_folder() / "profiles" / f"{name}.json", environment, read=read)

    def get(self, key: str) -> Any:
        """What was measured for the key, as JSON has it; None if nothing was."""
        return self._fresh.get(key, self._known.get(key))

    def put(self, key: str, value: Any) -> None:
        self._fresh[key] = value

    def save(self) -> None:
        """Adds what was put to the file, which is replaced whole."""
        if not self._fresh:
            return
        costs = self._stored()
        costs = {key: cost for key, cost in costs.items() if key not in self._fresh} | self._fresh
        costs = dict(list(costs.items())[-_MOST:])
        text = json.dumps({"environment": self._environment, "costs": costs}, indent=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False
            ) as aside:
                aside.write(text)
            os.replace(aside.name, self.path)
        except OSError:
            return
        self._known, self._fresh = costs, {}

    def _stored(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            same = found["environment"] == self._environment
            return dict(found["costs"]) if same else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}


def cache_folder() -> Path:
    """Where costs are kept: $ASYNCPIPE_CACHE, or `asyncpipe` in the user's cache folder."""
    if own := os.environ.get("ASYNCPIPE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncpipe"


def content_key(content: Any) -> str:
    """A hash of plain data: equal for equal content in every process."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def is_lasting(text: str) -> bool:
    """Whether a description means the same in another process: it names no place in memory."""
    return re.search(r"\b0x[0-9a-f]{6,}\b", text) is None


def device_identity(device: torch.device) -> str:
    """The kind of processor that `device` is here."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model} ({torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores)"
