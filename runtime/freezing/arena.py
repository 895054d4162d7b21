"""A file that the ranks of a host share: what frozen blocks have computed, by key.

The file has no name and is mapped by all of its ranks: the kernel's page cache is the part of it in
memory, the disk takes the rest, and nothing is left when the ranks end, in whatever way. Each rank
writes values to chunks of its own, and afterwards their entries to a log of its own, which the
others read. A value that a deeper one of the same key replaces gives its place back once every rank
has read the newer entry, so a place that may still be read is never written to.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .blocks import FreezeError

Gather = Callable[[bytes], Sequence[bytes]]
"""The content of each rank; all have the same length."""

KEY_BYTES = 16
_ENTRY = struct.Struct(f"<{KEY_BYTES}sqq")  # key, site, place
_NUMBER = struct.Struct("<q")
_PAGE = mmap.ALLOCATIONGRANULARITY
_MOST_CHUNK = 1 << 26
_PATH_BYTES = 128
_ASKED = 1 << 17
"""The bytes that are asked for at once: as a rule, kernels read no more ahead."""
_LEFT = -1
"""The round of a rank that reads no values."""


class Entry(NamedTuple):
    """Where the value of a key lies.

    site: the kind of the value; a greater number stands for more blocks
    place: the offset of its first byte
    """

    site: int
    place: int


class Arena:
    """One rank's end of the shared file.

    size: the most bytes that the values of all ranks may have.
    is_full: a value of this rank had no place.

    Arguments:
    file: the descriptor of the file.
    log: that of this rank's log.
    others: those of the other ranks' logs.
    rank, ranks: the place of this rank among those that share the file, and their number.
    """

    def __init__(
        self, file: int, size: int, log: int, others: Sequence[int], rank: int, ranks: int
    ) -> None:
        self.size, self.is_full = size, False
        self._file, self._log, self._others = file, log, others
        self._rank, self._ranks = rank, ranks
        self._head = _head_bytes(ranks)
        self._map = mmap.mmap(file, self._head + size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._rounds = self._bytes[_NUMBER.size : self._head].view(np.int64)[:ranks]
        self._round, self._rounds[rank] = 0, _LEFT
        self._entries: dict[bytes, Entry] = {}
        self._sizes: dict[int, int] = {}
        self._read = [0] * len(others)
        self._chunk = range(0)
        self._growth = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._replaced: deque[tuple[list[int], int]] = deque()
        weakref.finalize(self, _close, (file, log, *others))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def taken_bytes(self) -> int:
        """The bytes of all ranks' chunks."""
        return int.from_bytes(os.pread(self._file, _NUMBER.size, 0), "little")

    def find(self, key: bytes) -> Entry | None:
        """The entry of a key that is known here."""
        return self._entries.get(key)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the values of all entries can be read that this and other ranks have written."""
        self._round += 1
        self._rounds[self._rank] = self._round
        for number, log in enumerate(self._others):
            self._read[number] += self._take_in(log, self._read[number])
        while self._replaced and self._is_unread(self._replaced[0][0]):
            _, place = self._replaced.popleft()
            self.give_back(place)
        try:
            yield
        finally:
            self._rounds[self._rank] = _LEFT

    def take(self, size: int) -> int | None:
        """The place of a new value; None if there is none left."""
        if self._free[size]:
            place = self._free[size].pop()
        else:
            if len(self._chunk) < size and not self._claim(size):
                self.is_full = True
                return None
            place = self._chunk[0]
            self._chunk = self._chunk[size:]
        self._sizes[place] = size
        self._growth += size
        return place

    def give_back(self, place: int) -> None:
        """Returns a place that is in no entry any more."""
        size = self._sizes.pop(place)
        self._free[size].append(place)
        self._growth -= size

    def take_growth(self) -> int:
        """By how many bytes the values of this rank are more than at the last call."""
        growth, self._growth = self._growth, 0
        return growth

    def put(self, key: bytes, entry: Entry) -> None:
        """Writes the entry of a value that is complete."""
        if self._others:
            os.write(self._log, _ENTRY.pack(key, *entry))
        self._learn(key, entry)

    def at(self, place: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes at a place."""
        return self._bytes[place : place + size]

    def prefetch(self, places: Sequence[int], size: int) -> None:
        """Asks the kernel to read values from the disk, all at once, and returns immediately."""
        for pages in _pages_of(places, size):
            for start in range(pages.start, pages.stop, _ASKED):
                length = min(_ASKED, pages.stop - start)
                self._map.madvise(mmap.MADV_WILLNEED, start, length)

    def _learn(self, key: bytes, entry: Entry) -> None:
        known = self._entries.get(key)
        if known is not None and known.site >= entry.site:
            known, entry = entry, known
        self._entries[key] = entry
        if known is not None and known.place in self._sizes and known.place != entry.place:
            # Who reads now may not know the newer entry.
            rounds = [0 if number == _LEFT else int(number) + 1 for number in self._rounds]
            self._replaced.append((rounds, known.place))

    def _take_in(self, log: int, begin: int) -> int:
        """Learns the entries of a log from an offset on; returns their bytes."""
        content = os.pread(log, os.fstat(log).st_size - begin, begin)
        whole = len(content) // _ENTRY.size * _ENTRY.size
        for key, site, place in _ENTRY.iter_unpack(content[:whole]):
            self._learn(key, Entry(site, place))
        return whole

    def _is_unread(self, rounds: Sequence[int]) -> bool:
        own = self._rank
        return all(
            rank == own or self._rounds[rank] == _LEFT or self._rounds[rank] >= number
            for rank, number in enumerate(rounds)
        )

    def _claim(self, size: int) -> bool:
        """Takes a chunk of the file for this rank; False if no more fits on the disk or within the
        size."""
        usual = min(self.size // 256, _MOST_CHUNK)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            begin = self.taken_bytes
            length = min(max(_in_pages(usual), _in_pages(size)), self.size - begin)
            if length < size:
                return False
            # A write to a page for which the disk has no room would end the process.
            os.posix_fallocate(self._file, self._head + begin, length)
            os.pwrite(self._file, _NUMBER.pack(begin + length), 0)
        except OSError:
            return False
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._chunk = range(self._head + begin, self._head + begin + length)
        return True


def open_arena(folder: Path | None, size: int | None, rank: int, gather: Gather) -> Arena:
    """This rank's end of its host's file, which lies in `folder` or among temporary files; every
    rank calls it.

    size: the most bytes on a host; None for half of what the disk has left.

    Raises FreezeError where there can be no such file.
    """
    hosts = gather(_host())
    own = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    place, ranks = own.index(rank), len(own)
    try:
        log, file = _unnamed(None), _unnamed(folder)
        disk = os.fstatvfs(file)
        size = disk.f_bavail * disk.f_frsize // 2 if size is None else size
        os.ftruncate(file, _head_bytes(ranks) + _in_pages(size))
    except OSError as error:
        raise FreezeError(f"--cache: {error}.", "Leave --cache out.") from error
    addresses = gather(_address(file) + _address(log))
    shared, *logs = (
        _opened(address)
        for address in (
            addresses[own[0]][:_PATH_BYTES],
            *(addresses[number][_PATH_BYTES:] for number in own if number != rank),
        )
    )
    is_shared = gather(b"1" if shared is not None and None not in logs else b"0")
    if all(is_shared[number] == b"1" for number in own) and shared is not None:
        os.close(file)
        size = min(size, os.fstat(shared).st_size - _head_bytes(ranks))
        file, others = shared, [each for each in logs if each is not None]
    else:
        _close(each for each in (shared, *logs) if each is not None)
        size, place, ranks, others = size // ranks, 0, 1, []
    try:
        arena = Arena(file, size, log, others, place, ranks)
    except (OSError, ValueError) as error:
        raise FreezeError(
            f"--cache: {size} bytes cannot be mapped: {error}.", "--cache 1GiB"
        ) from error
    gather(b"1")  # all have opened the files, and read nothing yet
    return arena


def _host() -> bytes:
    """The same on all ranks that can open each other's files."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.urandom(KEY_BYTES)
    return hashlib.sha256(f"{boot} {space} {os.getuid()}".encode()).digest()[:KEY_BYTES]


def _head_bytes(ranks: int) -> int:
    """The bytes before the values: those that are taken, and the round of each rank."""
    return _in_pages(_NUMBER.size * (1 + ranks))


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _in_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _pages_of(places: Iterable[int], size: int) -> list[range]:
    """The bytes of all pages on which values lie.

    >>> _pages_of([100, 5000, 90000], 6000)
    [range(0, 12288), range(86016, 98304)]
    """
    found: list[range] = []
    for place in sorted(places):
        pages = range(place // _PAGE * _PAGE, _in_pages(place + size))
        if found and pages.start <= found[-1].stop:
            pages = range(found.pop().start, pages.stop)
        found.append(pages)
    return found


def _unnamed(folder: Path | None) -> int:
    """A new file without a name."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno())


def _address(file: int) -> bytes:
    return f"/proc/{os.getpid()}/fd/{file}".encode().ljust(_PATH_BYTES, b"\0")


def _opened(address: bytes) -> int | None:
    try:
        return os.open(address.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
