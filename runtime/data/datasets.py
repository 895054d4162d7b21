"""Built-in datasets that are not text: handwritten digits and the synthetic teaching data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from ..extras import install
from ..plan.plan import Plan
from .task import InputDtypes, Task
from .tokens import default_corpus

DIGIT_CLASSES = 10
_TRAIN_DIGITS = 1437


class Digits:
    """scikit-learn's 1,797 handwritten digits: 8 x 8 gray values, interpolated to `f32[channels,
    height, width]` on access.

    The last 360 digits, mostly written by other people than the first, are for evaluation.
    """

    def __init__(
        self, task: Task, shape: tuple[int, ...], *, evaluation: bool, dtypes: InputDtypes
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
        self._dtypes = dtypes

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self._task.sample, self._task.label) if name)

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        chosen = torch.tensor(indices)
        values = {}
        if self._task.sample in fields:
            grey = self._images[chosen].unsqueeze(1)
            large = F.interpolate(grey, self._size, mode="bilinear", align_corners=False)
            images = large.repeat(1, self._channels, 1, 1)
            values[self._task.sample] = self._dtypes.cast(self._task.sample, images)
        if self._task.label in fields:
            values[str(self._task.label)] = self._labels[chosen]
        return values


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

    def __init__(self, task: Task, features: int, *, evaluation: bool, dtypes: InputDtypes) -> None:
        self._task = task
        self._features = features
        self._classes = task.classes or CLUSTER_CLASSES
        self._dtypes = dtypes
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
        values = {}
        if self._task.sample in fields:
            points = self._points[chosen]
            values[self._task.sample] = self._dtypes.cast(self._task.sample, points)
        if self._task.label in fields:
            values[str(self._task.label)] = self._labels[chosen]
        return values

    @property
    def _points(self) -> Tensor:
        return clustered_points(self._features, self._classes)

    @cached_property
    def _labels(self) -> Tensor:
        generator = _generator("labels")
        wrong = torch.rand(SAMPLES, generator=generator) < _WRONG_LABELS
        drawn = torch.randint(self._classes, (SAMPLES,), generator=generator)
        return torch.where(wrong, drawn, cluster_of_sample(self._classes) % self._classes)


def cluster_of_sample(classes: int) -> Tensor:
    """The cluster that each sample belongs to."""
    return torch.randperm(SAMPLES, generator=_generator("order")) % (classes * _CLUSTERS)


@lru_cache(maxsize=1)
def clustered_points(features: int, classes: int) -> Tensor:
    """All points, of which training and evaluation each read their part."""
    generator = _generator("points")
    clusters = cluster_of_sample(classes)
    informative = max(1, features // 2)
    points = torch.randn(SAMPLES, features, generator=generator)
    for cluster in range(classes * _CLUSTERS):
        corner = torch.randint(2, (informative,), generator=generator) * 2.0 - 1.0
        mixing = torch.rand(informative, informative, generator=generator) * 2 - 1
        members = clusters == cluster
        points[members, :informative] = points[members, :informative] @ mixing + corner
    redundant = min(_REDUNDANT, features - informative)
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
