"""Seed and position -> sample: one order for all ranks, by construction, and the proof of it.

A position is a whole number that counts samples from the start of training; resuming needs
nothing else. Position x is sample `permutation(seed, x // n)[x % n]` of n samples.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from ..seeding import seed_of


def seeded_generator(seed: int, *key: object) -> torch.Generator:
    """A generator for one purpose: equal seed and key, equal numbers, on every machine."""
    return torch.Generator().manual_seed(seed_of(seed, *key))


class Order:
    """The order in which `length` samples are seen, epoch by epoch."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def samples(self, first: int, count: int) -> list[int]:
        """The samples at positions `first` to `first + count`."""
        return [
            self._permutation(position // self.length)[position % self.length]
            for position in range(first, first + count)
        ]

    def epochs(self, first: int, count: int) -> range:
        """The epochs that these positions touch."""
        return range(first // self.length, (first + count - 1) // self.length + 1)

    def digest(self, epoch: int) -> bytes:
        """32 bytes that differ when the order of an epoch does."""
        text = ",".join(map(str, self._permutation(epoch)))
        return hashlib.sha256(text.encode()).digest()

    def _permute(self, epoch: int) -> list[int]:
        generator = seeded_generator(self._seed, "epoch", epoch)
        permutation: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return permutation
