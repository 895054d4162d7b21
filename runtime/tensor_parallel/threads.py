"""Tensor ranks in one process, to check split stages where they are generated.

Each rank is a thread, and one runs at a time: from one collective to the next, by rank. So each has
its own state of torch's generator, and a rank that makes another number of collectives than the
others is an error instead of a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .ranks import TensorRanks, using

Result = TypeVar("Result")


def in_threads(size: int, work: Callable[[TensorRanks], Result]) -> list[Result]:
    """Runs `work` for each of `size` tensor ranks; returns the results by rank. Raises the first
    error that a rank raises, and RuntimeError if the ranks sum different tensors."""
    return _Ranks(size, work).results()


class _Ranks(Generic[Result]):
    def __init__(self, size: int, work: Callable[[TensorRanks], Result]) -> None:
        self._size, self._work = size, work
        self._turn, self._turned = 0, threading.Condition()
        self._parts: list[Tensor | None] = [None] * size
        self._results: dict[int, Result] = {}
        self._error: BaseException | None = None

    def results(self) -> list[Result]:
        state = torch.get_rng_state()
        threads = [
            threading.Thread(target=self._run, args=(rank, state), daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in range(self._size)]

    def _run(self, rank: int, state: Tensor) -> None:
        try:
            self._wait(rank, state)
            ranks = TensorRanks(rank, self._size, lambda tensor: self._sum(rank, tensor))
            with using(ranks):
                self._results[rank] = self._work(ranks)
            if any(part is not None for part in self._parts):
                raise RuntimeError(f"tensor rank {rank} ends where another one sums a tensor")
        except BaseException as error:
            self._error = self._error or error
        self._pass_on(rank)

    def _sum(self, rank: int, tensor: Tensor) -> None:
        self._parts[rank] = tensor
        if rank == self._size - 1:
            parts = [part for part in self._parts if part is not None]
            if len(parts) < self._size or len({part.shape for part in parts}) > 1:
                raise RuntimeError("the tensor ranks sum tensors of different shapes")
            total = torch.stack(parts).sum(0)
            for part in parts:
                part.copy_(total)
            self._parts = [None] * self._size
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._wait(rank, state)

    def _pass_on(self, rank: int) -> None:
        with self._turned:
            self._turn = (rank + 1) % self._size
            self._turned.notify_all()

    def _wait(self, rank: int, state: Tensor) -> None:
        with self._turned:
            self._turned.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise self._error
        torch.set_rng_state(state)
