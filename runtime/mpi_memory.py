"""Finds out whether an MPI library is CUDA-aware: whether messages may lie in GPU memory.

There are two ways to ask: MPI 4.1 lists kinds of memory (section 12.4.3), and Open MPI and its
derivatives answer `MPIX_Query_cuda_support`. A library that answers neither is not CUDA-aware.
"""

from __future__ import annotations

import ctypes
from typing import Any


def takes_cuda(world: Any) -> bool:
    """True if the library of mpi4py's communicator says so."""
    return _lists_cuda(world) or _answers_cuda()


def _lists_cuda(world: Any) -> bool:
    information = world.Get_info()
    try:
        kinds = information.Get("mpi_memory_alloc_kinds") or ""
    finally:
        information.Free()
    return any(kind.strip().startswith("cuda") for kind in kinds.split(","))


def _answers_cuda() -> bool:
    from mpi4py import MPI

    for file in (None, MPI.__file__):
        try:
            return bool(ctypes.CDLL(file).MPIX_Query_cuda_support())
        except (AttributeError, OSError):
            continue
    return False
