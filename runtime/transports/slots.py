"""A rank's shared memory -> slots for the messages that it sends, used again and again.

The memory is an unnamed file as large as the machine's memory, of which only the pages that were
written to exist: it lives for as long as a process has it open, and no size of /dev/shm bounds it.
A slot has a power of two of bytes; the last one given back is the next one used, while the caches
still hold it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from ..errors import TransportError

ALIGNMENT = 64

_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2  # linux/memfd.h
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # linux/fcntl.h
_MOST_BYTES = 256 * 2**30  # of addresses, which many ranks need of many ranks


def has_shared_memory() -> bool:
    """Whether this process can create and map such a file."""
    try:
        SharedMemory(create_memory())
    except (
        AttributeError,
        ImportError,
        OSError,
    ):  # not Linux; forbidden, or no address space (ulimit -v)
        return False
    return True


def create_memory() -> int:
    """A new file of memory that only this user's processes can open."""
    import fcntl  # Not every system that this module is loaded on has it.

    # Pythons that were built for an old C library (conda's, uv's) lack os.memfd_create.
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(b"asyncpipe", _CLOSE_ON_EXEC | _ALLOW_SEALING)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no file of memory can be created")
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _MOST_BYTES))
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return descriptor


class SharedMemory:
    """A file of memory, mapped for as long as this object or an array in it lives."""

    def __init__(self, descriptor: int) -> None:
        try:
            self.size = os.fstat(descriptor).st_size
            self._map = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)

    def bytes_at(self, place: int, size: int) -> npt.NDArray[np.uint8]:
        """A new array of bytes in the memory."""
        return np.frombuffer(self._map, np.uint8, size, place)


class Slots:
    """Which places of a memory of `size` bytes are in use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_bytes = 0
        self._capacity: dict[int, int] = {}
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, size: int) -> int:
        """The place of a slot of at least `size` bytes."""
        capacity = max(ALIGNMENT, 1 << (size - 1).bit_length())
        if self._free[capacity]:
            return self._free[capacity].pop()
        place = self.used_bytes
        if place + capacity > self.size:
            raise TransportError(
                f"A message of {size} bytes does not fit into the {self.size} bytes of memory for "
                f"messages, of which {place} are in use."
            )
        self.used_bytes += capacity
        self._capacity[place] = capacity
        return place

    def capacity(self, place: int) -> int:
        return self._capacity[place]

    def give_back(self, place: int) -> None:
        self._free[self._capacity[place]].append(place)
