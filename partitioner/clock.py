"""A device -> a clock for work on it, and a number of threads to work with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments in the work of a device, and tells the milliseconds between two of them."""

    def mark(self) -> Any: ...

    def ms(self, start: Any, end: Any) -> float: ...


class _CpuClock:
    """On a CPU with one thread it counts the time that this thread computed, so that others on the
    machine do not enter into a profile; a rank has its core for itself."""

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self.mark = time.thread_time if alone else time.perf_counter

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)


class _CudaClock:
    """Events in the device's stream: what the device did between them, launches that it waited
    for included. Reading the time waits for the second event and for nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`, at the present number of threads."""
    return _CudaClock(device) if device.type == "cuda" else _CpuClock()


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
