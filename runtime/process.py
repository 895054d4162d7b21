"""Processes and the machine: signals, freed memory, the end of a parent, versions and hardware
names.

Where the C library allows it, freed host memory stays with the process. glibc returns blocks to the
system soon after they are freed, and each of their pages comes back with a fault. The activations
of a pipeline are allocated with every micro-batch: in the first of four stages of gpt2 the faults
took 1.5 of 3.4 s.

A rank ends with the process that started it: Linux kills it when its parent ends, and the parent's
number reveals one that ended before. Nothing here imports more than Python's own modules, so that a
rank can do this first. Versions and the machine are read from metadata and files of the system;
what cannot be found is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, TypeVar

from . import __version__

STARTED = time.time()
"""The time at which this process began to import modules, in seconds since 1970: every command
imports this one among its first."""


class Ended(SystemExit):
    """A process ends because a signal asked it to, with an exit code that says so."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and where it is known what it interrupted."""


STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to write a checkpoint and end."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of what was asked so, whatever the signal: the one that batch systems know."""


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """In the block these signals call `handler`; only a main thread can have them do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def first_imports() -> Iterator[None]:
    """Imports torch in the block without collections of garbage, and leaves what it made out of
    later ones: they would go through all of its objects, which takes a fifth of a start."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_MANY_OBJECTS = 100_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """In the block, garbage is collected only after 100,000 new objects.

    For work that makes many small objects and keeps most of them: each whole collection goes
    through all objects of torch as well, which took a tenth of a partition of 1,800 operations.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: without collections
        gc.set_threshold(max(before[0], _MANY_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


Result = TypeVar("Result")


def _called(call: Callable[[], Result]) -> Result:
    return call()


_SLOTS = 1 << 16
_CALLED_WITH_ROOM = FunctionType(_called.__code__.replace(co_stacksize=_SLOTS), globals())


def with_room_for_frames(call: Callable[[], Result]) -> Result:
    """The result of `call`, whose Python frames have half a MiB of memory in one piece.

    CPython maps the memory of frames in pieces of 16 KiB, and unmaps a piece when the last frame in
    it returns. A loop whose calls reach just over the end of a piece pays for that in every round.
    A piece is at least twice as large as the frame that it is mapped for: here the frame of a
    function that claims a large stack.
    """
    result: Result = _CALLED_WITH_ROOM(call)
    return result


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1
_MOST, _FEW = 32 * 2**20, 2**20


def keep_freed_memory(*, few: bool = False) -> None:
    """From now on this process keeps what it frees, but for blocks of more than 32 MiB: gaps that
    such leave in a heap make it grow by a third (gpt2). New threads share the first heap: those of
    their own are given back in parts of 64 MiB. Other C libraries are left alone.

    With `few` it keeps blocks of up to 1 MiB: where gradients are sent away during a backward,
    others come to lie between them, and the gaps made a heap grow by the size of the model.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _FEW if few else _MOST)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_ARENA_MAX, 1)


def die_with_parent() -> None:
    """Lets Linux kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def die_with(command: int) -> None:
    """Ends this process with its parent, and at once if the process `command`, which had it
    started, has ended already."""
    die_with_parent()
    if not is_alive(command):
        os._exit(1)


def is_alive(process: int) -> bool:
    """True if a process of this machine is running, or if the system has no `/proc`."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()
    return state not in ("Z", "X")


PROC = Path("/proc")
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


def describe_environment() -> dict[str, Any]:
    """Versions and machine, as values for JSON."""
    packages = (*NEEDED, *(package for extra in EXTRAS.values() for package in extra))
    versions = {package: version_of(package) for package in packages}
    return {
        "versions": {
            "asyncpipe": __version__,
            "python": platform.python_version(),
            **{package: number for package, number in versions.items() if number},
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
    """The name of the processor."""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(proc / "cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def memory_bytes(proc: Path = PROC) -> int:
    """The machine's memory; 0 where it is not known."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    if match:
        return 1024 * int(match[1])
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
