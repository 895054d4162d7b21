"""A folder of tokenised files -> one sequence of ids, of which only what is asked for is read.

The files are taken in the order of their names, and a text goes on from one to the next, so that
it makes no difference in how many files it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ..errors import DataError
from .tokens import Ids, IdSequence, Tokens, read_bin

SUFFIX = ".bin"


def token_files(source: str) -> list[Path]:
    """The tokenised files that `--data` names: one, or those of a folder; none of another kind."""
    if source.endswith(SUFFIX):
        return [Path(source)]
    folder = Path(source)
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def read_token_files(files: Sequence[Path]) -> Tokens:
    """Maps tokenised files into memory. Raises DataError for one that is damaged, and for files of
    different tokenizers."""
    parts = [read_bin(file) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        if (part.tokenizer, part.mask) != (first.tokenizer, first.mask):
            raise DataError(
                f"{file} was made with the tokenizer {part.tokenizer}, {files[0].name} with "
                f"{first.tokenizer}: their numbers mean different tokens.",
                "Tokenise all files alike.",
            )
    if len(parts) == 1:
        return first
    ids = Shards([part.ids for part in parts])
    starts = (
        begin + start
        for begin, part in zip(ids.begins, parts, strict=True)
        for start in part.starts
    )
    size = max(part.vocab_size for part in parts)
    return Tokens(ids, first.tokenizer, size, tuple(starts), first.mask)


class Shards:
    """Arrays of ids as one; `begins` are the positions of their first ones.

    >>> shards = Shards([np.array([1, 2, 3], dtype="uint16"), np.array([4, 5], dtype="uint16")])
    >>> len(shards), shards.begins, shards[2:5].tolist(), shards[-1:].tolist()
    (5, (0, 3), [3, 4, 5], [5])
    """

    def __init__(self, parts: Sequence[IdSequence]) -> None:
        self._parts = tuple(parts)
        *begins, self._length = accumulate(map(len, parts), initial=0)
        self.begins = tuple(begins)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Ids:
        start, stop, step = where.indices(self._length)
        assert step == 1
        if stop <= start:
            return self._parts[0][:0]
        first = bisect_right(self.begins, start) - 1
        bounds = pairwise((*self.begins[first:], self._length))
        found = [
            part[max(0, start - begin) : stop - begin]
            for part, (begin, _) in zip(self._parts[first:], bounds, strict=True)
            if begin < stop
        ]
        return np.concatenate(found) if len(found) > 1 else found[0]
