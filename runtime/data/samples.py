"""Samples of the user -> batches by the names that the model reads.

A sample is a dict, or a tuple in the order of forward's arguments with the target last. It is like
an example input without the dimension of the batch, nested as that is. With a collate function, as
a DataLoader has one, that function joins the samples of a micro-batch and may pad them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..plan.structure import names_in, tensors_by_name
from ..tensor_files import raw_bytes
from ..user_code import user_errors_as
from .task import TARGET, InputDtypes, Task

_DIGESTED_BYTES = 1 << 26
"""The most bytes of a column that its digest reads, in pieces over its whole length."""

OTHER_NAMES = {TARGET: ("label", "labels"), "labels": ("label",)}
"""Names under which data sets keep what the model or the criterion calls otherwise."""

Collate = Callable[[list[Any]], Any]
"""The samples of a micro-batch -> the batch."""


class Naming:
    """Gives the values of a sample, or of a batch, the names that the model reads."""

    def __init__(self, task: Task, source: str, *, dtypes: InputDtypes) -> None:
        self.fields = task.fields
        self.source = source
        self._arguments = task.arguments
        self._has_label = task.label is not None
        answers = {TARGET, *OTHER_NAMES[TARGET]}
        self._left_out = [name for name in task.left_out if name not in answers]
        self._dtypes = dtypes

    def named(self, sample: Any) -> Mapping[str, Any]:
        """Every value by its name; raises DataError for another number of values."""
        if not isinstance(sample, Mapping):
            values = sample if isinstance(sample, tuple | list) else (sample,)
            names = self._positions()
            if not self._has_label and len(values) == len(names) + 1:
                values = values[:-1]  # the target, which a prediction does not read
            if len(values) != len(names):
                raise DataError(
                    f"a sample of {self.source} has {len(values)} values, but the model reads "
                    f"{len(names)}: {', '.join(names)}."
                )
            sample = dict(zip(names, values, strict=True))
        named = dict(sample)
        for name, structure in self._arguments.items():
            plain = name.removeprefix("*")
            if plain in sample and structure != plain:
                named |= tensors_by_name(structure, sample[plain], plain)
        for name, others in OTHER_NAMES.items():
            unused = [other for other in others if other in named and other not in self.fields]
            if name in self.fields and name not in named and len(unused) == 1:
                named[name] = named[unused[0]]
        return named

    def check(self, named: Mapping[str, Any], fields: Collection[str]) -> None:
        """Raises DataError for a field that is not there, and for a value of an argument of forward
        that the plan was made without."""
        lacking = [name for name in fields if name not in named]
        if lacking:
            raise DataError(
                f"a sample of {self.source} has {', '.join(map(str, named))}, "
                f"but the model reads {lacking[0]}.",
                f"Rename one of them to {lacking[0]}.",
            )
        for name in self._left_out:
            if named.get(name) is not None:
                raise DataError(
                    f"a sample of {self.source} has {name}, which forward takes, but the model was "
                    "partitioned without it.",
                    f"Leave {name} out of the samples, or partition the model with an example of "
                    "it.",
                )

    def tensor(self, name: str, value: Any) -> Tensor:
        """A value as a tensor in the dtype that the run reads. Raises DataError for a value that is
        not a tensor, an array or numbers."""
        try:
            tensor = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{name} of a sample of {self.source} has the type {type(value).__name__}, which "
                "is not a tensor, an array or numbers.",
                "Convert it in the dataset, for example by torchvision's ToTensor or a tokenizer.",
            ) from error
        is_strided = tensor.layout is torch.strided
        return self._dtypes.cast(name, tensor if is_strided else tensor.to_dense())

    def _positions(self) -> tuple[str, ...]:
        """The names of the values of a sample without names: arguments with tensors, then the
        target."""
        read = {
            name.removeprefix("*"): set(names_in(structure))
            for name, structure in self._arguments.items()
        }
        inputs = set().union(*read.values())
        others = [name for name in self.fields if name not in inputs]
        return (*(name for name, names in read.items() if names & set(self.fields)), *others)


class OwnDataset:
    """The user's samples by number, as batches of named tensors.

    Arguments:
    samples: has `__len__`, and `__getitem__` or `__getitems__`.
    collate: joins the samples of a batch, with the samples in dimension 0; without one, tensors
        are stacked.
    """

    def __init__(self, samples: Sequence[Any], naming: Naming, collate: Collate | None) -> None:
        self._samples = samples
        self._naming = naming
        self._collate = collate

    @property
    def fields(self) -> tuple[str, ...]:
        return self._naming.fields

    def __len__(self) -> int:
        with user_errors_as(DataError, f"the length of --data {self._naming.source}"):
            return len(self._samples)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        many = getattr(self._samples, "__getitems__", None)
        samples = many(list(indices)) if many else [self._samples[index] for index in indices]
        return batch_of(samples, fields, self._naming, self._collate)


def batch_of(
    samples: Sequence[Any], fields: Collection[str], naming: Naming, collate: Collate | None
) -> dict[str, Tensor]:
    """These fields of a batch, with the samples in dimension 0. Raises DataError."""
    if collate is None:
        named = [naming.named(sample) for sample in samples]
        naming.check(named[0], fields)
        return {name: _stacked(name, named, naming) for name in fields}
    batch = naming.named(collate(list(samples)))
    naming.check(batch, fields)
    tensors = {name: naming.tensor(name, batch[name]) for name in fields}
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or len(tensor) != len(samples):
            raise DataError(
                f"the collate function of {naming.source} made {name} of shape "
                f"{tuple(tensor.shape)} from {len(samples)} samples.",
                "Keep one row for each sample, in dimension 0.",
            )
    return tensors


def _stacked(name: str, samples: Sequence[Mapping[str, Any]], naming: Naming) -> Tensor:
    tensors = [naming.tensor(name, sample[name]) for sample in samples]
    shapes = {tuple(tensor.shape): None for tensor in tensors}
    if len(shapes) > 1:
        first, second = list(shapes)[:2]
        raise DataError(
            f"{name} has the shape {first} in one sample of {naming.source} and {second} in "
            "another, but all samples of a micro-batch have one shape.",
            "Return a DataLoader with a collate_fn that pads them (cross_entropy leaves out a "
            "target of -100), or pad the samples to one shape, graphs with more nodes and edges "
            "among these, and partition with an example of it.",
        )
    return torch.stack(tensors)


class Columns:
    """Tensors, arrays or lists of equal length as a sequence of samples: by name in a dict, or by
    position in a tuple. Dicts and tuples of such are structures of a sample."""

    def __init__(self, columns: Mapping[str, Any] | tuple[Any, ...], source: str) -> None:
        self._leaves = dict(_leaves(columns))
        lengths = {name: len(leaf) for name, leaf in self._leaves.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"--data {source}: the columns differ in length ({listed}).",
                "Return training and evaluation data as a pair: (X_train, y_train), (X_eval, "
                "y_eval)."
                if isinstance(columns, tuple)
                else "",
            )
        self._columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return _row(self._columns, index)

    def digest(self) -> bytes:
        """32 bytes that differ when a tensor or an array of numbers of the columns does."""
        sha256 = hashlib.sha256()
        for name, leaf in self._leaves.items():
            is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
            if is_array or isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                for part in _pieces(torch.as_tensor(leaf)):
                    sha256.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
                    sha256.update(raw_bytes(part))
        return sha256.digest()


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
