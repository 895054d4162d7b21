"""Freed memory that stays with the process, and collections of garbage."""

import gc
import platform
import subprocess
import sys

import pytest

from asyncpipe.runtime.process import rare_collections

CODE = """
from pathlib import Path
import torch
from asyncpipe.runtime.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
torch.ones(8)
before = resident_pages()
held = [torch.ones(6 * 2**20) for _ in range(8)]  # 24 MiB each
del held
print((resident_pages() - before) / 6144)
"""


IN_A_THREAD = """
import threading
from pathlib import Path
import torch
from asyncpipe.runtime.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def take():
    block = torch.ones(2**16)
    maps = Path("/proc/self/maps").read_text().splitlines()
    heap = next(line.split()[0] for line in maps if line.endswith("[heap]"))
    first, last = (int(end, 16) for end in heap.split("-"))
    print(int(first <= block.data_ptr() < last))
thread = threading.Thread(target=take)
thread.start()
thread.join()
"""


def printed(code: str) -> float:
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_was_freed_stays_with_the_process() -> None:
    assert printed(CODE.format(keep=False)) < 1
    assert printed(CODE.format(keep=True)) > 7


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_new_threads_share_the_first_heap() -> None:
    assert printed(IN_A_THREAD.format(keep=False)) == 0
    assert printed(IN_A_THREAD.format(keep=True)) == 1


FRAMES = """
import resource
from asyncpipe.runtime.process import with_room_for_frames
def nested(depth, call):
    return nested(depth - 1, call) if depth else call()
def over_the_ends():
    for depth in range(400):  # some of them are near the end of a piece
        nested(depth, lambda: [nested(12, int) for _ in range(50)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
(with_room_for_frames if {keep} else lambda call: call())(over_the_ends)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.python_implementation() != "CPython",
    reason="frames of Python functions are not mapped in pieces",
)
def test_with_room_no_loop_maps_and_unmaps_the_memory_of_its_frames() -> None:
    assert printed(FRAMES.format(keep=True)) < 100
    if sys.version_info < (3, 14):
        assert printed(FRAMES.format(keep=False)) > 1000


@pytest.mark.parametrize(("first", "within"), [(700, 100_000), (10**6, 10**6), (0, 0)])
def test_collections_are_rare_for_a_while(first: int, within: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(first, 7, 8)
    try:
        with pytest.raises(KeyError), rare_collections():
            assert gc.get_threshold() == (within, 7, 8)
            raise KeyError
        assert gc.get_threshold() == (first, 7, 8)
    finally:
        gc.set_threshold(*before)
