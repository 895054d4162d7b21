"""A feed -> the same feed, with its micro-batches read ahead by worker processes.

A worker of torch's DataLoader reads whole micro-batches, each by its number as the rank itself
would: seeds depend on the number alone, so any number of workers gives the same values. Workers are
forks of the rank, so that any data set can be used, and samples in memory are shared. They start
before the rank loads its stages, end with the rank, and leave signals to it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as worker_of_torch

from ..errors import LOADER_HAS_ENDED, AsyncPipeError, is_of_loader
from ..process import STOPPING, die_with_parent
from .batches import MicroBatches, ReadError
from .stream_feed import StreamFeed

_Made = tuple[dict[str, Tensor], Any]

_COPIED_BYTES = 1 << 18

_OF_THE_RANK = (signal.SIGINT, *STOPPING)
"""Signals that a launcher or a terminal sends to all processes, and that the rank answers."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that read data for a rank.

    count: their number.
    ahead: the micro-batches that each reads ahead.
    begin: called with the number of a worker when it starts; None does nothing.
    """

    count: int
    ahead: int
    begin: Callable[[int], None] | None = None


class ReadAhead:
    """The micro-batches of a feed, read ahead in ascending order; without workers only when they
    are asked for.

    state: the state of a feed that has one, after the last micro-batch that was asked for.

    Micro-batches may be asked for in another order: those that are passed over are kept until then.

    Arguments:
    numbers: returns the numbers of the micro-batches that will be asked for, in ascending order.
        After the last one, workers end; they start again when one is asked for again.
    """

    def __init__(
        self, feed: MicroBatches, numbers: Callable[[], Iterable[int]], workers: Workers
    ) -> None:
        self._feed, self._numbers, self._workers = feed, numbers, workers
        self._made: dict[int, _Made] = {}
        self._last = -1
        self.state: Any = None
        self._reading: Any = None
        self._processes: list[BaseProcess] = []
        self._sent = self._received = 0
        self._is_all_sent = False
        _open.add(self)

    def start(self) -> None:
        """Starts the workers, which begin to read."""
        self.close()
        self._made.clear()
        self._sent = self._received = 0
        self._is_all_sent = False
        by_number = _ByNumber(self._feed)
        if not self._workers.count:
            self._reading = map(by_number.__getitem__, self._sending())
            return
        before = multiprocessing.active_children()
        with warnings.catch_warnings(), _signals_held_back():
            warnings.simplefilter("ignore")  # more workers than cores pay off where they wait
            loader = DataLoader(
                by_number,
                batch_size=None,
                sampler=self._sending(),
                num_workers=self._workers.count,
                prefetch_factor=self._workers.ahead,
                collate_fn=_as_it_is,
                worker_init_fn=partial(_begin, self._workers.begin),
                multiprocessing_context="fork",
                generator=torch.Generator(),  # the global one stays as it is without workers
            )
            self._reading = iter(loader)
        self._processes = [
            child for child in multiprocessing.active_children() if child not in before
        ]

    def __call__(self, micro_batch: int) -> dict[str, Tensor]:
        """The fields of a micro-batch. Raises DataError, and ReadError if a worker has ended."""
        if micro_batch not in self._made and self._reading is None:
            self.start()
        while micro_batch not in self._made and self._reading is not None:
            number, *result = self._next(micro_batch)
            self._made[number] = result[0], result[1]
            if number > micro_batch:
                break
        if micro_batch not in self._made:
            return self._feed(micro_batch)
        fields, state = self._made.pop(micro_batch)
        if micro_batch > self._last:
            self._last, self.state = micro_batch, state
        return fields

    def close(self) -> None:
        """Ends the workers."""
        reading, self._reading = self._reading, None
        if reading is not None and self._processes:
            # Its own __del__ would come too late where a traceback refers to it: until then, the
            # end of any child process raises an error for a worker that has failed.
            reading._shutdown_workers()
        processes, self._processes = self._processes, []
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()

    def __del__(self) -> None:
        self.close()

    def _sending(self) -> Iterator[int]:
        for number in self._numbers():
            self._sent += 1
            yield number
        self._is_all_sent = True

    def _next(self, micro_batch: int) -> tuple[int, dict[str, Tensor], Any]:
        try:
            number, fields, state = next(self._reading)
        except RuntimeError as error:
            self.close()
            if not is_of_loader(error):
                raise
            raise ReadError(
                f"the data of micro-batch {micro_batch} could not be read: {error}",
                LOADER_HAS_ENDED,
            ) from error
        if isinstance(fields, AsyncPipeError):
            raise fields
        self._received += 1
        if self._is_all_sent and self._received == self._sent:
            self.close()
        return number, {name: _unpacked(value) for name, value in fields.items()}, state


_open: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


@atexit.register  # before multiprocessing waits for them
def _close_all() -> None:
    for reading in tuple(_open):
        reading.close()


@contextmanager
def readers_end() -> Iterator[None]:
    """After the block no worker of this process is left, also where an exception leaves it."""
    try:
        yield
    finally:
        _close_all()


class _ByNumber(Dataset[tuple[int, Any, Any]]):
    """Micro-batches by number, each with its number and the state of the feed after it. An error
    comes in place of one: its class and its sentences would not outlast DataLoader's way of passing
    errors on."""

    def __init__(self, feed: MicroBatches) -> None:
        self._feed = feed

    def __getitem__(self, number: int) -> tuple[int, Any, Any]:
        try:
            fields = self._feed(number)
        except AsyncPipeError as error:
            return number, error, None
        state = self._feed.state() if isinstance(self._feed, StreamFeed) else None
        return number, {name: _packed(value) for name, value in fields.items()}, state


def _packed(value: Tensor) -> Tensor | NDArray[Any]:
    """A small tensor as an array, which is copied through the pipe: the file descriptors that
    others are passed by cost as much as the copy of a quarter of a MiB."""
    is_small = value.nbytes <= _COPIED_BYTES and value.dtype != torch.bfloat16
    return value.numpy() if is_small else value


def _unpacked(value: Tensor | NDArray[Any]) -> Tensor:
    # A clone has torch's alignment, on which the last bits of a product may depend.
    return value if isinstance(value, Tensor) else torch.from_numpy(value).clone()


def _as_it_is(item: Any) -> Any:
    return item


def _begin(own: Callable[[int], None] | None, worker: int) -> None:
    """Runs in a worker that has started."""
    die_with_parent()
    for number in _OF_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_RANK)
    if own is not None:
        own(worker)
    # A worker reads as the rank would; a stream that sees a DataLoader's worker divides itself.
    worker_of_torch._worker_info = None


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Delays signals until after the block, so that a new process cannot handle them as this
    one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
