"""The cache of measured costs, and the conditions under which costs are measured.

`ProfileCache` keeps costs in one file for each environment (processor, threads, dtype, version of
torch). The key of a cost is a hash of a description of the operation. A cache never fails a
command: an unreadable file counts as empty, an unwritable one is skipped.

`describe_function` and `describe_module` describe an operation in words that are equal in every
process. Code outside torch is described with a hash of its source file, so that an edit changes
the key; an object without a source file is described by its address, and never cached.

`threads_set` and `mixed_precision` set the number of threads and the dtype of a block.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...runtime.errors import PlanError

_MEASURE = 2  # version of the measurement; a change of its meaning increases it
_MOST = 50_000  # entries of a file; the oldest are dropped first


class ProfileCache:
    """Measured costs by key; `save` writes new ones to the file.

    With `read=False` the cache starts empty, so that everything is measured again and written.
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
        """The cache in the user's folder for this machine, device, thread count and dtype."""
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
        """The JSON value stored under the key; None if there is none."""
        return self._fresh.get(key, self._known.get(key))

    def put(self, key: str, value: Any) -> None:
        self._fresh[key] = value

    def save(self) -> None:
        """Adds new costs to the file, and replaces the file atomically."""
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
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            same = stored["environment"] == self._environment
            return dict(stored["costs"]) if same else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}


def cache_folder() -> Path:
    """The folder of the cache: $ASYNCPIPE_CACHE, or `asyncpipe` in the user's cache folder."""
    if own := os.environ.get("ASYNCPIPE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncpipe"


def content_key(content: Any) -> str:
    """A hash of plain data: equal for equal content in every process."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def is_lasting(text: str) -> bool:
    """True if a description means the same in another process: it contains no address."""
    return re.search(r"\b0x[0-9a-f]{6,}\b", text) is None


def device_identity(device: torch.device) -> str:
    """The model name of the processor that `device` is on this machine."""
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


_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = ("torch", "_operator", "builtins", "math")


def describe_function(target: Any) -> str:
    """A function as its name and a hash of its file; the name of a method unchanged."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(target))
    module = getattr(target, "__module__", None) or ""
    where = "" if _is_torchs(module) else _file_hash(inspect.unwrap(target)) or f" {id(target):#x}"
    return f"{module}.{name}{where}"


def describe_module(module: nn.Module) -> str:
    """A module as its class, its settings, and the shapes of its tensors."""
    settings = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = dict.fromkeys(type(part) for part in module.modules())
    return repr(
        (
            [_describe_class(kind) for kind in kinds],
            repr(module),
            sorted(settings.items()),
            [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors],
        )
    )


def _describe_class(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_torchs(kind.__module__):
        return name
    return name + (_file_hash(kind) or f" {id(kind):#x}")


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in _OF_TORCH


def _file_hash(written: Any) -> str | None:
    try:
        file = inspect.getsourcefile(written)
    except TypeError:
        return None
    return _hash_of(file) if file else None


@cache
def _hash_of(file: str) -> str | None:
    try:
        return " " + hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


DTYPES = ("float32", "bfloat16")


def check_dtype(dtype: str) -> None:
    """Raises PlanError for a dtype that cannot be profiled."""
    if dtype not in DTYPES:
        raise PlanError(f"--dtype {dtype} is not known.", f"Choose {', '.join(DTYPES)}.")


@contextmanager
def threads_set(threads: int | None) -> Iterator[int]:
    """Sets torch's number of threads for the block and yields it; None leaves it unchanged."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def mixed_precision(dtype: str, *device_types: str, cached: bool = True) -> Iterator[None]:
    """Computes matrix products of the block in `dtype` (autocast); float32 changes nothing.

    With `cached=False` a parameter is cast at each use, as at the start of each micro-batch.
    """
    with ExitStack() as stack:
        for kind in dict.fromkeys(device_types) if dtype != "float32" else ():
            if kind != "meta":
                autocast = torch.autocast(kind, dtype=getattr(torch, dtype), cache_enabled=cached)
                stack.enter_context(autocast)
        yield
