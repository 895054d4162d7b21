"""What the ranks read of the data, each by itself -> the proof that they mean the same samples.

Inputs are read on one rank and labels on another; nothing but a common order pairs them. It is a
function of the seed and the number of samples, and the ranks compare it at the start and at
every epoch. Where the user's own code makes the samples, they also compare the first samples of the
epoch with all their fields, whichever of these each rank reads.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data.order import Order
from ..data.own import OwnDataset
from ..errors import DataError
from ..launching.world import World
from ..tensors import raw_bytes
from .sources import Data, Dataset, read_samples

_COMPARED = 16
"""How many samples of an epoch, and of the evaluation data, the ranks compare."""

_HOW_TO_DRAW = (
    "Draw from the global generators of torch, NumPy or Python, which are seeded alike on all "
    "ranks, or from one that is made of a fixed seed; sort what comes from a set."
)
_DIGEST_BYTES = 8
_OF_SAMPLE = 2 * _DIGEST_BYTES  # as it was read first, and as it was read again
_CONTENT = struct.Struct(f"<?32s32s{2 * f'{_COMPARED * _OF_SAMPLE}s'}qq")


@dataclass(frozen=True)
class _Seen:
    """What a rank has seen of an epoch.

    `order` and `content` are digests of the order and of the whole data, `train` and `evaluation`
    those of single samples, each of which was read twice. `unlike` is a sample that was another one
    the second time, `partial` one that was another one when only the rank's own fields were asked
    for; -1 where there is none.
    """

    reads: bool = False
    order: bytes = b""
    content: bytes = b""
    train: bytes = b""
    evaluation: bytes = b""
    unlike: int = -1
    partial: int = -1

    def to_bytes(self) -> bytes:
        return _CONTENT.pack(
            self.reads,
            self.order,
            self.content,
            self.train,
            self.evaluation,
            self.unlike,
            self.partial,
        )


class Agreement:
    """The numbers that all ranks need of data that only some of them read.

    `length` is the number of samples, `evaluation_batches` how many micro-batches there are to
    evaluate on, at most as many as were asked for. `first` is the position that the run begins at.
    `fields` are all that the model and the criterion read, `own_fields` those that this rank reads.
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
        fields: Collection[str] = (),
        own_fields: Collection[str] = (),
    ) -> None:
        self._world = world
        self._data = data
        self._order = order
        self._fields, self._own_fields = fields, own_fields
        lengths = (0, 0) if data is None else (len(data.train), len(data.evaluation or ()))
        told = [struct.unpack("<qq", part) for part in world.gathered(struct.pack("<qq", *lengths))]
        readers = {rank: pair for rank, pair in enumerate(told) if pair[0]}
        for rank, pair in readers.items():
            first_rank, expected = next(iter(readers.items()))
            if pair != expected:
                raise _disagreement(
                    first_rank, rank, f"they have {expected[0]:,} and {pair[0]:,} samples"
                )
        self.length, evaluation = next(iter(readers.values()), (1, 0))
        self._begun = self._checked = first // self.length
        self.evaluation_batches = min(batches, -(-evaluation // size))

    def check(
        self,
        first: int,
        count: int,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> str:
        """Compares every epoch that these positions are the first to touch; at the first one a
        warning of what is legal there and probably not meant.

        Collective; `reading` is entered where this rank reads samples. Raises DataError, the same
        on all ranks, naming two that differ.
        """
        last = (first + count - 1) // self.length
        warning = ""
        for epoch in range(self._checked, last + 1):
            with reading():
                own = self._seen(epoch)
            told = self._world.gathered(own.to_bytes())
            seen = [_Seen(*_CONTENT.unpack(part)) for part in told]
            readers = {rank: one for rank, one in enumerate(seen) if one.reads}
            for rank, one in readers.items():
                other, expected = next(iter(readers.items()))
                if how := self._difference(expected, one, epoch):
                    raise _disagreement(other, rank, how)
            if epoch == self._begun:
                warning = self._warning(readers)
        self._checked = max(self._checked, last + 1)
        return warning

    def _seen(self, epoch: int) -> _Seen:
        data, order = self._data, self._order
        if data is None or order is None:
            return _Seen()
        own = hashlib.sha256(order.digest(epoch)).digest()
        if data.seed is None:
            return _Seen(True, own, data.digest)
        train, unlike, partial = self._digests(data.train, data.seed, self._train_samples(epoch))
        evaluation = b""
        if data.evaluation is not None and epoch == self._begun:
            evaluation, *_ = self._digests(data.evaluation, data.seed, self._held_out_samples())
        return _Seen(True, own, data.digest, train, evaluation, unlike, partial)

    def _train_samples(self, epoch: int) -> list[int]:
        assert self._order is not None
        return self._order.samples(epoch * self.length, min(_COMPARED, self.length))

    def _held_out_samples(self) -> list[int]:
        assert self._data is not None and self._data.evaluation is not None
        return list(range(min(_COMPARED, len(self._data.evaluation))))

    def _digests(
        self, dataset: Dataset, seed: int, indices: Sequence[int]
    ) -> tuple[bytes, int, int]:
        """Digests of the samples, read twice, and which was another one when it was read again with
        all fields and with this rank's own."""

        def read(fields: Collection[str]) -> dict[str, Tensor]:
            key, what = ("compared", indices[0]), "the start of an epoch"
            return read_samples(dataset, indices, fields, seed=seed, key=key, what=what)

        def first_unlike(fields: Mapping[str, Tensor]) -> int:
            pairs = (
                (index, _digest(once, place, *fields), _digest(fields, place, *fields))
                for place, index in enumerate(indices)
            )
            return next((index for index, one, other in pairs if one != other), -1)

        once, again = read(self._fields), read(self._fields)
        unlike = first_unlike(again)
        # Of a sample that `OwnDataset` reads, all fields are made together.
        by_fields = unlike < 0 and not isinstance(dataset, OwnDataset)
        partial = first_unlike(read(self._own_fields)) if by_fields else -1
        places = range(len(indices))
        digests = (
            _digest(once, place, *self._fields) + _digest(again, place, *self._fields)
            for place in places
        )
        return b"".join(digests), unlike, partial

    def _difference(self, expected: _Seen, other: _Seen, epoch: int) -> str:
        """What two ranks do not have in common; "" if they read the same."""
        if other.order != expected.order:
            return f"their order of epoch {epoch} differs"
        for kind, one, two in (
            ("", expected.train, other.train),
            (" of the evaluation data", expected.evaluation, other.evaluation),
        ):
            places = range(0, len(one), _OF_SAMPLE)
            unequal = (at for at in places if one[at:][:_OF_SAMPLE] != two[at:][:_OF_SAMPLE])
            if (at := next(unequal, None)) is not None:
                samples = self._held_out_samples() if kind else self._train_samples(epoch)
                sample = samples[at // _OF_SAMPLE]
                return f"sample {sample}{kind} has other values"
        return "" if other.content == expected.content else "their tensors have other values"

    def _warning(self, readers: Mapping[int, _Seen]) -> str:
        """What of samples that depend on more than the seed is legal. Raises DataError where it is
        not."""
        for rank, one in readers.items():
            if one.partial >= 0:
                raise DataError(
                    f"sample {one.partial} of the data has other values when rank {rank} asks for "
                    "some of its fields alone: inputs would meet the labels of other samples.",
                    "get(indices, fields) has to give a field the same values, whatever else it is "
                    "asked for.",
                )
            if one.unlike >= 0:
                return (
                    f"sample {one.unlike} of the data has other values when it is read again with "
                    f"the same seed: a resumed run does not repeat this one. {_HOW_TO_DRAW}"
                )
        return ""


def _digest(fields: Mapping[str, Tensor], place: int, *names: str) -> bytes:
    """Of one sample in a batch, with these of its fields."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        value = fields[name][place]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(raw_bytes(value))
    return found.digest()


def _disagreement(first: int, second: int, how: str) -> DataError:
    return DataError(
        f"ranks {first} and {second} do not read the same data: {how}, so that inputs would meet "
        "the labels of other samples.",
        f"Give all ranks the same --data, --tokenizer and --seed. {_HOW_TO_DRAW}",
    )
