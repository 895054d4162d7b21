"""The value of the user's data function -> training and evaluation data.

Accepted are the forms in which people have data: a torch or Hugging Face dataset, a list of
samples, columns by name, arrays (X, y), an iterable, a DataLoader; and training and evaluation data
as a pair of these, as `random_split` gives it or as splits by name (DatasetDict).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ..errors import DataError
from ..formatting import kind_of
from ..rng import drawing_from, import_seeded
from ..user_code import user_errors_as
from .sampler_order import check_sampler, drawn_indices, sampler_of
from .samples import Collate, Columns
from .streams import Stream

_TRAIN = ("train", "training")
_HELD_OUT = ("validation", "valid", "val", "dev", "evaluation", "eval", "test")

_FORMS = (
    "Return a Dataset or DataLoader, a list of samples, a dict of tensors, arrays (X, y), an "
    "iterable of samples, or a (train, eval) pair of these."
)


@dataclass(frozen=True)
class Part:
    """Training or evaluation samples, and the DataLoader that they came in, if any. Those of a
    stream have no numbers."""

    samples: Any
    loader: DataLoader[Any] | None = None
    stream: Stream | None = None

    @property
    def collate(self) -> Collate | None:
        """The loader's own function that joins samples; None where tensors are stacked."""
        loader = self.loader
        if loader is None or loader.collate_fn is default_collate or not _batches(loader):
            return None
        collate: Collate = loader.collate_fn
        return collate


def own_parts(source: str, seed: int) -> tuple[Part, Part | None]:
    """Calls the user's function; returns its training and its evaluation data (None if there are
    none). Its random draws depend on the seed alone.

    The current folder is the same afterwards: a run's own folders may be relative to it. Raises
    DataError if the function returns something else.
    """
    with chdir("."):
        function = import_seeded(source, "--data", DataError, seed)
        there = os.getcwd()

    def call() -> Any:
        with (
            chdir(there),
            drawing_from(seed, "data"),
            user_errors_as(DataError, f"--data {source}"),
        ):
            return function() if callable(function) else function

    data = call()
    if isinstance(data, type):
        raise DataError(
            f"--data {source} gives the class {data.__name__}, not an object of it.",
            f"Return {data.__name__}(...).",
        )
    pair = _pair(data, source)
    if pair is None:
        return _part(data, source, call if callable(function) else None), None

    def call_for(place: int) -> Any:
        again = _pair(call(), source)
        return again and again[place]

    train, held_out = pair
    first = _part(train, source, partial(call_for, 0))
    if held_out is None:
        return first, None
    return first, _part(held_out, source, partial(call_for, 1), evaluation_seed=seed)


def _pair(data: Any, source: str) -> tuple[Any, Any] | None:
    """Training and evaluation data, if the value has both."""
    if isinstance(data, Mapping) and set(data) <= {*_TRAIN, *_HELD_OUT} and data:
        train = next((data[name] for name in _TRAIN if name in data), None)
        if train is None:
            raise DataError(
                f"--data {source} gives the splits {', '.join(data)}, but none to train on.",
                "Name one of them train.",
            )
        return train, next((data[name] for name in _HELD_OUT if name in data), None)
    if not isinstance(data, tuple | list) or not data:
        return None
    if all(map(_is_collection, data)):
        if len(data) != 2:
            kinds = " and ".join(sorted({type(part).__name__ for part in data}))
            raise DataError(
                f"--data {source} gives {kind_of(data)} of {len(data)} {kinds}.",
                "Return one of them, or a pair (train, eval).",
            )
        return data[0], data[1]
    if isinstance(data, tuple) and len(data) == 2 and not _are_arrays(data):
        rows = tuple(_with_rows(part, source) for part in data)
        if all(_is_dataset(part) or _is_collection(part) for part in rows):
            return rows
    return None


def _part(
    data: Any, source: str, call: Callable[[], Any] | None, *, evaluation_seed: int | None = None
) -> Part:
    """One of the two; `call` makes it again. A seed is given for evaluation data, whose order is
    that of their sampler."""
    if _is_stream(data):
        loader = data if isinstance(data, DataLoader) else None
        return Part(None, loader, Stream(source, data, call))
    if isinstance(data, DataLoader):
        check_sampler(data, source)
        samples = data.dataset
        if evaluation_seed is not None and (sampler := sampler_of(data)) is not None:
            samples = Subset(samples, drawn_indices(sampler, evaluation_seed, 0))
        return Part(samples, data)
    rows = _with_rows(data, source)
    if not _is_dataset(rows):
        raise DataError(
            f"--data {source} gives {kind_of(data)}, not a sequence of samples.",
            'Return columns: {"x": frame["x"].to_numpy(), ...}.' if _is_table(data) else _FORMS,
        )
    return Part(rows)


def _with_rows(data: Any, source: str) -> Any:
    is_columns = (isinstance(data, Mapping) and data) or _are_arrays(data)
    return Columns(tuple(data) if isinstance(data, list) else data, source) if is_columns else data


def _are_arrays(data: Any) -> bool:
    """True for (X, y): arrays with a row for each sample. A list of two equal shapes is a list of
    two samples."""
    if not isinstance(data, tuple | list) or len(data) < 2 or not _is_array(data[0]):
        return False
    if isinstance(data, tuple):
        return all(_is_array(column) or isinstance(column, list) for column in data)
    lengths, shapes = (
        {len(column) for column in data if _is_array(column)},
        {tuple(column.shape) for column in data if _is_array(column)},
    )
    return all(map(_is_array, data)) and len(lengths) == 1 and len(shapes) > 1


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _is_collection(value: Any) -> bool:
    """True for an object that holds samples and cannot be a sample itself."""
    if isinstance(value, Dataset | DataLoader) or _is_stream(value):
        return True
    plain = isinstance(value, tuple | list | Mapping | Tensor | np.ndarray | str | bytes)
    return not plain and _is_dataset(value)


def _is_stream(value: Any) -> bool:
    """True for samples that can only be read one after the other."""
    if isinstance(value, DataLoader):
        return isinstance(value.dataset, IterableDataset)
    is_plain = isinstance(value, tuple | list | Mapping | Set | Tensor | np.ndarray | str | bytes)
    is_plain |= _is_table(value)
    return not is_plain and hasattr(value, "__iter__") and not _is_dataset(value)


def _is_dataset(value: Any) -> bool:
    if isinstance(value, DataLoader):
        return True
    has_items = hasattr(value, "__len__") and (
        hasattr(value, "__getitem__") or hasattr(value, "get")
    )
    is_stream = isinstance(value, IterableDataset)
    is_other = isinstance(value, Tensor | str | Mapping) or _is_table(value)
    return has_items and not is_stream and not is_other


def _is_table(value: Any) -> bool:
    """True for a data frame, which is indexed by the names of its columns."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _batches(loader: DataLoader[Any]) -> bool:
    """True if a loader collates samples into batches."""
    return loader.batch_sampler is not None
