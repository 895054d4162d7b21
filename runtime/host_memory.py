"""Freed host memory stays with the process, where the C library can be told so.

glibc gives blocks back to the system soon after they are freed, and each of their pages comes back
with a fault. The activations of a pipeline come and go with every micro-batch: of the first of four
stages of gpt2 the faults took 1.5 of 3.4 s.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1
_MOST = 32 * 2**20


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees, but for blocks of more than 32 MiB: gaps that
    such leave in a heap make it grow by a third (gpt2). New threads share the first heap: those of
    their own are given back in parts of 64 MiB. Other C libraries are left alone."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_ARENA_MAX, 1)
