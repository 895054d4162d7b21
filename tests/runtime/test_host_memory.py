"""Freed memory that stays with the process."""

import platform
import subprocess
import sys

import pytest

CODE = """
from pathlib import Path
import torch
from asyncpipe.runtime.host_memory import keep_freed_memory
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


THREADS = """
import threading
from pathlib import Path
import torch
from asyncpipe.runtime.host_memory import keep_freed_memory
keep_freed_memory()
def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
torch.ones(8)
before = resident_pages()
def take():
    held = [torch.ones(6 * 2**20) for _ in range(8)]
for _ in range(2):
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
print((resident_pages() - before) / 6144)
"""


def blocks_left(code: str) -> float:
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_was_freed_stays_with_the_process() -> None:
    assert blocks_left(CODE.format(keep=False)) < 1
    assert blocks_left(CODE.format(keep=True)) > 7


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_a_thread_freed_stays_too() -> None:
    assert 7 < blocks_left(THREADS) < 9
