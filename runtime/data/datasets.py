"""Datasets that are not text: the user's own data, handwritten digits and the synthetic teaching
data."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from ..extras import install
from ..plan.plan import Plan
from ..plan.structure import names_in, tensors_by_name
from ..rng import drawing_from, import_seeded
from ..tensor_files import raw_bytes
from ..user_code import told_as
from .task import Task
from .tokens import default_corpus

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
                "another, but all samples of a run have one shape.",
                "Pad the samples to one shape, graphs with more nodes and edges among these, and "
                "partition with an example of it; cross_entropy leaves out a target of -100.",
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
        """The names of the values of a sample without names: arguments with tensors, then the
        target."""
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
    """Calls the user's function; returns its training and its evaluation samples (None if there are
    none). Its random draws depend on the seed alone.

    Raises DataError if it returns neither a sequence of samples nor a pair of these.
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


DIGIT_CLASSES = 10
_TRAIN_DIGITS = 1437


class Digits:
    """scikit-learn's 1,797 handwritten digits: 8 x 8 gray values, interpolated to `f32[channels,
    height, width]` on access.

    The last 360 digits, mostly written by other people than the first, are for evaluation.
    """

    def __init__(
        self, task: Task, shape: tuple[int, ...], *, evaluation: bool, dtype: torch.dtype
    ) -> None:
        if task.classes is not None and task.classes < DIGIT_CLASSES:
            raise DataError(
                f"digits has {DIGIT_CLASSES} classes, the model tells {task.classes} apart.",
                "Partition the model again with 10 labels, or give --data my_file.py:function",
            )
        images, labels = _load_digits()
        part = slice(_TRAIN_DIGITS, None) if evaluation else slice(_TRAIN_DIGITS)
        self._images, self._labels = images[part], labels[part]
        self._task = task
        self._channels, self._size = shape[0], shape[1:]
        self._dtype = dtype

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self._task.sample, self._task.label) if name)

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        chosen = torch.tensor(indices)
        found = {}
        if self._task.sample in fields:
            grey = self._images[chosen].unsqueeze(1)
            large = F.interpolate(grey, self._size, mode="bilinear", align_corners=False)
            found[self._task.sample] = large.repeat(1, self._channels, 1, 1).to(self._dtype)
        if self._task.label in fields:
            found[str(self._task.label)] = self._labels[chosen]
        return found


def _load_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "--data digits needs scikit-learn, which is not installed.",
            install("data"),
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    return (images - images.mean()) / images.std(), torch.from_numpy(digits.target).long()


SAMPLES = 10_000
CLUSTER_CLASSES = 32
_CLUSTERS = 10
_REDUNDANT = 2
_WRONG_LABELS = 0.01
_EVALUATION_SHARE = 0.1
_SEED = 2003


class Clusters:
    """The synthetic teaching data: 10,000 points `f32[features]` around corners of a hypercube, 10
    clusters a class, with their classes; a tenth of them is for evaluation.

    Made as in Guyon's "Design of experiments of the NIPS 2003 variable selection benchmark": half
    of the features carry information, two are mixtures of these, the others are noise, and one
    label in a hundred is wrong. With so few samples in so many dimensions it can be memorized but
    hardly learned: it serves to compare training losses, not qualities. The points are computed on
    first access, not for labels alone.
    """

    def __init__(self, task: Task, features: int, *, evaluation: bool, dtype: torch.dtype) -> None:
        self._task = task
        self._features = features
        self._classes = task.classes or CLUSTER_CLASSES
        self._dtype = dtype
        held_out = int(SAMPLES * _EVALUATION_SHARE)
        self._first, self._length = (
            (SAMPLES - held_out, held_out) if evaluation else (0, SAMPLES - held_out)
        )

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self._task.sample, self._task.label) if name)

    def __len__(self) -> int:
        return self._length

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        chosen = torch.tensor(indices) + self._first
        found = {}
        if self._task.sample in fields:
            found[self._task.sample] = self._points[chosen].to(self._dtype)
        if self._task.label in fields:
            found[str(self._task.label)] = self._labels[chosen]
        return found

    @cached_property
    def _cluster_of_sample(self) -> Tensor:
        order = torch.randperm(SAMPLES, generator=_generator("order"))
        return order % (self._classes * _CLUSTERS)

    @cached_property
    def _labels(self) -> Tensor:
        generator = _generator("labels")
        wrong = torch.rand(SAMPLES, generator=generator) < _WRONG_LABELS
        drawn = torch.randint(self._classes, (SAMPLES,), generator=generator)
        return torch.where(wrong, drawn, self._cluster_of_sample % self._classes)

    @cached_property
    def _points(self) -> Tensor:
        generator = _generator("points")
        informative = max(1, self._features // 2)
        points = torch.randn(SAMPLES, self._features, generator=generator)
        for cluster in range(self._classes * _CLUSTERS):
            corner = torch.randint(2, (informative,), generator=generator) * 2.0 - 1.0
            mixing = torch.rand(informative, informative, generator=generator) * 2 - 1
            members = self._cluster_of_sample == cluster
            points[members, :informative] = points[members, :informative] @ mixing + corner
        redundant = min(_REDUNDANT, self._features - informative)
        weights = torch.rand(informative, redundant, generator=generator) * 2 - 1
        mixtures = points[:, :informative] @ weights
        points[:, informative : informative + redundant] = mixtures
        return points


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(_SEED + sum(map(ord, name)))


def default_data(task: Task, plan: Plan) -> str:
    """The built-in data for a task. Raises DataError when none fits."""
    if task.kind == "text":
        return default_corpus()
    if task.label is not None and len(plan.inputs) <= 2:
        if task.kind == "image":
            return "digits"
        if task.kind == "features" and _labels_are_classes(task, plan):
            return "clusters"
    inputs = ", ".join(f"{spec.name}: {spec}" for spec in plan.inputs)
    raise DataError(
        f"no built-in data fits the inputs of {plan.name} ({inputs}).",
        "Give --data my_file.py:function, which returns a sequence of samples.",
    )


def _labels_are_classes(task: Task, plan: Plan) -> bool:
    labels = next((spec for spec in plan.inputs if spec.name == task.label), None)
    return task.classes is not None and (
        labels is None or (labels.dtype == "int64" and len(labels.shape) == 1)
    )
