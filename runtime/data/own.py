"""A user's own data -> a dataset."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..user_code import import_object
from .task import Task


class OwnDataset:
    """A sequence of dicts, or of tuples in the order of the model's inputs with the target last."""

    def __init__(
        self, samples: Sequence[Any], task: Task, source: str, *, dtype: torch.dtype
    ) -> None:
        self._samples = samples
        self._dtype = dtype
        self._source = source
        self._names = task.fields

    @property
    def fields(self) -> tuple[str, ...]:
        return self._names

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        samples = [self._named(self._samples[index]) for index in indices]
        lacking = [name for name in fields if name not in samples[0]]
        if lacking:
            raise DataError(
                f"a sample of {self._source} has {', '.join(map(str, samples[0]))}, "
                f"but the model reads {lacking[0]}."
            )
        return {
            name: torch.stack([self._tensor(sample[name]) for sample in samples]) for name in fields
        }

    def _tensor(self, value: Any) -> Tensor:
        tensor = torch.as_tensor(value)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _named(self, sample: Any) -> Mapping[str, Any]:
        if isinstance(sample, Mapping):
            return sample
        values = sample if isinstance(sample, tuple | list) else (sample,)
        if len(values) != len(self._names):
            raise DataError(
                f"a sample of {self._source} has {len(values)} values, but the model reads "
                f"{len(self._names)}: {', '.join(self._names)}."
            )
        return dict(zip(self._names, values, strict=True))


class Columns:
    """A dict of tensors (or lists) of equal length as a sequence of samples."""

    def __init__(self, columns: Mapping[str, Any], source: str) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"--data {source}: the columns differ in length ({told}).")
        self._columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


def own_parts(source: str) -> tuple[Any, Any]:
    """Calls the user's function; its training and its evaluation samples (None: no such).

    Raises DataError when it returns neither a sequence of samples nor a pair of these.
    """
    made = import_object(source, "--data", DataError)
    if callable(made):
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
