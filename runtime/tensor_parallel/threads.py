"""Tensor ranks in one process, to check split stages where they are generated.

Each rank is a thread, and one runs at a time: from one collective to the next, by rank. So each has
its own state of torch's generator, and a rank that makes another number of collectives than the
others is an error instead of a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .ranks import Reduction, TensorRanks, using

Result = TypeVar("Result")


def in_threads(size: int, work: Callable[[TensorRanks], Result]) -> list[Result]:
    """Runs `work` for each of `size` tensor ranks; returns the results by rank. Raises the first
    error that a rank raises, and RuntimeError if the ranks make different collectives."""
    return _Ranks(size, work).results()


class _Ranks(Generic[Result]):
    def __init__(self, size: int, work: Callable[[TensorRanks], Result]) -> None:
        self._size, self._work = size, work
        self._turn, self._turned = 0, threading.Condition()
        self._parts: dict[int, Tensor] = {}
        self._calls: set[tuple[str, torch.Size]] = set()
        self._gathered: list[Tensor] = []
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
            ranks = TensorRanks(rank, self._size, _Collectives(rank, self))
            with using(ranks):
                self._results[rank] = self._work(ranks)
            if self._parts:
                raise RuntimeError(f"tensor rank {rank} ends where another one exchanges a tensor")
        except BaseException as error:
            self._error = self._error or error
        self._pass_on(rank)

    def exchange(self, rank: int, call: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which make this call."""
        self._parts[rank] = tensor.clone(memory_format=torch.contiguous_format)
        self._calls.add((call, tensor.shape))
        if rank == self._size - 1:
            if len(self._parts) < self._size or len(self._calls) > 1:
                raise RuntimeError("the tensor ranks exchange tensors of different shapes")
            self._gathered = list(self._parts.values())
            self._parts, self._calls = {}, set()
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._wait(rank, state)
        return self._gathered

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


@dataclass(frozen=True)
class _Collectives:
    """The collectives of the rank of one thread."""

    rank: int
    ranks: _Ranks[Any]

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        parts = torch.stack(self.ranks.exchange(self.rank, op, tensor))
        return parts.sum(0) if op == "sum" else parts.amax(0)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.clone() for part in self.ranks.exchange(self.rank, "gather", tensor)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        of_ranks = self.ranks.exchange(self.rank, "reduce and scatter", torch.stack(list(parts)))
        return torch.stack([each[self.rank] for each in of_ranks]).sum(0)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self.ranks.exchange(self.rank, "broadcast", tensor)[source].clone()

    def close(self) -> None:
        """Does nothing, because threads have no connections."""
