"""A user's own data -> a dataset, and a digest of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..seeding import drawing_from, import_seeded
from ..structure import names_in, tensors_by_name
from ..tensors import raw_bytes
from ..user_code import told_as
from .task import Task

_DIGESTED_BYTES = 1 << 26
"""The most bytes of a column that its digest reads, in pieces over its whole length."""


class OwnDataset:
    """A sequence of dicts, or of tuples in the order of forward's arguments with the target last.

    A sample is like an example input without the dimension of the batch, nested as that is.
    """

    def __init__(
        self, samples: Sequence[Any], task: Task, source: str, *, dtype: torch.dtype
    ) -> None:
        self._samples = samples
        self._dtype = dtype
        self._source = source
        self._names = task.fields
        self._arguments = task.arguments

    @property
    def fields(self) -> tuple[str, ...]:
        return self._names

    def __len__(self) -> int:
        with told_as(DataError, f"the length of --data {self._source}"):
            return len(self._samples)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        samples = [self._named(self._samples[index]) for index in indices]
        lacking = [name for name in fields if name not in samples[0]]
        if lacking:
            raise DataError(
                f"a sample of {self._source} has {', '.join(map(str, samples[0]))}, "
                f"but the model reads {lacking[0]}."
            )
        return {name: self._stacked(name, samples) for name in fields}

    def _stacked(self, name: str, samples: Sequence[Mapping[str, Any]]) -> Tensor:
        tensors = [self._tensor(sample[name]) for sample in samples]
        shapes = {tuple(tensor.shape): None for tensor in tensors}
        if len(shapes) > 1:
            first, second = list(shapes)[:2]
            raise DataError(
                f"{name} has the shape {first} in one sample of {self._source} and {second} in "
                "another of the same micro-batch.",
                "Pad the samples to one shape.",
            )
        return torch.stack(tensors)

    def _tensor(self, value: Any) -> Tensor:
        tensor = torch.as_tensor(value)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _named(self, sample: Any) -> Mapping[str, Any]:
        if not isinstance(sample, Mapping):
            values = sample if isinstance(sample, tuple | list) else (sample,)
            names = self._positions()
            if len(values) != len(names):
                raise DataError(
                    f"a sample of {self._source} has {len(values)} values, but the model reads "
                    f"{len(names)}: {', '.join(names)}."
                )
            sample = dict(zip(names, values, strict=True))
        named = dict(sample)
        for name, structure in self._arguments.items():
            plain = name.removeprefix("*")
            if plain in sample and structure != plain:
                named |= tensors_by_name(structure, sample[plain], plain)
        return named

    def _positions(self) -> tuple[str, ...]:
        """What the values of a sample without names are: arguments with tensors, the target."""
        read = {
            name.removeprefix("*"): set(names_in(structure))
            for name, structure in self._arguments.items()
        }
        inputs = set().union(*read.values())
        others = [name for name in self._names if name not in inputs]
        return (*(name for name, names in read.items() if names & set(self._names)), *others)


class Columns:
    """A dict of tensors (or lists) of equal length as a sequence of samples; dicts and tuples of
    such are structures of a sample."""

    def __init__(self, columns: Mapping[str, Any], source: str) -> None:
        self._leaves = dict(_leaves(columns))
        lengths = {name: len(leaf) for name, leaf in self._leaves.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"--data {source}: the columns differ in length ({told}).")
        self._columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: _row(column, index) for name, column in self._columns.items()}

    def digest(self) -> bytes:
        """32 bytes that differ when a tensor or an array of the columns does."""
        found = hashlib.sha256()
        for name, leaf in self._leaves.items():
            if isinstance(leaf, Tensor | np.ndarray):
                for part in _pieces(torch.as_tensor(leaf)):
                    found.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
                    found.update(raw_bytes(part))
        return found.digest()


def _pieces(column: Tensor, pieces: int = 64) -> Iterator[Tensor]:
    """The whole column, or pieces from all parts of it where it is large."""
    rows = len(column)
    if column.nbytes <= _DIGESTED_BYTES:
        yield column
        return
    count = max(1, _DIGESTED_BYTES // pieces * rows // column.nbytes)
    for piece in range(pieces):
        first = piece * rows // pieces
        yield column[first : first + count]


def _leaves(column: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every column by its name, those in nested dicts and tuples too."""
    if isinstance(column, Mapping):
        for key, inner in column.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(column, tuple):
        for position, inner in enumerate(column):
            yield from _leaves(inner, f"{name}[{position}]")
    else:
        yield name, column


def _row(column: Any, index: int) -> Any:
    if isinstance(column, Mapping):
        return {key: _row(inner, index) for key, inner in column.items()}
    if isinstance(column, tuple):
        return tuple(_row(inner, index) for inner in column)
    return column[index]


def own_parts(source: str, seed: int) -> tuple[Any, Any]:
    """Calls the user's function; its training and its evaluation samples (None: no such). What it
    draws depends on the seed alone.

    Raises DataError when it returns neither a sequence of samples nor a pair of these.
    """
    made = import_seeded(source, "--data", DataError, seed)
    if callable(made):
        with drawing_from(seed, "data"), told_as(DataError, f"--data {source}"):
            made = made()
    if isinstance(made, tuple) and len(made) == 2:
        made = tuple(_with_rows(part, source) for part in made)
        if all(map(_is_dataset, made)):
            return made
    made = _with_rows(made, source)
    if not _is_dataset(made):
        raise DataError(
            f"--data {source} gives a {type(made).__name__}, not a sequence of samples.",
            "Return a dict of tensors, a list of dicts, a torch Dataset with a length, or a "
            "(train, eval) pair of these.",
        )
    return made, None


def _with_rows(made: Any, source: str) -> Any:
    return Columns(made, source) if isinstance(made, Mapping) and made else made


def _is_dataset(value: Any) -> bool:
    has_items = hasattr(value, "__len__") and (
        hasattr(value, "__getitem__") or hasattr(value, "get")
    )
    return has_items and not isinstance(value, Tensor | str | Mapping)
