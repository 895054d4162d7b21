"""The facts about this process that every result in it depends on: its code and its surroundings.

The code is known by the files that were imported or mapped into memory. A file counts as unchanged
while its size, its times and its inode are the same. The system sets the time of the last change
itself, so that no edit, copy or installation leaves all four as they were.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.process import PROC, STARTED, describe_environment
from ..runtime.tensor_files import raw_bytes
from .capture.model_state import plain_tensors
from .profile.cache import device_identity

_PACKAGE = Path(__file__).parents[1]
_WITH_DATA = ("partitioner", "runtime", "templates")
"""The folders of the package that hold its templates and tables besides code."""

FileState = tuple[int, int, int, int]
"""Size, modification time, time of the last change (both in nanoseconds) and inode of a file."""

_EARLIER_S = 2.0
"""Seconds before `STARTED` in which the interpreter may have read its first modules."""


def state_of_file(path: str) -> FileState | None:
    """The state of a file; None if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def loaded_files() -> dict[str, FileState]:
    """The files of all imported modules, of all shared libraries in memory, and the data files of
    this package, with their states; files that are gone, such as timed stages, are left out."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    named = {vars(module).get("__file__") for module in modules}
    paths = {path for path in named if isinstance(path, str) and os.path.isabs(path)}
    paths |= _mapped_libraries() | data_files()
    states = {path: state_of_file(path) for path in sorted(paths)}
    return {path: state for path, state in states.items() if state is not None}


def data_files() -> set[str]:
    """The files of this package that are not code."""
    paths = (path for folder in _WITH_DATA for path in (_PACKAGE / folder).rglob("*.*"))
    return {str(path) for path in paths if path.suffix not in (".py", ".pyc")}


def _mapped_libraries() -> set[str]:
    try:
        lines = (PROC / "self" / "maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5:] for line in lines)
    return {path for found in paths for path in found if path.startswith("/") and ".so" in path}


def changed_since_start(files: Mapping[str, FileState]) -> bool:
    """True if a file has changed since this process began to import modules: what runs may differ
    from what the file now holds."""
    start_ns = int((STARTED - _EARLIER_S) * 1e9)
    return any(changed_ns >= start_ns for _, _, changed_ns, _ in files.values())


_WITHOUT_EFFECT = {
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR"),
    *("DISPLAY", "WAYLAND_DISPLAY", "WINDOWID", "STY", "SESSION_MANAGER", "LS_COLORS"),
    *("ASYNCPIPE_CACHE", "ASYNCPIPE_STATE"),
}
_WITHOUT_EFFECT_PREFIXES = ("SSH_", "TMUX", "VTE_", "TERM_", "XDG_", "DBUS_", "PYTEST_", "GNOME_")


def surroundings() -> dict[str, Any]:
    """The machine, the installed packages, the settings of torch and the environment variables,
    except those that name the terminal, as values for JSON."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _WITHOUT_EFFECT and not name.startswith(_WITHOUT_EFFECT_PREFIXES)
    }
    return {
        "machine": describe_environment(),
        "processor": device_identity(torch.device("cpu")),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "python": [sys.version, sys.executable, list(sys.flags), platform.libc_ver()],
        "torch": [
            torch.__version__,
            torch.__config__.show(),
            torch.get_num_threads(),
            str(torch.get_default_dtype()),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "importable": {entry: _names_in(entry) for entry in sys.path},
        "variables": variables,
        "folder": os.getcwd(),
    }


def _names_in(folder: str) -> list[str]:
    """The names in a folder of `sys.path`: a new one may hide a module, or be an optional one."""
    try:
        return sorted(os.listdir(folder or "."))
    except OSError:
        return []


def runs_only(command: str) -> bool:
    """True if this process was started as `command`, so that no other program has changed the
    modules in it."""
    started = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return Path(started).name == command


def model_digest(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """A hash of the structure of a model and of all of its values, and of its example inputs; None
    if some value cannot be hashed.

    Each tensor is hashed in a thread of its own number, because hashing leaves the interpreter to
    the others.
    """
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    tensors |= {f"plain {index}": each for index, each in enumerate(plain_tensors(model))}
    tensors |= {f"input {name}": value for name, value in inputs.items()}
    if not all(map(_is_plain, tensors.values())):
        return None
    distinct = {id(tensor): tensor for tensor in tensors.values()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = dict(zip(distinct, pool.map(_hash_of, distinct.values()), strict=True))
    order = {number: place for place, number in enumerate(distinct)}
    lines = [f"{name} {order[id(each)]} {hashes[id(each)]}" for name, each in tensors.items()]
    return joined_hash([repr(model), *lines])


def joined_hash(texts: Iterable[str]) -> str:
    """The SHA-256 of some texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    kinds = (Tensor, nn.Parameter, nn.Buffer)
    return type(value) in kinds and value.layout is torch.strided and not value.is_quantized


def _hash_of(tensor: Tensor) -> str:
    facts = (
        f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad} "
        f"{tensor.device}"
    )
    if tensor.is_meta:
        return facts
    return f"{facts} {hashlib.sha256(raw_bytes(tensor)).hexdigest()}"
