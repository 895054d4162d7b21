"""What the ranks read of the data, each by itself -> the proof that they mean the same samples.

Inputs are read on one rank and labels on another; nothing but a common order pairs them. It is a
function of the seed and the number of samples, and the ranks compare it at the start and at
every epoch.
"""

from __future__ import annotations

import hashlib
import struct

from ..data.order import Order
from ..errors import DataError
from ..launching.world import World
from .sources import Data

_NOTHING = bytes(32)


class Agreement:
    """The numbers that all ranks need of data that only some of them read.

    `length` is the number of samples, `evaluation_batches` how many micro-batches there are to
    evaluate on, at most as many as were asked for. `first` is the position that the run begins at.
    Making one is collective. Raises DataError when ranks differ.
    """

    def __init__(
        self,
        world: World,
        data: Data | None,
        order: Order | None,
        *,
        size: int,
        batches: int,
        first: int = 0,
    ) -> None:
        self._world = world
        self._data = data
        self._order = order
        lengths = (0, 0) if data is None else (len(data.train), len(data.evaluation or ()))
        told = [struct.unpack("<qq", part) for part in world.gathered(struct.pack("<qq", *lengths))]
        readers = {rank: pair for rank, pair in enumerate(told) if pair[0]}
        for rank, pair in readers.items():
            first, expected = next(iter(readers.items()))
            if pair != expected:
                raise _disagreement(
                    first, rank, f"they have {expected[0]:,} and {pair[0]:,} samples"
                )
        self.length, evaluation = next(iter(readers.values()), (1, 0))
        self._checked = first // self.length
        self.evaluation_batches = min(batches, -(-evaluation // size))

    def check(self, first: int, count: int) -> None:
        """Compares the order of every epoch that these positions are the first to touch.

        Collective. Raises DataError, the same on all ranks, naming two that differ.
        """
        last = (first + count - 1) // self.length
        for epoch in range(self._checked, last + 1):
            digests = self._world.gathered(self._digest(epoch))
            readers = {rank: digest for rank, digest in enumerate(digests) if digest != _NOTHING}
            for rank, digest in readers.items():
                other, expected = next(iter(readers.items()))
                if digest != expected:
                    raise _disagreement(other, rank, f"their order of epoch {epoch} differs")
        self._checked = max(self._checked, last + 1)

    def _digest(self, epoch: int) -> bytes:
        if self._data is None or self._order is None:
            return _NOTHING
        return hashlib.sha256(self._data.digest + self._order.digest(epoch)).digest()


def _disagreement(first: int, second: int, how: str) -> DataError:
    return DataError(
        f"ranks {first} and {second} do not read the same data: {how}, so that inputs would meet "
        "the labels of other samples.",
        "Give all ranks the same --data, --tokenizer and --seed.",
    )
