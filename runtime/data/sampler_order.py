"""The sampler of a DataLoader -> the order of its samples, the same on all ranks.

A random or a sequential sampler only says whether samples are shuffled. Any other sampler, or batch
sampler, is iterated once for each epoch with random numbers that depend on the seed and the epoch
alone; only its indices are used, so that a position in training still says which sample it is.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from ..errors import DataError
from ..rng import drawing_from
from ..user_code import user_errors_as
from .task import SampleOrder

_LIBRARIES = ("torch", "torchdata")
_KEPT = 10_000_000
"""The indices of past epochs that are kept: an asynchronous segment may span several epochs."""


def order_of(loader: DataLoader[Any] | None, length: int, seed: int, source: str) -> SampleOrder:
    """The order of training samples: shuffled, unless a loader says otherwise."""
    if loader is None:
        return SampleOrder(length, seed)
    if (sampler := sampler_of(loader)) is not None:
        return SamplerOrder(sampler, seed, length, source)
    return SampleOrder(length, seed, shuffled=not isinstance(loader.sampler, SequentialSampler))


def check_sampler(loader: DataLoader[Any], source: str) -> None:
    """Raises DataError for a sampler that gives each rank other samples."""
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise DataError(
                f"the DataLoader of {source} has a DistributedSampler, which gives every rank "
                "other samples, but the stages of a pipeline read the same ones.",
                "Leave it out: replicas of the pipeline share out the samples by themselves.",
            )


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler or batch sampler that chooses samples in its own way; None if all samples are
    read once per epoch, in order or shuffled."""
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler
    if batches is not None and not _is_of_library(batches, BatchSampler):
        return batches
    if _is_of_library(sampler, SequentialSampler):
        return None
    if _is_of_library(sampler, RandomSampler):
        is_whole = sampler.num_samples == len(sampler.data_source) and not sampler.replacement
        return None if is_whole else sampler
    return sampler


def _is_of_library(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and type(value).__module__.split(".")[0] in _LIBRARIES


def drawn_indices(sampler: Any, seed: int, epoch: int) -> list[int]:
    """The indices of an epoch, those of batches one after the other."""
    with drawing_from(seed, "epoch", epoch):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        indices: list[int] = []
        for drawn in sampler:
            indices += drawn if isinstance(drawn, list | tuple) else [int(drawn)]
    return indices


class SamplerOrder(SampleOrder):
    """The order of a sampler that is neither random nor sequential.

    All epochs have as many samples as the first. A sampler may keep a state, so epochs are drawn
    one after the other from the first on.
    """

    def __init__(self, sampler: Any, seed: int, samples: int, source: str) -> None:
        self._sampler, self._source, self._samples = sampler, source, samples
        self._epochs: dict[int, list[int]] = {}
        self._next = 0
        super().__init__(samples, seed)
        self.length = len(self._permute(0))

    def digest(self, epoch: int) -> bytes:
        text = ",".join(map(str, self._permute(epoch)))
        return hashlib.sha256(text.encode()).digest()

    def _permute(self, epoch: int) -> list[int]:
        while self._next <= epoch:
            self._draw()
        return self._epochs[epoch]

    def _draw(self) -> None:
        epoch, self._next = self._next, self._next + 1
        with user_errors_as(DataError, f"the sampler of --data {self._source}"):
            indices = drawn_indices(self._sampler, self._seed, epoch)
        first = self.length if self._epochs else len(indices)
        if not indices or len(indices) != first:
            raise DataError(
                f"the sampler of {self._source} gives {len(indices)} samples in epoch {epoch}"
                + (f", but {first} before." if indices else "."),
                "Let it give the same number of samples in every epoch.",
            )
        if not all(0 <= index < self._samples for index in indices):
            raise DataError(
                f"the sampler of {self._source} gives sample {max(indices)}, but there are "
                f"{self._samples}.",
                "Give it the data set of the DataLoader.",
            )
        self._epochs[epoch] = indices
        while len(self._epochs) > max(2, _KEPT // first):
            del self._epochs[next(iter(self._epochs))]
