"""A stream of samples -> the micro-batches of a rank, in ascending order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import cycle
from typing import Any

from torch import Tensor

from ..config.batch_layout import StepBatch
from ..data.streams import StreamReader, StreamSamples
from ..data.task import BatchDims, laid_out
from .batches import read_errors


class StreamFeed:
    """The number of a micro-batch -> the fields of it that this rank's stages read.

    Numbers ascend; the samples of those that are left out, which other replicas train on, are read
    and dropped.

    Arguments:
    first: the number of the first micro-batch of the run in all replicas.
    place: the place in the stream that a checkpoint keeps; None begins with the first sample, and
        skips those that were trained on before.
    """

    def __init__(
        self,
        samples: StreamSamples,
        batch: StepBatch,
        fields: Collection[str],
        *,
        seed: int,
        dims: BatchDims,
        first: int,
        place: Mapping[str, Any] | None,
    ) -> None:
        self._batch, self._fields, self._dims = batch, fields, dims
        self._reader = StreamReader(samples.stream, samples.naming, fields, seed, place)
        self._next = first

    def __call__(self, micro_batch: int) -> dict[str, Tensor]:
        begin, size = self._batch.place(micro_batch)
        with read_errors(f"micro-batch {micro_batch}", range(begin, begin + size)):
            for count in self._skipped(micro_batch):
                self._reader.take(count)
            rows = self._reader.take(size)
        self._next = micro_batch + 1
        return laid_out(rows, self._dims)

    def state(self) -> dict[str, Any] | None:
        """The place in the stream as JSON; None if the stream cannot say it."""
        return self._reader.state()

    def _skipped(self, micro_batch: int) -> Iterator[int]:
        """The samples to be read before a micro-batch: micro-batch by micro-batch, as their random
        numbers depend on the positions at which reads begin."""
        start = self._batch.place(self._next)[0]
        sizes = cycle(self._batch.sizes)
        while (left := start - self._reader.position) > 0:
            yield min(left, next(sizes))
        for number in range(self._next, micro_batch):
            yield self._batch.place(number)[1]
