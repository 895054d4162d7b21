"""The file of a cache: shared by ranks, bounded, and gone with them."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncpipe.runtime.freezing.arena import KEY_BYTES, Arena, Entry, open_arena

KEYS = [bytes([number]) * KEY_BYTES for number in range(4)]
SIZE = 1 << 16


def opened(folder: Path, ranks: int, size: int = 1 << 20) -> list[Arena]:
    """The ends of a file, one for each rank."""
    contents, barrier = [b""] * ranks, threading.Barrier(ranks)

    def gather_of(rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def gather(content: bytes) -> Sequence[bytes]:
            contents[rank] = content
            barrier.wait()
            found = list(contents)
            barrier.wait()
            return found

        return gather

    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda rank: open_arena(folder, size, rank, gather_of(rank)), range(ranks))
        )


def written(arena: Arena, key: bytes, site: int, value: int) -> int:
    """Writes a value, whose bytes are all the same; returns its place."""
    place = arena.take(SIZE)
    assert place is not None
    arena.at(place, SIZE)[:] = value
    arena.put(key, Entry(site, place))
    return place


def test_ranks_find_what_others_have_written(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 2)
    written(first, KEYS[0], 1, 7)
    assert second.find(KEYS[0]) is None
    with second.reading():
        entry = second.find(KEYS[0])
        assert entry is not None and set(second.at(entry.place, SIZE)) == {7}
    written(second, KEYS[1], 1, 8)
    with first.reading():
        entry = first.find(KEYS[1])
        assert entry is not None and set(first.at(entry.place, SIZE)) == {8}
    assert first.taken_bytes == 2 * SIZE


def test_a_replaced_value_stays_as_long_as_a_rank_may_read_it(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 2)
    place = written(first, KEYS[0], 1, 7)
    with second.reading():
        assert second.find(KEYS[0]) == Entry(1, place)
        written(first, KEYS[0], 2, 8)
        with first.reading():
            assert written(first, KEYS[1], 1, 9) != place
        assert set(second.at(place, SIZE)) == {7}
    with first.reading():
        assert written(first, KEYS[2], 1, 10) == place
    with second.reading():
        entry = second.find(KEYS[0])
        assert entry is not None and set(second.at(entry.place, SIZE)) == {8}
    # The deeper value of another rank replaces one here, too.
    mine = written(first, KEYS[3], 1, 11)
    with second.reading():
        written(second, KEYS[3], 2, 12)
    with first.reading():
        assert first.find(KEYS[3]) != Entry(1, mine)
    with first.reading():
        assert first.take(SIZE) == mine


def test_no_more_is_kept_than_the_size(tmp_path: Path) -> None:
    first, second = opened(tmp_path, 2, size=3 * SIZE)
    places = {written(arena, key, 1, 1) for arena in (first, second) for key in KEYS[:1]}
    places.add(written(first, KEYS[1], 1, 1))
    assert len(places) == 3
    assert first.take(SIZE) is None and second.take(SIZE) is None and first.is_full
    (alone,) = opened(tmp_path, 1, size=100)
    assert alone.take(101) is None and alone.take(60) is not None and alone.take(60) is None


def resident(arena: Arena, place: int) -> bool:
    """True if all pages of a value are in memory."""
    address = arena.at(place, SIZE).ctypes.data
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * -(-(address + SIZE - begin) // mmap.PAGESIZE))()
    length = ctypes.c_size_t(address + SIZE - begin)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), length, pages) == 0
    return all(page & 1 for page in pages)


def test_the_kernel_reads_the_values_that_are_asked_for_and_no_others(tmp_path: Path) -> None:
    (arena,) = opened(tmp_path, 1)
    places = [written(arena, key, 1, number) for number, key in enumerate(KEYS)]
    for drop in (arena._map.flush, lambda: arena._map.madvise(mmap.MADV_DONTNEED)):
        drop()
    os.posix_fadvise(arena._file, 0, 0, os.POSIX_FADV_DONTNEED)
    # A file system in memory, such as tmpfs, drops nothing.
    before = [resident(arena, place) for place in places]
    arena.prefetch([places[3], places[0]], SIZE)
    end_s = time.monotonic() + 10
    while not (resident(arena, places[0]) and resident(arena, places[3])):
        assert time.monotonic() < end_s
    assert [resident(arena, place) for place in places[1:3]] == before[1:3]
    assert [set(arena.at(place, SIZE)) for place in places] == [{0}, {1}, {2}, {3}]


def open_files() -> set[str]:
    """What the open files are called; other processes make files in the same folders."""
    return {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_nothing_is_left_of_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        before = open_files()
        arena = open_arena(tmp_path, 1 << 20, 0, lambda content: [content])
        written(arena, KEYS[0], 1, 7)
        os.write(write, "\n".join(open_files() - before).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    os.close(write)
    with open(read) as pipe:
        opened_by_child = pipe.read().split("\n")
    assert len(opened_by_child) >= 2  # the values and the log
    assert os.listdir(tmp_path) == [] and not any(map(os.path.exists, opened_by_child))
