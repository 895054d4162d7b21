"""The data that each rank reads -> a check that all ranks read the same samples.

Inputs are read on one rank and labels on another; only a common order pairs them. The order is a
function of the seed and the number of samples, and the ranks compare it at the start and at every
epoch. If the user's own code makes the samples, the ranks also compare the first samples of the
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

from ..data.samples import OwnDataset
from ..data.streams import StreamSamples
from ..data.task import SampleOrder
from ..distributed.process_groups import World
from ..errors import DataError
from ..tensor_files import raw_bytes
from .batches import Data, Dataset, read_samples

_COMPARED = 16
"""The number of samples of an epoch, and of the evaluation data, that the ranks compare."""

_HOW_TO_DRAW = (
    "Draw from the global generators of torch, NumPy or Python, which are seeded alike on all "
    "ranks, or from one with a fixed seed; sort the elements of a set."
)
_DIGEST_BYTES = 8
_OF_SAMPLE = 2 * _DIGEST_BYTES  # as it was read first, and as it was read again
_CONTENT = struct.Struct(f"<?32s32s{2 * f'{_COMPARED * _OF_SAMPLE}s'}qq")


@dataclass(frozen=True)
class _Seen:
    """A rank's view of an epoch.

    reads: True if the rank reads data.
    order: the digest of the order.
    content: the digest of the whole data.
    train, evaluation: digests of single samples, each of which was read twice.
    unlike: a sample that differed the second time; -1 if there is none.
    partial: a sample that differed when only the rank's own fields were read; -1 if there is none.
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
    """Numbers about the data that all ranks need, though only some of them read it.

    The constructor is collective and raises DataError when ranks differ.

    length: the number of samples.
    evaluation_length: the number of evaluation samples.

    Arguments:
    first: the position at which the run begins.
    fields: the fields that the model and the criterion read.
    own_fields: those that this rank reads.
    """

    def __init__(
        self,
        world: World,
        data: Data | None,
        order: SampleOrder | None,
        *,
        first: int = 0,
        fields: Collection[str] = (),
        own_fields: Collection[str] = (),
    ) -> None:
        self._world = world
        self._data = data
        self._order = order
        self._fields, self._own_fields = fields, own_fields
        lengths = (0, 0) if data is None else (len(data.train), len(data.evaluation or ()))
        parts = world.gathered(struct.pack("<qq", *lengths))
        pairs = [struct.unpack("<qq", part) for part in parts]
        readers = {rank: pair for rank, pair in enumerate(pairs) if pair[0]}
        for rank, pair in readers.items():
            first_rank, expected = next(iter(readers.items()))
            if pair != expected:
                raise _disagreement(
                    first_rank, rank, f"they have {expected[0]:,} and {pair[0]:,} samples"
                )
        self.length, self.evaluation_length = next(iter(readers.values()), (1, 0))
        self._begun = self._checked = first // self.length

    def check(
        self,
        first: int,
        count: int,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> str:
        """Compares every epoch that begins at these positions; at the first epoch, returns a
        warning of data that is legal but probably unintended.

        Collective; `reading` is entered while this rank reads samples. Raises DataError, the same
        on all ranks, that names two ranks that differ.
        """
        last = (first + count - 1) // self.length
        warning = ""
        for epoch in range(self._checked, last + 1):
            with reading():
                own = self._seen(epoch)
            parts = self._world.gathered(own.to_bytes())
            seen = [_Seen(*_CONTENT.unpack(part)) for part in parts]
            readers = {rank: reader for rank, reader in enumerate(seen) if reader.reads}
            for rank, reader in readers.items():
                other, expected = next(iter(readers.items()))
                if how := self._difference(expected, reader, epoch):
                    raise _disagreement(other, rank, how)
            if epoch == self._begun:
                warning = self._warning(readers)
        self._checked = max(self._checked, last + 1)
        return warning

    def _seen(self, epoch: int) -> _Seen:
        data, order = self._data, self._order
        if data is None:
            return _Seen()
        own = b"" if order is None else hashlib.sha256(order.digest(epoch)).digest()
        if data.seed is None or (order is None and epoch != self._begun):
            return _Seen(True, own, data.digest)
        is_first, samples = epoch == self._begun, self._train_samples(epoch)
        train, unlike, partial = self._digests(data.train, data.seed, samples, is_first=is_first)
        evaluation = b""
        if data.evaluation is not None and is_first:
            samples = self._held_out_samples()
            evaluation, *_ = self._digests(data.evaluation, data.seed, samples, is_first=False)
        return _Seen(True, own, data.digest, train, evaluation, unlike, partial)

    def _train_samples(self, epoch: int) -> list[int]:
        count = min(_COMPARED, self.length)
        if self._order is None:  # a stream
            return list(range(count))
        return self._order.samples(epoch * self.length, count)

    def _held_out_samples(self) -> list[int]:
        assert self._data is not None and self._data.evaluation is not None
        return list(range(min(_COMPARED, len(self._data.evaluation))))

    def _digests(
        self, dataset: Dataset, seed: int, indices: Sequence[int], *, is_first: bool
    ) -> tuple[bytes, int, int]:
        """Digests of the samples, which are read twice at first; then the first sample that
        differed when it was read again with all fields, and with this rank's own."""

        def read(fields: Collection[str]) -> dict[str, Tensor]:
            key, owner = ("compared", indices[0]), "the start of an epoch"
            return read_samples(dataset, indices, fields, seed=seed, key=key, owner=owner)

        def first_unlike(fields: Mapping[str, Tensor]) -> int:
            pairs = (
                (index, _digest(once, place, *fields), _digest(fields, place, *fields))
                for place, index in enumerate(indices)
            )
            return next((index for index, first, other in pairs if first != other), -1)

        once = again = read(self._fields)
        if is_first:
            again = read(self._fields)
        unlike = first_unlike(again)
        # These always make all fields of a sample together.
        makes_all = isinstance(dataset, OwnDataset | StreamSamples)
        by_fields = is_first and unlike < 0 and not makes_all
        partial = first_unlike(read(self._own_fields)) if by_fields else -1
        places = range(len(indices))
        digests = (
            _digest(once, place, *self._fields) + _digest(again, place, *self._fields)
            for place in places
        )
        return b"".join(digests), unlike, partial

    def _difference(self, expected: _Seen, other: _Seen, epoch: int) -> str:
        """The difference between the data of two ranks; "" if there is none."""
        if other.order != expected.order:
            return f"their order of epoch {epoch} differs"
        for kind, mine, theirs in (
            ("", expected.train, other.train),
            (" of the evaluation data", expected.evaluation, other.evaluation),
        ):
            places = range(0, len(mine), _OF_SAMPLE)
            unequal = (at for at in places if mine[at:][:_OF_SAMPLE] != theirs[at:][:_OF_SAMPLE])
            if (at := next(unequal, None)) is not None:
                samples = self._held_out_samples() if kind else self._train_samples(epoch)
                sample = samples[at // _OF_SAMPLE]
                return f"sample {sample}{kind} has other values"
        return "" if other.content == expected.content else "their tensors have other values"

    def _warning(self, readers: Mapping[int, _Seen]) -> str:
        """A warning of samples that depend on more than the seed. Raises DataError where this is
        not allowed."""
        for rank, reader in readers.items():
            if reader.partial >= 0:
                raise DataError(
                    f"sample {reader.partial} of the data has other values when rank {rank} asks "
                    "for some of its fields alone: inputs would meet the labels of other samples.",
                    "get(indices, fields) must give a field the same values, whichever fields are "
                    "requested.",
                )
            if reader.unlike >= 0:
                return (
                    f"sample {reader.unlike} of the data has other values when it is read again "
                    f"with the same seed: a resumed run cannot repeat this one. {_HOW_TO_DRAW}"
                )
        return ""


def _digest(fields: Mapping[str, Tensor], place: int, *names: str) -> bytes:
    """The digest of some fields of one sample in a batch."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        value = fields[name][place]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(raw_bytes(value))
    return digest.digest()


def _disagreement(first: int, second: int, how: str) -> DataError:
    return DataError(
        f"ranks {first} and {second} read different data: {how}, so that inputs would meet the "
        "labels of other samples.",
        f"Give all ranks the same --data, --tokenizer and --seed. {_HOW_TO_DRAW}",
    )
