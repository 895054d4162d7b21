"""A device made of files: memory that two processes map, and work that lags behind its calls.

It keeps CUDA's rules, as far as a transport needs them: copies, records and waits are carried out
in order by one stream, later than they were asked for; a wait is for the last record that was
asked for before it, in whichever process.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Event = tuple[Path, np.ndarray]


class PretendedDevice:
    """`lag_s` is the longest that the stream sleeps before a piece of work."""

    def __init__(self, folder: Path, *, lag_s: float = 0.002) -> None:
        self.device = torch.device("cpu")
        self.opened = 0
        self._folder = folder
        self._lag_s = lag_s
        self._numbers = itertools.count()
        self._file_of: dict[int, Path] = {}
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._carry_out, daemon=True).start()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def allocate(self, size: int) -> Tensor:
        path = self._new_file()
        buffer = self._map(path, size)
        self._file_of[buffer.data_ptr()] = path
        return buffer

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._work.put(partial(target.copy_, source))

    def share(self, buffer: Tensor) -> str:
        return f"{self._file_of[buffer.data_ptr()]}:{len(buffer)}"

    def open(self, handle: str) -> Tensor:
        self.opened += 1
        path, _, size = handle.rpartition(":")
        return self._map(Path(path), int(size))

    def new_event(self) -> Event:
        path = self._new_file()
        path.write_bytes(bytes(16))
        return self.open_event(str(path))

    def share_event(self, event: Event) -> str:
        return str(event[0])

    def open_event(self, handle: str) -> Event:
        return Path(handle), np.memmap(handle, np.int64, "r+")

    def record(self, event: Event) -> None:
        _, counts = event
        counts[0] += 1
        self._work.put(partial(counts.__setitem__, 1, int(counts[0])))

    def wait(self, event: Event) -> None:
        self._work.put(partial(_wait_for, event[1], int(event[1][0])))

    def finish(self) -> None:
        """Returns when all work is done."""
        done = threading.Event()
        self._work.put(done.set)
        assert done.wait(20)

    def _carry_out(self) -> None:
        lag = random.Random(os.getpid())
        while True:
            work = self._work.get()
            time.sleep(lag.uniform(0, self._lag_s))
            work()

    def _new_file(self) -> Path:
        return self._folder / f"{os.getpid()}-{next(self._numbers)}"

    def _map(self, path: Path, size: int) -> Tensor:
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


class UnorderedDevice(PretendedDevice):
    """A device whose streams ignore each other's events."""

    def wait(self, event: Event) -> None:
        pass


def _wait_for(counts: np.ndarray, count: int) -> None:
    end_s = time.monotonic() + 10
    while counts[1] < count and time.monotonic() < end_s:
        time.sleep(1e-4)
