"""A device -> a clock for work on it, and a number of threads to work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def clock_ms(device: torch.device) -> Callable[[], float]:
    """A clock in milliseconds that waits for the device.

    On a CPU with one thread it counts the time that this process computed, so that other programs
    on the machine do not enter into a profile; a rank has its core for itself.
    """
    if device.type == "cuda":

        def synchronized_ms() -> float:
            torch.cuda.synchronize(device)
            return 1e3 * time.perf_counter()

        return synchronized_ms
    if torch.get_num_threads() == 1:
        return lambda: 1e3 * time.process_time()
    return lambda: 1e3 * time.perf_counter()


@contextmanager
def threads_set(threads: int | None) -> Iterator[int]:
    """Runs the block with that many threads, by default as many as before; gives the number."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
